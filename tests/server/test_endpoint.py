"""Arguments of a program as clients give them: how values are read, and refused."""

from __future__ import annotations

import datetime as dt
import enum
import json
from decimal import Decimal
from typing import Any, Literal

import jsonschema
import msgspec
import pytest

from structgen import State
from structgen.program.program import Program
from structgen.server.endpoint import Endpoint, endpoints


class Shade(enum.Enum):
    DARK = "dark"
    PALE = "pale"


class Cat(msgspec.Struct, tag="cat"):
    lives: int


class Dog(msgspec.Struct, tag="dog"):
    bone: Shade


def taking(type_: object) -> Endpoint:
    """A program of one argument, `value`."""

    async def taken(s: State, value: Any) -> None: ...

    taken.__annotations__ = {"s": State, "value": type_}
    return endpoints([Program(taken)])["taken"]


class TestAnArgument:
    @pytest.mark.parametrize(
        ("type_", "given", "value"),
        [
            (int, 2**70, 2**70),
            (Any, -(2**70), -(2**70)),
            (float, 1, 1.0),
            (float, 3.0, 3.0),
            (Any, 3.0, 3.0),
            (int, 3.0, 3),
            (list[int | str], ["a", 1e3], ["a", 1000]),
            (dict[int, Cat], {"1": {"type": "cat", "lives": 9.0}}, {1: Cat(9)}),
            (bytes, "YWI=", b"ab"),
            (Decimal, "1.50", Decimal("1.50")),
            (dt.date, "2026-01-02", dt.date(2026, 1, 2)),
            (frozenset[int], [1, 2], frozenset([1, 2])),
            (dict[int, str], {"1": "a"}, {1: "a"}),
            (Shade, "pale", Shade.PALE),
            (Cat | Dog, {"type": "dog", "bone": "dark"}, Dog(Shade.DARK)),
        ],
        ids=str,
    )
    def test_is_read_as_its_type(self, type_: object, given: object, value: object) -> None:
        found = taking(type_).read(json.dumps({"value": given}).encode())

        assert found == {"value": value}
        assert type(found["value"]) is type(value)

    @pytest.mark.parametrize(
        ("type_", "given", "message"),
        [
            (Shade, "blue", '"blue" is none of the choices: "dark", "pale" - at `$.value`'),
            (Literal["a", 3] | None, "b", '"b" is none of the choices: 3, "a" - at `$.value`'),
            (
                list[Shade],
                ["dark", "x"],
                '"x" is none of the choices: "dark", "pale" - at `$.value[1]`',
            ),
            (
                dict[str, Shade],
                {"k": "x"},
                '"x" is none of the choices: "dark", "pale" - at `$.value.k`',
            ),
            (
                Cat | Dog,
                {"type": "cow"},
                '"cow" is none of the choices: "cat", "dog" - at `$.value.type`',
            ),
        ],
        ids=str,
    )
    def test_that_is_no_choice_is_told_the_choices(
        self, type_: object, given: object, message: str
    ) -> None:
        with pytest.raises(ValueError, match="none of") as caught:
            taking(type_).read(json.dumps({"value": given}).encode())

        assert str(caught.value) == message

    def test_that_is_no_whole_number_is_refused(self) -> None:
        with pytest.raises(ValueError, match="Expected `int`"):
            taking(dict[str, int]).read(b'{"value": {"a": 2.0, "b": 1.5}}')

    def test_is_told_some_of_very_many_choices(self) -> None:
        many = Literal[tuple(f"x{number:03}" for number in range(500))]  # type: ignore[valid-type] # made here

        with pytest.raises(ValueError, match="none of") as caught:
            taking(many).read(json.dumps({"value": "y" * 5000}).encode())

        assert len(str(caught.value)) < 350
        assert '"x019", ... (500 in all) - at `$.value`' in str(caught.value)


class TestAnEndpoint:
    @pytest.mark.parametrize(
        "type_", [int, Any, bytes, Decimal, Shade | None, dict[int, str], list[Cat | Dog]], ids=str
    )
    def test_has_a_schema_that_is_one(self, type_: object) -> None:
        jsonschema.Draft202012Validator.check_schema(taking(type_).parameters)
