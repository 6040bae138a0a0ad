"""Schemas from real use on the default model, greedy and sampled: valid, or cut off and said so.

The schemas are data beside the project; without them, this skips.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from structgen import Engine, Meta, State, program
from structgen.errors import ConstraintError, InvalidOutputError
from structgen.grammar.schema import strict
from tests.shared_cases import rows

COUNT, SEEDS, MOST_TOKENS, RETRIES = 50, 4, 160, 3
SCHEMAS = rows("schemas_dev.jsonl")
PROMPT = "Example no. {number} of {title}, as JSON:\n"
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)', re.DOTALL)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SCHEMAS, reason="the data are not there"),
]


class Tally(msgspec.Struct):
    """How the outputs of some schemas ended: valid, cut off by the limit, faulty by the check.

    refused   schemas
    again     attempts after the first: keys that stand twice, mostly
    """

    valid: int = 0
    cut: int = 0
    faulty: list[str] = msgspec.field(default_factory=list)
    refused: int = 0
    again: int = 0


async def judged(engine: Engine, case: dict[str, Any], tally: Tally) -> None:
    """Generate with all seeds, greedy and sampled, and judge each output."""
    schema = case["schema"]
    title = schema.get("title") or schema.get("description") or "a record"
    try:
        compiled = await engine.compile(schema)
    except ConstraintError:
        tally.refused += 1
        return

    @program
    async def record(s: State, number: int, temperature: float) -> Meta:
        s += PROMPT.format(number=number, title=f"{title:.80}")
        await s.gen(
            "record",
            constraint=compiled,
            max_tokens=MOST_TOKENS,
            temperature=temperature,
            seed=number,
            retries=RETRIES,
        )
        return s.meta("record")

    asked = (
        record.run(engine, seed, temperature) for seed in range(SEEDS) for temperature in (0.0, 0.8)
    )
    judge = jsonschema.validators.validator_for(schema)(schema)
    for result in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(result, InvalidOutputError):
            tally.faulty.append(f"{case['id']}: {result}")
            continue
        if isinstance(result, BaseException):
            raise result
        done = result.value
        tally.again += done.attempts - 1
        outside = STRINGS.sub('""', done.text)
        assert re.search(r"\s{3}", outside) is None, (case["id"], done.text)
        if done.finish.complete:
            assert judge.is_valid(strict.loads(done.text)), (case["id"], done.text)
            tally.valid += 1
        else:
            assert done.finish.reason == "length", (case["id"], done.finish)
            tally.cut += 1


async def test_fifty_schemas_on_the_default_model(default_model: Path) -> None:
    tally = Tally()
    step = max(1, len(SCHEMAS) // COUNT)
    async with Engine(default_model, dtype="float32", slots=16_000, max_running=16) as engine:
        for start in range(0, COUNT, 4):
            chosen = SCHEMAS[::step][:COUNT][start : start + 4]
            await asyncio.gather(*(judged(engine, case, tally) for case in chosen))

    print(tally)
    outputs = tally.valid + tally.cut + len(tally.faulty)
    assert tally.refused <= 2
    assert outputs == (COUNT - tally.refused) * SEEDS * 2
    assert tally.faulty == []
