"""A model that always wants the worst of what it may write: blanks, digits, ever deeper nesting.

It is never led into a dead end, blanks have their bounds whatever it wants, and however long it was
let go, a model that wants to come to an end still can.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Matcher
from structgen.request import JsonSchema
from tests.grammar.schema.values import VOCABULARY
from tests.grammar.test_sampled import finite
from tests.shared_cases import rows

NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "kids"],
}
SCHEMAS: tuple[Any, ...] = (
    {},
    {"type": "number"},
    {"type": "integer"},
    {"type": "number", "minimum": 0.5, "multipleOf": 0.25},
    {"type": "string"},
    {"type": "string", "pattern": "^a+b*$"},
    {"type": "string", "format": "email"},
    {"type": "array", "items": {"type": "number"}},
    {"type": "array", "minItems": 3, "uniqueItems": True},
    {"type": "object"},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "required": ["xy", "z"]},
    {"enum": ["a", "b c", {"k": [1, 2]}, None]},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]},
    NODE,
)
WISHES = {
    "blanks": b" \n\t\r",
    "newlines": b"\n",
    "nines": b"9",
    "zeros": b"0",
    "fractions": b".0-e+",
    "nesting": b'[{"',
    "strings": b'"a',
    "escapes": b"\\u0dD",
    "commas": b",",
}
CLOSING = b']}"'
LET_GO = 300  # bytes that the worst model may write
TO_THE_END = 3_000
REAL = rows("schemas_dev.jsonl")[::8]
BLANKS_OUTSIDE = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|(\s{3,})', re.DOTALL)


def legal(matcher: Matcher) -> Sequence[int]:
    row = np.zeros(matcher.words, np.int32)
    matcher.fill(row)
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def worst(allowed: Sequence[int], wishes: bytes) -> int:
    """What it wants most of all; or else what does not lead to an end."""
    for wish in wishes:
        if wish in allowed:
            return wish
    return next((token for token in reversed(allowed) if token not in CLOSING), allowed[0])


def written(grammar: Grammar, wishes: bytes) -> tuple[str, bool]:
    """What the worst model writes, and after it, if need be, one that wants to end; and whether
    that is complete."""
    matcher, chance, data = grammar.matcher(), random.Random(0), bytearray()
    while len(data) < LET_GO or not matcher.complete:
        allowed = legal(matcher)
        assert allowed or matcher.complete, f"a dead end after {bytes(data)!r}"
        if not allowed or len(data) >= LET_GO + TO_THE_END:
            break
        token = worst(allowed, wishes)
        if len(data) >= LET_GO:
            ends = [token for token in allowed if token in CLOSING]
            token = chance.choice(ends if ends and chance.random() < 0.7 else allowed)
        matcher.accept(token)
        data.append(token)
    return data.decode(), matcher.complete


def check(schema: Any, *, ends: bool) -> None:
    """Write with all wishes; `ends`: no name has to be guessed to come to the end."""
    grammar = compile_constraint(JsonSchema(json.dumps(schema)), VOCABULARY)
    judge = jsonschema.validators.validator_for(schema)(schema)
    for wishes in WISHES.values():
        text, complete = written(grammar, wishes)
        assert not any(found[1] for found in BLANKS_OUTSIDE.finditer(text)), text
        assert complete or not ends, text
        if complete and grammar.fault(text) is None:
            assert judge.is_valid(json.loads(text, parse_float=finite)), text


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_the_worst_model_is_held_and_can_be_ended(schema: Any) -> None:
    check(schema, ends=True)


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in REAL])
def test_it_is_held_by_schemas_from_real_use(row: dict[str, Any]) -> None:
    check(row["schema"], ends=False)
