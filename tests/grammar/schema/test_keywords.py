"""Every keyword of drafts 4 to 2020-12: enforced by the mask, or checked in the end; never dropped.

The oracle is the validator `jsonschema`, which shares no code with what is tested.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from structgen.errors import ConstraintError
from tests.grammar.schema.oracle import compiled, judged
from tests.grammar.schema.values import POOL, accepts, lets_through

D4 = "http://json-schema.org/draft-04/schema#"
D6 = "http://json-schema.org/draft-06/schema#"
D7 = "http://json-schema.org/draft-07/schema#"
D19 = "https://json-schema.org/draft/2019-09/schema"
D20 = "https://json-schema.org/draft/2020-12/schema"

SCHEMAS: tuple[Any, ...] = (
    True,
    {},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string"},
    {"type": "array"},
    {"type": "object"},
    {"type": ["integer", "string", "null"]},
    {"enum": [1, "a", None, [1], {"a": 1}, 2.75]},
    {"const": {"a": {"b": 1}}},
    {"const": [1, 2]},
    {"const": 0},
    {"const": False},
    {"type": "string", "enum": ["a", 1, "b"]},
    {"enum": [True, 0]},
    {"minimum": 2},
    {"maximum": 2},
    {"exclusiveMinimum": 1},
    {"exclusiveMaximum": 3},
    {"type": "integer", "minimum": 1.5, "maximum": 6.5},
    {"multipleOf": 3},
    {"type": "integer", "multipleOf": 7},
    {"multipleOf": 0.5},
    {"type": "number", "minimum": -0.25, "exclusiveMaximum": 3.14},
    {"type": "number", "minimum": -3, "maximum": 1.5, "multipleOf": 0.25},
    {"minLength": 2},
    {"maxLength": 1},
    {"type": "string", "minLength": 1, "maxLength": 2},
    {"pattern": "a"},
    {"pattern": "^a"},
    {"pattern": "b$"},
    {"type": "string", "pattern": "^[a-z]+$"},
    {"pattern": "^a|2$"},
    {"type": "string", "pattern": "^(?!a)"},
    {"type": "string", "pattern": "(.)\\1"},
    {"type": "string", "pattern": "\\bb"},
    {"type": "string", "pattern": "^a", "minLength": 2, "maxLength": 3},
    {"pattern": "^[^\\s]*$"},
    {"pattern": '"'},
    {"pattern": "\\\\"},
    {"pattern": "\\d{2,}"},
    {"pattern": "^.b$"},
    {"minItems": 2},
    {"maxItems": 1},
    {"type": "array", "minItems": 1, "maxItems": 2},
    {"items": {"type": "integer"}},
    {"items": False},
    {"prefixItems": [{"type": "string"}, {"type": "integer"}]},
    {"prefixItems": [{"type": "integer"}], "items": False},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2},
    {"uniqueItems": True},
    {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"enum": [1, True]}, "uniqueItems": True},
    {"contains": {"type": "string"}},
    {"contains": {"const": 1}, "minContains": 2},
    {"contains": {"const": 1}, "maxContains": 1},
    {"contains": {"const": 1}, "minContains": 0},
    {"contains": True},
    {"contains": False},
    {"minContains": 2},
    {"contains": {"const": 1}, "minContains": 0, "maxContains": 1},
    {"properties": {"a": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    {"properties": {"a": False}},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"required": ["a"]},
    {"required": ["a", "b"]},
    {"type": "object", "required": ["b"], "properties": {"a": True}},
    {"additionalProperties": False},
    {"additionalProperties": {"type": "integer"}},
    {"properties": {"a": True}, "additionalProperties": False},
    {"properties": {"a": True}, "additionalProperties": {"type": "string"}},
    {"patternProperties": {"^a": {"type": "integer"}}},
    {"patternProperties": {"b": {"type": "string"}}, "additionalProperties": False},
    {"patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "integer"}}},
    {
        "properties": {"a": {"minimum": 1}},
        "patternProperties": {"^a": {"type": "integer"}},
        "additionalProperties": {"type": "integer"},
    },
    {"patternProperties": {"^(?!a)": {"type": "string"}}},
    {"patternProperties": {"^(?!a)": {"type": "integer"}}, "additionalProperties": False},
    {"propertyNames": {"pattern": "^a"}},
    {"propertyNames": {"enum": ["a", "b"]}},
    {"propertyNames": {"maxLength": 1}},
    {"propertyNames": {"const": "a"}},
    {"propertyNames": False},
    {"propertyNames": True},
    {"propertyNames": {"minLength": 2}, "additionalProperties": {"type": "integer"}},
    {"properties": {"a": {"type": "integer"}}, "propertyNames": {"pattern": "^[ab]$"}},
    {"properties": {"a": {"type": "integer"}}, "propertyNames": {"pattern": "^[b]$"}},
    {
        "properties": {"a": {"type": "integer"}},
        "propertyNames": {"pattern": "^a"},
        "additionalProperties": {"type": "string"},
    },
    {"propertyNames": {"not": {"const": "a"}}},
    {"propertyNames": {"minLength": 1, "pattern": "^a"}},
    {"minProperties": 1},
    {"maxProperties": 1},
    {"minProperties": 2, "maxProperties": 2},
    {"type": "object", "properties": {"a": True, "b": True}, "minProperties": 1},
    {"type": "object", "properties": {"a": True, "b": True}, "minProperties": 2},
    {
        "type": "object",
        "properties": {"a": True, "b": True, "c": True},
        "minProperties": 2,
        "additionalProperties": False,
    },
    {"properties": {"a": True, "b": True}, "maxProperties": 1},
    {
        "properties": {"a": True, "b": True, "c": True},
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": True, "b": True, "c": True},
        "required": ["a"],
        "minProperties": 2,
    },
    {
        "type": "object",
        "properties": {"a": True, "b": True, "c": True},
        "required": ["b"],
        "maxProperties": 2,
    },
    {"type": "object", "properties": {"a": True}, "required": ["a"], "maxProperties": 2},
    {"allOf": [{"properties": {"a": True}}], "minProperties": 2},
    {"maxProperties": 0},
    {"properties": {"a": {"type": "integer"}}, "minProperties": 3},
    {"dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentRequired": {"a": ["b"], "b": ["c"]}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}}}},
    {"dependentSchemas": {"a": False}},
    {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    {"allOf": [True, {"type": "string"}]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 3}]},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"anyOf": [True, False]},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "anyOf": [
            {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
            {"properties": {"b": False}},
        ],
    },
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"oneOf": [{"type": "string"}, {"enum": ["a", "b"]}]},
    {"oneOf": [{"multipleOf": 5}, {"multipleOf": 3}], "type": "integer"},
    {"oneOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"},
    {"oneOf": [True]},
    {"oneOf": [True, False]},
    {
        "oneOf": [
            {"properties": {"a": {"const": 1}}, "required": ["a"]},
            {"properties": {"a": {"const": "x"}}, "required": ["a"]},
        ]
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"a": True}, "additionalProperties": False},
            {"type": "object", "properties": {"b": True}, "additionalProperties": False},
        ]
    },
    {
        "oneOf": [
            {"type": "array", "items": {"type": "integer"}},
            {"type": "array", "items": {"type": "string"}},
        ]
    },
    {"not": {"type": "string"}},
    {"not": {"type": "integer"}},
    {"not": {"enum": ["a", "b"]}},
    {"type": "string", "not": {"enum": ["a", "b"]}},
    {"type": "string", "not": {"const": ""}},
    {"not": {"const": 1}},
    {"not": {"required": ["a"]}},
    {"type": "object", "not": {"required": ["a", "b"]}},
    {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {"type": "string", "not": {"pattern": "^a"}},
    {"not": {"not": {"type": "integer"}}},
    {"not": {"minimum": 3}},
    {"not": False},
    {"type": "integer", "not": {"multipleOf": 2}},
    {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    {"not": {"items": {"type": "integer"}}},
    {"type": "array", "not": {"minItems": 2}},
    {"not": {"type": ["object", "array"]}},
    {"not": {"const": {"a": 1}}},
    {"not": {"additionalProperties": False}},
    {"type": ["string", "integer"], "not": {"enum": ["a", 1]}},
    {"enum": ["a", "b", 1], "not": {"const": "b"}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}},
    {"if": {"type": "integer"}, "else": {"type": "string"}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {
        "type": "object",
        "properties": {"a": {"enum": [1, "x"]}, "b": True},
        "required": ["a"],
        "if": {"properties": {"a": {"const": 1}}},
        "then": {"required": ["b"]},
    },
    {"then": {"type": "integer"}},
    {"if": True, "then": {"type": "integer"}},
    {"if": False, "then": False, "else": {"type": "object"}},
    {"properties": {"a": True}, "unevaluatedProperties": False},
    {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
    {
        "allOf": [{"properties": {"a": True}}],
        "properties": {"b": True},
        "unevaluatedProperties": {"type": "string"},
    },
    {
        "anyOf": [{"properties": {"a": True}, "required": ["a"]}, {"properties": {"b": True}}],
        "unevaluatedProperties": False,
    },
    {
        "$ref": "#/$defs/x",
        "unevaluatedProperties": False,
        "$defs": {"x": {"properties": {"a": {"type": "integer"}}}},
    },
    {"additionalProperties": {"type": "integer"}, "unevaluatedProperties": False},
    {
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"properties": {"b": True}},
        "unevaluatedProperties": False,
    },
    {"prefixItems": [True], "unevaluatedItems": False},
    {"allOf": [{"prefixItems": [True, {"type": "integer"}]}], "unevaluatedItems": False},
    {"unevaluatedItems": {"type": "integer"}},
    {"contains": {"const": 1}, "unevaluatedItems": False},
    {
        "anyOf": [{"prefixItems": [{"const": 1}]}, {"prefixItems": [True, True]}],
        "unevaluatedItems": False,
    },
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}},
    {"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": {"type": "integer"}}},
    {"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "string"}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    {"$id": "http://e.org/r", "$ref": "x", "$defs": {"y": {"$id": "x", "type": "string"}}},
    {"$defs": {"a/b~c %": {"type": "null"}}, "$ref": "#/$defs/a~1b~0c%20%25"},
    {"definitions": {"x": {"type": "integer"}}, "items": {"$ref": "#/definitions/x"}},
    {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}},
    {
        "$ref": "#/$defs/l",
        "$defs": {
            "l": {
                "anyOf": [
                    {"type": "null"},
                    {
                        "type": "object",
                        "properties": {"a": {"$ref": "#/$defs/l"}},
                        "required": ["a"],
                    },
                ]
            }
        },
    },
    {
        "items": {"$dynamicRef": "#n"},
        "type": "array",
        "$defs": {"x": {"$dynamicAnchor": "n", "type": "integer"}},
    },
    {
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
        "$comment": "c",
        "x-foo": {"type": "bar"},
        "type": "integer",
    },
    {"format": "phone", "type": "string"},
    {"contentMediaType": "application/json", "type": "string"},
    {"$schema": D4, "minimum": 2, "exclusiveMinimum": True},
    {"$schema": D4, "maximum": 2, "exclusiveMaximum": False},
    {"$schema": D4, "items": [{"type": "integer"}], "additionalItems": False},
    {"$schema": D4, "items": {"type": "integer"}, "additionalItems": False},
    {"$schema": D4, "dependencies": {"a": ["b"]}},
    {"$schema": D4, "const": 1},
    {
        "$schema": D4,
        "id": "http://e.org/x",
        "properties": {"a": {"$ref": "#/definitions/n"}},
        "definitions": {"n": {"type": "null"}},
    },
    {"$schema": D4, "definitions": {"x": {"id": "#foo", "type": "integer"}}, "$ref": "#foo"},
    {"$schema": D4, "type": "integer"},
    {
        "$schema": D7,
        "definitions": {"x": {"type": "integer"}},
        "$ref": "#/definitions/x",
        "maximum": 2,
    },
    {
        "$schema": D7,
        "items": [{"type": "integer"}, {"type": "string"}],
        "additionalItems": {"type": "null"},
    },
    {"$schema": D7, "dependencies": {"a": {"required": ["b"]}}},
    {"$schema": D7, "dependencies": {"a": ["b"], "b": {"maxProperties": 2}}},
    {"$schema": D7, "dependentRequired": {"a": ["b"]}},
    {"$schema": D6, "if": {"type": "integer"}, "then": False},
    {"$schema": D7, "if": {"type": "integer"}, "then": {"minimum": 3}},
    {"$schema": D6, "contains": {"const": 1}},
    {"$schema": D6, "propertyNames": {"enum": ["a"]}},
    {"$schema": D6, "exclusiveMinimum": 2},
    {"$schema": D7, "prefixItems": [{"type": "string"}]},
    {"$schema": D19, "items": [{"type": "integer"}], "unevaluatedItems": False},
    {
        "$schema": D19,
        "$recursiveAnchor": True,
        "type": ["object", "integer"],
        "properties": {"a": {"$recursiveRef": "#"}},
    },
    {"$schema": D19, "dependentRequired": {"a": ["b"]}},
    {"$schema": D19, "contains": {"const": 1}, "minContains": 2},
    {"$schema": D20, "additionalItems": False, "prefixItems": [True]},
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
class TestASchema:
    def test_accepts_what_another_validator_accepts(self, schema: Any) -> None:
        assert judged(json.dumps(schema)).wrong == []

    def test_has_an_exact_mask_or_says_what_is_left_to_the_check(self, schema: Any) -> None:
        found = judged(json.dumps(schema))

        assert found.invalid == [] or found.unmasked


class TestWhereReadersDiffer:
    def test_known_formats_are_enforced_by_the_mask(self) -> None:
        grammar = compiled({"type": "string", "format": "date"})

        assert [v for v in POOL if accepts(grammar, v)] == ["2024-02-29"]

    def test_classes_take_what_all_readers_take(self) -> None:
        word, other = compiled({"pattern": r"^\w$"}), compiled({"pattern": r"^\W$"})

        assert word.accepts('"a"')
        assert not word.accepts('"é"')
        assert not other.accepts('"é"')
        assert other.accepts('"-"')

    def test_classes_of_unicode_are_known(self) -> None:
        grammar = compiled({"type": "string", "pattern": r"^\p{L}+$"})

        assert grammar.accepts('"é日本"')
        assert not grammar.accepts('"a1"')

    def test_hundredths_are_multiples_whatever_floats_say(self) -> None:
        grammar = compiled({"type": "number", "multipleOf": 0.01})

        assert grammar.accepts("0.07")
        assert grammar.accepts("0.5")
        assert not grammar.accepts("0.075")

    @pytest.mark.parametrize("draft", [{}, {"$schema": D20}], ids=["undeclared", "2020-12"])
    def test_dependencies_are_meant_in_every_draft(self, draft: dict[str, str]) -> None:
        grammar = compiled({**draft, "dependencies": {"a": ["b"]}})

        assert grammar.accepts('{"a": 1, "b": 2}')
        assert not grammar.accepts('{"a": 1}')
        assert not lets_through(grammar, {"a": 1})

    def test_old_bounds_are_understood_where_no_draft_is_named(self) -> None:
        grammar = compiled({"type": "integer", "minimum": 1, "exclusiveMinimum": True})

        assert grammar.accepts("2")
        assert not grammar.accepts("1")

    def test_old_tuples_are_understood_where_no_draft_is_named(self) -> None:
        grammar = compiled({"type": "array", "items": [{"const": 1}], "additionalItems": False})

        assert grammar.accepts("[1]")
        assert not grammar.accepts("[2]")
        assert not grammar.accepts("[1, 2]")

    def test_nothing_is_fetched(self) -> None:
        with pytest.raises(ConstraintError, match=r"example\.org/elsewhere"):
            compiled({"$ref": "https://example.org/elsewhere"})


class TestBounds:
    @pytest.mark.parametrize(
        ("bounds", "inside", "outside"),
        [
            ({"maximum": 0.64}, ["0.6", "0.64", "-3"], ["0.641", "0.7"]),
            ({"minimum": -2.625}, ["-2.6", "-2.62", "-2.625"], ["-2.63", "-2.7"]),
            ({"exclusiveMaximum": 5.626}, ["5.6", "5.62", "5.625"], ["5.626", "5.63"]),
            ({"minimum": -0.27, "maximum": 2.01}, ["-0.2", "2", "2.01", "0"], ["-0.3", "2.1"]),
        ],
        ids=json.dumps,
    )
    def test_let_through_what_they_begin_with(
        self, bounds: dict[str, float], inside: list[str], outside: list[str]
    ) -> None:
        grammar = compiled({"type": "number", **bounds})

        assert [text for text in inside if not grammar.accepts(text)] == []
        assert [text for text in outside if grammar.accepts(text)] == []
        assert grammar.source.unmasked == ()

    @pytest.mark.parametrize("bound", [2**63, 10**30, 1e300])
    def test_beyond_what_the_mask_holds_are_taken_narrower(self, bound: float) -> None:
        grammar = compiled({"type": "integer", "minimum": 0, "maximum": bound})

        assert grammar.accepts("5")
        assert grammar.accepts(str(2**63 - 1))
        assert not lets_through(grammar, -1)
        assert not lets_through(grammar, 2**63)
        assert grammar.source.unmasked == ()
