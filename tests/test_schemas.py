"""From types to JSON Schemas: msgspec's and pydantic's types, bounds from both, none dropped."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Annotated, Any, Literal, NewType, TypedDict

import jsonschema
import msgspec
import pydantic
import pytest
from annotated_types import Ge, Len

from structgen.errors import ConstraintError, InvalidOutputError, OptionError
from structgen.output.types import form_of
from structgen.request import JsonSchema
from structgen.schemas import closed, schema_of_type, schema_text


class Address(pydantic.BaseModel):
    street: str
    number: Annotated[int, pydantic.Field(ge=1)] = 1


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=5)]
    home: Address | None = None
    tags: dict[str, int] | None = None


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


class Renamed(pydantic.BaseModel):
    value: int = pydantic.Field(alias="theValue")


class Even(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def halves(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd")
        return value


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


@dataclasses.dataclass
class Score:
    value: Annotated[int, pydantic.Field(ge=0, le=10)]


class Bounded(TypedDict):
    value: Annotated[int, msgspec.Meta(ge=0)]


class Mixed(msgspec.Struct):
    value: Annotated[int, msgspec.Meta(ge=0)]
    other: Annotated[int, Ge(0)]


class Plain:
    pass


class Loop(msgspec.Struct):
    inner: Loop | None = None


Whole = NewType("Whole", Annotated[int, Ge(0)])
Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


def valid(type_: Any, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema_of_type(type_)).is_valid(value))


class TestPydantic:
    @pytest.mark.parametrize(
        ("type_", "value", "text"),
        [
            (Address, Address(street="a", number=2), '{"street":"a","number":2}'),
            (Person, Person(name="b"), '{"name":"b"}'),
            (list[Address], [Address(street="a")], '[{"street":"a"}]'),
            (Address | None, None, "null"),
            (Score, Score(3), '{"value":3}'),
            (Renamed, Renamed(theValue=3), '{"theValue":3}'),
            (Pet, Dog(kind="dog"), '{"kind":"dog"}'),
            (Annotated[int, Ge(3)], 3, "3"),
            (Annotated[list[int], Len(1, 2)], [1], "[1]"),
            (set[pydantic.PositiveInt], {1, 2}, "[1,2]"),
        ],
    )
    def test_reads_values_of_its_types(self, type_: Any, value: object, text: str) -> None:
        assert valid(type_, json.loads(text))
        assert form_of(type_).read(text) == value

    @pytest.mark.parametrize(
        ("type_", "value"),
        [
            (Address, {"street": "a", "number": 0}),
            (Address, {"street": "a", "town": "b"}),
            (Person, {"name": "too long"}),
            (Person, {"name": "a", "home": {"street": "a", "town": "b"}}),
            (Score, {"value": 11}),
            (Renamed, {"value": 3}),
            (Annotated[int, Ge(3)], 2),
            (Annotated[list[int], Len(1, 2)], []),
            (dict[str, Annotated[int, Ge(3)]], {"a": 2}),
            (Whole, -1),
            (tuple[Score, int], [{"value": -1}, 1]),
        ],
    )
    def test_has_its_bounds_in_the_schema(self, type_: Any, value: object) -> None:
        assert not valid(type_, value)

    def test_opens_what_a_model_opens(self) -> None:
        assert valid(Strict, {"name": "a", "more": 1})

    @pytest.mark.parametrize(
        ("type_", "text", "message"),
        [
            (Even, '{"number":3}', r"no Even: Value error, odd - at `\$\.number`; it begins"),
            (list[Even], '[{"number":"a"}]', r"valid integer.* - at `\$\[0\]\.number`"),
            (Even, '{"number', r"no Even: Invalid JSON: EOF"),
        ],
    )
    def test_says_what_is_wrong_and_where(self, type_: Any, text: str, message: str) -> None:
        with pytest.raises(InvalidOutputError, match=message) as caught:
            form_of(type_).read(text)

        assert caught.value.text == text

    @pytest.mark.parametrize(
        ("type_", "reason"),
        [
            (list[Address] | Plain, "cannot be asked for: "),
            (Mixed, "neither library sees the other's bounds"),
            (tuple[Score, Bounded], "neither library sees the other's bounds"),
        ],
    )
    def test_is_refused_where_it_cannot_say_all_of_it(self, type_: Any, reason: str) -> None:
        with pytest.raises(OptionError, match=reason):
            form_of(type_)
        with pytest.raises(ConstraintError, match="has no JSON schema: "):
            schema_of_type(type_)


class TestText:
    @pytest.mark.parametrize(
        ("schema", "text"),
        [
            ('{ "type": "null" }', '{ "type": "null" }'),
            (True, "true"),
            (False, "false"),
            ({"const": "ä"}, '{"const":"ä"}'),
            (list[int], '{"type":"array","items":{"type":"integer"}}'),
            (int | None, '{"anyOf":[{"type":"integer"},{"type":"null"}]}'),
        ],
    )
    def test_is_written_compactly_unless_it_is_text(self, schema: Any, text: str) -> None:
        assert schema_text(schema) == text

    @pytest.mark.parametrize("type_", [Address, Score, list[Bounded], Loop])
    def test_of_a_type_is_that_of_its_form(self, type_: Any) -> None:
        assert form_of(type_).constraint == JsonSchema(type_)

    @pytest.mark.parametrize("schema", [{"const": {1, 2}}, {"enum": [b"a"]}])
    def test_is_refused_for_what_json_has_not(self, schema: Any) -> None:
        with pytest.raises(ConstraintError, match="cannot be written as JSON"):
            schema_text(schema)

    def test_is_refused_for_what_is_no_type(self) -> None:
        with pytest.raises(ConstraintError, match=re.escape("3 has no JSON schema: ")):
            schema_text(3)


class TestClosing:
    def test_looks_at_schemas_only(self) -> None:
        schema = {"properties": {"properties": {"properties": {"a": {"type": "null"}}}}}

        assert closed(schema) == {
            "properties": {
                "properties": {
                    "properties": {"a": {"type": "null"}},
                    "additionalProperties": False,
                }
            },
            "additionalProperties": False,
        }

    def test_leaves_values_alone(self) -> None:
        schema: dict[str, Any] = {"const": {"properties": {}}, "default": {"properties": {}}}

        assert closed(dict(schema)) == schema
