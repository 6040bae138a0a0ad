"""However a call of a program fails, it raises at its await, at once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from structgen import gen, program
from structgen.engine.engine import Engine
from structgen.errors import (
    BudgetError,
    ConcurrentUseError,
    ConstraintError,
    DeadlineError,
    EngineClosedError,
    EngineDiedError,
    OptionError,
    PromptError,
    StateClosedError,
    StepFailedError,
)
from structgen.program.state import State

LONG: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}
SOON = 1.0  # seconds in which a failure is told, machine-busy included

Call = Callable[[State], Awaitable[Any]]


async def long_gen(s: State) -> None:
    await s.gen("x", **LONG)


async def long_samples(s: State) -> None:
    await s.gen("x", n=3, **LONG)


async def long_stream(s: State) -> None:
    async with s.stream("x", **LONG) as pieces:
        async for _ in pieces:
            pass


async def long_settle(s: State) -> None:
    s += gen("x", **LONG) + " and " + gen("y", **LONG)
    await s


async def long_branches(s: State) -> None:
    async with s.fork(3) as branches:
        await branches.map(lambda branch, _: branch.gen("x", **LONG))


async def long_join(s: State) -> None:
    async with s.fork(3) as branches:
        for branch in branches:
            branch.append(gen("x", **LONG))
        await branches.join()


CALLS = [long_gen, long_samples, long_stream, long_settle, long_branches, long_join]


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    async with Engine(tiny_model, slots=3000, threads=1, max_context=512) as opened:
        yield opened


async def until_busy(engine: Engine) -> None:
    while engine.statistics().generated_tokens < 3:  # noqa: ASYNC110 - the engine has no event
        await asyncio.sleep(0)


async def require_idle(engine: Engine) -> None:
    """Within a second nothing runs, waits or holds a slot; and the engine serves."""
    async with asyncio.timeout(SOON):
        while engine.statistics().running or engine.statistics().waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
    now = engine.statistics()
    assert (now.slots_held, now.slots_limbo, now.scopes) == (0, 0, 0)
    assert now.slots_free + now.slots_cached == now.slots_total
    assert (await engine.generate("abc", max_tokens=2, ignore_eos=True)).finish.reason == "length"


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


@program
async def call_it(s: State, call: Call) -> None:
    """Make one call on a state with some text."""
    s += "abcdef"
    await call(s)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
class TestWhateverIsCalled:
    async def test_a_cancelled_task_ends_it(self, engine: Engine, call: Call) -> None:
        task = asyncio.create_task(call_it.run(engine, call))
        await until_busy(engine)
        task.cancel()
        async with asyncio.timeout(SOON):
            with pytest.raises(asyncio.CancelledError):
                await task
        await require_idle(engine)

    async def test_a_timeout_around_it_ends_it(self, engine: Engine, call: Call) -> None:
        @program
        async def impatient(s: State) -> str:
            s += "abcdef"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await call(s)
            s.discard()
            return s.text()

        assert (await impatient.run(engine)).value == "abcdef"
        await require_idle(engine)

    async def test_the_budget_of_tokens_ends_it(self, engine: Engine, call: Call) -> None:
        async with asyncio.timeout(10 * SOON):
            with pytest.raises((BudgetError, ExceptionGroup)) as info:
                await call_it.budget(tokens=10).run(engine, call)
        assert all(isinstance(leaf, BudgetError) for leaf in leaves(info.value))
        await require_idle(engine)

    async def test_the_budget_of_seconds_ends_it(self, engine: Engine, call: Call) -> None:
        async with asyncio.timeout(10 * SOON):
            with pytest.raises(BudgetError, match=r"budget of 0\.02 s"):
                await call_it.budget(seconds=0.02).run(engine, call)
        await require_idle(engine)

    async def test_a_step_that_fails_is_told_to_it(
        self, engine: Engine, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task = asyncio.create_task(call_it.run(engine, call))
        await until_busy(engine)

        def explode(*_: Any) -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(engine.loaded.runner, "forward", explode)
            async with asyncio.timeout(SOON):
                with pytest.raises((StepFailedError, ExceptionGroup)) as info:
                    await task
        assert all(isinstance(leaf, StepFailedError) for leaf in leaves(info.value))
        await require_idle(engine)

    async def test_the_death_of_the_engine_is_told_to_it(
        self, tiny_model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def explode() -> None:
            raise AssertionError("an invariant is broken")

        async def die() -> None:
            async with Engine(tiny_model, slots=3000, threads=1) as engine:
                task = asyncio.create_task(call_it.run(engine, call))
                await until_busy(engine)
                monkeypatch.setattr(engine._core, "plan", explode)
                async with asyncio.timeout(SOON):
                    with pytest.raises((EngineDiedError, ExceptionGroup)) as info:
                        await task
                assert all(isinstance(leaf, EngineDiedError) for leaf in leaves(info.value))

        with pytest.raises(EngineDiedError):
            await die()

    async def test_the_end_of_the_engine_is_told_to_it(self, tiny_model: Path, call: Call) -> None:
        async with Engine(tiny_model, slots=3000, threads=1) as engine:
            task = asyncio.create_task(call_it.run(engine, call))
            await until_busy(engine)
        async with asyncio.timeout(SOON):
            with pytest.raises((EngineClosedError, ExceptionGroup)) as info:
                await task
        assert all(isinstance(leaf, EngineClosedError) for leaf in leaves(info.value))

    async def test_the_end_of_its_program_is_told_to_it(self, engine: Engine, call: Call) -> None:
        tasks: list[asyncio.Task[None]] = []

        @program
        async def careless(s: State) -> None:
            s += "abcdef"

            async def work() -> None:
                await call(s)

            tasks.append(asyncio.create_task(work()))
            await until_busy(engine)

        with warnings.catch_warnings():
            # What was appended and not run when the program ends is its mistake, and said so.
            warnings.simplefilter("ignore", ResourceWarning)
            with contextlib.suppress(ConcurrentUseError):
                await careless.run(engine)
        async with asyncio.timeout(SOON):
            with pytest.raises((StateClosedError, ExceptionGroup)) as info:
                await tasks[0]
        assert all(isinstance(leaf, StateClosedError) for leaf in leaves(info.value))
        await require_idle(engine)


class TestOneCall:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"top_p": 7}, OptionError, "top_p"),
            ({"heat": 7}, OptionError, "heat"),
            ({"stop_token_ids": [10**6]}, OptionError, "stop_token_ids"),
            ({"regex": "(abc"}, ConstraintError, "abc"),
            ({"max_tokens": 10**6}, PromptError, "max_tokens"),
            ({"deadline": 0.005, **LONG}, DeadlineError, "deadline"),
            ({"timeout": 0.005, **LONG}, DeadlineError, "timeout"),
        ],
        ids=lambda value: next(iter(value), "") if isinstance(value, dict) else None,
    )
    async def test_raises_at_its_await_and_the_program_goes_on(
        self, engine: Engine, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        @program
        async def persistent(s: State) -> str:
            s += "abcdef"
            with pytest.raises(error, match=message):
                await s.gen("x", **options)
            return await s.gen("x", max_tokens=3, ignore_eos=True)

        async with asyncio.timeout(10 * SOON):
            assert (await persistent.run(engine)).value
        await require_idle(engine)

    async def test_of_a_branch_cancels_its_siblings_in_the_scope(self, engine: Engine) -> None:
        @program
        async def three(s: State) -> None:
            s += "abcdef"
            async with s.fork(3) as branches:
                waiting = [asyncio.create_task(long_gen(branch)) for branch in branches[:2]]
                await until_busy(engine)
                try:
                    await branches[2].gen("x", regex="(abc")
                finally:
                    results.append(waiting)

        results: list[list[asyncio.Task[None]]] = []
        with pytest.raises(ConstraintError):
            await three.run(engine)
        async with asyncio.timeout(SOON):
            ended = await asyncio.gather(*results[0], return_exceptions=True)
        assert all(isinstance(each, StateClosedError) for each in ended)
        assert "fork scope" in str(ended[0])
        await require_idle(engine)
