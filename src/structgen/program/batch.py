"""A program over many items: all of them, or as a stream of results in order.

Owns   a task for each item that runs; at most `concurrency` exist.
Holds  nothing of an item is lost because another one failed, and no task is left when a batch has
       ended, however it ended.
Used   by `Program.run_batch` and `Program.iter_batch`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar

from structgen.errors import BatchError, ConcurrentUseError, OptionError, StateError
from structgen.program.tasks import cut, failure_of, named, result_of, start
from structgen.sampling import check_whole

T = TypeVar("T")
RunOne = Callable[[tuple[Any, ...], dict[str, Any]], Awaitable[T]]
Report = Callable[[int, int], None]

REDRAWN_AFTER = 0.1  # seconds between two drawings of the progress bar


async def run_batch(
    run_one: RunOne[T],
    items: Iterable[Any],
    *,
    concurrency: int = 64,
    progress: bool | Report = False,
    return_exceptions: bool = False,
) -> list[T]:
    """Run each item and return the results in the order of the items.

    run_one             runs one item, given as positional and keyword arguments
    items               mappings (keyword arguments), tuples (positional arguments), or anything
                        else (the only argument); taken from their source before the first runs
    concurrency         items that run at once
    progress            True for a bar on stderr, or a function of (ended, total)
    return_exceptions   an item that fails leaves its exception in its place

    All items are run, whatever others do. Without `return_exceptions`, `BatchError` is raised
    after that if some have failed, with all outcomes. Cancelling the batch cancels all items.
    """
    check_whole("concurrency", concurrency, low=1)
    _check_source(items, "run_batch")
    if isinstance(items, AsyncIterable):
        raise TypeError(
            "run_batch() takes items that are there already; for an async source write "
            "`async with program.iter_batch(backend, items) as results:`"
        )
    listed = list(items)
    with _reporting(progress, len(listed)) as report:
        outcomes, failed = await _run_all(run_one, listed, concurrency, report)
    if failed and not return_exceptions:
        first = min(failed)
        error = failed[first]
        raise BatchError(
            f"{len(failed)} of {len(listed)} items failed, the first of them item {first} with "
            f"{named(error)}; all outcomes are in `.outcomes` of this error, and "
            "return_exceptions=True returns them",
            outcomes,
        ) from error
    return outcomes


async def _run_all(
    run_one: RunOne[T], items: Sequence[Any], concurrency: int, report: Report
) -> tuple[list[Any], dict[int, Exception]]:
    """What each item ended with, and which have failed."""
    outcomes: list[Any] = [None] * len(items)
    failed: dict[int, Exception] = {}
    running: dict[asyncio.Task[T], int] = {}
    ended: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    waiting = iter(enumerate(items))
    try:
        for done in range(1, len(items) + 1):
            while len(running) < concurrency and (following := next(waiting, None)) is not None:
                task = _start(run_one, following[1])
                running[task] = following[0]
                task.add_done_callback(ended.put_nowait)
            task = await ended.get()
            index = running.pop(task)
            error = _failure(task, index)
            if error is None:
                outcomes[index] = task.result()
            else:
                outcomes[index] = failed[index] = error
            report(done, len(items))
    finally:
        await cut(running)
    return outcomes, failed


class BatchResults(Generic[T]):
    """The results of a batch in the order of the items, each as soon as it is its turn.

        async with judge.iter_batch(engine, essays) as results:
            async for result in results:
                ...

    Items come from a source, sync or async. It is asked for the next one as soon as fewer than
    `concurrency` items are taken from it and not handed out as results; an async source is
    awaited while items run. An item that failed raises at its turn, unless `return_exceptions`
    hands its exception out; so does an error of the source. Reading may go on after it.

    Leaving the block cancels what runs, and closes an async source that has an `aclose`.
    """

    def __init__(
        self,
        run_one: RunOne[T],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        concurrency: int = 64,
        return_exceptions: bool = False,
    ) -> None:
        check_whole("concurrency", concurrency, low=1)
        _check_source(items, "iter_batch")
        self._run_one, self._items = run_one, items
        self._concurrency, self._return_exceptions = concurrency, return_exceptions
        self._feeder: asyncio.Task[None] | None = None
        self._window: deque[tuple[int, asyncio.Task[T]]] = deque()
        self._room, self._arrival = asyncio.Event(), asyncio.Event()
        self._left = self._reading = self._source_told = False

    async def __aenter__(self) -> Self:
        if self._feeder is not None:
            raise StateError("this batch was opened before; call iter_batch() again")
        self._feeder = start(self._feed, "structgen batch source")
        self._feeder.add_done_callback(lambda _: self._arrival.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._feeder is not None, "the block was not entered"
        self._left, closing = True, not self._feeder.done()
        try:
            await cut([self._feeder, *(task for _, task in self._window)])
        finally:
            self._window.clear()
        # What failed before, and was not read, is of no interest any more; closing the source is.
        if closing and not self._feeder.cancelled():
            result_of(self._feeder)

    def __aiter__(self) -> Self:
        self._require_open()
        return self

    async def __anext__(self) -> T:
        self._require_open()
        if self._reading:
            raise ConcurrentUseError("two tasks read one batch; let one read and pass results on")
        self._reading = True
        try:
            # It stays in the window until it is handed out: a reader that gives up loses nothing.
            index, task = await self._next()
        finally:
            self._reading = False
        self._window.popleft()
        self._room.set()
        error = _failure(task, index)
        if error is None:
            return task.result()
        if self._return_exceptions:
            return error  # type: ignore[return-value]  # whoever asks for them has them in T
        raise error

    async def _next(self) -> tuple[int, asyncio.Task[T]]:
        """The item whose turn it is, when it has ended."""
        assert self._feeder is not None
        while not self._window:
            if self._feeder.done():
                error = failure_of(self._feeder, "the source of the items")
                told, self._source_told = self._source_told, True
                raise StopAsyncIteration if error is None or told else error
            self._arrival.clear()
            await self._arrival.wait()
            self._require_open()
        index, task = self._window[0]
        if not task.done():
            await asyncio.wait([task])
            self._require_open()
        return index, task

    async def _feed(self) -> None:
        """Take items and start them, until the source ends or the block is left."""
        items = self._items
        source: AsyncIterator[Any] | None = None
        index = 0
        try:
            source = aiter(items if isinstance(items, AsyncIterable) else _each(items))
            while not self._left:
                if len(self._window) >= self._concurrency:
                    self._room.clear()
                    await self._room.wait()
                    continue
                item = await anext(source)
                if not self._left:
                    self._window.append((index, _start(self._run_one, item)))
                    self._arrival.set()
                index += 1
        except StopAsyncIteration:
            pass
        finally:
            # In this task, which has iterated it: cancel scopes inside it want to be left there.
            if (close := getattr(source, "aclose", None)) is not None:
                await close()

    def _require_open(self) -> None:
        if self._feeder is None or self._left:
            when = "was left" if self._left else "was not entered"
            raise StateError(
                f"the block of this batch {when}: write `async with program.iter_batch(backend, "
                "items) as results:` and read `async for result in results:` inside it"
            )


async def _each(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def _start(run_one: RunOne[T], item: object) -> asyncio.Task[T]:
    """Run one item in a task of its own, with a copy of the context that it may change."""

    async def run() -> T:
        if isinstance(item, Mapping):
            return await run_one((), dict(item))
        return await run_one(item if isinstance(item, tuple) else (item,), {})

    return start(run)


def _failure(task: asyncio.Task[Any], index: int) -> Exception | None:
    """What an item failed with, if it did."""
    error = failure_of(task, f"item {index}")
    if error is None:
        return None
    error.add_note(f"in item {index} of the batch")
    if not isinstance(error, Exception):
        raise error  # no failure of an item: somebody wants to end the process
    return error


def _check_source(items: object, name: str) -> None:
    if isinstance(items, Mapping | str | bytes) or not isinstance(items, Iterable | AsyncIterable):
        raise TypeError(
            f"{name}() takes an iterable of items, got {type(items).__name__}; write [item] for "
            "a batch of one"
        )


@contextmanager
def _reporting(progress: bool | Report, total: int) -> Iterator[Report]:
    if callable(progress):
        yield progress
    elif progress is True:
        with _bar(total) as report:
            yield report
    elif progress is False:
        yield lambda _done, _total: None
    else:
        raise OptionError("progress", f"expected a bool or a function, got {progress!r}")


@contextmanager
def _bar(total: int) -> Iterator[Report]:
    """A bar on stderr; where that is no terminal, one line at the end."""
    from rich import progress as bars  # noqa: PLC0415 - only for those who want a bar
    from rich.console import Console  # noqa: PLC0415 - as above

    left = bars.TimeRemainingColumn(elapsed_when_finished=True)
    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), left)
    # Drawn when an item has ended: a thread of rich's would draw between two lines of ours.
    with bars.Progress(*columns, console=Console(stderr=True), auto_refresh=False) as display:
        row, drawn = display.add_task("", total=total), 0.0

        def report(done: int, _total: int) -> None:
            nonlocal drawn
            display.update(row, completed=done)
            if (now := time.monotonic()) - drawn >= REDRAWN_AFTER:
                drawn = now
                display.refresh()

        yield report
