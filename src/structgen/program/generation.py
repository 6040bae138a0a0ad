"""One request of a program run while it is live.

Owns   the backend's context for the request, and the deltas that were read.
Holds  the context is left exactly once, by whoever comes first: the block that entered it, or
       the end of the run.
Used   by `State.gen` and `Pieces`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self, TypeVar

import anyio

from structgen.errors import ConcurrentUseError, GenerationError, StateClosedError
from structgen.program.run import Run
from structgen.request import Completion, Delta, Finish, Request, Usage, join_deltas

T = TypeVar("T")


class Generation:
    """One request while it is live: `async with` it, then `step()` or `finish()`.

    It may be left in another task than it was entered in, since an abandoned async generator is
    closed that way. Two tasks may meet here: the one that reads and the one that ends the run.
    """

    __slots__ = (
        "_calm",
        "_context",
        "_cut",
        "_deltas",
        "_gone",
        "_held",
        "_left",
        "_run",
        "_scope",
        "_tokenizer",
        "deltas",
        "request",
    )

    def __init__(self, run: Run, request: Request) -> None:
        self.request = request
        self.deltas: list[Delta] = []
        self._run = run
        # Asked for now: a backend that closes meanwhile says nothing of itself any more.
        self._tokenizer = run.backend.capabilities.tokenizer
        self._context: AbstractAsyncContextManager[AsyncIterator[Delta]] | None = None
        self._deltas: AsyncIterator[Delta] | None = None
        self._scope: anyio.CancelScope | None = None
        self._cut = self._left = self._held = False
        self._calm: anyio.Event | None = None
        self._gone: anyio.Event | None = None

    async def __aenter__(self) -> Self:
        self._run.require_open("a generation")
        self._context = self._run.backend.generate(self.request)
        self._run.take(self)
        self._held = True
        try:
            self._deltas = await self._interruptible(self._context.__aenter__)
        except BaseException:
            self._forget()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave(kind, error, trace)

    async def step(self) -> Delta | None:
        """The next delta, None after the last."""
        return await self._interruptible(self._next)

    async def finish(self) -> Completion:
        """Read to the end. Raises `GenerationError` where the backend ends it without a result."""
        await self._interruptible(self._drain)
        return self.completion()

    def completion(self) -> Completion:
        """What was read, as a completion; of reason "abort" before the last delta was read."""
        if self.finished:
            return join_deltas(self.deltas, self._tokenizer)
        tokens = sum(len(delta.tokens) for delta in self.deltas)
        whole = _exact(self.deltas)
        text = "".join(delta.text for delta in self.deltas)
        tail = "".join(delta.text for delta in self.deltas[whole:])
        return Completion(
            text=text,
            tokens=tuple(token for delta in self.deltas[:whole] for token in delta.tokens),
            tail=tail,
            finish=Finish(reason="abort", usage=Usage(completion_tokens=tokens)),
            logprobs=tuple(entry for delta in self.deltas[:whole] for entry in delta.logprobs),
            tokenizer=self._tokenizer,
        )

    @property
    def finished(self) -> bool:
        """Whether the last delta was read."""
        return bool(self.deltas) and self.deltas[-1].finish is not None

    def cut(self) -> None:
        """Interrupt the task that waits for a delta; it raises `StateClosedError`."""
        self._cut = True
        if self._scope is not None:
            self._scope.cancel()

    async def close(self) -> None:
        """Leave the backend's context, in place of the task that entered it if need be."""
        if self._scope is not None:
            self._calm = anyio.Event()
            await self._calm.wait()
        if not self._left:
            await self._leave(None, None, None)
        elif self._held:
            self._gone = anyio.Event()
            await self._gone.wait()

    async def _next(self) -> Delta | None:
        assert self._deltas is not None, "the generation was not entered"
        if self.finished:
            return None
        try:
            delta = await anext(self._deltas)
        except StopAsyncIteration:
            raise GenerationError("the backend ended the request without saying why") from None
        self.deltas.append(delta)
        if delta.finish is not None:
            self._run.usage += delta.finish.usage
            if delta.finish.reason == "abort":
                raise GenerationError("the backend aborted the request before it was finished")
        return delta

    async def _drain(self) -> None:
        while await self._next() is not None:
            pass

    async def _interruptible(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await what the end of the run may interrupt."""
        if self._scope is not None:
            raise ConcurrentUseError("two tasks read one stream; let one read and pass it on")
        if not self._cut:
            # A scope interrupts this wait and nothing else: the task that waits here may be
            # anybody's, and cancelling it would end more than this request.
            self._scope = scope = anyio.CancelScope()
            with scope:
                try:
                    return await call()
                finally:
                    self._scope = None
                    if self._calm is not None:
                        self._calm.set()
        raise StateClosedError(
            "the program that owns this State ended while a generation was still running, and "
            "its request was aborted; await every generation inside the program"
        )

    async def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._left:
            return
        self._left = True
        try:
            if not self.finished:
                self._run.usage += self.completion().usage
            assert self._context is not None, "the generation was not entered"
            await self._context.__aexit__(kind, error, trace)
        finally:
            self._forget()

    def _forget(self) -> None:
        self._left, self._held = True, False
        self._run.drop(self)
        if self._gone is not None:
            self._gone.set()


def _exact(deltas: Sequence[Delta]) -> int:
    """How many deltas can be kept with their tokens: up to the last that is not partial."""
    kept = len(deltas)
    while kept and deltas[kept - 1].partial:
        kept -= 1
    return kept
