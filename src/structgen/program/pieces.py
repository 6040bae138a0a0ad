"""A generation that is read piece by piece inside a program.

Owns   one generation between entering and leaving its block. Used by `State.stream`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import anyio

from structgen.errors import IncompleteOutputError, InvalidOutputError, OptionError, StateError
from structgen.events import Channel
from structgen.program import operations
from structgen.program.calls import generating
from structgen.program.cursor import Cursor, Question
from structgen.program.expression import Gen
from structgen.program.generation import Generation
from structgen.request import JsonSchema


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


class Objects:
    """The values of one stream of JSON; see `Pieces.objects`."""

    def __init__(self, pieces: Pieces) -> None:
        from structgen.output.partial import Partial  # noqa: PLC0415 - few programs read objects

        self._pieces, self._parser = pieces, Partial()
        self._text, self._ended = "", False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401 - a JSON value
        parser = self._parser
        while not self._ended:
            try:
                await self._read()
            except StopAsyncIteration:
                self._ended = True
                parser.end()
            if parser.due or (self._ended and parser.changed):
                return parser.value()
        raise StopAsyncIteration

    async def _read(self) -> None:
        piece = await anext(self._pieces)
        self._text += piece
        try:
            self._parser.push(piece)
        except ValueError as error:
            raise InvalidOutputError(f"the output is no JSON: {error}", self._text) from None


class Pieces:
    """The pieces of text of one generation: enter it, then iterate.

    A class, not an async generator: nothing of it waits for the garbage collector when the
    block is left early.
    """

    def __init__(self, cursor: Cursor, call: Gen) -> None:
        """`call` has no samples."""
        self._cursor, self._call = cursor, call
        self._label = f"stream({call.name!r})" if call.name else "stream()"
        self._generation: Generation | None = None
        self._question: Question | None = None
        self._fresh: list[Piece] = []
        self._entered: float | None = None
        self._reader: Objects | None = None

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
                with cursor.noting(name):
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
        whole = generation.finished or call.form is None
        value = generating.value_of(call, generation) if whole else None
        cursor.commit(generating.kept_parts(completion))
        meta = generating.meta_of(completion, prefix_lost=self._question.prefix_lost)
        for name, found in generating.captures_of(generation).items():
            cursor.write(name, found, meta)
        if call.reasoning is not None and call.name is not None:
            cursor.write(call.name + generating.REASONING, generation.channels["reasoning"], meta)
        if whole:
            cursor.write(call.name, value, meta)
        elif call.name is not None:
            cursor.variables.fail(call.name, self._unfinished(generation))

    def _unfinished(self, generation: Generation) -> IncompleteOutputError:
        """What keeps the variable of a stream that was left from being a value of its type."""
        assert self._call.form is not None
        return IncompleteOutputError(
            f"{self._label} was left before there was a whole {self._call.form.name}",
            generation.channels["answer"],
        )

    def objects(self) -> AsyncIterator[Any]:
        """The JSON value that is being written, again and again as far as it has come.

        In place of the text: dicts and lists with what is complete of them, the last string as far
        as it goes. Each is a new value, and the last is the whole one; change none of them, since
        they share what is complete in them. Raises `OptionError` where the output is no JSON, and
        `StateError` outside of the block or after text was read.
        """
        if self._question is None or self._generation is None:
            raise StateError("objects() is read inside `async with s.stream(...)` only")
        constraint = self._question.requests[0].constraint
        if not isinstance(constraint, JsonSchema):
            raise OptionError(
                "type", "objects() reads JSON; give the stream a type that is JSON, or json_schema="
            )
        if self._generation.deltas and self._reader is None:
            raise StateError("text of this stream was read already; read the text or the objects")
        if self._reader is None:
            self._reader = Objects(self)
        return self._reader

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
