"""One request of a program run while it is live.

Owns   the backend's context for the request, and the deltas that were read.
Holds  the context is left exactly once, by whoever comes first: the block that entered it, or
       the end of the run.
Used   by `operations`, for `gen`, and by `Pieces`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

import anyio
import msgspec

from structgen.errors import GenerationError, StateError
from structgen.events import CallEnded, CallStarted, Channel, TextDelta
from structgen.output.reasoning import Splitter
from structgen.program.run import Interruption, Place, Run
from structgen.program.tasks import named
from structgen.request import Completion, Delta, Finish, Request, Usage, join_deltas


class Caller(msgspec.Struct, frozen=True):
    """Who generates: the place and number of its state, the variable's name, for the reports."""

    place: Place
    state: int
    name: str = ""
    reasoning: str | None = None


class Generation(Interruption):
    """One request while it is live: `async with` it, then `step()` or `finish()`.

    It may be left in another task than it was entered in, since an abandoned async generator is
    closed that way. Two tasks may meet here: the one that reads and the one that ends the run.

    fresh      what the last step wrote, by channel
    channels   all that was written, by channel
    """

    __slots__ = (
        "_call",
        "_caller",
        "_context",
        "_counted",
        "_deltas",
        "_gone",
        "_held",
        "_left",
        "_splitter",
        "_tokenizer",
        "channels",
        "deltas",
        "fresh",
        "request",
    )

    def __init__(self, run: Run, request: Request, caller: Caller) -> None:
        super().__init__(run, f"gen({caller.name!r})" if caller.name else "gen()", caller.place)
        self.request = request
        self.deltas: list[Delta] = []
        self.channels: dict[Channel, str] = {"answer": "", "reasoning": ""}
        self.fresh: list[tuple[Channel, str]] = []
        # Asked for now: a backend that closes meanwhile says nothing of itself any more.
        self._tokenizer = run.backend.capabilities.tokenizer
        self._caller = caller
        self._splitter = Splitter(caller.reasoning) if caller.reasoning else None
        self._context: AbstractAsyncContextManager[AsyncIterator[Delta]] | None = None
        self._deltas: AsyncIterator[Delta] | None = None
        self._left = self._held = False
        self._gone: anyio.Event | None = None
        self._counted = 0  # tokens that the run knows to be spent
        self._call = 0

    async def __aenter__(self) -> Self:
        self._run.require_open("a generation")
        self._context = self._run.backend.generate(self.request)
        self._run.take(self)
        self._held = True
        self._call = next(self._run.calls)
        caller = self._caller
        self._run.tell(
            CallStarted, call=self._call, state=caller.state, kind="gen", name=caller.name
        )
        try:
            self._deltas = await self.interruptible(self._context.__aenter__)
        except BaseException as error:
            self._forget(error)
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
        return await self.interruptible(self._next)

    async def finish(self) -> Completion:
        """Read to the end. Raises `GenerationError` where the backend ends it without a result."""
        await self.interruptible(self._drain)
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
            finish=Finish(reason="abort", complete=False, usage=Usage(completion_tokens=tokens)),
            logprobs=tuple(entry for delta in self.deltas[:whole] for entry in delta.logprobs),
            tokenizer=self._tokenizer,
        )

    @property
    def finished(self) -> bool:
        """Whether the last delta was read."""
        return bool(self.deltas) and self.deltas[-1].finish is not None

    async def close(self) -> None:
        """Leave the backend's context, in place of the task that entered it if need be."""
        await self.calm()
        if not self._left:
            await self._leave(None, None, None)
        elif self._held:
            self._gone = anyio.Event()
            await self._gone.wait()

    def end_channels(self) -> None:
        """Nothing more comes: what was held back as the beginning of a marker is text."""
        if self._splitter is not None:
            self._hear(self._splitter.flush())
            self._splitter = None

    # ------------------------------------------------------------ reading

    async def _next(self) -> Delta | None:
        assert self._deltas is not None, "the generation was not entered"
        if self.finished:
            return None
        try:
            delta = await anext(self._deltas)
        except StopAsyncIteration:
            raise GenerationError("the backend ended the request without saying why") from None
        if self._left:
            raise StateError("the block of this stream was left while another task read it")
        self.deltas.append(delta)
        self._split(delta)
        self._count(delta)
        if delta.finish is not None:
            self._run.usage += delta.finish.usage
            if delta.finish.reason == "abort":
                raise GenerationError("the backend aborted the request before it was finished")
        if self._run.exhausted is not None:
            raise self._run.budget_error()
        return delta

    async def _drain(self) -> None:
        while await self._next() is not None:
            pass

    def _split(self, delta: Delta) -> None:
        self.fresh = []
        if self._splitter is None:
            self._hear([("answer", delta.text)] if delta.text else [], len(delta.tokens))
        else:
            self._hear(self._splitter.push(delta.text), len(delta.tokens))
            if delta.finish is not None:
                self.end_channels()

    def _hear(self, pieces: Sequence[tuple[Channel, str]], tokens: int = 0) -> None:
        self.fresh += pieces
        for channel, text in pieces:
            self.channels[channel] += text
        if self._run.heard:
            caller = self._caller
            for channel, text in pieces or ([("answer", "")] if tokens else []):
                self._run.tell(
                    TextDelta,
                    call=self._call,
                    state=caller.state,
                    name=caller.name,
                    text=text,
                    tokens=tokens,
                    channel=channel,
                )
                tokens = 0

    def _count(self, delta: Delta) -> None:
        tokens = len(delta.tokens)
        if delta.finish is not None:
            # With those that a stop cut off, and the end token.
            tokens = delta.finish.usage.completion_tokens - self._counted
        self._counted += tokens
        self._run.spend(tokens)

    # ------------------------------------------------------------ leaving

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
            self._forget(error)

    def _forget(self, error: BaseException | None) -> None:
        self._left, self._held = True, False
        self._run.drop(self)
        if self._run.heard:
            finish = self.completion().finish
            self._run.tell(
                CallEnded,
                call=self._call,
                state=self._caller.state,
                name=self._caller.name,
                reason=None if error is not None else finish.reason,
                usage=finish.usage,
                waited=finish.waited,
                error="" if error is None else named(error),
            )
        if self._gone is not None:
            self._gone.set()


def _exact(deltas: Sequence[Delta]) -> int:
    """How many deltas can be kept with their tokens: up to the last that is not partial."""
    kept = len(deltas)
    while kept and deltas[kept - 1].partial:
        kept -= 1
    return kept
