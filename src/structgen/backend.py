"""The seam between programs and engines: what a backend can be asked for.

`Engine`, `ScriptedBackend` and every remote backend keep this contract; one conformance suite
(`tests/conformance.py`) holds them to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self

import msgspec

from structgen.chat import Chat
from structgen.request import Delta, Lineage, Namespace, Prompt, Request, Scores, Usage


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do; programs check it before they send anything.

    tokens        output carries exact token ids, and prompts may contain them
    tokenizer     fingerprint of the tokenizer that those ids belong to, "" if it has none
    logprobs      of output tokens
    score         continuations can be scored exactly
    stop_regex    `Sampling.stop_regex` is heeded
    primes        `prime` costs nothing to send and saves work later, so programs may call it ahead
    constraints   kinds of constraint that are enforced while decoding: "regex", "json_schema",
                  "ebnf", "choice", "structure"
    max_context   tokens of prompt and output together, None if unknown
    """

    tokens: bool = False
    tokenizer: str = ""
    logprobs: bool = False
    score: bool = False
    stop_regex: bool = False
    primes: bool = False
    images: bool = False
    constraints: frozenset[str] = frozenset()
    max_context: int | None = None


class Backend(Protocol):
    """An engine as programs see it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do.

        One that has to be opened first (an async context manager) raises `EngineClosedError`
        while it is not: that is how `run_sync` knows that it has to open it.
        """
        ...

    @property
    def chat(self) -> Chat | None:
        """The model's chat format, None if it has none."""
        ...

    def generate(self, request: Request, /) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Generate. Leaving the block early, by whatever way, aborts the request.

        The last delta carries `finish`. Raises before any work for what cannot be served.
        """
        ...

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str],
        /,
        *,
        lineage: Lineage = ...,
        namespace: Namespace = ...,
    ) -> Scores:
        """Exact log-probabilities of each continuation after the prompt, token by token.

        A continuation is encoded as a part of its own and follows the prompt's last token. With
        an empty prompt the first token of a continuation follows the model's BOS token; where the
        model has none, its log-probability is given as 0.
        Raises `PromptError` for an empty continuation.
        """
        ...

    async def encode(self, prompt: Prompt, /) -> tuple[int, ...]:
        """The token ids that a prompt is sent as. Raises `UnsupportedError` without `tokens`."""
        ...

    async def prime(
        self, prompt: Prompt, /, *, lineage: Lineage = ..., namespace: Namespace = ...
    ) -> Usage:
        """Compute the prompt's keys and values, so that later requests find them cached."""
        ...

    def scope(
        self, prefix: Prompt, /, *, namespace: Namespace = ...
    ) -> AbstractAsyncContextManager[int]:
        """A fork scope: while it is open the prefix stays cached. Yields the scope's id."""
        ...


class Relay:
    """A `Backend` over another, which passes everything on; who changes something overrides it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend below."""
        return self._backend.capabilities

    @property
    def chat(self) -> Chat | None:
        """That of the backend below."""
        return self._backend.chat

    def generate(self, request: Request, /) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Pass on."""
        return self._backend.generate(request)

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str],
        /,
        *,
        lineage: Lineage = Lineage(),
        namespace: Namespace = Namespace(),
    ) -> Scores:
        """Pass on."""
        return await self._backend.score(
            prompt, continuations, lineage=lineage, namespace=namespace
        )

    async def encode(self, prompt: Prompt, /) -> tuple[int, ...]:
        """Pass on."""
        return await self._backend.encode(prompt)

    async def prime(
        self, prompt: Prompt, /, *, lineage: Lineage = Lineage(), namespace: Namespace = Namespace()
    ) -> Usage:
        """Pass on."""
        return await self._backend.prime(prompt, lineage=lineage, namespace=namespace)

    def scope(
        self, prefix: Prompt, /, *, namespace: Namespace = Namespace()
    ) -> AbstractAsyncContextManager[int]:
        """Pass on."""
        return self._backend.scope(prefix, namespace=namespace)


class Heard:
    """Deltas that somebody hears of as they pass.

    An iterator, not a generator: nothing of it is left to close when it is abandoned.
    """

    def __init__(self, deltas: AsyncIterator[Delta], hear: Callable[[Delta], None]) -> None:
        self._deltas, self._hear = deltas, hear

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await anext(self._deltas)
        self._hear(delta)
        return delta
