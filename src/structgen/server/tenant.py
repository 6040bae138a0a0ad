"""The engine as the programs of one client see it: all they ask for is in that client's namespace.

Holds  no request of a program leaves the namespace, so that its prefixes are shared with nobody
       else. A client that has left gets nothing more. Owns nothing.
Used   by `programs`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio.lowlevel
import msgspec

from structgen.backend import Backend, Heard, Relay
from structgen.engine.stream import DeltaStream
from structgen.errors import StateClosedError
from structgen.request import Delta, Lineage, Namespace, Prompt, Request, Scores, Usage

Came = Callable[[Delta], None]


class Tenant(Relay):
    """A `Backend` over another, in one namespace of it."""

    def __init__(
        self,
        backend: Backend,
        namespace: Namespace,
        came: Came,
        unfinished: Callable[[Usage], None],
    ) -> None:
        """What is called meanwhile:

        came         with every delta
        unfinished   with the prompt of a generation that does not come to its end: the run's own
                     usage has what was drawn, and cannot know what the prompt came to
        """
        super().__init__(backend)
        self._namespace, self._came = namespace, came
        self._unfinished = unfinished
        self._left = False

    def leave(self) -> None:
        """The client is gone: refuse what is asked for from now on, by `StateClosedError`.

        A program is cancelled then, and may catch that; it must not compute for nobody.
        """
        self._left = True

    async def _require_client(self) -> None:
        if self._left:
            # Whoever tries again and again must not stop the event loop.
            await anyio.lowlevel.checkpoint()
            raise StateClosedError(
                "the client of this program has left, so its run is over; let the program end when "
                "it is cancelled"
            )

    @asynccontextmanager
    async def generate(self, request: Request, /) -> AsyncIterator[AsyncIterator[Delta]]:
        """Generate, in the namespace."""
        await self._require_client()
        own = msgspec.structs.replace(request, namespace=self._namespace)
        ended = False

        def hear(delta: Delta) -> None:
            nonlocal ended
            ended = delta.finish is not None
            self._came(delta)

        stream = self._backend.generate(own)
        try:
            async with stream as deltas:
                yield Heard(deltas, hear)
        finally:
            if not ended and isinstance(stream, DeltaStream):
                self._unfinished(msgspec.structs.replace(stream.usage, completion_tokens=0))

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str],
        /,
        *,
        lineage: Lineage = Lineage(),
        namespace: Namespace = Namespace(),  # noqa: ARG002 - the contract has it; theirs is ours
    ) -> Scores:
        """Score, in the namespace."""
        await self._require_client()
        return await self._backend.score(
            prompt, continuations, lineage=lineage, namespace=self._namespace
        )

    async def prime(
        self,
        prompt: Prompt,
        /,
        *,
        lineage: Lineage = Lineage(),
        namespace: Namespace = Namespace(),  # noqa: ARG002 - the contract has it; theirs is ours
    ) -> Usage:
        """Prime, in the namespace."""
        await self._require_client()
        return await self._backend.prime(prompt, lineage=lineage, namespace=self._namespace)

    @asynccontextmanager
    async def scope(
        self,
        prefix: Prompt,
        /,
        *,
        namespace: Namespace = Namespace(),  # noqa: ARG002 - the contract has it; theirs is ours
    ) -> AsyncIterator[int]:
        """A fork scope, in the namespace."""
        await self._require_client()
        async with self._backend.scope(prefix, namespace=self._namespace) as found:
            yield found
