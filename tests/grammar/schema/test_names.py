"""Properties whose names are words of JSON Schema are properties like any other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.request import JsonSchema
from tests.grammar.schema.values import VOCABULARY, accepts

WORDS = (
    *("enum", "const", "$ref", "$defs", "type", "items", "properties", "required", "allOf", "if"),
    *("default", "x-guidance", "$id", "$anchor", "dependencies"),
)


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return compile_constraint(JsonSchema(json.dumps(schema)), VOCABULARY)


@pytest.mark.parametrize("name", WORDS)
class TestAPropertyNamedLikeAKeyword:
    def test_has_its_schema(self, name: str) -> None:
        grammar = grammar_of(
            {
                "type": "object",
                "properties": {name: {"$ref": "#/$defs/whole"}},
                "required": [name],
                "additionalProperties": False,
                "$defs": {"whole": {"type": "integer"}},
            }
        )

        assert accepts(grammar, {name: 1})
        assert not accepts(grammar, {name: "a"})
        assert not accepts(grammar, {})

    def test_is_left_out_where_its_schema_has_no_end(self, name: str) -> None:
        endless = {"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#/$defs/x"}}}
        grammar = grammar_of(
            {
                "type": "object",
                "properties": {name: {"$ref": "#/$defs/x"}, "b": {"type": "integer"}},
                "additionalProperties": False,
                "$defs": {"x": endless},
            }
        )

        assert accepts(grammar, {})
        assert accepts(grammar, {"b": 1})
        assert grammar.matcher().try_all(f'{{"{name}"'.encode()) < len(name) + 3

    def test_tells_branches_apart(self, name: str) -> None:
        grammar = grammar_of(
            {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {name: {"$ref": f"#/$defs/{kind}"}},
                        "required": [name],
                    }
                    for kind in ("one", "two")
                ],
                "$defs": {"one": {"const": 1}, "two": {"const": 2}},
            }
        )

        assert accepts(grammar, {name: 1})
        assert accepts(grammar, {name: 2})
        assert not accepts(grammar, {name: 3})
        assert grammar.source.unmasked == ()

    def test_of_a_value_is_a_value(self, name: str) -> None:
        grammar = grammar_of({"enum": [{name: "#/$defs/x"}, {name: {"type": "string"}}]})

        assert accepts(grammar, {name: "#/$defs/x"})
        assert accepts(grammar, {name: {"type": "string"}})
        assert not accepts(grammar, {name: "a"})
