"""Prompts whose greedy continuation on SmolLM2-135M-Instruct is far from any tie.

`gap` is the smallest distance between the best and second-best logit over `new` tokens in
float32, as transformers computes them; results may be compared id for id where it is wide.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from structgen import Engine
from structgen.request import Completion

EMOJI = "\U0001f600"


class Probe(msgspec.Struct, frozen=True):
    """A prompt, the tokens it has, how many new ones were measured, and the gap."""

    name: str
    prompt: str
    tokens: int
    new: int
    gap: float
    begins: str


COUNT = Probe("count", "1, 2, 3, 4, 5, 6, 7, 8,", 23, 80, 1.89, " 9, 10, 11, 12, 13,")
EVEN = Probe("even", "2, 4, 6, 8, 10, 12, 14,", 23, 40, 1.40, " 16, 18, 20, 22,")
LINES = Probe("lines", '{"id": 1}\n{"id": 2}\n{"id": 3}\n', 21, 48, 1.64, '{"id": 4}\n')
TEN = Probe("ten", "10 9 8 7 6 5 4 3", 16, 20, 0.87, " 2 1 0 1 2 3")
SMILES = Probe("smiles", EMOJI * 16, 48, 24, 1.49, EMOJI * 8)
PROBES = (COUNT, EVEN, LINES, TEN, SMILES)

# The first ids of COUNT's continuation.
COUNT_IDS = (216, 41, 28, 216, 33, 32, 28)


def logprobs_of(completion: Completion) -> list[float]:
    """The log-probabilities of a completion's tokens."""
    return [entry.logprob for entry in completion.logprobs if entry.logprob is not None]


def chat(text: str) -> list[dict[str, str]]:
    """A chat of one user message."""
    return [{"role": "user", "content": text}]


@asynccontextmanager
async def opened(model: Path, **options: Any) -> AsyncIterator[Engine]:
    """An engine in float32 with a pool that is roomy for these prompts."""
    async with Engine(model, **{"dtype": "float32", "slots": 4000, **options}) as engine:
        yield engine
