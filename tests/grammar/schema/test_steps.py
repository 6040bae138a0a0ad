"""`multipleOf`: a mask remembers the remainder, so it has only so many steps to follow."""

from __future__ import annotations

import time
from typing import Any

import pytest

from structgen.grammar.schema.numbers import is_step, too_many
from tests.grammar.schema.oracle import compiled
from tests.grammar.schema.values import lets_through


def step(size: float) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": size}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


class TestAStep:
    @pytest.mark.parametrize("size", [1, 7, 9_973, 10_000, 1e4, 0.1, 0.000001])
    def test_is_masked(self, size: float) -> None:
        assert is_step(size)

    @pytest.mark.parametrize("size", [10_001, 99_991, 1e6, 0.25, 2.5, 1e-7])
    def test_is_checked(self, size: float) -> None:
        assert not is_step(size)

    @pytest.mark.parametrize("size", [9_973, 999_983])
    def test_is_kept_to_either_way(self, size: int) -> None:
        grammar = compiled(step(size))

        assert grammar.accepts(str(7 * size))
        assert not grammar.accepts(str(7 * size + 1))
        assert lets_through(grammar, 7 * size + 1) == (size > 10_000)
        assert bool(grammar.source.unmasked) == (size > 10_000)


class TestTheStepsOfASchema:
    def test_are_dropped_from_the_largest(self) -> None:
        assert too_many([(f"p{n}", 9_970 + n) for n in range(6)]) == {9_974, 9_975}

    def test_count_once_wherever_they_are(self) -> None:
        assert too_many([(f"p{n}", 9_973) for n in range(1_000)]) == set()

    def test_count_by_their_common_multiple_where_they_may_meet(self) -> None:
        assert too_many([("a", 997), ("b", 991)]) == set()
        assert too_many([("a", 997), ("a", 991)]) == {997}
        assert too_many([("a", 997), (None, 991)]) == {997}
        assert too_many([(None, 997), ("a", 991)]) == {997}
        assert too_many([(None, 5), ("a", 7), ("a", 100), ("b", 9_000), ("b", 6)]) == set()

    @pytest.mark.parametrize(
        "schema",
        [
            thing(**{f"p{n}": step(9_973 - n) for n in range(10)}),
            {**step(997), "allOf": [step(991)]},
            {"type": "array", "items": {"anyOf": [step(997), step(991), step(983)]}},
            {**step(7), "anyOf": [step(997), step(991)]},
            {"allOf": [{"type": "array", "items": step(n)} for n in (997, 991)]},
            {"allOf": [thing(a=step(997)), {"additionalProperties": step(991)}]},
            {"allOf": [thing(ab=step(997)), {"patternProperties": {"^a": step(991)}}]},
            {**step(997), "$ref": "#/$defs/a", "$defs": {"a": step(991)}},
            {"oneOf": [thing(a=step(997)), thing(a={"allOf": [step(991), step(983)]})]},
        ],
    )
    def test_never_make_it_long_to_compile(self, schema: Any) -> None:
        began = time.thread_time()
        grammar = compiled(schema)

        assert time.thread_time() - began < 2
        assert grammar.source.unmasked

    def test_that_are_dropped_are_checked_and_told(self) -> None:
        grammar = compiled(thing(a={"allOf": [step(97), step(991)]}, b=step(9_000)))

        assert grammar.source.unmasked == ("#/properties/a/allOf/1: multipleOf",)
        assert grammar.accepts(f'{{"a": {97 * 991}, "b": 18000}}')
        assert not grammar.accepts(f'{{"a": {97 * 990}}}')
        assert lets_through(grammar, {"a": 97 * 990})
        assert not lets_through(grammar, {"a": 991 * 3})
        assert not lets_through(grammar, {"b": 9_001})
