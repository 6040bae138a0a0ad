"""Signatures as classes: which parameters arguments are read for, and what is read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from structgen.output.signature import (
    EMPTY,
    arguments_class,
    arguments_in,
    needs_pydantic,
    object_schema,
    parameters_of,
)
from structgen.schemas import described

NOWHERE = object()


class Spot(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=5)]


async def plain(first: int, city: str, bare, days: int = 3, where: Any = NOWHERE) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - the test
    del first, city, bare, days, where


async def modelled(spot: Spot, at: int = 1) -> None:
    del spot, at


def read(function: Any, text: str, skip: int = 0) -> dict[str, Any]:
    parameters = parameters_of(function, "a test", skip=skip)
    typed = {name: (Any if of is EMPTY else of, value) for name, (of, value) in parameters.items()}
    made = arguments_class("made", typed, pydantic=needs_pydantic(typed))
    return arguments_in(described(made)[1](text))


class TestParameters:
    def test_are_all_but_those_that_somebody_else_gives(self) -> None:
        assert list(parameters_of(plain, "a test", skip=1)) == ["city", "bare", "days", "where"]

    def test_say_where_they_have_no_annotation_and_no_default(self) -> None:
        found = parameters_of(plain, "a test")

        assert found["bare"] == (EMPTY, EMPTY)
        assert found["days"] == (int, 3)

    @pytest.mark.parametrize("kind", ["*args", "**more", "only, /"])
    def test_have_names(self, kind: str) -> None:
        names: dict[str, Any] = {}
        exec(f"def function({kind}): pass", names)

        with pytest.raises(TypeError, match=r"^a test gives arguments by name, so "):
            parameters_of(names["function"], "a test")


class TestArguments:
    def test_are_what_was_given_and_the_defaults_themselves(self) -> None:
        found = read(plain, '{"city": "Ulm", "bare": [1]}', skip=1)

        assert found == {"city": "Ulm", "bare": [1], "days": 3, "where": NOWHERE}

    def test_are_read_by_pydantic_where_its_types_are_used(self) -> None:
        assert read(modelled, '{"spot": {"name": "a"}}') == {"spot": Spot(name="a"), "at": 1}
        with pytest.raises(ValueError, match=r"at most 5 characters - at `\$.spot.name`"):
            read(modelled, '{"spot": {"name": "longer"}}')

    @pytest.mark.parametrize("text", ['{"city": 1, "bare": 0}', '{"city": "a"}', "[]", "{"])
    def test_are_refused_where_a_type_does_not_admit_them(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"Expected|missing|truncated"):
            read(plain, text, skip=1)

    def test_have_the_schema_of_an_object(self) -> None:
        made = arguments_class("made", parameters_of(modelled, "a test"), pydantic=True)
        schema = object_schema(described(made)[0])

        assert schema["properties"].keys() == {"spot", "at"}
        assert schema["additionalProperties"] is False
        assert "title" not in schema

    def test_make_no_class_of_names_that_pydantic_refuses(self) -> None:
        with pytest.raises(TypeError, match=r"^pydantic reads no field like _spot"):
            arguments_class("made", {"_spot": (Spot, EMPTY)}, pydantic=True)


class TestASchema:
    def test_keeps_the_definitions_that_it_uses(self) -> None:
        class Place(msgspec.Struct):
            name: str

        made = arguments_class("made", {"place": (Place, EMPTY)}, pydantic=False)

        assert object_schema(described(made)[0])["$defs"].keys() == {"Place"}
