"""Which schemas are refused, by which path and keyword, and that hostile ones cost little."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from structgen.errors import ConstraintError
from structgen.grammar.compiler import compile_constraint
from structgen.grammar.schema import relaxed
from structgen.request import JsonSchema
from tests.grammar.schema.values import VOCABULARY

D3 = "http://json-schema.org/draft-03/schema#"


CHAIN = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(30)}


def nested(depth: int) -> str:
    return '{"items": ' * depth + "{}" + "}" * depth


class TestARefusal:
    @pytest.mark.parametrize(
        ("schema", "message"),
        [
            ({"properties": {"a": {"required": True}}}, r"#/properties/a/required: true"),
            ({"minLength": -1}, r"#/minLength: -1"),
            ({"multipleOf": 0}, r"#/multipleOf: 0"),
            ({"enum": []}, r"nothing satisfies it .*enum"),
            ({"type": "integer", "minimum": 3, "maximum": 2}, r"minimum.*maximum"),
            ({"type": "string", "enum": [1]}, r"type.*enum|enum.*type"),
            ({"type": "string", "minLength": 2, "maxLength": 1}, r"minLength.*maxLength"),
            ({"not": {}}, r"nothing satisfies it .*not"),
            (
                {"type": "object", "properties": {"a": {"allOf": [False]}}, "required": ["a"]},
                r"#/properties/a/allOf/0: nothing satisfies it",
            ),
            ({"$ref": "#"}, r"no finite value"),
            (
                {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
                r"nothing satisfies it|no finite value",
            ),
            ({"$ref": "#/$defs/none"}, r"/\$defs/none"),
            ({"$ref": "http://example.org/x"}, r"http://example\.org/x"),
            ({"$schema": D3, "type": "string"}, r"#/\$schema: .*draft that is not known"),
        ],
        ids=json.dumps,
    )
    def test_names_path_and_keyword(self, schema: Any, message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            relaxed(json.dumps(schema))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{not json", "it is no JSON"),
            ("", "it is no JSON"),
            ("a+", "a pattern is given as regex="),
            ("[1]", r"expected an object, true or false, got \[1\]"),
            ("false", "it accepts nothing"),
            ('{"const": 1e999}', "it is no JSON"),
            ('{"minimum": NaN}', "NaN is no JSON number"),
            ('{"const": "\\ud800"}', "half of a surrogate pair"),
            ('{"type": "string", "type": "null"}', "the key 'type' is there twice"),
        ],
    )
    def test_is_for_what_is_no_schema_at_all(self, text: str, message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            relaxed(text)

    @pytest.mark.parametrize(
        ("schema", "message"),
        [
            ({"type": "strng"}, "at #/type: 'strng' is no type; there are string"),
            ({"properties": {"type": "strng"}}, "at #/properties/type: .* is not of types"),
            ({"type": "string", "pattern": "[a"}, r"at #/pattern: '\[a' is no regular expression"),
            (
                {
                    "type": "object",
                    "properties": {"name": {}},
                    "required": ["nmae"],
                    "additionalProperties": False,
                },
                r"at #: nothing satisfies it \(.*additionalProperties, required",
            ),
        ],
    )
    def test_says_what_is_wrong_in_words(self, schema: Any, message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            relaxed(json.dumps(schema))

    @pytest.mark.parametrize(
        ("separators", "message"),
        [
            ((",", ";"), "and a colon"),
            ((", ",), "a comma"),
            ((" " * 9 + ",", ":"), "at most 8"),
        ],
    )
    def test_is_for_a_layout_that_is_no_json(self, separators: Any, message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            relaxed("{}", separators)


def tower(levels: int) -> dict[str, Any]:
    """References to references, two each, under a keyword that asks what they evaluate."""
    defs: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)
    }
    last = {"properties": {"a": {"type": "integer"}}}
    return {
        "$ref": "#/$defs/d0",
        "unevaluatedProperties": False,
        "$defs": defs | {f"d{levels}": last},
    }


CLOSED = {"$ref": "#", "unevaluatedProperties": False}
BY_ANCHOR = {"$dynamicRef": "#n", "unevaluatedProperties": False}
INTEGER = {"type": "integer"}


class TestASchemaInItself:
    """With `unevaluated...` inside of it: canonical forms of it are endless, and crash."""

    @pytest.mark.parametrize(
        ("schema", "good", "bad"),
        [
            ({"anyOf": [{"properties": {"a": CLOSED}}, INTEGER]}, {"a": 1}, {"a": {"b": 1}}),
            ({"oneOf": [{"properties": {"a": CLOSED}}, {"type": "null"}]}, {"a": {}}, None),
            (
                {"if": {"required": ["k"]}, "then": {"properties": {"a": CLOSED}}},
                {"a": {"b": 1}},
                {"k": 1, "a": {"b": 1}},
            ),
            (
                {"dependentSchemas": {"k": {"properties": {"a": CLOSED}}}},
                {"a": {"b": 1}},
                {"a": {"b": 1}, "k": 1},
            ),
            (
                {
                    "if": {"required": ["k"]},
                    "then": {"additionalProperties": {"$ref": "#", "unevaluatedItems": False}},
                },
                {"a": [1]},
                {"a": [1], "k": 1},
            ),
            (
                {
                    "$dynamicAnchor": "n",
                    "anyOf": [{"properties": {"a": BY_ANCHOR}}, INTEGER],
                },
                {"a": 1},
                {"a": {"b": 1}},
            ),
        ],
        ids=["anyOf", "oneOf", "then", "dependentSchemas", "items", "dynamic"],
    )
    def test_is_taken_and_checked(self, schema: Any, good: Any, bad: Any) -> None:
        judge = relaxed(json.dumps(schema)).judge

        assert judge.fault(json.dumps(good)) is None
        assert judge.fault(json.dumps(bad)) is not None


class TestWhatATowerEvaluates:
    def test_is_known_of_a_low_one(self) -> None:
        judge = relaxed(json.dumps(tower(6))).judge

        assert judge.fault('{"a": 1}') is None
        assert judge.fault('{"b": 1}') is not None

    @pytest.mark.parametrize("levels", [12, 40])
    def test_is_refused_of_a_high_one_at_once(self, levels: int) -> None:
        began = time.thread_time()
        with pytest.raises(ConstraintError, match="ways through references; close the objects"):
            relaxed(json.dumps(tower(levels)))

        assert time.thread_time() - began < 0.5


class TestWhatIsNoSchema:
    @pytest.mark.parametrize(
        "schema",
        [
            {"enum": [{"pattern": f"x{n}"} for n in range(501)]},
            {"default": [{"pattern": f"x{n}"} for n in range(501)]},
            {"const": {"properties": {f"x{n}": 0 for n in range(1_001)}}},
        ],
        ids=["enum", "default", "const"],
    )
    def test_has_none_of_the_limits_of_schemas(self, schema: Any) -> None:
        assert relaxed(json.dumps(schema)).json

    def test_has_them_where_it_can_be_referred_to(self) -> None:
        inside = {"anyOf": [{"pattern": f"x{n}"} for n in range(501)]}

        with pytest.raises(ConstraintError, match="more than 500 patterns"):
            relaxed(json.dumps({"$ref": "#/x/enum", "x": {"enum": inside}}))


class TestAHostileSchema:
    @pytest.mark.parametrize(
        "schema",
        [
            pytest.param(json.dumps({"description": "x" * 5_000_000}), id="5 MB"),
            pytest.param(nested(500), id="deep"),
            pytest.param(nested(50_000), id="deeper"),
            pytest.param(
                json.dumps({"properties": {f"p{n}": {} for n in range(2_000)}}), id="properties"
            ),
            pytest.param(json.dumps({"enum": [f"v{n}" for n in range(30_000)]}), id="values"),
            pytest.param(
                json.dumps({"anyOf": [{"pattern": f"a{n}"} for n in range(501)]}), id="patterns"
            ),
            pytest.param(
                json.dumps({"patternProperties": {f"a{n}": {} for n in range(501)}}),
                id="patterns of names",
            ),
            pytest.param(
                json.dumps({"$ref": "#/$defs/a0", "$defs": {**CHAIN, "a30": {"type": "string"}}}),
                id="references to references",
            ),
        ],
    )
    def test_is_refused_at_once(self, schema: str) -> None:
        began = time.thread_time()
        with pytest.raises(ConstraintError, match=r"more than|recursion"):
            relaxed(schema)

        assert time.thread_time() - began < 0.5

    @pytest.mark.parametrize(
        "schema",
        [
            pytest.param({"enum": [f"value {n}" for n in range(20_000)]}, id="20,000 values"),
            pytest.param(
                {"dependentSchemas": {f"a{n}": {"required": [f"b{n}"]} for n in range(30)}},
                id="2 ** 30 ways",
            ),
            pytest.param(
                {"oneOf": [{"properties": {f"k{n}": {"const": n}}} for n in range(40)]},
                id="40 branches that overlap",
            ),
            pytest.param(
                {
                    "oneOf": [
                        {
                            "properties": {f"p{n}_{m}": INTEGER for m in range(30)},
                            "required": [f"p{n}_0"],
                        }
                        for n in range(44)
                    ]
                },
                id="44 wide branches",
            ),
            pytest.param({"type": "string", "pattern": "^(a+)+$"}, id="nested repeats"),
            pytest.param({"type": "string", "minLength": 10**4, "maxLength": 10**9}, id="lengths"),
            pytest.param({"type": "array", "minItems": 10**3}, id="items"),
        ],
    )
    def test_is_served_soon(self, schema: Any) -> None:
        began = time.thread_time()
        grammar = compile_constraint(JsonSchema(schema), VOCABULARY)

        assert time.thread_time() - began < 5
        assert not grammar.accepts("{")

    def test_is_read_as_it_is_meant_where_parts_are_given_up(self) -> None:
        chain = [
            {"if": {"properties": {"k": {"const": n}}}, "then": {"required": [f"x{n}"]}}
            for n in range(24)
        ]
        schema = {
            "type": "object",
            "properties": {"k": {"type": "integer"}},
            "required": ["k"],
            "allOf": chain,
        }
        grammar = compile_constraint(JsonSchema(schema), VOCABULARY)

        assert grammar.accepts('{"k": 23, "x23": 1}')
        assert not grammar.accepts('{"k": 23, "x22": 1}')
        assert not grammar.accepts('{"k": 0}')


class TestTheLayout:
    def test_has_at_most_two_white_space_characters_between_tokens(self) -> None:
        grammar = compile_constraint(JsonSchema({"type": "array"}), VOCABULARY)

        assert grammar.accepts("[ 1 ,\n\n2]")
        assert not grammar.accepts("[   1]")
        assert not grammar.accepts(" [1]")
        assert not grammar.accepts("[1]\n")

    @pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
    def test_is_fixed_by_separators(self, separators: tuple[str, str]) -> None:
        value = {"a": [1, 2], "b": {"c": None}}
        grammar = compile_constraint(JsonSchema({"type": "object"}, separators), VOCABULARY)

        assert grammar.accepts(json.dumps(value, separators=separators))
        assert not grammar.accepts(json.dumps(value, separators=(" ,", ":")))
