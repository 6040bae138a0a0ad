"""A deterministic engine: the bits of a request, whatever it shares its steps and its cache with.

The oracle is the request alone, in an engine that has no cache and computes its prompt at once. All
comparisons are `==`, of tokens and of every log-probability.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from structgen.engine.config import EngineConfig
from structgen.engine.engine import Engine
from structgen.engine.loading import load
from structgen.errors import UnsupportedError
from structgen.kernels import cpu_fixed
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
    Wish("a", 9),
    Wish("a", 5, seed=1),
    Wish(TEXT[:124], 8),
    Wish(TEXT[:124] + "!", 6, seed=2),
    Wish(TEXT[:260] + "1, 2, 3", 30, regex="( then [ab]+ and so on){2}"),
    Wish(TEXT[:509], 7),
    Wish(TEXT[:509], 7, seed=3),
    Wish(TEXT[:700] + "?", 4, seed=4),
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
            (one_by_one, {"chunk_size": 37, "radix": False}),
            (together, {"threads": 2, "chunk_size": 256}),
            (together, {"chunk_size": 16}),
            (staggered, {"max_running": 3, "radix": False}),
            (cold_and_warm, {}),
            (retracted, {"slots": 711}),
        ],
        ids=lambda each: getattr(each, "__name__", str(each)),
    )
    def test_are_the_same_in_every_company(
        self, model: Path, alone: list[Bits], arrange: Any, options: dict[str, Any]
    ) -> None:
        assert found_by(model, arrange, **options) == alone

    def test_are_the_same_in_low_precision(self, model: Path) -> None:
        async def few(engine: Engine) -> list[Completion]:
            return [await wish.of(engine) for wish in WISHES[:4]]

        wanted = found_by(model, few, dtype="bfloat16", radix=False)

        assert found_by(model, together, dtype="bfloat16", chunk_size=16)[:4] == wanted


class TestTheDecoder:
    def test_takes_the_last_elements_of_a_threads_share_as_all_others(self, tmp_path: Path) -> None:
        """Shares of three threads end within vectors, and elsewhere for another number of rows."""
        odd = write_tiny_model(tmp_path, intermediate_size=1001)
        decoder = load(odd, EngineConfig(deterministic=True, threads=3, slots=9)).runner.decoder
        weights = decoder._weights.layers[0]
        x_th = 3 * torch.randn(100, 48, generator=torch.Generator().manual_seed(0))
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            alone = torch.cat([decoder._mlp(row_th, weights) for row_th in torch.split(x_th, 1)])
            different = [
                rows
                for rows in range(33, 100)
                if not torch.equal(decoder._mlp(x_th[:rows], weights), alone[:rows])
            ]
        finally:
            torch.set_num_threads(before)

        assert different == []


class TestAnEngineThatCannotPromiseIt:
    async def test_is_refused_when_it_loads(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_bits(*_: object) -> bool:
            raise ValueError("queries have other bits alone")

        monkeypatch.setattr(cpu_fixed, "chunks_agree", no_bits)

        with pytest.raises(UnsupportedError, match="queries have other bits alone"):
            async with Engine(tiny_model, deterministic=True):
                pass


class Setting(msgspec.Struct, frozen=True):
    """Options of an engine."""

    slots: int
    chunk_size: int
    max_running: int
    radix: bool


wishes = st.builds(
    Wish,
    st.builds(
        lambda shared, end: TEXT[:shared] + end,
        st.sampled_from([0, 5, 120, 126]),
        st.text("ab", min_size=1, max_size=4),
    ),
    st.integers(1, 6),
    seed=st.none() | st.integers(0, 3),
)
setting = st.builds(
    Setting,
    slots=st.integers(140, 400),
    chunk_size=st.integers(1, 90),
    max_running=st.integers(1, 5),
    radix=st.booleans(),
)


class TestTheBitsOfARandomWorkload:
    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(setting=setting, workload=st.lists(st.tuples(wishes, st.integers(0, 9)), max_size=4))
    def test_are_those_of_each_request_alone(
        self, model: Path, setting: Setting, workload: list[tuple[Wish, int]]
    ) -> None:
        async def late(engine: Engine, wish: Wish, turns: int) -> Completion:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await wish.of(engine)

        async def as_they_come(engine: Engine) -> list[Completion]:
            return await asyncio.gather(*(late(engine, *each) for each in workload))

        async def in_turn(engine: Engine) -> list[Completion]:
            return [await wish.of(engine) for wish, _ in workload]

        found = found_by(model, as_they_come, worker=False, **msgspec.structs.asdict(setting))

        assert found == found_by(model, in_turn, radix=False, worker=False)
