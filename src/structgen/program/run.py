"""The run of a program: it owns every request that its states have made and not finished.

Owns   leases (live generations, open fork scopes), the run's id and its usage.
Holds  when the program has ended, however it ended, nothing of the run is left in the backend.
Used   by `Program` (which ends it), `Cursor`, `Generation` and `Branches` (which ask through it).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

import anyio

from structgen.backend import Backend
from structgen.errors import ConstraintError, StateClosedError, UnsupportedError
from structgen.options import request_from
from structgen.request import Lineage, Prompt, Request, Usage


class Lease(Protocol):
    """Something in the backend that a run has taken and must give back."""

    def cut(self) -> None:
        """Interrupt whoever waits for it."""
        ...

    async def close(self) -> None:
        """Give it back, unless that was done; returns when it is given back."""
        ...


class Run:
    """One run of a program on a backend."""

    __slots__ = ("_leases", "backend", "chat", "ended", "id", "usage")

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.chat = backend.chat  # texts can be read, and a result made, after the backend closed
        self.id = secrets.token_hex(8)
        self.ended = False
        self.usage = Usage()
        self._leases: dict[Lease, None] = {}  # in the order in which they were taken

    def require_open(self, action: str) -> None:
        """Raise `StateClosedError` when the program has ended."""
        if self.ended:
            raise StateClosedError(
                f"{action} after the program that owns this State has ended; states live as long "
                "as the call of run(): read what they hold from its Result"
            )

    def take(self, lease: Lease) -> None:
        """Own a lease until it is dropped."""
        self._leases[lease] = None

    def drop(self, lease: Lease) -> None:
        """Forget a lease that was given back."""
        self._leases.pop(lease, None)

    def request(self, prompt: Prompt, options: Mapping[str, Any], lineage: Lineage) -> Request:
        """Build a request.

        Raises `OptionError`, and for what the backend lacks `ConstraintError` or
        `UnsupportedError`.
        """
        request = request_from(prompt, options, lineage=lineage)
        able = self.backend.capabilities
        if request.constraint is not None:
            kind = type(request.constraint).__struct_config__.tag
            if kind not in able.constraints:
                raise ConstraintError(
                    f"this backend cannot enforce {request.constraint!r}; it can enforce "
                    f"{', '.join(sorted(able.constraints)) or 'no constraints'}"
                )
        want = request.want
        wants_logprobs = want.logprobs or want.top_logprobs or want.prompt_logprobs is not None
        if wants_logprobs and not able.logprobs:
            raise UnsupportedError("this backend reports no logprobs; generate without them")
        return request

    async def end(self) -> None:
        """End the run: interrupt who still waits for it, give back what it still has."""
        self.ended = True
        if not self._leases:
            return
        leases = tuple(self._leases)
        for lease in leases:
            lease.cut()
        # Shielded: a cancelled program must not leave its requests to the backend.
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as stack:
                for lease in leases:
                    stack.push_async_callback(lease.close)


class ForkScope:
    """The fork scope of some branches in the backend; until it is opened, that of their parent."""

    __slots__ = ("_context", "_run", "id", "outer")

    def __init__(self, run: Run, outer: ForkScope | None) -> None:
        self._run, self.outer = run, outer
        self._context: AbstractAsyncContextManager[int] | None = None
        self.id = 0

    @property
    def innermost(self) -> int:
        """Id of the innermost scope that is open here, 0 for none."""
        scope: ForkScope | None = self
        while scope is not None and not scope.id:
            scope = scope.outer
        return scope.id if scope is not None else 0

    async def open(self, prefix: Prompt) -> None:
        """Keep `prefix` cached until the scope is closed."""
        context = self._run.backend.scope(prefix)
        self.id = await context.__aenter__()
        self._context = context
        self._run.take(self)
        if self._run.ended:
            await self.close()
            self._run.require_open("a fork scope")

    def cut(self) -> None:
        """Nobody waits for a scope."""

    async def close(self) -> None:
        """Close it, if it is open."""
        context, self._context, self.id = self._context, None, 0
        if context is not None:
            self._run.drop(self)
            await context.__aexit__(None, None, None)


def derived_seed(seed: int, path: Sequence[int]) -> int:
    """The seed of one call: a hash of the run's seed and the place of the call in the program.

    `path` is, for each fork on the way from the root state, how many calls and forks its parent
    had made before and the index of the branch; then how many the state had made before this
    call. So branches differ, forks of one state differ, and a rerun makes the same choices.
    """
    text = ",".join(str(number) for number in (seed, *path))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
