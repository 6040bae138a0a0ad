"""A generation that is read piece by piece inside a program.

Owns   one generation between entering and leaving its block. Used by `State.stream`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import anyio

from structgen.errors import StateError
from structgen.events import Channel
from structgen.program import operations
from structgen.program.calls import generating
from structgen.program.cursor import Cursor, Question
from structgen.program.expression import Gen
from structgen.program.generation import Generation


class Piece(str):
    """A piece of the text that is being generated.

    channel   "answer", or "reasoning" for what a model thinks aloud (with the option `reasoning`)
    """

    __slots__ = ("channel",)

    channel: Channel

    def __new__(cls, text: str, channel: Channel) -> Self:
        """A piece of text of a channel."""
        piece = super().__new__(cls, text)
        piece.channel = channel
        return piece


class Pieces:
    """The pieces of text of one generation: enter it, then iterate.

    A class, not an async generator: nothing of it waits for the garbage collector when the
    block is left early.
    """

    def __init__(self, cursor: Cursor, call: Gen) -> None:
        """`call` has neither a type nor samples."""
        self._cursor, self._call = cursor, call
        self._label = f"stream({call.name!r})" if call.name else "stream()"
        self._generation: Generation | None = None
        self._question: Question | None = None
        self._fresh: list[Piece] = []
        self._entered: float | None = None

    async def __aenter__(self) -> Self:
        cursor, call = self._cursor, self._call
        if self._entered is not None:
            raise StateError("this stream has been read; call s.stream(...) again for another one")
        self._entered = anyio.current_time()
        if cursor.pending:
            with cursor.noting(call.name), self._limit():
                await operations.settle(cursor)
        await cursor.begin(self._label)
        try:
            with cursor.noting(call.name):
                question = self._question = cursor.ask(call)
                generation = Generation(cursor.run, question.requests[0], question.caller)
                with self._limit():
                    self._generation = await generation.__aenter__()
        except BaseException:
            cursor.end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        generation, self._generation = self._generation, None
        assert generation is not None, "the block was not entered"
        cursor, name = self._cursor, self._call.name
        try:
            with cursor.noting(name):
                await generation.__aexit__(kind, error, trace)
                if error is None:
                    cursor.run.require_open("leaving a stream")
            if error is None:
                self._commit(generation)
            elif name is not None:
                cursor.variables.fail(name, error)
        finally:
            cursor.end()

    def _commit(self, generation: Generation) -> None:
        assert self._question is not None
        cursor, call = self._cursor, self._call
        generation.end_channels()
        completion = generation.completion()
        cursor.commit(generating.kept_parts(completion))
        meta = generating.meta_of(completion, prefix_lost=self._question.prefix_lost)
        for name, found in generating.captures_of(generation).items():
            cursor.write(name, found, meta)
        if call.reasoning is not None and call.name is not None:
            cursor.write(call.name + generating.REASONING, generation.channels["reasoning"], meta)
        cursor.write(call.name, generation.channels["answer"], meta)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while not self._fresh:
            generation = self._generation
            if generation is None:
                raise StateError("these pieces are read inside `async with s.stream(...)` only")
            with self._limit():
                delta = await generation.step()
            if delta is None:
                raise StopAsyncIteration
            self._fresh = [Piece(text, channel) for channel, text in generation.fresh]
        return self._fresh.pop(0)

    def _limit(self) -> AbstractContextManager[None]:
        """The timeout of the call, which runs from entering the block."""
        return operations.time_limit(self._call.timeout, self._label, since=self._entered)
