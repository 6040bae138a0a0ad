"""The final check: what it finds, how it says so, and that it always answers."""

from __future__ import annotations

import json
import time

import pytest

from structgen.grammar.schema import relaxed


def fault(schema: object, text: str) -> str | None:
    return relaxed(json.dumps(schema)).judge.fault(text)


class TestAFault:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"a": [1, "x"]}', "$.a[1]: type: "),
            ('{"a": []}', "$.a: minItems: "),
            ("{}", "$: required: "),
            ('{"a": [1], "b c": 0}', "$[b c]: type: "),
        ],
    )
    def test_names_path_and_keyword(self, text: str, message: str) -> None:
        schema = {
            "properties": {
                "a": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                "b c": {"type": "string"},
            },
            "required": ["a"],
        }

        found = fault(schema, text)

        assert found is not None
        assert found.startswith(message)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"a": 1, "a": 2}', "duplicate key 'a'"),
            ('{"a": {"b": 1, "c": 2, "b": 3}}', "duplicate key 'b'"),
            ('"\\ud800"', "half of a surrogate pair"),
            ('{"\\udc00": 1}', "half of a surrogate pair"),
            ("NaN", "NaN is no JSON number"),
            ("[-Infinity]", "-Infinity is no JSON number"),
            ("[1", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("9" * 5_000, "not JSON"),
        ],
        ids=lambda text: text[:20],
    )
    def test_is_found_in_what_is_no_plain_json(self, text: str, message: str) -> None:
        found = fault(True, text)

        assert found is not None
        assert message in found

    def test_is_not_found_in_a_pair_of_surrogates(self) -> None:
        assert fault({"maxLength": 1}, '"\\ud83d\\ude00"') is None

    @pytest.mark.parametrize("text", ["1e999", "-1e999", "[2E+4099405787]"])
    def test_is_not_found_in_a_number_beyond_floats(self, text: str) -> None:
        assert fault({"type": ["number", "array"]}, text) is None

    @pytest.mark.parametrize("power", ["999", "9" * 20, "+" + "9" * 20, "9" * 5_000])
    def test_is_found_where_such_a_number_is_out_of_bounds(self, power: str) -> None:
        assert fault({"maximum": 10}, f"1e{power}") is not None
        assert fault({"maximum": 10}, f"-1E{power}") is None
        assert fault({"minimum": 10}, f"-1.5E{power}") is not None
        assert fault({"oneOf": [{"type": "integer"}, {"type": "number"}]}, f"1e{power}")

    @pytest.mark.parametrize("power", ["-6000", "-" + "9" * 20, "-" + "9" * 5_000])
    def test_is_told_of_a_number_near_0_by_its_sign(self, power: str) -> None:
        assert fault({"exclusiveMinimum": 0}, f"0.1e{power}") is None
        assert fault({"exclusiveMinimum": 0}, f"-1E{power}") is not None
        assert fault({"type": "integer"}, f"1e{power}") is not None
        assert fault({"oneOf": [{"type": "integer"}, {"type": "number"}]}, f"1e{power}") is None

    @pytest.mark.parametrize("text", ["0e" + "9" * 20, "-0.00E-" + "9" * 20, "0e+" + "9" * 5_000])
    def test_is_not_found_in_a_0_with_any_exponent(self, text: str) -> None:
        assert fault({"const": 0}, text) is None

    def test_is_told_of_an_exponent_with_zeros_before_it(self) -> None:
        assert fault({"const": 1000}, "1e" + "0" * 30 + "3") is None

    def test_is_told_in_time_whatever_a_pattern_costs(self) -> None:
        judge = relaxed('{"pattern": "^(?:(a+)+)\\\\1$"}').judge
        began = time.thread_time()

        assert judge.fault(json.dumps("a" * 40 + "b")) is not None
        assert time.thread_time() - began < 5
