"""`--arg name=value`: text to the types that a program declares."""

from __future__ import annotations

import enum
from datetime import date
from typing import Annotated, Any, Literal

import msgspec
import pytest

from structgen import State
from structgen.cli.arguments import keywords
from structgen.cli.failure import CommandError


class City(msgspec.Struct):
    name: str
    people: int = 0


class Colour(enum.Enum):
    RED = "red"
    DARK_RED = "dark red"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


MANY = {f"C{number}": f"c{number}" for number in range(1000)}
Code = enum.Enum("Code", MANY)  # type: ignore[misc]  # its members are made, not written


async def typed(
    s: State,
    *,
    text: str = "",
    count: int = 0,
    share: Annotated[float, msgspec.Meta(le=1)] = 0,
    sure: bool = False,
    size: Literal["small", "large"] = "small",
    day: date | None = None,
    names: list[str] | None = None,
    city: City | None = None,
    colour: Colour | None = None,
    level: Level = Level.LOW,
    code: Code | None = None,
    colours: list[Colour] | None = None,
    limit: int | Literal["none"] = "none",
    nothing: None = None,
) -> None:
    """Parameters of many types."""


async def open_ended(s: State, **rest: int) -> None:
    """Takes any name."""


class TestAValue:
    @pytest.mark.parametrize(
        ("pair", "value"),
        [
            ("text=5", "5"),
            ("text=a=b", "a=b"),
            ("text=", ""),
            ("count=5", 5),
            ("share=0.5", 0.5),
            ("sure=true", True),
            ("sure=0", False),
            ("size=large", "large"),
            ("day=2024-02-29", date(2024, 2, 29)),
            ('names=["a", "b"]', ["a", "b"]),
            ('city={"name": "Rome", "people": 3}', City("Rome", 3)),
            ("city=null", None),
            ("colour=dark red", Colour.DARK_RED),
            ("level=2", Level.HIGH),
            ('colours=["red"]', [Colour.RED]),
            ("limit=5", 5),
            ("limit=none", "none"),
        ],
    )
    def test_becomes_what_the_annotation_says(self, pair: str, value: Any) -> None:
        name = pair.partition("=")[0]

        assert keywords(typed, [pair]) == {name: value}

    @pytest.mark.parametrize(
        ("pair", "message"),
        [
            ("count=five", "--arg count=five: Expected `int`"),
            ("share=1.5", "--arg share=1.5: Expected `float` <= 1"),
            ("size=tall", "--arg size=tall: expected one of small, large"),
            ("colour=blue", "--arg colour=blue: expected one of red, 'dark red'"),
            ("level=high", "--arg level=high: expected one of 1, 2"),
            ("level=3", "--arg level=3: expected one of 1, 2"),
            ("code=c1000", "expected one of c0, c1, c2"),
            ("code=c1000", "c18, c19, ... (1000 in all)"),
            ("limit=few", "Invalid enum value 'few'; the choices are none"),
            (
                'colours=["red", "blue"]',
                "value 'blue' - at `$[1]`; the choices are red, 'dark red'",
            ),
            ("colours=red", "write it as JSON; the choices are red, 'dark red'"),
            ("nothing=5", "Expected `null`"),
            ("names=a, b", "got `str`; write it as JSON"),
            ('names=["a", 1]', "Expected `str`, got `int`"),
            ('city={"people": 3}', "missing required field `name`"),
        ],
    )
    def test_that_does_not_fit_is_refused(self, pair: str, message: str) -> None:
        with pytest.raises(CommandError) as caught:
            keywords(typed, [pair])

        assert message in str(caught.value)

    def test_without_annotation_stays_text(self) -> None:
        async def untyped(s, anything=None) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - the case
            """A parameter without annotation."""

        assert keywords(untyped, ["anything=5"]) == {"anything": "5"}

    def test_may_have_any_name_where_the_program_takes_any(self) -> None:
        assert keywords(open_ended, ["a=1", "b=2"]) == {"a": "1", "b": "2"}


async def three(s: State, a: int, b: str, c: str = "c") -> None:
    """Two parameters must be given."""


class TestArguments:
    @pytest.mark.parametrize(
        ("pairs", "message"),
        [
            ([], "missing arguments: add --arg a=... --arg b=...; the program takes a, b, c='c'"),
            (["c=x", "a=1"], "missing argument: add --arg b=...; the program takes a, b, c='c'"),
        ],
        ids=["two", "one"],
    )
    def test_that_are_missing_are_all_named(self, pairs: list[str], message: str) -> None:
        with pytest.raises(CommandError) as caught:
            keywords(three, pairs)

        assert str(caught.value) == message

    def test_that_are_unknown_are_answered_with_the_nearest(self) -> None:
        with pytest.raises(
            CommandError, match=r"--arg colors: unknown .* \(did you mean colours\?"
        ):
            keywords(typed, ["colors=[]"])

    def test_that_are_bound_need_not_be_given(self) -> None:
        assert keywords(three, ["b=x"], {"a": 1}) == {"b": "x"}

    def test_that_are_bound_can_be_given(self) -> None:
        assert keywords(three, ["a=2", "b=x"], {"a": 1}) == {"a": 2, "b": "x"}
