"""Small schemas with which others of this kind were found to be wrong; here each must be right."""

from __future__ import annotations

from typing import Any

import pytest

from structgen.grammar.compiler import compile_constraint
from structgen.request import JsonSchema
from tests.grammar.schema.values import VOCABULARY

CASES = (
    pytest.param(
        {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
        ['"abc"', '"a"'],
        ['"abca"', '"ad"'],
        id="pattern and maxLength",
    ),
    pytest.param(
        {"type": "string", "format": "email", "maxLength": 8},
        ['"a@b.co"'],
        ['"abcdefgh@example.com"'],
        id="format and maxLength",
    ),
    pytest.param(
        {
            "type": "object",
            "properties": {"k": {"type": "integer"}, "m": {"type": "string"}},
            "additionalProperties": False,
            "anyOf": [{"required": ["k"]}, {"required": ["m"]}],
        },
        ['{"k":1}', '{"m":"x"}', '{"k":1,"m":"x"}'],
        ['{"z":1}', "3", "{}", '{"k":"s"}'],
        id="anyOf beside properties",
    ),
    pytest.param(
        {"type": "object", "required": ["a"]},
        ['{"a":1}', '{"a":"z","b":2}'],
        ["{}", '{"b":1}'],
        id="a required name that is not declared",
    ),
    pytest.param(
        {"type": "string", "pattern": "^cat$|^dog$"},
        ['"cat"', '"dog"'],
        ['"cow"', '"catdog"', '"cat|dog"'],
        id="alternatives, each anchored",
    ),
    pytest.param(
        {"type": "string", "pattern": "b"},
        ['"abc"', '"b"'],
        ['"ac"', '""'],
        id="a pattern is searched for",
    ),
    pytest.param(
        {
            "type": "object",
            "properties": {"total": {"type": "integer"}},
            "required": ["total"],
            "patternProperties": {"^total$": {"minimum": 0}},
            "additionalProperties": False,
        },
        ['{"total":3}'],
        ['{"total":-1}'],
        id="a name that a pattern matches, too",
    ),
    pytest.param(
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        ["[1,2]", "[]"],
        ["[1,1]"],
        id="uniqueItems",
    ),
    pytest.param(
        {"type": "integer", "multipleOf": 7}, ["14", "0", "-7"], ["15", "1"], id="multipleOf"
    ),
    pytest.param(
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}},
        ["[1,3]"],
        ["[1,2]", "[]"],
        id="contains",
    ),
    pytest.param(
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
        ["0.1", "2.5", "1", "0.0001"],
        ["0", "2.6", "-1", "2.50001"],
        id="exclusive bound of a float",
    ),
    pytest.param(
        {"type": "integer", "minimum": -12, "maximum": 7},
        ["-12", "-1", "0", "7"],
        ["-13", "8", "12"],
        id="negative bounds",
    ),
    pytest.param({"type": "integer"}, ["1", "-3"], ["1.5", '"1"'], id="integers"),
    pytest.param(
        {"enum": ['é"q"', "日本", "a\\b", "tab\t", "😀"]},
        ['"é\\"q\\""', '"日本"', '"a\\\\b"', '"tab\\t"', '"😀"'],
        ['"e"', '"日"'],
        id="an enum with characters that are escaped",
    ),
    pytest.param(
        {"const": {"a": [1, None, {"b": True}]}},
        ['{"a":[1,null,{"b":true}]}', '{"a": [1, null, {"b": true}]}'],
        ['{"a":[1,null,{"b":false}]}', '{"a":[1]}'],
        id="const of an object",
    ),
    pytest.param(
        {"type": "string", "maxLength": 5},
        ['"a\\nb"', '"\\""', '"a\\\\b"', '"\\u00e9abcd"'],
        ['"abcdef"'],
        id="escapes count as one character",
    ),
    pytest.param({"type": "string", "maxLength": 2}, ['"a"'], ['"\\ud800"'], id="lone surrogates"),
    pytest.param(
        {"type": "string", "maxLength": 4},
        ['"ab"'],
        ['"a\x01b"', '"a\nb"', '"a\tb"'],
        id="control characters",
    ),
    pytest.param(
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "integer"},
                        "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
                    },
                    "required": ["v", "next"],
                    "additionalProperties": False,
                }
            },
        },
        ['{"v":1,"next":null}', '{"v":1,"next":{"v":2,"next":null}}'],
        ['{"v":1}', '{"v":1,"next":{"v":2}}'],
        id="recursion",
    ),
    pytest.param(
        {"$ref": "#/$defs/s", "maxLength": 3, "$defs": {"s": {"type": "string"}}},
        ['"abc"'],
        ['"abcd"', "1"],
        id="keywords beside $ref",
    ),
    pytest.param({"type": "string", "not": {"enum": ["root"]}}, ['"bob"'], ['"root"'], id="not"),
    pytest.param(
        {
            "type": "object",
            "properties": {"k": {"enum": ["a", "b"]}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"required": ["v"]},
        },
        ['{"k":"b"}', '{"k":"a","v":1}'],
        ['{"k":"a"}'],
        id="if and then",
    ),
    pytest.param(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        ['{"a":1,"b":2}'],
        ['{"a":1}'],
        id="the order of keys",
    ),
    pytest.param(
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ['{"a":1,"b":2}'],
        ['{"a":1,"a":2}'],
        id="duplicate keys",
    ),
    pytest.param(
        {
            "type": "object",
            "properties": {
                "u": {"type": "string", "format": "uuid"},
                "i": {"type": "string", "format": "ipv4"},
            },
            "required": ["u", "i"],
        },
        ['{"u":"123e4567-e89b-12d3-a456-426614174000","i":"10.0.255.1"}'],
        [
            '{"u":"123e4567","i":"10.0.255.1"}',
            '{"u":"123e4567-e89b-12d3-a456-426614174000","i":"10.0.256.1"}',
        ],
        id="formats",
    ),
    pytest.param(
        {"type": "string", "format": "phone"}, ['"+44 20"'], ["5"], id="a format that nobody knows"
    ),
    pytest.param({"type": "object"}, ["{}", '{"a":1}'], ["[]", "1"], id="any object"),
    pytest.param(
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "items": False,
            "minItems": 2,
        },
        ['[1,"a"]'],
        ["[1]", '[1,"a",2]', '["a",1]'],
        id="a tuple",
    ),
    pytest.param(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ['{"a":1}', '{ "a": 1 }'],
        ['{   "a":1}', '{"a":\n\n\n1}'],
        id="white space",
    ),
    pytest.param(
        {
            "type": "object",
            "properties": {
                "a": {"type": "string", "minLength": 1},
                "b": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        ['{"a":"x","b":["y"]}'],
        ['{"a":"","b":["y"]}', '{"a":"x","b":[]}'],
        id="lengths",
    ),
    pytest.param(
        {
            "type": "object",
            "properties": {"a/b": {"type": "integer"}, "~": {"type": "integer"}},
            "$defs": {"x/y": {"type": "string"}},
            "additionalProperties": {"$ref": "#/$defs/x~1y"},
        },
        ['{"a/b":1,"~":2,"z":"s"}'],
        ['{"z":1}'],
        id="a pointer with an escaped slash",
    ),
    pytest.param(
        {"type": "string", "pattern": "^(?!admin)[a-z]+$"},
        ['"bob"'],
        ['"admin"', '"administrator"'],
        id="a look-ahead",
    ),
    pytest.param(
        {"type": "object", "properties": {"a": True, "b": False}, "additionalProperties": False},
        ['{"a":[1]}', "{}"],
        ['{"b":1}', '{"a":1,"b":2}'],
        id="true and false",
    ),
    pytest.param(
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
        ["[1,2]", "[1,2,3,4]"],
        ["[1]", "[1,2,3,4,5]"],
        id="numbers of items",
    ),
    pytest.param(
        {"type": "string", "pattern": '^a"b$'},
        ['"a\\"b"'],
        ['"a"b"', '"ab"'],
        id="a quote in a pattern",
    ),
    pytest.param({"maximum": 3}, ["2", '"s"', "null"], ["4"], id="a bound without a type"),
    pytest.param(
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}},
            "additionalProperties": False,
        },
        ['{"x1":1}', '{"x":2}', "{}"],
        ['{"y":1}', '{"x1":"s"}'],
        id="patternProperties",
    ),
    pytest.param(
        {"type": "integer", "minimum": 1.5, "maximum": 3.5},
        ["2", "3"],
        ["1", "4"],
        id="fractional bounds of an integer",
    ),
    pytest.param(
        {"type": "integer", "minimum": 0, "maximum": 9223372036854775808},
        ["5", "0"],
        ["-1"],
        id="a bound beyond 64 bits",
    ),
    pytest.param(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "dependencies": {"a": ["b"]},
        },
        ['{"a":1,"b":1}', '{"b":1}'],
        ['{"a":1}'],
        id="dependencies",
    ),
    pytest.param({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"], id="type and enum"),
    pytest.param(
        {"type": "string", "pattern": "^[0-9]*$", "minLength": 3},
        ['"123"'],
        ['"12"', '""'],
        id="pattern and minLength",
    ),
    pytest.param(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": {"type": "string"},
        },
        ['{"a":1,"b":"s"}'],
        ['{"a":1}', '{"a":1,"b":2}'],
        id="required and additionalProperties",
    ),
)


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_accepts_what_is_valid_and_nothing_else(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    grammar = compile_constraint(JsonSchema(schema), VOCABULARY)

    assert [text for text in good if not grammar.accepts(text)] == []
    assert [text for text in bad if grammar.accepts(text)] == []


def test_strings_may_be_spelled_with_escapes() -> None:
    grammar = compile_constraint(
        JsonSchema({"type": "array", "items": {"type": "string"}}), VOCABULARY
    )

    assert grammar.accepts('["a\\u0041", "😀", "\\ud83d\\ude00"]')
    assert not grammar.accepts('["a\\u00"]')
    assert not grammar.accepts('["a\\x"]')
    assert not grammar.accepts('["a\x01b"]')
    assert not grammar.accepts('["unterminated]')


def test_a_large_enum_is_exact() -> None:
    names = [f"item_{n:04}" for n in range(1_500)]
    grammar = compile_constraint(JsonSchema({"enum": names}), VOCABULARY)

    assert all(grammar.accepts(f'"{name}"') for name in names[::100])
    assert not any(grammar.accepts(f'"{text}"') for text in ("item_9999", "item_00", "item_"))


def test_arrays_may_be_nested_deeply() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    grammar = compile_constraint(JsonSchema(schema), VOCABULARY)

    assert grammar.accepts("[" * 100 + "7" + "]" * 100)
    assert not grammar.accepts("[" * 99 + "7" + "]" * 99)
