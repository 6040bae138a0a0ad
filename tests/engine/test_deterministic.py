"""A deterministic engine: the bits of a request, whatever it shares its steps and its cache with.

The oracle is the request alone, in an engine that has no cache and computes its prompt at once. All
comparisons are `==`, of tokens and of every log-probability.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from structgen.engine.engine import Engine
from structgen.request import Completion, TokenLogprob
from tests.engine.tiny import write_tiny_model

Bits = tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]


class Wish(msgspec.Struct, frozen=True):
    """A request: its prompt, and how many tokens it wants; greedy without a seed."""

    prompt: str
    new: int
    seed: int | None = None
    regex: str | None = None

    async def of(self, engine: Engine) -> Completion:
        """Let an engine grant it."""
        options: dict[str, Any] = {"max_tokens": self.new, "top_logprobs": 3}
        options |= {"prompt_logprobs": len(self.prompt) // 2, "ignore_eos": True}
        options |= {"temperature": 0} if self.seed is None else {"seed": self.seed, "top_p": 0.9}
        if self.regex is not None:
            options |= {"regex": self.regex, "ignore_eos": False}
        return await engine.generate(self.prompt, **options)


# Lengths on both sides of where columns are rounded up, and outputs that cross there.
TEXT = "the quick brown fox jumps over the lazy dog; " * 20
WISHES = (
    Wish("a", 12),
    Wish("a", 12, seed=1),
    Wish(TEXT[:120], 16),
    Wish(TEXT[:120], 16, seed=2),
    Wish(TEXT[:120] + "!", 9, seed=3),
    Wish(TEXT[:300], 5),
    Wish(TEXT[:260] + "1, 2, 3", 30, regex="( then [a-c]+ and so on){2}"),
    Wish(TEXT[:505], 20),
    Wish(TEXT[:505], 20, seed=4),
    Wish(TEXT[:700] + "?", 8, seed=5),
)


def bits(done: Completion) -> Bits:
    return done.tokens, done.logprobs, done.prompt_logprobs


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 9000, "threads": 1, "deterministic": True, **options})


async def one_by_one(engine: Engine) -> list[Completion]:
    return [await wish.of(engine) for wish in WISHES]


async def together(engine: Engine) -> list[Completion]:
    return await asyncio.gather(*(wish.of(engine) for wish in WISHES))


async def staggered(engine: Engine) -> list[Completion]:
    async def late(at: int, wish: Wish) -> Completion:
        while engine.statistics().steps < 3 * at:  # noqa: ASYNC110 - what is waited for is a number
            await asyncio.sleep(0)
        return await wish.of(engine)

    return await asyncio.gather(*(late(at, wish) for at, wish in enumerate(WISHES)))


async def cold_and_warm(engine: Engine) -> list[Completion]:
    for wish in WISHES:
        await wish.of(engine)
    assert engine.statistics().slots_cached > 0
    return await together(engine)


async def retracted(engine: Engine) -> list[Completion]:
    # All prompts are admitted, their outputs do not fit.
    engine._core.schedule._expected = 0.1
    done = await together(engine)
    assert engine.statistics().retractions > 0
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for several blocks of keys."""
    return write_tiny_model(tmp_path_factory.mktemp("roomy"), max_context=2048)


def found_by(
    model: Path, arrange: Callable[[Engine], Awaitable[Sequence[Completion]]], **options: Any
) -> list[Bits]:
    async def main() -> list[Bits]:
        async with new_engine(model, **options) as engine:
            return [bits(done) for done in await arrange(engine)]

    return asyncio.run(main())


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Bits]:
    """What each request gets from an engine that computes nothing else."""
    return found_by(model, one_by_one, radix=False, chunk_size=2048, worker=False)


class TestTheBitsOfARequest:
    @pytest.mark.parametrize(
        ("arrange", "options"),
        [
            (one_by_one, {"chunk_size": 16}),
            (one_by_one, {"chunk_size": 256}),
            (one_by_one, {"chunk_size": 37, "radix": False}),
            (together, {}),
            (together, {"chunk_size": 16}),
            (together, {"chunk_size": 77, "radix": False}),
            (staggered, {"chunk_size": 256}),
            (staggered, {"max_running": 3, "radix": False}),
            (cold_and_warm, {}),
            (retracted, {"slots": 980, "radix": False}),
            (retracted, {"slots": 800, "chunk_size": 50}),
        ],
        ids=str,
    )
    def test_are_the_same_in_every_company(
        self, model: Path, alone: list[Bits], arrange: Any, options: dict[str, Any]
    ) -> None:
        assert found_by(model, arrange, **options) == alone
