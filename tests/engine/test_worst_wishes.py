"""Models that want blanks, digits, brackets or quotes without end, on an engine.

An output ends, whole and valid; or it is cut off and says so. Neither has more blanks in a row than
a layout may have.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from structgen import Completion, Engine
from structgen.errors import InvalidOutputError
from structgen.models.checkpoint import open_checkpoint
from tests.grammar.test_sampled import finite

PROMPT = "the quick brown fox"
NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "kids"],
    "additionalProperties": False,
}
# The second ones let the model name keys: it may write one twice, which only the check can tell.
CLOSED: tuple[Any, ...] = (
    {"type": "boolean"},
    {"type": "number", "minimum": 0.5},
    {"type": "string", "maxLength": 20},
    {"type": "array", "items": {"enum": ["a b", 1, None]}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    NODE,
)
OPEN: tuple[Any, ...] = (True, {"type": "object"}, {"type": "array", "items": {"type": "object"}})
WISHES = {"blanks": " \n\t\r", "digits": "0123456789", "brackets": "[{]}", "quotes": '"'}
OUTSIDE = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|(\s{3,})', re.DOTALL)


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    async with Engine(tiny_model, slots=8_000, threads=1) as engine:
        yield engine


def too_many_blanks(text: str) -> list[str]:
    """Three blanks or more in a row that stand in no string."""
    return [found[1] for found in OUTSIDE.finditer(text) if found[1]]


def fault(done: Completion | BaseException, schema: Any) -> str | None:
    """What is wrong with an output and what is said of it."""
    if isinstance(done, BaseException):
        known = isinstance(done, InvalidOutputError) and "duplicate key" in str(done)
        return None if known and schema in OPEN else repr(done)
    if too_many_blanks(done.text):
        return f"blanks in {done.text!r}"
    if done.finish.reason not in {"stop", "length"}:
        return str(done.finish)
    if not done.finish.complete:  # a number may be cut off, and be whole
        return None if done.finish.reason == "length" else str(done.finish)
    value = json.loads(done.text, parse_float=finite)
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    return None if valid else f"invalid: {done.text!r}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES)
async def test_an_output_ends_or_says_that_it_was_cut_off(
    engine: Engine, tiny_model: Path, wishes: str, temperature: float
) -> None:
    tokenizer = open_checkpoint(tiny_model, chat_template=None).tokenizer
    bias = {tokenizer.encode(each)[0]: 100.0 for each in wishes}
    done = await asyncio.gather(
        *(
            engine.generate(
                PROMPT,
                json_schema=schema,
                max_tokens=120,
                logit_bias=bias,
                temperature=temperature,
                seed=1,
            )
            for schema in (*CLOSED, *OPEN)
        ),
        return_exceptions=True,
    )

    faults = [fault(each, schema) for each, schema in zip(done, (*CLOSED, *OPEN), strict=True)]
    assert faults == [None] * len(done)
    now = engine.statistics()
    assert (now.running, now.waiting, now.slots_held) == (0, 0, 0)
