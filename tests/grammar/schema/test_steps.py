"""`multipleOf`: a mask remembers the remainder, so it has only so many steps to follow."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest

from structgen.grammar.schema.numbers import steps_of, too_many
from tests.grammar.schema.oracle import compiled
from tests.grammar.schema.values import lets_through


def step(size: float) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": size}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


class TestAStep:
    @pytest.mark.parametrize("size", [1, 7, 9_973, 10_000, 1e4, 0.1, 0.000001, 2.5, 12.5])
    def test_is_masked(self, size: float) -> None:
        assert steps_of(size) == (size,)

    @pytest.mark.parametrize("size", [10_001, 99_991, 1e6, 1e15, 1e300, 0.0123457, 1000.5, 1 / 3])
    def test_is_checked(self, size: float) -> None:
        assert steps_of(size) == ()

    @pytest.mark.parametrize(
        ("size", "steps"),
        [
            (0.25, (0.25, 0.5)),
            (0.75, (0.75, 1.5)),
            (0.125, (0.125, 0.25, 0.5)),
            (0.05, (0.05, 0.1)),
        ],
    )
    def test_of_several_digits_is_one_for_each_number_of_them(
        self, size: float, steps: tuple[float, ...]
    ) -> None:
        assert steps_of(size) == steps

    @pytest.mark.parametrize("size", [1e-7, 1e-12, 1e-300, 5e-324, 2e-9])
    def test_that_is_finer_than_all_that_is_written_takes_no_finer_digits(
        self, size: float
    ) -> None:
        assert steps_of(size) == (1e-6,)

    @pytest.mark.parametrize("size", [0.25, 2.5, 0.75, 1.1, 0.0125, 1e-300])
    def test_of_fractions_is_kept_to_by_the_mask(self, size: float) -> None:
        grammar = compiled({"type": "number", "multipleOf": size})
        texts = [f"{sign}{n / 80:g}" for n in range(0, 1_000, 7) for sign in ("", "-")]
        exact = [text for text in texts if (Fraction(text) / Fraction(repr(size))).denominator == 1]

        assert [text for text in texts if grammar.matches((), text)] == exact
        assert grammar.source.unmasked == ()

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
            thing(**{f"p{n}": {"multipleOf": (9_973 - n) / 10_000} for n in range(10)}),
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
