"""Values as JSON: what has a form there, what has none, and what would lose something."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import math
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest

from structgen.output.values import LARGE, json_in_turns, json_of


class Shade(enum.Enum):
    DARK = "dark"


@dataclasses.dataclass
class Point:
    x: float


class Place(msgspec.Struct, rename="camel"):
    how_far: float
    next_: Any = None


class Spot(pydantic.BaseModel):
    x: float
    more: dict[str, Any] = {}


class Told(pydantic.BaseModel):
    x: float

    @pydantic.field_serializer("x")
    def tell(self, x: float) -> str:
        return f"{x}!"


class Broken(pydantic.BaseModel):
    @pydantic.model_serializer
    def fail(self) -> str:
        raise LookupError("no form")


@dataclasses.dataclass
class Mixed:
    spot: Spot
    other: object


class TestAValue:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ({1}, "[1]"),
            (b"ab", '"YWI="'),
            (dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), '"2026-01-02T03:00:00Z"'),
            (dt.timedelta(days=1), '"P1D"'),
            (Decimal("1.50"), '"1.50"'),
            (Shade.DARK, '"dark"'),
            (2**70, "1180591620717411303424"),
            ({2**70: None}, '{"1180591620717411303424":null}'),
            (Point(1.5), '{"x":1.5}'),
            (Place(1.5, [Spot(x=1)]), '{"howFar":1.5,"next":[{"x":1.0,"more":{}}]}'),
            (Told(x=math.nan), '{"x":"nan!"}'),
            ([None, "null", {"\ud800": None}], '[null,"null",{"?":null}]'),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_is_written_as_what_it_is(self, value: object, expected: str) -> None:
        assert json_of(value).decode() == expected

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (math.nan, "^it is nan, and JSON has no such number"),
            (-math.inf, "^it is -inf,"),
            ([1, {"a": [2, math.inf]}], r"^`\[1\]\.a\[1\]` is inf,"),
            ({1: None, 2.5: math.nan}, r"^`2\.5` is nan,"),
            (Point(math.nan), "^`x` is nan,"),
            (Place(math.nan), "^`howFar` is nan,"),
            (Place(1, Spot(x=1, more={"a": {2**70: math.nan}})), "^`next.more.a.1180591620717"),
            ([Spot(x=math.nan), None], r"^`\[0\]\.x` is nan,"),
            ({"\ud800": math.nan}, r"^`\?` is nan,"),
            (frozenset([math.nan]), r"^`\[0\]` is nan,"),
        ],
        ids=str,
    )
    def test_is_refused_where_a_number_would_be_lost(self, value: object, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            json_of(value)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (1j, "no form for values of the type complex"),
            ({(1, 2): 3}, "no form for values of the type tuple"),
            ([Broken()], "LookupError: no form"),
            (Mixed(Spot(x=1), object()), "object"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_is_refused_where_json_has_no_form_for_it(self, value: object, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            json_of(value)


DEEP: dict[Any, Any] = {"a": [{"b": "\u00e9\n" * LARGE, 1: None}, (2.5, "x")], "c": [[]] * LARGE}


class TestALargeValue:
    @pytest.mark.parametrize(
        "value",
        [
            "a\u20ac" * LARGE,
            list(range(LARGE)),
            {str(n): [n] for n in range(LARGE)},
            DEEP,
            [],
            {},
            "",
        ],
        ids=["text", "list", "dict", "deep", "no list", "no dict", "no text"],
    )
    async def test_is_written_in_turns_as_it_is_at_once(self, value: object) -> None:
        assert await json_in_turns(value) == json_of(value)

    @pytest.mark.parametrize(
        ("last", "message"),
        [(math.nan, rf"^`\[{LARGE}\]` is nan"), ("\ud800", r"^'\\ud800' in it is half of a surro")],
        ids=["nan", "half"],
    )
    async def test_is_refused_as_a_small_one_is(self, last: object, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            await json_in_turns([*range(LARGE), last])

    async def test_that_holds_itself_is_refused(self) -> None:
        value: list[Any] = list(range(LARGE))
        value[5] = value

        with pytest.raises(TypeError, match="recursion"):
            await json_in_turns(value)
