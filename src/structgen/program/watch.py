"""A program that runs in a task of its own, and what others see of it while it runs.

Owns   that task, and the list of the events of its run.
Holds  when the block is left the task has ended and its requests are gone from the backend; an
       error of the program is told once to each reader, and at the end if nobody has read it.
Used   by `Program.stream`; `batch` and `combine` end and read their tasks with what is here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, Self, TypeVar

from structgen.errors import StateError
from structgen.events import Channel, Event, Listener, TextDelta
from structgen.program.result import Result
from structgen.program.tasks import EXITS, cut, failure_of, start

R = TypeVar("R")


class RunStream(Generic[R]):
    """A run that is watched while it goes on.

        async with chat.stream(engine, "Hello") as run:
            async for piece in run.text("answer"):
                print(piece, end="")
        print(run.result.usage)

    The program runs by itself and never waits for a reader. There may be several: each reads
    from the beginning, at its own pace. What the program raises, every reader raises at its end.

    Leaving the block before the program has ended cancels it, and aborts its requests. That is
    no error, whatever the program makes of it.
    """

    def __init__(self, start: Callable[[Listener], Coroutine[Any, Any, Result[R]]]) -> None:
        """`start` runs the program, with a listener that gets its events."""
        self._start = start
        self._log = _Log()
        self._task: asyncio.Task[Result[R]] | None = None
        self._failure: BaseException | None = None
        self._left_early = self._told = False

    # ------------------------------------------------------------ the block

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise StateError("this stream was opened before; call stream() again for another run")
        self._log.open()
        self._task = start(lambda: self._start(self._log.add), "structgen stream")
        self._task.add_done_callback(self._end)
        return self

    async def __aexit__(self, _: object, error: BaseException | None, _trace: object) -> None:
        assert self._task is not None, "the block was not entered"
        if not self._task.done():
            self._left_early = True
            try:
                await cut([self._task])
            finally:
                self._report_lost()
            return
        self._end(self._task)
        if self._failure is None or self._told or self._failure is error:
            return
        if error is None:
            raise self._failure
        error.add_note(f"the program that was watched had failed before: {self._failure!r}")

    def _end(self, task: asyncio.Task[Result[R]]) -> None:
        """The task is done. Its callback may come later than somebody who looks at it."""
        if self._failure is None and not self._left_early:
            self._failure = failure_of(task, "the program")
        self._log.wake()

    def _report_lost(self) -> None:
        """An error of a program that was cancelled: nobody waits for it, but it is not hidden."""
        assert self._task is not None
        if self._task.cancelled():
            return
        error = failure_of(self._task, "the program")
        if error is None:
            return
        if isinstance(error, EXITS):
            raise error
        context = {"message": "a program failed when its stream was left", "exception": error}
        self._task.get_loop().call_exception_handler(context)

    # ------------------------------------------------------------ reading

    def __aiter__(self) -> AsyncIterator[Event]:
        """All events of the run, in order, from the first to the last."""
        self._require_entered()
        return _Events(self._log, self._over)

    def text(self, name: str | None = None, *, channel: Channel = "answer") -> AsyncIterator[str]:
        """The text of a variable as it is generated, until the program ends.

        name      of the variable; without it the text of everything that is generated, in the
                  order in which it arrives
        channel   "reasoning" for what a model with separate reasoning thinks

        A reader that is late or slow gets what there is in one piece. With `retries`, what the
        attempts that failed have written is text, too: events tell it apart by its call.
        """
        self._require_entered()
        return _Texts(self._log, self._over, name, channel)

    @property
    def result(self) -> Result[R]:
        """What `Program.run` would have returned; raises what it would have raised.

        Raises `StateError` while the program runs, and when the block was left before its end.
        """
        if self._over():
            assert self._task is not None
            return self._task.result()
        raise StateError(
            "the program is still running, and has no result yet: read to its end first, "
            "`async for piece in run.text():` or `async for event in run:`"
        )

    def _over(self) -> bool:
        """Whether the program has returned. Raises what it raised."""
        self._require_entered()
        assert self._task is not None
        if self._left_early:
            raise StateError(
                "the stream was left before its program had ended, so the program was cancelled "
                "and has no result: read to the end inside the block"
            )
        if not self._task.done():
            return False
        self._end(self._task)
        if self._failure is not None:
            self._told = True
            raise self._failure
        return True

    def _require_entered(self) -> None:
        if self._task is None:
            raise StateError(
                "the program of this stream was not started: write `async with program.stream("
                "backend, ...) as run:` and read `async for piece in run.text():` inside it"
            )


class _Log:
    """The events so far, and who waits for more."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._waiting: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def open(self) -> None:
        """Take events, and readers on this event loop, from now on."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def add(self, event: Event) -> None:
        """The listener."""
        self.events.append(event)
        if threading.get_ident() == self._thread:
            self.wake()
        elif self._loop is not None:
            # A program that calls another one with `run_sync` hears it from that one's thread.
            self._loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        """There may be something new."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def news(self) -> None:
        """Wait until there may be something new."""
        assert self._loop is not None
        waiting = self._loop.create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)


class _Reader:
    """One reader's place in the log."""

    def __init__(self, log: _Log, over: Callable[[], bool]) -> None:
        self._log, self._over = log, over
        self._at = 0
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def _more(self) -> bool:
        """Wait until there are events that were not read; False at the end of the run."""
        while self._at == len(self._log.events):
            if self._ended:
                return False
            try:
                self._ended = self._over()
            except BaseException:
                self._ended = True
                raise
            if not self._ended:
                await self._log.news()
        return True


class _Events(_Reader):
    """All events."""

    async def __anext__(self) -> Event:
        if not await self._more():
            raise StopAsyncIteration
        self._at += 1
        return self._log.events[self._at - 1]


class _Texts(_Reader):
    """The text of one variable, or of all."""

    def __init__(
        self, log: _Log, over: Callable[[], bool], name: str | None, channel: Channel
    ) -> None:
        super().__init__(log, over)
        self._name, self._channel = name, channel

    async def __anext__(self) -> str:
        while await self._more():
            events, start = self._log.events, self._at
            self._at = len(events)
            if text := "".join(map(self._text, events[start:])):
                return text
        raise StopAsyncIteration

    def _text(self, event: Event) -> str:
        if not isinstance(event, TextDelta) or event.channel != self._channel:
            return ""
        return event.text if self._name in {None, event.name} else ""
