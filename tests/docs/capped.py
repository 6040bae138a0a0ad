"""A backend for running the pages' programs on the real model in little time.

Holds  a request gets at most so many new tokens, whatever its program asks for; nothing else of it
       is changed. Used by the tests of the cookbook and of the seed programs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import msgspec

from structgen.backend import Backend
from structgen.request import Delta, Request


def capped(backend: Backend, tokens: int) -> Backend:
    """The backend, with at most `tokens` new tokens for each request."""
    return cast("Backend", _Capped(backend, tokens))


class _Capped:
    def __init__(self, backend: Backend, tokens: int) -> None:
        self._backend, self._tokens = backend, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def generate(self, request: Request, /) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        limit = min(request.sampling.max_tokens or self._tokens, self._tokens)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=limit)
        return self._backend.generate(msgspec.structs.replace(request, sampling=sampling))
