"""What a final check may cost: counted beforehand, and refused where it would take for ever."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from structgen.errors import ConstraintError
from structgen.grammar.schema import relaxed
from structgen.grammar.schema.bundling import Bundle
from structgen.grammar.schema.effort import Effort


def effort(schema: Any, **defs: Any) -> Effort:
    return Effort(Bundle(schema, defs, {}, {}))


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def towers(keyword: str, levels: int) -> dict[str, Any]:
    """A schema that stands 2 ** levels times in the whole."""
    defs: dict[str, Any] = {f"d{n}": {keyword: [ref(f"d{n + 1}")] * 2} for n in range(levels)}
    return {**ref("d0"), "$defs": {**defs, f"d{levels}": {"type": "integer"}}}


def unevaluated(levels: int) -> Any:
    """A schema each level of which asks what the one inside has evaluated."""
    schema: Any = True
    for _ in range(levels):
        schema = {"allOf": [schema], "unevaluatedProperties": False, "properties": {"a": True}}
    return schema


def nested(times: int) -> Any:
    value: Any = {}
    for _ in range(times):
        value = {"a": value}
    return value


# Refers to itself in two ways from the same place: as many ways as there are to go down.
TWICE = {
    "anyOf": [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "minProperties": 0},
    ]
}

TREE = {"type": "array"}
D7 = "http://json-schema.org/draft-07/schema#"
D19 = "https://json-schema.org/draft/2019-09/schema"


class TestTheCount:
    @pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
    def test_doubles_with_each_reference_that_stands_twice(self, keyword: str) -> None:
        schema = towers(keyword, 10)
        counted = effort(ref("d0"), **schema["$defs"])

        # Of each level the references and what they lead to.
        exact = 1 + sum(2**n + 2 ** (n + 1) for n in range(10)) + 2**10
        assert counted.within(exact, 5)
        assert not counted.within(exact - 1, 5)

    def test_follows_a_value_down_a_schema_that_is_part_of_itself(self) -> None:
        counted = effort(
            ref("n"), n={"properties": {"a": ref("n")}, "patternProperties": {"a": ref("n")}}
        )

        assert not counted.within(2**11, nested(10))
        assert counted.within(2**13, nested(10))

    def test_is_of_the_places_and_not_of_what_is_written_twice(self) -> None:
        tree = effort(ref("n"), n={"properties": {"l": ref("n"), "r": ref("n")}})
        value: Any = {}
        for _ in range(8):
            value = {"l": value, "r": json.loads(json.dumps(value))}

        assert tree.within(2 * 2**9, value)

    def test_never_ends_where_a_schema_comes_back_to_itself_at_one_place(self) -> None:
        assert not effort(ref("n"), n={"anyOf": [ref("n"), {"type": "null"}]}).within(10**9, None)

    def test_is_not_made_where_the_length_of_the_text_says_enough(self) -> None:
        # The value is not looked at.
        assert effort({"items": {"type": "integer"}}).within(1000, object(), 400)

    def test_of_a_huge_value_is_given_up(self) -> None:
        counted = effort(ref("n"), n={"items": ref("n")})

        assert not counted.within(10**9, [[n] for n in range(40_000)])

    @pytest.mark.parametrize("keyword", ["then", "else"])
    def test_leaves_out_what_follows_no_condition(self, keyword: str) -> None:
        assert effort(ref("n"), n={keyword: ref("n")}).within(2, 1)
        assert not effort(ref("n"), n={"if": {}, keyword: ref("n")}).within(10**9, 1)

    def test_has_a_condition_that_nothing_follows_only_for_what_it_evaluates(self) -> None:
        alone = effort(ref("n"), n={"if": ref("n")})
        evaluated = effort(ref("n"), n={"if": ref("n"), "unevaluatedProperties": False})

        assert alone.within(2, 1)
        assert not evaluated.within(10**9, 1)

    @pytest.mark.parametrize("value", [1, [], ["k"], "k", {}, {"a": 1}, {"a": {"b": 1}}])
    def test_has_what_depends_on_a_key_only_where_it_is(self, value: Any) -> None:
        assert effort(ref("n"), n={"dependentSchemas": {"k": ref("n")}}).within(2, value)

    def test_never_ends_where_what_depends_on_a_key_is_the_whole(self) -> None:
        counted = effort(ref("n"), n={"dependentSchemas": {"k": ref("n")}})

        assert not counted.within(10**9, {"k": 1})


class TestACheck:
    @pytest.mark.parametrize(
        ("schema", "valid", "endless"),
        [
            ({"then": {"$ref": "#"}}, ["1", "{}"], []),
            ({"if": {"$ref": "#"}}, ["1", "{}"], []),
            (
                {"$dynamicAnchor": "n", "else": {"$dynamicRef": "#n"}, "type": "integer"},
                ["1", "2"],
                [],
            ),
            ({"dependentSchemas": {"k": {"$ref": "#"}}}, ["1", '{"a": 1}'], ['{"k": 1}']),
            ({"$schema": D7, "dependencies": {"k": {"$ref": "#"}}}, ["[]", "{}"], ['{"k": 1}']),
        ],
        ids=["then", "if", "else", "dependent", "dependencies"],
    )
    def test_is_made_of_what_does_not_come_back_to_its_place(
        self, schema: Any, valid: list[str], endless: list[str]
    ) -> None:
        judge = relaxed(json.dumps(schema)).judge

        assert [judge.fault(text) for text in valid] == [None] * len(valid)
        assert ["cannot be checked" in (judge.fault(text) or "") for text in endless] == (
            [True] * len(endless)
        )

    def test_that_would_take_for_ever_is_refused_at_once(self) -> None:
        judge = relaxed(json.dumps(TWICE)).judge
        began = time.perf_counter()
        fault = judge.fault(json.dumps(nested(100)))

        assert fault is not None
        assert "cannot be checked" in fault
        assert time.perf_counter() - began < 1.0

    @pytest.mark.parametrize(
        "schema",
        [
            towers("allOf", 40),
            towers("anyOf", 40),
            {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            {"not": {"$ref": "#"}},
            unevaluated(24),
            {"$dynamicRef": "#"},
            {"$dynamicAnchor": "n", "anyOf": [{"$dynamicRef": "#n"}, {"type": "null"}]},
        ],
        ids=["all of", "any of", "around", "not", "unevaluated", "dynamic", "dynamic around"],
    )
    def test_that_could_be_made_of_no_value_is_refused_with_its_schema(self, schema: Any) -> None:
        began = time.perf_counter()
        with pytest.raises(ConstraintError, match="no value can be checked"):
            relaxed(json.dumps(schema))
        assert time.perf_counter() - began < 1.0

    def test_of_what_is_not_unevaluated_stays_short(self) -> None:
        began = time.perf_counter()
        assert relaxed(json.dumps(unevaluated(10))).judge.fault('{"a": 1}') is None
        assert time.perf_counter() - began < 2.0

    def test_that_is_long_but_plain_is_made(self) -> None:
        names = itertools.product("abcdefghij", repeat=3)
        properties = {"".join(name): {"type": ["integer", "null"]} for name in names}
        judge = relaxed(json.dumps({"type": "array", "items": {"properties": properties}})).judge
        rows = [dict.fromkeys(properties, n) for n in range(20)]

        assert judge.fault(json.dumps(rows)) is None
        rows[7]["abc"] = "seven"  # type: ignore[assignment]  # what is wrong
        fault = judge.fault(json.dumps(rows))
        assert fault is not None

    def test_of_a_tree_is_made_and_says_what_is_wrong(self) -> None:
        node = {
            "type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}, "n": {"minimum": 0}},
        }
        judge = relaxed(json.dumps(node)).judge
        good = {"n": 1, "kids": [{"n": 2, "kids": [{"n": n} for n in range(50)]}] * 3}

        assert judge.fault(json.dumps(good)) is None
        assert judge.fault('{"kids": [{"kids": [{"n": -1}]}]}') == (
            "$.kids[0].kids[0].n: minimum: -1 is less than the minimum of 0"
        )

    @pytest.mark.parametrize(
        "schema",
        [
            {
                "$dynamicRef": "#n",
                "$defs": {"x": {"$dynamicAnchor": "n", **TREE, "items": {"$dynamicRef": "#n"}}},
            },
            {"$dynamicAnchor": "n", **TREE, "items": {"$dynamicRef": "#n"}},
            {"$schema": D19, "$recursiveAnchor": True, **TREE, "items": {"$recursiveRef": "#"}},
            {"$schema": D19, **TREE, "items": {"$recursiveRef": "#"}},
        ],
        ids=["root", "inside", "recursive", "recursive without anchor"],
    )
    def test_follows_dynamic_references_to_where_they_may_lead(self, schema: Any) -> None:
        judge = relaxed(json.dumps(schema)).judge

        assert judge.fault("[[], [[[[]]], []]]") is None
        fault = judge.fault("[[], [[[1]]]]")
        assert fault is not None
        assert "$[1][0][0][0]" in fault
