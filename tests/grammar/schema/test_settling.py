"""Definitions that nothing satisfies: they are false, and what may do without them is not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from structgen.errors import ConstraintError
from tests.grammar.schema.oracle import compiled, judged
from tests.grammar.schema.values import accepts

EMPTY = {"type": "integer", "enum": ["a"]}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


SCHEMAS: tuple[dict[str, Any], ...] = (
    {**ref("a"), "$defs": {"a": thing(c=ref("empty"))}},
    thing(a={"$ref": "#"}, b=ref("empty")),
    {**thing(a=ref("a")), "$defs": {"a": {"anyOf": [{"type": "integer"}, ref("empty")]}}},
    {**thing(a=ref("a")), "$defs": {"a": {"oneOf": [ref("empty"), {"type": "null"}]}}},
    {**thing(a=ref("a")), "$defs": {"a": {**thing(x=ref("empty")), "required": ["x"]}}},
    {"type": "array", "items": ref("empty")},
    {"prefixItems": [ref("empty")]},
    {**thing(), "additionalProperties": ref("empty")},
    {**thing(), "patternProperties": {"^a": ref("empty")}},
    {"dependentSchemas": {"a": ref("empty")}},
    {"if": {"required": ["a"]}, "then": ref("empty")},
    {"not": ref("empty")},
    # Empty only for what stands beside the reference, or for both of two.
    {**thing(a=ref("a"), b={"$ref": "#"}), "$defs": {"a": {**ref("b"), "minimum": 3}}},
    {**thing(a={"allOf": [ref("b"), ref("c")]}, b={"$ref": "#"})},
    # Round and round: each refers to each, one of them is empty by itself.
    {
        **thing(a=ref("a")),
        "$defs": {
            "a": thing(a=ref("b"), b=ref("a")),
            "b": {**thing(a=ref("a"), b=ref("empty")), "required": ["b"]},
        },
    },
    {
        "type": ["object", "array"],
        "items": ref("a"),
        "$defs": {"a": {"type": "array", "items": {"anyOf": [ref("empty"), ref("a")]}}},
    },
)
DEFS = {"empty": EMPTY, "b": {"type": "integer", "maximum": 2}, "c": {"type": "string"}}


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@pytest.mark.parametrize("empty", [EMPTY, {"type": "string", "enum": []}, ref("b_and_c")])
class TestWhatRefersToAnEmptyDefinition:
    def test_accepts_what_does_without(self, schema: Any, empty: Any) -> None:
        both = {"allOf": [ref("b"), ref("c")]}
        defs = {**DEFS, "empty": empty, "b_and_c": both, **schema.get("$defs", {})}

        assert judged(json.dumps({**schema, "$defs": defs})).wrong == []


class TestManyEmptyDefinitions:
    def test_are_all_found_soon(self) -> None:
        chain = {f"d{n}": {**thing(x=ref(f"d{n + 1}")), "required": ["x"]} for n in range(40)}
        began = time.thread_time()
        grammar = compiled({**thing(a=ref("d0"), b={}), "$defs": {**chain, "d40": EMPTY}})

        assert time.thread_time() - began < 5
        assert accepts(grammar, {"b": 1})
        assert not accepts(grammar, {"a": {}})

    def test_are_told_where_all_is_empty(self) -> None:
        # The dynamic reference keeps the schema from being told empty beforehand.
        needed = {**thing(x=ref("d1"), y={"$dynamicRef": "#n"}), "required": ["x"]}
        schema = {"$dynamicAnchor": "n", **ref("d0"), "$defs": {"d0": needed, "d1": EMPTY}}

        with pytest.raises(ConstraintError, match="nothing satisfies it"):
            compiled(schema)
