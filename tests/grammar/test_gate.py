"""The schemas that are for xgrammar: which they are, and that they mean what they meant."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.grammar.gate import MOST, MOST_DEPTH, MOST_ITEMS, closed
from tests.grammar.closed_schemas import SCHEMAS, Schema, spoiled, value_of


def record(**properties: Any) -> Schema:
    """A closed object of required properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def rewritten(schema: Any) -> Any:
    text = closed(schema)
    return None if text is None else json.loads(text)


TEXT = {"type": "string"}
NO_MORE = {"items": False}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

TAKEN: list[tuple[Schema, Schema]] = [
    (TEXT, TEXT),
    ({"type": "string", "title": "T", "default": 1, "x-unknown": {"not": {}}}, TEXT),
    ({"type": "string", "minimum": 3, "required": ["a"]}, TEXT),
    ({"$schema": DRAFT_7, "$id": "http://a.example/b", "type": "string"}, TEXT),
    ({"type": ["string", "string"]}, TEXT),
    ({"type": ["integer", "number"]}, {"type": "number"}),
    ({"type": ["string", "null"]}, {"anyOf": [TEXT, {"type": "null"}]}),
    ({"anyOf": [TEXT], "description": "one"}, TEXT),
    ({"const": "a"}, {"enum": ["a"]}),
    ({"type": "integer", "enum": [1, "a", True, None]}, {"enum": [1]}),
    ({"type": "boolean", "enum": [1, "a", True, None]}, {"enum": [True]}),
    ({"type": ["null", "number"], "enum": [1, "a", None]}, {"enum": [1, None]}),
    ({"type": "integer", "minimum": 1, "exclusiveMinimum": 1}, {"type": "integer", "minimum": 2}),
    ({"type": "integer", "exclusiveMaximum": -2}, {"type": "integer", "maximum": -3}),
    ({"type": "object", "additionalProperties": False}, record()),
    (
        {"type": "array", "items": TEXT, "maxItems": 2},
        {"type": "array", "items": TEXT, "minItems": 0, "maxItems": 2},
    ),
    (
        {"type": "array", "prefixItems": [TEXT, TEXT], "minItems": 2, "maxItems": 2},
        {
            "type": "array",
            "prefixItems": [TEXT, TEXT],
            "items": False,
            "minItems": 2,
            "maxItems": 2,
        },
    ),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": record(x={"$ref": "#/$defs/b"}), "b": TEXT}},
        record(x=TEXT),
    ),
    (record(a={"$ref": "#/definitions/t"}) | {"definitions": {"t": TEXT}}, record(a=TEXT)),
]

REFUSED: list[Any] = [
    True,
    {},
    {"title": "any"},
    {"type": "object"},
    {"type": "object", "properties": {"a": TEXT}},
    {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True},
    {"properties": {"a": TEXT}, "additionalProperties": False},
    record(a={}),
    record(a=True),
    record(a=TEXT) | {"required": ["b"]},
    record(a=TEXT) | {"required": [["b"]]},
    record(a=TEXT) | {"minProperties": 1},
    record(a=TEXT) | {"patternProperties": {"^x": TEXT}},
    record(a=TEXT) | {"dependentRequired": {"a": ["b"]}},
    record(a=TEXT) | {"unevaluatedProperties": False},
    record(**{"a\nb": TEXT}),
    record(**{"a\x7f": TEXT}),
    {"type": "array"},
    {"type": "array", "items": {}},
    {"type": "array", "items": [TEXT]},
    {"type": "array", "items": TEXT, "uniqueItems": True},
    {"type": "array", "items": TEXT, "contains": {"const": "a"}},
    {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 1},
    {"type": "array", "items": TEXT, "minItems": 1.0},
    {"type": "array", "items": TEXT, "maxItems": MOST_ITEMS + 1},
    {"type": "array", "prefixItems": [TEXT]},
    {"type": "array", "prefixItems": [TEXT], "minItems": 1},
    {"type": "array", "prefixItems": [TEXT], "minItems": 1, "maxItems": 2, "items": TEXT},
    {"$schema": DRAFT_7, "type": "array", "prefixItems": [TEXT], "minItems": 1, "maxItems": 1},
    {"type": "string", "minLength": 1},
    {"type": "string", "maxLength": 9},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "unknown"},
    {"type": "string", "format": "uuid", "pattern": "^a$"},
    {"type": "string", "contentEncoding": "base64"},
    {"type": "string", "pattern": "a"},
    {"type": "string", "pattern": "^a"},
    {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": '^"$'},
    {"type": "string", "pattern": "^\\d$"},
    {"type": "string", "pattern": "^a.$"},
    {"type": "string", "pattern": "^[^a]$"},
    {"type": "string", "pattern": "^(a)$"},
    {"type": "string", "pattern": "^a{2,1}$"},
    {"type": "string", "pattern": "^a{0}$"},
    {"type": "string", "pattern": "^" + 9 * "a?" + "$"},
    {"type": "string", "pattern": "^" + 5 * "[a-z]+" + "$"},
    {"type": "string", "pattern": "^[a-z]{65}$"},
    {"type": "string", "pattern": "^a{1,}{2}$"},
    {"type": "number", "minimum": 0},
    {"type": "number", "multipleOf": 2},
    {"type": "integer", "multipleOf": 2},
    {"type": "integer", "minimum": 1.5},
    {"type": "integer", "minimum": 2.0},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "integer", "minimum": 2**63},
    {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
    {"type": "integer", "format": "int32"},
    {"type": "float"},
    {"type": []},
    {"type": ["string", 1]},
    {"type": "strng", "enum": ["a"]},
    {"enum": []},
    {"enum": "a"},
    {"enum": [1.5]},
    {"enum": [2**60]},
    {"enum": [["a"]]},
    {"enum": ["a\x00"]},
    {"enum": ["\ud800"]},
    {"type": "string", "enum": [1]},
    {"type": "string", "enum": ["a"], "minLength": 2},
    {"enum": ["a"], "const": "a"},
    {"$schema": DRAFT_4, "const": "a"},
    {"$schema": "http://json-schema.org/draft-03/schema#", "type": "string"},
    {"anyOf": []},
    {"anyOf": [TEXT, {}]},
    {"anyOf": [TEXT], "type": "string"},
    {"oneOf": [TEXT, {"type": "null"}]},
    {"allOf": [TEXT]},
    {"type": "string", "not": {"const": "a"}},
    {"type": "string", "if": {"const": "a"}},
    {"$ref": "#"},
    {"$ref": "http://a.example/b"},
    {"$ref": "#/$defs/a"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": record(x={"$ref": "#/$defs/a"})}},
    {"$ref": "#/$defs/a", "type": "string", "$defs": {"a": TEXT}},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": TEXT}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://a.example/c", "type": "string"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$anchor": "x", "type": "string"}}},
    {"type": "string", "x-guidance": {"lenient": True}},
]


class TestSchemasThatAreTaken:
    @pytest.mark.parametrize(
        ("schema", "expected"), TAKEN, ids=lambda value: json.dumps(value)[:60]
    )
    def test_are_written_in_a_few_forms(self, schema: Schema, expected: Schema) -> None:
        assert rewritten(schema) == expected

    @given(schema=SCHEMAS, seed=st.integers(0, 2**32))
    @settings(max_examples=200, deadline=None)
    def test_mean_what_they_meant(self, schema: Schema, seed: int) -> None:
        new = rewritten(schema)
        assert new is not None
        before = jsonschema.Draft202012Validator(schema)
        after = jsonschema.Draft202012Validator(new)

        draw = random.Random(seed)
        value = value_of(schema, draw)
        assert before.is_valid(value)
        for each in (value, *(spoiled(value, draw) for _ in range(8))):
            assert after.is_valid(each) == before.is_valid(each)

    def test_keep_the_order_of_their_properties(self) -> None:
        text = closed(record(z=TEXT, a=TEXT, m=TEXT))

        assert text is not None
        assert list(json.loads(text)["properties"]) == ["z", "a", "m"]


class TestSchemasThatAreRefused:
    @pytest.mark.parametrize("schema", REFUSED, ids=range(len(REFUSED)))
    def test_are_those_that_may_not_be_exact(self, schema: Any) -> None:
        assert closed(schema) is None
        if schema is not True:
            assert closed({"type": "array", "items": schema}) is None

    @pytest.mark.parametrize(
        ("schema", "larger"),
        [
            (
                record(**dict.fromkeys(map(str, range(MOST["properties"])), TEXT)),
                record(**dict.fromkeys(map(str, range(MOST["properties"] + 1)), TEXT)),
            ),
            (
                record(**dict.fromkeys("abcdefghijklmn", TEXT)) | {"required": ["a", "n"]},
                record(**dict.fromkeys("abcdefghijklmn", TEXT)) | {"required": ["a"]},
            ),
            ({"enum": [*range(MOST["values"])]}, {"enum": [*range(MOST["values"] + 1)]}),
            ({"const": "a" * MOST["text"]}, {"const": "a" * (MOST["text"] + 1)}),
            ({"anyOf": [TEXT] * MOST["branches"]}, {"anyOf": [TEXT] * (MOST["branches"] + 1)}),
            (
                {"type": "string", "pattern": f"^a{{{MOST['repeats']}}}$"},
                {"type": "string", "pattern": f"^a{{{MOST['repeats']}}}b{{1}}$"},
            ),
        ],
        ids=["properties", "optional", "values", "text", "branches", "repeats"],
    )
    def test_are_those_that_are_large(self, schema: Schema, larger: Schema) -> None:
        assert closed(schema) is not None
        assert closed(larger) is None

    def test_are_those_that_are_deep(self) -> None:
        def nested(depth: int) -> Schema:
            return {"type": "array", "items": nested(depth - 1)} if depth else TEXT

        assert closed(nested(MOST_DEPTH)) is not None
        assert closed(nested(MOST_DEPTH + 1)) is None
        assert closed(nested(300)) is None

    def test_are_those_that_references_make_large(self) -> None:
        defs: Schema = {"0": record(a=TEXT, b=TEXT)}
        for level in range(1, 12):
            below = {"$ref": f"#/$defs/{level - 1}"}
            defs[str(level)] = record(a=below, b=below)

        assert closed({"$ref": "#/$defs/3", "$defs": defs}) is not None
        assert closed({"$ref": "#/$defs/11", "$defs": defs}) is None
