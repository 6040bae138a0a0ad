"""Streams: how deltas get from the loop to the coroutine that waits for them.

Owns   the hand-over (`Mailbox`) and the scope in which a request lives (`DeltaStream`).
Holds  a request is aborted when its stream is left, by whatever way: return, break, error,
       cancellation, or garbage collection of a stream that nobody closed.
Used   by `engine`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

import anyio.to_thread
import msgspec

from structgen.errors import GenerationError, StructgenError
from structgen.grammar.source import Finder
from structgen.request import Delta, Usage


class Mailbox:
    """Deltas of one request, waiting to be read. One wake-up per step and reader.

    usage      what it has cost, once it has ended in whatever way
    enforced   what its end says of that; see `Finish`
    finder     finds what was captured, which the end says, too; None where nothing is
    """

    def __init__(self) -> None:
        self.finished = False
        self.usage = Usage()
        self.enforced = ""
        self.finder: Finder | None = None
        self._text: list[str] = []  # of all deltas, where something is to be found in it
        self._deltas: deque[Delta] = deque()
        self._error: StructgenError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._reading = False

    def push(self, delta: Delta) -> None:
        """Add a delta; the one that carries `finish` is the last."""
        if delta.finish is not None:
            finish = msgspec.structs.replace(delta.finish, enforced=self.enforced)
            delta = msgspec.structs.replace(delta, finish=finish)
            self.finished, self.usage = True, finish.usage
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: StructgenError) -> None:
        """End the stream by an error; what arrived before it can still be read."""
        if not self.finished:
            self._error = error
            self.finished = True
            self._wake()

    async def take(self) -> Delta | None:
        """The next delta, None after the last. Raises the error that ended the stream."""
        if self._reading:
            raise GenerationError("this stream is being read already; read it from one task")
        self._reading = True
        try:
            return await self._next()
        finally:
            self._reading = False

    async def _next(self) -> Delta | None:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.finished:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        delta = self._deltas[0]
        if self.finder is not None:
            delta = await self._with_captures(delta, self.finder)
        # Only now: a reader that was cancelled before has taken nothing.
        self._deltas.popleft()
        return delta

    async def _with_captures(self, delta: Delta, finder: Finder) -> Delta:
        """The delta, which says what was captured if it is the last one of a complete output.

        Asked for by the reader, and found in a thread: where a text can be read in many ways it
        takes long. A reader that is cancelled does not wait for it.
        """
        if delta.finish is None or not delta.finish.complete:
            self._text.append(delta.text)
            return delta
        text = "".join([*self._text, delta.text])
        try:
            captures = await anyio.to_thread.run_sync(finder.captures, text, abandon_on_cancel=True)
        except StructgenError as error:
            self._deltas.popleft()
            self._error = error
            raise
        finish = msgspec.structs.replace(delta.finish, captures=captures)
        return msgspec.structs.replace(delta, finish=finish)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class DeltaStream(AbstractAsyncContextManager["DeltaStream"], AsyncIterator[Delta]):
    """The deltas of one request: `async with engine.stream(...) as deltas`.

    Entering submits the request; leaving aborts it unless it has finished. Read by one task.
    """

    def __init__(
        self,
        submit: Callable[[Mailbox], Coroutine[Any, Any, int]],
        abandon: Callable[[int], None],
        abandon_from_anywhere: Callable[[int], None],
    ) -> None:
        """`submit` sends the request and returns its id; the `abandon`s end one by its id."""
        self._submit, self._abandon = submit, abandon
        self._abandon_from_anywhere = abandon_from_anywhere
        self._mailbox = Mailbox()
        self._entered = False
        self._request: int | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    async def __aenter__(self) -> Self:
        if self._entered:
            raise GenerationError("a stream can be entered once; make a new one")
        self._entered = True
        try:
            self._request = await self._submit(self._mailbox)
        except BaseException:
            self._entered = False
            raise
        # A stream that is dropped without being left must not keep its request running. The
        # collector may find it on any thread, hence the thread-safe way.
        self._finalizer = weakref.finalize(self, self._abandon_from_anywhere, self._request)
        self._finalizer.atexit = False
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._finalizer is not None and self._request is not None:
            self._finalizer.detach()
            self._abandon(self._request)
            # Nothing arrives any more: whoever reads on must not wait for it.
            self._mailbox.fail(GenerationError("this stream was left before it had finished"))

    @property
    def usage(self) -> Usage:
        """What the request has cost, once it has ended, failed or was left; zeros before."""
        return self._mailbox.usage

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._request is None:
            raise GenerationError("the stream is not open; use `async with ... as deltas:`")
        delta = await self._mailbox.take()
        if delta is None:
            raise StopAsyncIteration
        return delta
