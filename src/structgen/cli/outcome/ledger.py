"""What each request of a run cost: a backend that passes everything on and takes notes.

Owns   the list of calls of one run. Used by `run` for its tables; the engine does not know it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from structgen.backend import Backend, Heard, Relay
from structgen.request import Delta, Finish, Lineage, Namespace, Prompt, Request, Scores, Usage


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request: where in the program it was made, and its cost.

    A call that scored continuations ended by "stop": nothing cut it off.
    """

    lineage: Lineage
    finish: Finish


class Ledger(Relay):
    """A `Backend` over another that notes what passes."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._started = time.perf_counter()
        self._calls: list[Call | None] = []
        self.first_token: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the ledger was opened."""
        return time.perf_counter() - self._started

    @property
    def calls(self) -> list[Call]:
        """The calls that finished, in the order in which they started."""
        return [call for call in self._calls if call is not None]

    @property
    def usage(self) -> Usage:
        """Tokens of all finished calls."""
        return sum((call.finish.usage for call in self.calls), Usage())

    @asynccontextmanager
    async def generate(self, request: Request, /) -> AsyncIterator[AsyncIterator[Delta]]:
        """Pass a request on and note its deltas on their way back."""
        async with self._backend.generate(request) as deltas:
            yield self.watch(request.lineage, deltas)

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str],
        /,
        *,
        lineage: Lineage = Lineage(),
        namespace: Namespace = Namespace(),
    ) -> Scores:
        """Pass on, and note what it cost."""
        number = self._open()
        scores = await super().score(prompt, continuations, lineage=lineage, namespace=namespace)
        finish = Finish(reason="stop", usage=scores.usage)
        self._calls[number] = Call(lineage=lineage, finish=finish)
        return scores

    def watch(self, lineage: Lineage, deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        """The same deltas, noted as they pass."""
        return Heard(deltas, functools.partial(self.note, self._open(), lineage))

    def note(self, number: int, lineage: Lineage, delta: Delta) -> None:
        """Take down one delta of the call of that number."""
        if self.first_token is None and delta.tokens:
            self.first_token = self.seconds
        if delta.finish is not None:
            self._calls[number] = Call(lineage=lineage, finish=delta.finish)

    def _open(self) -> int:
        """The number of a call that starts now."""
        self._calls.append(None)
        return len(self._calls) - 1
