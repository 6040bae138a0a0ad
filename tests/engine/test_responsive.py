"""The event loop stays free, whatever the engine does; and after it nothing is left.

A ticker that wakes every few milliseconds measures how late it wakes. The bound is generous, for
machines that are busy with something else, and far below what a call that blocks would take.
"""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from structgen.engine.engine import Engine
from structgen.errors import EngineClosedError, ModelNotFoundError, PromptError
from structgen.program.program import program
from structgen.program.state import State

TICK = 0.002
LIMIT = 0.05  # seconds; what blocks is repeated, so that only what is late each time counts
TRIES = 3


class Ticker:
    """How late the loop was, at worst, while something ran."""

    def __init__(self) -> None:
        self.worst = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        try:
            yield
        finally:
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        try:
            while True:
                await asyncio.sleep(TICK)
                now = loop.time()
                self.worst = max(self.worst, now - before - TICK)
                before = now
        finally:
            self.worst = max(self.worst, loop.time() - before - TICK)


async def least_lag(work: Callable[[int], Awaitable[None]]) -> float:
    """How late the loop was while the work was done: the least of several times that were late."""
    least = math.inf
    for number in range(TRIES):
        ticker = Ticker()
        async with ticker.running():
            await work(number)
        least = min(least, ticker.worst)
        if least < LIMIT:
            break
    return least


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 2000, "threads": 1, **options})


@pytest.fixture(autouse=True)
def without_pauses() -> Iterator[None]:
    """The collector looks through all that the test session keeps, which is not the engine's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    """Makes a blocking call on the loop (a file, a socket, a lock, a sleep) raise."""
    with blockbuster_ctx("structgen") as blocks:
        yield blocks


@program
async def said(s: State, text: str) -> None:
    s += text
    await s.gen(max_tokens=1)


@program
async def forked(s: State, n: int) -> None:
    s += "a prefix that all branches share. " * 8
    async with s.fork(n) as branches:
        for index, branch in enumerate(branches):
            branch.append(f"branch {index}")
        await branches.map(lambda branch, _: branch.gen("x", max_tokens=12, ignore_eos=True))
        await branches.join()


FORMS: dict[str, Callable[[Engine, str], Awaitable[Any]]] = {
    "text": lambda engine, text: engine.generate(text, max_tokens=1),
    "chat": lambda engine, text: engine.generate([{"role": "user", "content": text}]),
    "program": said.run,
}


class TestTheLoopIsFree:
    async def test_while_an_engine_opens_and_closes(self, tiny_model: Path) -> None:
        async def work(_: int) -> None:
            async with new_engine(tiny_model) as engine:
                await engine.generate("abc", max_tokens=2)

        assert await least_lag(work) < LIMIT

    async def test_while_a_model_is_not_found(self, tmp_path: Path) -> None:
        async def work(_: int) -> None:
            with pytest.raises(ModelNotFoundError):
                await new_engine(tmp_path / "nothing").__aenter__()

        assert await least_lag(work) < LIMIT

    async def test_while_a_prompt_of_megabytes_is_refused(self, long_model: Path) -> None:
        async def work(_: int) -> None:
            with pytest.raises(PromptError, match="more than the context"):
                await engine.generate("word " * 1_000_000)

        async with new_engine(long_model) as engine:
            assert await least_lag(work) < LIMIT

    @pytest.mark.parametrize("form", ["text", "chat", "program"])
    async def test_while_a_long_prompt_is_encoded(self, long_model: Path, form: str) -> None:
        text = "some words. " * 8_000  # 96,000 tokens, as many as 400 KB have in a real vocabulary

        async def work(number: int) -> None:
            with pytest.raises(PromptError, match="the pool has 10"):
                await FORMS[form](engine, f"{number} {text}")

        async with new_engine(long_model, slots=10) as engine:
            assert await least_lag(work) < LIMIT

    async def test_while_many_long_stops_are_prepared(self, tiny_model: Path) -> None:
        stops = [f"{number} is a number that is never said " * 4 for number in range(600)]

        async def work(_: int) -> None:
            await engine.generate("abc", max_tokens=4, stop=stops)

        async with new_engine(tiny_model) as engine:
            assert await least_lag(work) < LIMIT

    async def test_while_many_requests_stream(self, tiny_model: Path) -> None:
        async def read(number: int) -> int:
            options: Any = {"max_tokens": 40, "ignore_eos": True, "stop": ["never said"]}
            async with engine.stream(f"{number} words", **options) as deltas:
                return sum([len(delta.tokens) async for delta in deltas])

        async def work(_: int) -> None:
            assert await asyncio.gather(*(read(n) for n in range(64))) == [40] * 64

        async with new_engine(tiny_model, slots=6000) as engine:
            assert await least_lag(work) < LIMIT

    async def test_while_programs_fork(self, tiny_model: Path) -> None:
        async def work(_: int) -> None:
            await forked.run(engine, 48)

        async with new_engine(tiny_model, slots=6000) as engine:
            assert await least_lag(work) < LIMIT

    async def test_while_it_measures_that_itself(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.generate("abc", max_tokens=300, ignore_eos=True)
            now = engine.statistics()

        assert 0 <= now.loop_lag_p50 <= now.loop_lag_p99 <= now.loop_lag_max


class TestABlockingCall:
    async def test_is_what_these_tests_would_notice(self) -> None:
        """The ticker sees a loop that is blocked."""
        ticker = Ticker()
        async with ticker.running():
            await asyncio.sleep(0)
            until = asyncio.get_running_loop().time() + 2 * LIMIT
            while asyncio.get_running_loop().time() < until:
                pass

        assert ticker.worst > LIMIT


class TestAfterManyRequests:
    async def test_nothing_is_left(self, tiny_model: Path) -> None:
        before = asyncio.all_tasks()
        async with new_engine(tiny_model, slots=600) as engine:
            opened = asyncio.all_tasks()
            for batch in range(20):
                tasks = [
                    asyncio.create_task(
                        engine.generate(f"{batch} {n}", max_tokens=1 + n % 7, deadline=60)
                    )
                    for n in range(50)
                ]
                for n, task in enumerate(tasks):
                    if n % 3 == 0:
                        await asyncio.sleep(0)
                        task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(5):
                while (now := engine.statistics()).running or now.waiting:  # noqa: ASYNC110 - polls
                    await asyncio.sleep(0.001)

            assert now.requests_finished + now.requests_aborted <= 1000
            assert now.requests_finished > 500
            assert now.requests_aborted > 50
            assert (engine._mailboxes, engine._timers, engine._core._sequences) == ({}, {}, {})
            assert (now.slots_held, now.slots_limbo, now.scopes) == (0, 0, 0)
            assert asyncio.all_tasks() <= opened
            assert all(handle.cancelled() for handle in timers_of(engine))
        assert asyncio.all_tasks() <= before
        assert [t for t in threading.enumerate() if t.name.startswith("structgen")] == []

    async def test_no_memory_is_left(self, tiny_model: Path) -> None:
        async def work(engine: Engine) -> int:
            for _ in range(10):
                await asyncio.gather(
                    *(engine.generate("the same", max_tokens=2, ignore_eos=True) for _ in range(20))
                )
            gc.collect()
            return len(gc.get_objects())

        async with new_engine(tiny_model) as engine:
            await work(engine)
            first = await work(engine)
            second = await work(engine)

        assert second - first < 200

    async def test_streams_that_outlive_the_engine_hold_nothing(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            streams = [engine.stream("abc", max_tokens=50, deadline=60) for _ in range(20)]
            for stream in streams:
                await stream.__aenter__()
        for stream in streams[:10]:
            with pytest.raises(EngineClosedError):
                await exhaust(stream)
        del stream, streams
        gc.collect()

        assert (engine._mailboxes, engine._timers) == ({}, {})


async def exhaust(deltas: AsyncIterator[Any]) -> None:
    async for _ in deltas:
        pass


def timers_of(engine: Engine) -> list[asyncio.TimerHandle]:
    """What the event loop would still call; only asyncio's own loop can be asked."""
    scheduled = getattr(engine._event_loop, "_scheduled", [])
    return [handle for handle in scheduled if "_expire" in repr(handle)]
