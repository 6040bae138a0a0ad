"""Values of all kinds, and whether a schema's grammar accepts one in some spelling and order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

from structgen.grammar.compiler import Grammar
from tests.grammar.derivatives import vocabulary_of

VOCABULARY = vocabulary_of([bytes([byte]) for byte in range(256)])

POOL: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 4, 5, 6, 7, 10, 12, 21, -1, -3, 100, 10**12),
    *(0.5, 1.5, -0.25, 2.75, 3.14, 0.01, 0.07, 1e-5, 123456.789),
    *("", "a", "b", "ab", "abc", "abcd", "foo", "bar", "A", "1", "12", "é", "日本", "😀", "a b"),
    *("a\nb", 'q"q', "back\\slash", "2024-02-29", "x@y.org", "10.0.0.1", "null", "1.0"),
    *([], [1], [1, 1], [1, 2], [2, 1], [1, 2, 3], [1, 2, 3, 4], ["a"], ["a", "a"], ["a", 1]),
    *([1, "a"], [None], [True, 1], [[1], [1]], [{}], [{"a": 1}], ["a", "b", "c"], [0], [3], [5, 7]),
    *({}, {"a": 1}, {"a": "x"}, {"a": None}, {"b": 2}, {"b": "y"}, {"a": 1, "b": 2}, {"c": 3}),
    *({"a": 1, "b": "y"}, {"a": "x", "b": 2}, {"a": 1, "c": 3}, {"b": 2, "c": 3}, {"foo": 1}),
    *({"a": 1, "b": 2, "c": 3}, {"a": {"a": 1}}, {"a": {"b": 1}}, {"a": [1]}, {"ab": 1, "b": 1}),
    *({"a": {"a": {"a": {}}}}, {"": 1}, {"é": 1}, {"a b": 2}),
)


def spellings(value: Any) -> Iterator[str]:
    """A value as texts: its keys in every order, whole floats as integers."""
    if isinstance(value, dict):
        for keys in permutations(value):
            for inner in product(*(list(spellings(value[key])) for key in keys)):
                pairs = zip(keys, inner, strict=True)
                yield "{" + ", ".join(f"{_written(key)}: {text}" for key, text in pairs) + "}"
    elif isinstance(value, list):
        for inner in product(*(list(spellings(each)) for each in value)):
            yield "[" + ", ".join(inner) + "]"
    elif value == 1e-5:
        yield "0.00001"
    else:
        yield _written(value)


def accepts(grammar: Grammar, value: Any) -> bool:
    """Whether a grammar accepts a value in any of its spellings."""
    return any(grammar.accepts(text) for text in spellings(value))


def lets_through(grammar: Grammar, value: Any) -> bool:
    """Whether the mask alone does."""
    return any(grammar.matches((), text) for text in spellings(value))


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
