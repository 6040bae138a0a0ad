"""Numbers that are equal though they are written otherwise, and those that no float tells apart."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.grammar.schema.oracle import compiled
from tests.grammar.schema.values import lets_through

# JSON has one zero, and 1.0 is 1: a text that writers use must be there for each.
USUAL = ("0", "1", "2", "5", "[0]", "[[0]]", '{"a": 0}', '{"a": [0, 1]}', "[0, 5]", "[5]", "[]")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"const": -0.0},
    {"const": 0.0},
    {"enum": [-0.0]},
    {"enum": [-0.0, 5.0]},
    {"const": [-0.0]},
    {"const": [[-0.0]]},
    {"enum": [{"a": -0.0}, 2.0]},
    {"const": {"a": [-0.0, 1.0]}},
    {"not": {"const": -0.0}},
    {"minimum": -0.0, "type": "number"},
    {"maximum": -0.0, "type": "number"},
    {"exclusiveMinimum": -0.0, "type": "number"},
    {"items": {"const": -0.0}},
    {"type": "array", "items": {"enum": [-0.0, 5]}, "uniqueItems": True},
    {"enum": [-0.0, 1e-12]},
    {"contains": {"const": -0.0}},
    {"properties": {"a": {"oneOf": [{"const": -0.0}, {"const": 1.0}]}}},
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_the_usual_spelling_of_a_number_is_taken_where_it_is_valid(schema: Any) -> None:
    grammar = compiled(schema)
    oracle = jsonschema.Draft202012Validator(schema)
    valid = [text for text in USUAL if oracle.is_valid(json.loads(text))]

    assert [text for text in USUAL if grammar.accepts(text)] == valid


def test_equal_numbers_are_one_item_of_a_list_without_repeats() -> None:
    items = {"enum": [1, 1.0, 0, -0.0, True]}
    grammar = compiled({"type": "array", "items": items, "uniqueItems": True})

    assert grammar.source.unmasked == ()
    assert lets_through(grammar, [1, True, 0])
    assert not lets_through(grammar, [1, 1])
    assert not lets_through(grammar, [0, 0])


def test_small_numbers_are_listed_without_an_exponent() -> None:
    items = {"enum": [1e-12, 5]}
    grammar = compiled({"type": "array", "items": items, "uniqueItems": True})

    assert grammar.accepts("[0.000000000001]")
    assert grammar.accepts("[5, 0.000000000001]")
    assert not lets_through(grammar, [5, 5])
    assert not grammar.accepts("[0.00000000001]")
    assert grammar.source.unmasked == ()
