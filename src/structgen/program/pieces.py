"""A generation that is read piece by piece inside a program.

Owns   one generation between entering and leaving its block. Used by `State.stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from structgen.errors import StateError
from structgen.program.cursor import Cursor
from structgen.program.generation import Generation


class Pieces:
    """The pieces of text of one generation: enter it, then iterate.

    A class, not an async generator: nothing of it waits for the garbage collector when the
    block is left early.
    """

    def __init__(self, cursor: Cursor, name: str | None, options: Mapping[str, Any]) -> None:
        self._cursor, self._name, self._options = cursor, name, options
        self._generation: Generation | None = None
        self._lost = False

    async def __aenter__(self) -> Self:
        await self._cursor.begin(f"stream({self._name!r})" if self._name else "stream()")
        try:
            with self._cursor.noting(self._name):
                request, self._lost = self._cursor.ask(self._name, self._options)
                self._generation = await Generation(self._cursor.run, request).__aenter__()
        except BaseException:
            self._cursor.end()
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
        try:
            with self._cursor.noting(self._name):
                await generation.__aexit__(kind, error, trace)
                if error is None:
                    self._cursor.run.require_open("leaving a stream")
            if error is None:
                completion = generation.completion()
                self._cursor.commit(self._name, completion, prefix_lost=self._lost)
            elif self._name is not None:
                self._cursor.variables.fail(self._name, error)
        finally:
            self._cursor.end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._generation is None:
            raise StateError("these pieces are read inside `async with s.stream(...)` only")
        while (delta := await self._generation.step()) is not None:
            if delta.text:
                return delta.text
        raise StopAsyncIteration
