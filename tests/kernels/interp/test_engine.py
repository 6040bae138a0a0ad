"""The engine on the Triton kernels, interpreted, against the engine on the CPU's own.

No product code knows of it: the engine is told to load with the table's row of sm_90 in place of
the CPU's. Cases FC-D1 (cache hits), FC-D3 (batches) and FC-D4 (pressure), on a tiny model.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from structgen.engine.engine import Engine
from structgen.engine.loading import load
from structgen.kernels.choose import Kernels, triton_kernels
from structgen.kernels.gpu.attention import TritonAttention
from structgen.kernels.segment_plan import saves
from structgen.request import Completion, Regex
from tests.engine.tiny import write_tiny_model

PROMPTS = ("the quick", "a", "1, 2, 3,")
NEW = 3

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def interpreted(device: torch.device) -> Kernels:
    assert device.type == "cpu"
    return triton_kernels("sm_90")


class TritonEngine(Engine):
    """The engine as on a GPU, where Triton interprets."""

    _load = staticmethod(partial(load, kernels_of=interpreted))


def opened(kind: type[Engine], model: Path, **options: Any) -> Engine:
    return kind(model, **{"slots": 1000, "threads": 1, **options})


async def greedy(engine: Engine, prompt: str, new: int = NEW) -> Completion:
    return await engine.generate(
        prompt, max_tokens=new, temperature=0, ignore_eos=True, logprobs=True
    )


async def alone(model: Path, prompts: tuple[str, ...] = PROMPTS) -> list[Completion]:
    """What the CPU's kernels give, each prompt alone."""
    async with opened(Engine, model, radix=False) as engine:
        return [await greedy(engine, prompt) for prompt in prompts]


def shared_from(engine: Engine, tokens: int) -> None:
    """Let three branches read a prefix of `tokens` once, which as a rule is too short for that."""
    attention: Any = engine.loaded.runner._attention
    attention.limits = replace(attention.limits, shared_tokens=tokens - 1)
    assert saves(attention.shape, attention.limits, reads=3, rows=3, tokens=tokens - 1)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    assert [done.tokens for done in found] == [done.tokens for done in expected]
    for one, other in zip(found, expected, strict=True):
        logprobs = [entry.logprob for entry in other.logprobs]
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(logprobs, abs=1e-3)


class TestGreedyIds:
    async def test_cold_and_warm_are_those_of_the_cpu(self, tiny_model: Path) -> None:
        async with opened(TritonEngine, tiny_model) as engine:
            attention: Any = engine.loaded.runner._attention
            cold = await greedy(engine, PROMPTS[0])
            warm = await greedy(engine, PROMPTS[0])

        assert isinstance(attention, TritonAttention)
        assert [cold.usage.cached_tokens, warm.usage.cached_tokens] == [0, len(PROMPTS[0]) - 1]
        assert_same([cold, warm], await alone(tiny_model, (PROMPTS[0], PROMPTS[0])))

    @pytest.mark.parametrize("chunk_size", [5, 512])
    async def test_in_a_batch_and_in_chunks_are_those_of_the_cpu(
        self, tiny_model: Path, chunk_size: int
    ) -> None:
        async with opened(TritonEngine, tiny_model, radix=False, chunk_size=chunk_size) as engine:
            found = await asyncio.gather(*(greedy(engine, prompt) for prompt in PROMPTS))

        assert_same(found, await alone(tiny_model))

    async def test_after_a_retraction_are_those_of_the_cpu(self, tiny_model: Path) -> None:
        async with opened(TritonEngine, tiny_model, slots=21, radix=False) as engine:
            engine._core.schedule._expected = 0.1  # their prompts fit together, not their outputs
            found = await asyncio.gather(*(greedy(engine, PROMPTS[0]) for _ in range(2)))
            retractions = engine.statistics().retractions

        assert retractions > 0
        assert_same(found, await alone(tiny_model, (PROMPTS[0], PROMPTS[0])))

    async def test_of_forks_are_those_of_the_cpu(self, tiny_model: Path) -> None:
        prefix, branches = "once upon a time", ("", "y", "zz")
        runs = []
        for kind in (Engine, TritonEngine):
            async with opened(kind, tiny_model) as engine:
                if kind is TritonEngine:
                    shared_from(engine, len(prefix))
                await engine.prime(prefix)
                forks = (greedy(engine, prefix + branch, 2) for branch in branches)
                runs.append(await asyncio.gather(*forks))

        assert_same(runs[1], runs[0])


class TestDraws:
    async def test_are_those_of_the_cpu(self, tiny_model: Path) -> None:
        """Noise, filters, edits and a grammar's mask, in one batch."""
        wishes: list[dict[str, Any]] = [
            {"temperature": 1.0, "seed": 3},
            {"temperature": 1.4, "seed": 4, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
            {"temperature": 0.8, "seed": 5, "frequency_penalty": 1.5, "logit_bias": {104: 90.0}},
            {"temperature": 1.0, "seed": 6, "constraint": Regex("[0-9]{9}")},
        ]
        runs = []
        for kind in (Engine, TritonEngine):
            async with opened(kind, tiny_model) as engine:
                asked = (engine.generate(PROMPTS[1], max_tokens=3, **wish) for wish in wishes)
                runs.append([done.tokens for done in await asyncio.gather(*asked)])

        assert runs[1] == runs[0]
        assert len(set(runs[0])) == len(wishes)
