"""Numbers of all magnitudes in a schema: a mask lets none through that the final check refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Context, Decimal, localcontext
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.errors import ConstraintError
from structgen.grammar.compiler import Grammar
from structgen.grammar.schema.numbers import exact
from tests.grammar.schema.oracle import compiled

DIGITS = Context(prec=800)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

numbers = st.one_of(
    st.integers(-20, 20),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1e19, 1e19),
    st.builds(
        lambda digits, power: float(f"{digits}e{power}"),
        st.integers(-999, 999),
        st.integers(-30, 30),
    ),
    st.sampled_from([1e15, -1e15, 2**53 + 1, 2**63, -(2**63), 2**64, 1e17, 1e308, 5e-324, -0.0]),
)
schemas = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional=dict.fromkeys(BOUNDS, numbers) | {"multipleOf": numbers.map(abs).filter(bool)},
)


def written(number: Decimal) -> str:
    return format(number, "f")


def near(schema: dict[str, Any]) -> Iterator[str]:
    """Texts of numbers at the bounds of a schema, on both sides and near by."""
    yield from ("0", "-0", "1", "-1", "0.5", "-0.25", "1e3", "9" * 25, "-" + "9" * 25)
    for keyword, value in schema.items():
        if keyword == "type":
            continue
        number = Decimal(repr(value))
        for power in (0, 3, -3, -17, number.adjusted() - 16, number.adjusted() - 14):
            step = Decimal(1).scaleb(power)
            for each in (number, number + step, number - step, number * 2, number + number / 2):
                yield written(each)
                yield written(each.to_integral_value())


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """What another validator says, which counts with all digits."""
    oracle = jsonschema.Draft202012Validator(exact(schema))
    return bool(oracle.is_valid(json.loads(text, parse_float=Decimal)))


def grammar_of(schema: dict[str, Any]) -> Grammar | None:
    """The grammar of a schema, None for one that is refused."""
    try:
        return compiled(schema)
    except ConstraintError:
        return None


class TestWhatTheMaskLetsBeComplete:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(schemas)
    def test_passes_the_check_and_is_valid(self, schema: dict[str, Any]) -> None:
        grammar = grammar_of(schema)
        if grammar is None or grammar.source.unmasked:
            return
        with localcontext(DIGITS):
            let = [text for text in near(schema) if grammar.matches((), text)]

            assert [text for text in let if grammar.fault(text)] == []
            assert [text for text in let if not is_valid(schema, text)] == []

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(st.lists(numbers, min_size=1, max_size=3))
    def test_is_one_of_the_listed_numbers(self, values: list[float]) -> None:
        schema = {"enum": values}
        grammar = grammar_of(schema)
        if grammar is None:
            return
        with localcontext(DIGITS):
            texts = list(near({str(n): value for n, value in enumerate(values)}))
            let = [text for text in texts if grammar.matches((), text)]

            assert let
            assert [text for text in let if not is_valid(schema, text)] == []
            assert [text for text in let if grammar.fault(text)] == []

    @pytest.mark.parametrize(
        ("schema", "texts"),
        [
            ({"minimum": 1e15}, ["1000000000000000", "1000000000000000.5", "2000000000000000"]),
            ({"maximum": 1e300}, ["5", "-3.5", "999999999999999999"]),
            ({"exclusiveMinimum": 0.3}, ["0.30000000000000001", "0.31"]),
            ({"exclusiveMinimum": 0}, [f"{1e-300:.300f}"]),
            ({"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, ["6.02e23"]),
            ({"multipleOf": 0.25}, ["0.5", "0.50", "0.75", "1", "-2.25"]),
            ({"const": 1e-12}, ["0.000000000001"]),
        ],
        ids=str,
    )
    def test_are_the_usual_spellings(self, schema: dict[str, Any], texts: list[str]) -> None:
        grammar = compiled({"type": "number", **schema})

        assert [text for text in texts if not grammar.accepts(text)] == []
        assert grammar.source.unmasked == ()

    def test_are_all_whole_numbers_of_64_bits(self) -> None:
        grammar = compiled({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
        inside = [2**63 - 1, 1234567890123456789, 0, -(2**63) + 1024]

        assert [number for number in inside if not grammar.accepts(str(number))] == []
        assert not grammar.matches((), str(2**63))
        assert not grammar.matches((), str(-(2**63) - 1))
        assert grammar.source.unmasked == ()


class TestWhatNoMaskKeeps:
    @pytest.mark.parametrize(
        ("schema", "message"),
        [
            (
                {"type": "integer", "minimum": 2**63},
                r"#/minimum: 9223372036854775808: a mask holds",
            ),
            ({"type": "number", "exclusiveMinimum": 1e19}, r"#/exclusiveMinimum: 1e\+19: a mask"),
            ({"type": "number", "maximum": -1e30}, r"#/maximum: -1e\+30: a mask holds numbers to"),
            ({"const": 10**30}, r"#/const: 1000.*: no mask can tell this number from"),
            ({"enum": ["a", 2**53 + 1]}, r"#/enum: 9007199254740993: no mask can tell"),
            ({"enum": [[0.1 + 0.2]]}, r"#/enum: \[0.30000000000000004\]: no mask can tell"),
            ({"type": "array", "minItems": 10**9}, r"#/minItems: 1,000,000,000 items: a mask"),
            ({"type": "string", "minLength": 10**6}, r"#/minLength: 1,000,000 characters: a mask"),
            ({"contains": {}, "minContains": 10**9}, r"#/minContains: 1,000,000,000 items"),
        ],
        ids=str,
    )
    def test_is_refused_by_name(self, schema: dict[str, Any], message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            compiled(schema)

    def test_is_left_out_where_it_comes_of_a_negation(self) -> None:
        grammar = compiled({"not": {"type": "number", "maximum": 1e19}})

        assert grammar.accepts('"a"')
        assert not grammar.matches((), "5")

    @pytest.mark.parametrize("keyword", ["maxItems", "maxLength", "maxProperties", "maxContains"])
    def test_of_the_most_there_may_be_is_served(self, keyword: str) -> None:
        grammar = compiled({keyword: 10**12, "contains": {}, "minContains": 0})

        assert grammar.accepts("[]")
        assert grammar.accepts('"a"')
