"""Programs in the OpenAPI document: told apart, whatever they and their types are called."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from structgen import State, program
from structgen.server import ServerConfig
from tests.server.served import Serve
from tests.server.test_openapi import document, operations, references

pytestmark = pytest.mark.anyio
CONFIG = ServerConfig(names=("tiny",))


class Value(msgspec.Struct):
    """Called as the part of a program's schema that it stands in."""

    inner: Body | None = None


class Body(msgspec.Struct, rename="kebab"):
    how_much: int


class Cat(msgspec.Struct, tag="cat"):
    lives: int


class Dog(msgspec.Struct, tag="dog"):
    bones: int


class Größe(msgspec.Struct):  # noqa: PLC2401 - OpenAPI has no such names
    zahl: int


def another_body() -> type[msgspec.Struct]:
    return msgspec.defstruct("Body", [("text", str)])


Other = another_body()


@program
async def mixed(s: State, arguments: Value, body: Body) -> Other:  # type: ignore[valid-type] # made
    """Takes a Body and gives another."""
    s += f"{arguments}{body}"
    return Other(text="a")


@program
async def pet(s: State, animal: Cat | Dog) -> Cat | Dog:
    s += "a"
    return animal


@program
async def maß(s: State, größe: Größe) -> Größe:  # noqa: PLC2401 - OpenAPI has no such names
    s += "a"
    return größe


@program
async def name(s: State) -> int:
    s += "a"
    return 1


PROGRAMS = (mixed, pet, maß, name)
# Where a value stands, one that is right there, and one that is not.
VALUES: tuple[tuple[str, str, Any, Any], ...] = (
    (
        "/v1/programs/mixed",
        "arguments",
        {"arguments": {"inner": {"how-much": 1}}, "body": {"how-much": 2}},
        {"arguments": {"inner": {"text": "a"}}, "body": {"text": "a"}},
    ),
    ("/v1/programs/mixed", "value", {"text": "a"}, {"how-much": 1}),
    ("/v1/programs/pet", "value", {"type": "dog", "bones": 1}, {"type": "dog"}),
    ("/v1/programs/maß", "arguments", {"größe": {"zahl": 1}}, {"größe": {}}),
)


def mappings(value: Any) -> Iterator[str]:
    """What the discriminators in a document point at."""
    if isinstance(value, dict):
        if isinstance(value.get("discriminator"), dict):
            yield from value["discriminator"].get("mapping", {}).values()
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from mappings(each)


def schema_of(found: dict[str, Any], path: str, field: str) -> Any:
    """The schema of a field of a program's body or answer, with what it refers to."""
    operation = found["paths"][path]["post"]
    content = operation["requestBody"] if field == "arguments" else operation["responses"]["200"]
    whole = content["content"]["application/json"]["schema"]
    named = found["components"]["schemas"][whole["$ref"].rpartition("/")[2]]
    return {**named["properties"][field], "components": found["components"]}


class TestTheProgramsOfADocument:
    async def test_have_names_that_a_generator_can_use(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS, config=CONFIG) as served:
            found = await document(served)

        for each in found["components"]["schemas"]:
            assert re.fullmatch(r"[a-zA-Z0-9._-]+", each)
        names = [operation["operationId"] for operation in operations(found).values()]
        assert len(set(names)) == len(names)
        schemas = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
        assert set(references(found)) <= schemas
        assert set(mappings(found)) <= schemas
        assert len(set(mappings(found))) >= 2

    async def test_have_the_schemas_of_their_own_types(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS, config=CONFIG) as served:
            found = await document(served)

        for path, field, good, bad in VALUES:
            validator = jsonschema.Draft202012Validator(schema_of(found, path, field))
            assert (path, field, validator.is_valid(good)) == (path, field, True)
            assert (path, field, validator.is_valid(bad)) == (path, field, False)


class TestTheListOfPrograms:
    async def test_has_schemas_that_are_schemas(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS, config=CONFIG) as served:
            listed = (await served.get("/v1/programs")).json["data"]
            answer = await served.post("/v1/programs/maß", {"arguments": {"größe": {"zahl": 1}}})

        for card in listed:
            jsonschema.Draft202012Validator.check_schema(card["parameters"])
            jsonschema.Draft202012Validator.check_schema(card["returns"])
            assert card["parameters"]["type"] == "object"
            assert set(references(card["parameters"])) <= {
                f"#/$defs/{name}" for name in card["parameters"].get("$defs", {})
            }
        assert listed[0]["description"] == "Takes a Body and gives another."
        assert json.loads(answer.text)["value"] == {"zahl": 1}
