"""The engine as the programs of one client see it: all they ask for is in that client's namespace.

Holds  no request of a program leaves the namespace, so that its prefixes are shared with nobody
       else. Owns nothing.
Used   by `programs`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from structgen.backend import Backend, Heard, Relay
from structgen.request import Delta, Lineage, Namespace, Prompt, Request, Scores, Usage

Came = Callable[[Delta], None]


class Tenant(Relay):
    """A `Backend` over another, in one namespace of it."""

    def __init__(self, backend: Backend, namespace: Namespace, came: Came) -> None:
        """`came` hears of every delta."""
        super().__init__(backend)
        self._namespace, self._came = namespace, came

    @asynccontextmanager
    async def generate(self, request: Request, /) -> AsyncIterator[AsyncIterator[Delta]]:
        """Generate, in the namespace."""
        own = msgspec.structs.replace(request, namespace=self._namespace)
        async with self._backend.generate(own) as deltas:
            yield Heard(deltas, self._came)

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
        return await self._backend.prime(prompt, lineage=lineage, namespace=self._namespace)

    def scope(
        self,
        prefix: Prompt,
        /,
        *,
        namespace: Namespace = Namespace(),  # noqa: ARG002 - the contract has it; theirs is ours
    ) -> AbstractAsyncContextManager[int]:
        """A fork scope, in the namespace."""
        return self._backend.scope(prefix, namespace=self._namespace)
