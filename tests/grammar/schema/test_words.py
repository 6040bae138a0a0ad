"""Words that a string or a key may or may not be, listed beside what else is said of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.grammar.schema.oracle import judged

LISTS: tuple[dict[str, Any], ...] = (
    {"enum": ["a", "b", 1]},
    {"const": "a"},
    {"enum": ["a"], "type": "string"},
    {"enum": ["a"], "type": ["string", "null"]},
    {"enum": ["a"], "type": "integer"},
    {"enum": ["a", "b"], "const": "a"},
    {"enum": ["a", "b"], "const": "c"},
    {"enum": ["a"], "const": None},
    {"enum": [1, None]},
    {"enum": []},
    {"const": 1},
    {"type": "integer"},
    {"type": ["number", "null"], "pattern": "a"},
    {"type": "integer", "minLength": 1},
    {"enum": ["a", "ab"], "maxLength": 1},
    {"minLength": 3, "maxLength": 2},
    {"maxLength": 0},
    {"not": {"type": "string"}},
)
# A schema whose reference only the validator follows: nothing is certain of it beforehand.
UNCERTAIN = {"$dynamicAnchor": "n", "anyOf": [{}, {"items": {"$dynamicRef": "#n"}}]}


@pytest.mark.parametrize("beside", [{}, UNCERTAIN], ids=["certain", "uncertain"])
@pytest.mark.parametrize("words", LISTS, ids=json.dumps)
class TestListedWords:
    def test_are_taken_out_of_strings(self, words: Any, beside: Any) -> None:
        assert_right({"type": "string", "not": words, **beside})

    def test_are_the_keys(self, words: Any, beside: Any) -> None:
        assert_right({"propertyNames": words, **beside})

    def test_are_not_the_keys(self, words: Any, beside: Any) -> None:
        assert_right({"type": "object", "propertyNames": {"not": words}, **beside})


@pytest.mark.parametrize("beside", [{}, UNCERTAIN], ids=["certain", "uncertain"])
def test_no_word_at_all_is_no_key(beside: Any) -> None:
    assert_right({"propertyNames": False, **beside})


def assert_right(schema: Any) -> None:
    found = judged(json.dumps(schema))

    assert found.wrong == []
    assert found.invalid == [] or found.unmasked
