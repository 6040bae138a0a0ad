"""A program over many items, at once and as a stream."""

from __future__ import annotations

import asyncio
import io
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from structgen.errors import (
    BatchError,
    ConcurrentUseError,
    OptionError,
    StateError,
    StructgenError,
)
from structgen.program.batch import BatchResults, run_batch
from structgen.program.result import Result
from structgen.program.state import State
from structgen.testing import ScriptedBackend
from tests.program.bodies import run, until
from tests.program.turns import Clean, cancel_everywhere, turns

pytestmark = pytest.mark.timeout(20)

NAME: ContextVar[str] = ContextVar("name", default="")


async def same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What it was called with; a number waits for so many turns."""
    if args and isinstance(args[0], int):
        await turns(args[0])
        return args[0]
    await asyncio.sleep(0)
    return args, kwargs


async def odd_fails(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    number: int = args[0]
    await asyncio.sleep(0)
    if number % 2:
        raise ValueError(f"odd {number}")
    return number


class Crowd:
    """Counts how many run at once, and how many were started and ended."""

    def __init__(self) -> None:
        self.live = self.peak = self.started = self.ended = self.peak_tasks = 0
        self.gate = asyncio.Event()

    async def __call__(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        self.started += 1
        self.live += 1
        self.peak = max(self.peak, self.live)
        try:
            await turns(1 + args[0] % 3)
            self.peak_tasks = max(self.peak_tasks, len(asyncio.all_tasks()))
            await self.gate.wait()
            return args[0]
        finally:
            self.live -= 1
            self.ended += 1


class TestABatch:
    async def test_has_results_in_the_order_of_the_items(self) -> None:
        assert await run_batch(same, [5, 1, 3, 0]) == [5, 1, 3, 0]

    @pytest.mark.parametrize(
        ("item", "called"),
        [
            ({"a": 1, "b": 2}, ((), {"a": 1, "b": 2})),
            (("a", "b"), (("a", "b"), {})),
            ((), ((), {})),
            ("text", (("text",), {})),
            (["a", "list"], ((["a", "list"],), {})),
            (None, ((None,), {})),
        ],
        ids=repr,
    )
    async def test_calls_with_what_the_item_is(self, item: Any, called: Any) -> None:
        assert await run_batch(same, [item]) == [called]

    async def test_of_nothing_is_nothing(self) -> None:
        assert await run_batch(same, []) == []

    async def test_takes_any_iterable(self) -> None:
        assert await run_batch(same, (number for number in range(3))) == [0, 1, 2]

    @pytest.mark.parametrize("concurrency", [1, 3, 100])
    async def test_runs_no_more_items_at_once_than_allowed(self, concurrency: int) -> None:
        crowd, before = Crowd(), len(asyncio.all_tasks())
        crowd.gate.set()

        await run_batch(crowd, range(20), concurrency=concurrency)

        most = min(concurrency, 20)
        assert (crowd.peak, crowd.peak_tasks - before) == (most, most)

    async def test_makes_a_task_only_for_what_runs(self) -> None:
        crowd, before = Crowd(), len(asyncio.all_tasks())
        crowd.gate.set()

        results = await run_batch(crowd, range(10_000), concurrency=8)

        assert results == list(range(10_000))
        assert crowd.peak_tasks - before == 8

    async def test_keeps_context_variables_and_those_of_items_apart(self) -> None:
        async def rename(args: tuple[Any, ...], _: dict[str, Any]) -> str:
            before = NAME.get()
            NAME.set(args[0])
            return before

        NAME.set("Ada")

        assert await run_batch(rename, ["abc"] * 3, concurrency=1) == ["Ada"] * 3
        assert NAME.get() == "Ada"

    @pytest.mark.parametrize("concurrency", [0, -1, 1.5, True, None])
    async def test_needs_a_concurrency(self, concurrency: Any) -> None:
        with pytest.raises(OptionError, match="concurrency"):
            await run_batch(same, [1], concurrency=concurrency)

    @pytest.mark.parametrize(
        ("items", "message"),
        [
            (7, r"run_batch\(\) takes an iterable of items, got int; write \[item\]"),
            ("text", "got str"),
            ({"a": 1}, "got dict"),
        ],
        ids=repr,
    )
    async def test_of_one_item_is_refused(self, items: Any, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            await run_batch(same, items)

    async def test_of_an_async_source_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"for an async source write `async with program\.iter"):
            await run_batch(same, counting(3))  # type: ignore[arg-type]  # the mistake under test


class TestAFailureInABatch:
    async def test_loses_nothing(self) -> None:
        with pytest.raises(BatchError) as caught:
            await run_batch(odd_fails, range(5), concurrency=2)

        outcomes = [str(outcome) for outcome in caught.value.outcomes]
        assert outcomes == ["0", "odd 1", "2", "odd 3", "4"]
        assert caught.value.__cause__ is caught.value.outcomes[1]

    async def test_says_how_many_and_which_was_the_first(self) -> None:
        message = r"^2 of 5 items failed, the first of them item 1 with ValueError: odd 1; all"

        with pytest.raises(BatchError, match=message):
            await run_batch(odd_fails, range(5))

    async def test_stands_in_its_place_if_asked_for(self) -> None:
        outcomes = await run_batch(odd_fails, range(3), return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [int, ValueError, int]

    async def test_says_which_item_it_was(self) -> None:
        outcomes: list[Any] = await run_batch(odd_fails, range(4), return_exceptions=True)

        assert outcomes[3].__notes__ == ["in item 3 of the batch"]

    async def test_by_cancellation_from_within_is_one(self) -> None:
        async def cancelled(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            if args[0]:
                raise asyncio.CancelledError
            return 0

        outcomes = await run_batch(cancelled, [0, 1], return_exceptions=True)

        assert outcomes[0] == 0
        assert isinstance(outcomes[1], StructgenError)
        assert "item 1 was cancelled from within" in str(outcomes[1])

    async def test_of_the_source_comes_before_anything_runs(self) -> None:
        started: list[Any] = []

        async def note(args: tuple[Any, ...], _: dict[str, Any]) -> None:
            started.append(args)

        with pytest.raises(ZeroDivisionError):
            await run_batch(note, (1 // number for number in [1, 0]))

        assert started == []


class TestCancellingABatch:
    async def test_cancels_every_item(self) -> None:
        clean, crowd = Clean(), Crowd()
        task = asyncio.create_task(run_batch(crowd, range(9), concurrency=4))
        await until(lambda: crowd.live == 4)

        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        assert (crowd.live, crowd.started, clean.left()) == (0, 4, set())

    async def test_at_any_moment_leaves_nothing(self) -> None:
        backend = ScriptedBackend("abcdefgh")

        async def one(args: tuple[Any, ...], _: dict[str, Any]) -> Result[Any]:
            async def body(s: State) -> str:
                s += args[0]
                return await s.gen()

            return await run(body, backend)

        def check() -> None:
            assert backend.running == 0

        work = lambda: run_batch(one, ["a", "b", "c", "d"], concurrency=2)  # noqa: E731 - repeated

        assert await cancel_everywhere(work, check) > 8

    async def test_by_a_scope_leaves_nothing(self) -> None:
        clean, crowd = Clean(), Crowd()

        with anyio.move_on_after(0.01) as scope:
            await run_batch(crowd, range(9), concurrency=4)

        assert scope.cancelled_caught
        assert (crowd.live, clean.left()) == (0, set())


class Terminal(io.StringIO):
    """A stderr that somebody looks at."""

    def isatty(self) -> bool:
        return True


class TestProgress:
    async def test_is_told_after_each_item(self) -> None:
        told: list[tuple[int, int]] = []

        await run_batch(
            odd_fails,
            range(4),
            progress=lambda done, total: told.append((done, total)),
            return_exceptions=True,
        )

        assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]

    async def test_that_fails_ends_the_batch(self) -> None:
        clean, crowd = Clean(), Crowd()
        crowd.gate.set()

        def fail(_done: int, _total: int) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await run_batch(crowd, range(9), concurrency=3, progress=fail)

        assert (crowd.live, clean.left()) == (0, set())

    async def test_is_a_bar_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        seen: list[str] = []

        async def look(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            seen.append(terminal.getvalue())
            return args

        await run_batch(look, [1, 2], concurrency=1, progress=True)

        assert ["0/2" in seen[0], "1/2" in seen[1]] == [True, True]
        assert "2/2" in terminal.getvalue()

    async def test_is_one_line_at_the_end_where_there_is_no_terminal(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        seen: list[str] = []

        async def look(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            seen.append(capfd.readouterr().err)
            return args

        await run_batch(look, range(5), concurrency=1, progress=True)

        assert seen == [""] * 5
        assert re.fullmatch(r".*5/5.*\n", capfd.readouterr().err)

    async def test_leaves_no_thread(self) -> None:
        clean = Clean()

        await run_batch(same, range(3), progress=True)

        assert clean.left() == set()

    async def test_is_nothing_else(self) -> None:
        with pytest.raises(OptionError, match="progress: expected a bool or a function, got 'yes'"):
            await run_batch(same, [1], progress="yes")  # type: ignore[arg-type]  # the mistake


async def counting(number: int, closed: list[str] | None = None) -> AsyncIterator[int]:
    try:
        for each in range(number):
            await asyncio.sleep(0)
            yield each
    finally:
        await asyncio.sleep(0)
        if closed is not None:
            closed.append("closed")


class TestAStreamOfResults:
    @pytest.mark.parametrize("seed", range(10))
    async def test_is_in_the_order_of_the_items(self, seed: int) -> None:
        items = random.Random(seed).choices(range(9), k=30)

        async with BatchResults(same, items, concurrency=5) as results:
            assert [result async for result in results] == items

    async def test_hands_a_result_out_as_soon_as_it_is_its_turn(self) -> None:
        gate = asyncio.Event()

        async def one(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            if args[0] == 1:
                await gate.wait()
            return args[0]

        async with BatchResults(one, range(3)) as results:
            first = await anext(results)
            gate.set()
            rest = [result async for result in results]

        assert (first, rest) == (0, [1, 2])

    @pytest.mark.parametrize("concurrency", [1, 2, 5])
    @pytest.mark.parametrize("asynchronous", [False, True])
    async def test_takes_no_more_than_the_window(
        self, concurrency: int, asynchronous: bool
    ) -> None:
        taken = handed = widest = 0

        def source() -> Iterator[int]:
            nonlocal taken, widest
            for number in range(20):
                taken += 1
                widest = max(widest, taken - handed)
                yield number

        async def async_source() -> AsyncIterator[int]:
            for number in source():
                await asyncio.sleep(0)
                yield number

        items: Any = async_source() if asynchronous else source()
        async with BatchResults(same, items, concurrency=concurrency) as results:
            async for _ in results:
                handed += 1
                await turns(4)

        assert (taken, widest) == (20, concurrency)

    async def test_awaits_its_source_while_items_run(self) -> None:
        running = asyncio.Event()

        async def source() -> AsyncIterator[int]:
            yield 1
            await running.wait()
            yield 2

        async def one(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            running.set()
            return args[0]

        async with BatchResults(one, source()) as results:
            assert [result async for result in results] == [1, 2]

    async def test_of_nothing_is_nothing(self) -> None:
        async with BatchResults(same, []) as results:
            assert [result async for result in results] == []

    async def test_makes_a_task_only_for_what_runs(self) -> None:
        crowd, before = Crowd(), len(asyncio.all_tasks())
        crowd.gate.set()

        async with BatchResults(crowd, range(2_000), concurrency=8) as results:
            assert [result async for result in results] == list(range(2_000))

        assert (crowd.peak, crowd.peak_tasks - before) == (8, 9)  # and one takes from the source

    async def test_may_be_left_off_and_read_on(self) -> None:
        gate = asyncio.Event()

        async def one(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            await gate.wait()
            return args[0]

        async with BatchResults(one, range(3)) as results:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(results)
            gate.set()

            assert [result async for result in results] == [0, 1, 2]

    async def test_keeps_context_variables(self) -> None:
        async def name(_args: tuple[Any, ...], _: dict[str, Any]) -> str:
            return NAME.get()

        NAME.set("Ada")
        async with BatchResults(name, range(2)) as results:
            assert [result async for result in results] == ["Ada"] * 2


class TestAFailureInAStream:
    async def test_is_raised_when_it_is_its_turn(self) -> None:
        async with BatchResults(odd_fails, [0, 2, 3, 4]) as results:
            read = [await anext(results), await anext(results)]
            with pytest.raises(ValueError, match="odd 3") as caught:
                await anext(results)

        assert read == [0, 2]
        assert caught.value.__notes__ == ["in item 2 of the batch"]

    async def test_does_not_end_it(self) -> None:
        async with BatchResults(odd_fails, [1, 2]) as results:
            with pytest.raises(ValueError, match="odd 1"):
                await anext(results)

            assert [result async for result in results] == [2]

    async def test_stands_in_its_place_if_asked_for(self) -> None:
        async with BatchResults(odd_fails, range(3), return_exceptions=True) as results:
            outcomes = [result async for result in results]

        assert [str(outcome) for outcome in outcomes] == ["0", "odd 1", "2"]

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (asyncio.CancelledError(), StructgenError, "item 0 was cancelled from within"),
            (StopAsyncIteration(), RuntimeError, "item 0 raised StopAsyncIteration"),
        ],
        ids=["cancelled", "stop"],
    )
    async def test_that_looks_like_something_else_is_told_apart(
        self, error: BaseException, kind: type[Exception], message: str
    ) -> None:
        async def one(_args: tuple[Any, ...], _: dict[str, Any]) -> None:
            raise error

        async with BatchResults(one, [1]) as results:
            with pytest.raises(kind, match=message) as caught:
                await anext(results)

        assert caught.value.__cause__ is error

    @pytest.mark.parametrize("asynchronous", [False, True])
    async def test_of_the_source_comes_after_what_came_before_it(self, asynchronous: bool) -> None:
        def source() -> Iterator[int]:
            yield 4
            yield 5
            raise ZeroDivisionError

        async def async_source() -> AsyncIterator[int]:
            for number in source():
                yield number

        items: Any = async_source() if asynchronous else source()
        async with BatchResults(same, items) as results:
            read = [await anext(results), await anext(results)]
            with pytest.raises(ZeroDivisionError):
                await anext(results)
            rest = [result async for result in results]

        assert (read, rest) == ([4, 5], [])

    async def test_of_a_source_that_was_cancelled_is_not_its_end(self) -> None:
        async def source() -> AsyncIterator[int]:
            yield 1
            raise asyncio.CancelledError

        async with BatchResults(same, source()) as results:
            await anext(results)
            with pytest.raises(StructgenError, match="source of the items was cancelled from"):
                await anext(results)


class TestLeavingAStreamOfResults:
    async def test_early_cancels_what_runs(self) -> None:
        clean, crowd = Clean(), Crowd()

        async with BatchResults(crowd, range(9), concurrency=4):
            await until(lambda: crowd.live == 4)

        assert (crowd.live, crowd.started, clean.left()) == (0, 4, set())

    @pytest.mark.parametrize("read", [0, 1, 3])
    async def test_early_closes_an_async_source(self, read: int) -> None:
        clean, closed = Clean(), list[str]()

        async with BatchResults(same, counting(9, closed), concurrency=2) as results:
            for _ in range(read):
                await anext(results)
            await turns(9)
            before = list(closed)

        assert (before, closed, clean.left()) == ([], ["closed"], set())

    async def test_closes_the_source_in_the_task_that_read_it(self) -> None:
        async def source() -> AsyncIterator[int]:
            # A cancel scope has to be left by the task that entered it.
            with anyio.CancelScope():
                for number in range(9):
                    yield number

        async with BatchResults(same, source(), concurrency=2) as results:
            await anext(results)

    async def test_raises_what_closing_the_source_raised(self) -> None:
        async def source() -> AsyncIterator[int]:
            try:
                yield 1
                yield 2
            finally:
                raise ZeroDivisionError

        async def work() -> None:
            async with BatchResults(same, source(), concurrency=1):
                await turns(5)

        with pytest.raises(ZeroDivisionError):
            await work()

    async def test_stops_a_source_that_will_not_be_cancelled(self) -> None:
        class Stubborn:
            def __aiter__(self) -> Stubborn:
                return self

            async def __anext__(self) -> int:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    return 1
                raise AssertionError

        clean, crowd = Clean(), Crowd()

        async with BatchResults(crowd, Stubborn()):
            await turns(3)

        assert (crowd.started, clean.left()) == (0, set())

    async def test_by_cancellation_at_any_moment_leaves_nothing(self) -> None:
        backend, closed = ScriptedBackend("abcdefgh"), list[str]()

        async def one(args: tuple[Any, ...], _: dict[str, Any]) -> Result[Any]:
            async def body(s: State) -> str:
                s += str(args[0])
                return await s.gen()

            return await run(body, backend)

        async def work() -> None:
            closed.clear()
            async with BatchResults(one, counting(4, closed), concurrency=2) as results:
                async for _ in results:
                    pass

        def check() -> None:
            assert backend.running == 0

        assert await cancel_everywhere(work, check) > 8
        assert closed == ["closed"]

    async def test_tells_another_task_that_reads(self) -> None:
        crowd = Crowd()
        async with BatchResults(crowd, range(3)) as results:
            reader = asyncio.create_task(_next(results))
            await until(lambda: crowd.live == 3)

        with pytest.raises(StateError, match="block of this batch was left"):
            await reader


async def _next(results: BatchResults[Any]) -> Any:
    return await anext(results)


class TestTheBlockOfAStream:
    async def test_is_needed(self) -> None:
        results = BatchResults(same, [1])

        with pytest.raises(StateError, match=r"not entered: write `async with program\.iter_batch"):
            aiter(results)
        with pytest.raises(StateError, match=r"not entered: write `async with program\.iter_batch"):
            await anext(results)

    async def test_is_entered_once(self) -> None:
        async with BatchResults(same, [1]) as results:
            with pytest.raises(StateError, match="opened before; call iter_batch"):
                await results.__aenter__()

    async def test_has_one_reader(self) -> None:
        async with BatchResults(Crowd(), [1]) as results:
            reader = asyncio.create_task(_next(results))
            await turns(3)
            with pytest.raises(ConcurrentUseError, match="two tasks read one batch"):
                await anext(results)
            reader.cancel()
            await asyncio.wait([reader])

    @pytest.mark.parametrize("concurrency", [0, True])
    async def test_needs_a_concurrency(self, concurrency: Any) -> None:
        with pytest.raises(OptionError, match="concurrency"):
            BatchResults(same, [1], concurrency=concurrency)

    async def test_needs_items(self) -> None:
        items: Any = "text"
        with pytest.raises(TypeError, match=r"iter_batch\(\) takes an iterable of items, got str"):
            BatchResults(same, items)
