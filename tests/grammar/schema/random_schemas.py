"""JSON Schemas at random: any keywords beside each other, small values, sometimes impossible."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any] | bool

_SMALL: tuple[Schema, ...] = (
    *(True, {}, {"type": "integer"}, {"type": "string"}, {"type": "boolean"}, {"const": 1}),
    *({"const": "a"}, {"enum": ["a", 1, None]}, {"type": ["string", "null"]}, {"minimum": 2}),
    {"maxLength": 1},
)
_TYPES = ("object", "object", "array", "string", "integer", "number", "null", ["object", "null"])
_VALUES = (1, "a", None, [1], {"a": 1}, 2.75, "b", True)
_NAMES = ({"pattern": "^[ab]"}, {"maxLength": 1}, {"enum": ["a", "b"]}, {"not": {"const": "a"}})

Part = Callable[[random.Random, int], Any]


def schema(chance: random.Random, depth: int = 3) -> Schema:
    """A schema, with schemas in it down to `depth`."""
    if depth <= 0 or chance.random() < 0.15:
        return chance.choice(_SMALL)
    words = chance.sample(sorted(_KEYWORDS), chance.randint(1, 3))
    return {word: _KEYWORDS[word](chance, depth - 1) for word in words}


def _several(chance: random.Random, depth: int) -> list[Schema]:
    return [schema(chance, depth) for _ in range(chance.randint(1, 3))]


def _named(chance: random.Random, depth: int) -> dict[str, Schema]:
    return {name: schema(chance, depth) for name in sorted(chance.sample("abc", 2))}


_KEYWORDS: dict[str, Part] = {
    "type": lambda chance, _: chance.choice(_TYPES),
    "properties": _named,
    "required": lambda chance, _: sorted(chance.sample("abc", chance.randint(1, 2))),
    "additionalProperties": lambda chance, depth: chance.choice([False, schema(chance, depth)]),
    "patternProperties": lambda chance, depth: {
        chance.choice(["^a", "b$", "[bc]"]): schema(chance, depth)
    },
    "propertyNames": lambda chance, _: chance.choice(_NAMES),
    "minProperties": lambda chance, _: chance.randint(0, 2),
    "maxProperties": lambda chance, _: chance.randint(1, 3),
    "items": schema,
    "prefixItems": _several,
    "minItems": lambda chance, _: chance.randint(0, 2),
    "maxItems": lambda chance, _: chance.randint(1, 3),
    "uniqueItems": lambda *_: True,
    "contains": schema,
    "minimum": lambda chance, _: chance.choice([0, 2, 5, 1.5, 2.75]),
    "maximum": lambda chance, _: chance.choice([0, 2, 5, 1.5, 2.75]),
    "multipleOf": lambda chance, _: chance.choice([2, 3, 0.5]),
    "minLength": lambda chance, _: chance.randint(0, 2),
    "maxLength": lambda chance, _: chance.randint(1, 3),
    "pattern": lambda chance, _: chance.choice(["a", "^a", "b$", "^[a-c]+$", "^(?!a)"]),
    "enum": lambda chance, _: chance.sample(_VALUES, chance.randint(1, 3)),
    "const": lambda chance, _: chance.choice([1, "a", {"a": 1}, [1, 2]]),
    "allOf": _several,
    "anyOf": _several,
    "oneOf": _several,
    "not": schema,
    "if": schema,
    "then": schema,
    "dependentRequired": lambda chance, _: {chance.choice("abc"): [chance.choice("abc")]},
    "dependentSchemas": lambda chance, depth: {chance.choice("abc"): schema(chance, depth)},
    "unevaluatedProperties": lambda chance, depth: chance.choice([False, schema(chance, depth)]),
    "unevaluatedItems": lambda chance, depth: chance.choice([False, schema(chance, depth)]),
}
