"""The queue: how long it may be, what is refused beyond that, and what is told of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from structgen.core.batch import Batch, Picked
from structgen.engine.engine import Engine
from structgen.engine.loop import Computer
from structgen.engine.stream import DeltaStream
from structgen.errors import EngineError, OverloadedError
from structgen.grammar.matcher import Mask

PROMPT = "the quick brown fox"
ENDLESS: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}


@asynccontextmanager
async def opened(model: Path, **options: Any) -> AsyncIterator[Engine]:
    async with Engine(model, **{"slots": 2000, "threads": 1, **options}) as engine:
        yield engine


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[DeltaStream]:
    """A request that runs for as long as the block."""
    async with engine.stream(PROMPT, **ENDLESS) as deltas:
        await anext(deltas)
        yield deltas


class TestAQueueWithALimit:
    async def test_refuses_the_request_that_is_one_too_many(self, tiny_model: Path) -> None:
        async with (
            opened(tiny_model, max_running=1, max_waiting=1) as engine,
            running(engine),
            engine.stream(PROMPT, **ENDLESS),
        ):
            with pytest.raises(
                OverloadedError, match="as many requests wait as max_waiting allows, 1;"
            ):
                await engine.generate(PROMPT, max_tokens=1)

    async def test_takes_requests_again_once_it_is_shorter(self, tiny_model: Path) -> None:
        async with opened(tiny_model, max_running=1, max_waiting=1) as engine:
            async with running(engine), engine.stream(PROMPT, **ENDLESS):
                with pytest.raises(OverloadedError):
                    await engine.generate(PROMPT, max_tokens=1)

            assert (await engine.generate(PROMPT, max_tokens=1)).tokens

    async def test_of_none_takes_as_many_as_run(self, tiny_model: Path) -> None:
        async with opened(tiny_model, max_running=2, max_waiting=0) as engine:
            found = await asyncio.gather(
                *(engine.generate(PROMPT, max_tokens=2) for _ in range(3)), return_exceptions=True
            )

        assert [type(each).__name__ for each in found] == [
            *["Completion"] * 2,
            "OverloadedError",
        ]

    async def test_is_no_limit_where_there_is_none(self, tiny_model: Path) -> None:
        async with opened(tiny_model, max_running=1) as engine:
            found = await asyncio.gather(*(engine.generate(PROMPT, max_tokens=1) for _ in range(9)))

        assert len(found) == 9

    async def test_leaves_nothing_of_what_it_refused(self, tiny_model: Path) -> None:
        async with opened(tiny_model, max_running=1, max_waiting=1) as engine:
            async with running(engine), engine.stream(PROMPT, **ENDLESS):
                before = engine.statistics()
                with pytest.raises(EngineError):
                    await engine.generate(PROMPT, max_tokens=1)
                after = engine.statistics()
            # What was left while a step computed it is let go when that step has ended.
            await engine.generate(PROMPT, max_tokens=1)
            end = engine.statistics()

        assert (after.waiting, after.running) == (before.waiting, before.running) == (1, 1)
        assert after.requests_aborted == after.requests_failed == 0
        assert (end.running, end.waiting, end.slots_held) == (0, 0, 0)

    @pytest.mark.parametrize("use", ["prime", "score", "read"])
    async def test_is_the_same_for_all_work(self, tiny_model: Path, use: str) -> None:
        async with opened(tiny_model, max_running=1, max_waiting=0) as engine, running(engine):
            work: dict[str, Callable[[], Awaitable[Any]]] = {
                "prime": lambda: engine.prime(PROMPT),
                "score": lambda: engine.score(PROMPT, [" jumps"]),
                "read": lambda: engine.generate(PROMPT, max_tokens=0),
            }
            with pytest.raises(OverloadedError):
                await work[use]()

    async def test_takes_one_call_of_score_for_one_request(self, tiny_model: Path) -> None:
        async with opened(tiny_model, max_running=1, max_waiting=1) as engine:
            scores = await engine.score(PROMPT, [f"{n} jumps" for n in range(10, 30)])

        assert len(scores) == 20


class TestAQueueWithALimitOfTokens:
    async def test_refuses_the_request_that_is_too_long_for_it(self, tiny_model: Path) -> None:
        limits = {"max_running": 1, "max_waiting_tokens": 50}
        async with (
            opened(tiny_model, **limits) as engine,
            running(engine),
            engine.stream("x" * 30, **ENDLESS),
        ):
            with pytest.raises(OverloadedError, match=r"30 prompt tokens wait.* with 21 more"):
                await engine.generate("x" * 21, max_tokens=1)
            async with engine.stream("x" * 20, **ENDLESS):
                assert engine.statistics().waiting_tokens == 50

    async def test_takes_a_longer_one_if_nothing_else_waits(self, tiny_model: Path) -> None:
        async with (
            opened(tiny_model, max_running=1, max_waiting_tokens=5) as engine,
            running(engine),
            engine.stream(PROMPT, **ENDLESS),
        ):
            assert engine.statistics().waiting_tokens == len(PROMPT)


class Halted:
    """A computer whose steps wait until they may go on."""

    def __init__(self, real: Computer) -> None:
        self.real, self.free, self.reached = real, threading.Event(), threading.Event()

    def forward(self, batch: Batch) -> Tensor:
        self.reached.set()
        assert self.free.wait(10)
        return self.real.forward(batch)

    def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
        return self.real.pick(logits_rv, batch, mask)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come to be within seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is a number, not an event
            await asyncio.sleep(0.002)


class TestAStall:
    async def test_lasts_from_the_last_step_while_there_is_work(self, tiny_model: Path) -> None:
        async with opened(tiny_model) as engine:
            idle = engine.statistics().stalled
            halted = Halted(engine.loaded.runner)
            engine._loop._computer = halted
            task = asyncio.create_task(engine.generate(PROMPT, max_tokens=1))
            await until(halted.reached.is_set)
            await until(lambda: engine.statistics().stalled > 0.05)
            halted.free.set()
            await task
            await until(lambda: engine.statistics().stalled == 0.0)

        assert idle == 0.0
