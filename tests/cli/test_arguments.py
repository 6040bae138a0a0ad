"""`--arg name=value`: text to the types that a program declares."""

from __future__ import annotations

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
            ("size=tall", "--arg size=tall: Invalid enum value 'tall'"),
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
