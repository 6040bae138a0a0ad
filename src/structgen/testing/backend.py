"""The scripted backend itself: the contract of `Backend`, kept by a script of replies.

Owns   the script, and counts of what was asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType

import anyio
import anyio.lowlevel

from structgen.backend import Capabilities
from structgen.chat import CHATML, Chat
from structgen.errors import ContextLengthError, OptionError, PromptError
from structgen.grammar.compiler import KINDS
from structgen.request import (
    Delta,
    Lineage,
    Namespace,
    Prompt,
    Request,
    Score,
    Scores,
    Usage,
    prompt_text,
)
from structgen.testing.output import Output
from structgen.testing.tokenizer import ScriptedTokenizer
from structgen.testing.verdict import course_of

Script = str | Sequence[str] | Mapping[str, str] | Callable[[Request], str]


class ScriptedBackend:
    """A backend that says what it is told to.

    replies       a string: every reply; a list: the replies in order; a mapping: the reply by
                  name of the variable ("" for unnamed ones); a function of the request
    chunk         tokens in a delta
    token_size    characters in a token (see `ScriptedTokenizer`)
    latency       seconds before each delta; 0 gives other tasks one turn
    score         (text of the prompt, continuation) -> log-probability of the continuation,
                  spread evenly over its tokens; by default each token has -1. After an empty
                  prompt the first token has 0, and the others share it
    fail          called with each request before it starts; what it raises, the request raises
    chat          the chat format, None for a model without one
    max_context   tokens of prompt and output together

    A reply ends by itself with an end token, at `max_tokens`, or before a stop. With
    `ignore_eos`, or to reach `min_tokens`, it is repeated for as long as its constraint lets
    anything follow. Every token of it has log-probability 0: the script is certain.

    Constraints are read as the engine reads them: what it refuses is refused in the same words. A
    reply that its masks would not let through, and a request that the script has no reply for, are
    mistakes of the test and raise `AssertionError`. JSON that is not valid under the schema ends as
    it does on an engine's final check, by `InvalidOutputError`.

    primed     prompts that `prime` was called with
    requests   all requests that were accepted, in order
    running    requests that run now; `peak` the most that ran at once
    finished   requests that were read to their end; `aborted` those that were left before
    scopes     prefixes of all fork scopes by their id; `open_scopes` the ids of those open now
    """

    def __init__(
        self,
        replies: Script = "",
        *,
        chunk: int = 4,
        token_size: int = 1,
        latency: float = 0.0,
        score: Callable[[str, str], float] | None = None,
        fail: Callable[[Request], None] | None = None,
        chat: Chat | None = CHATML,
        max_context: int | None = None,
    ) -> None:
        self.tokenizer = ScriptedTokenizer(token_size)
        self.requests: list[Request] = []
        self.primed: list[Prompt] = []
        self.running = self.peak = self.finished = self.aborted = 0
        self.scopes: dict[int, Prompt] = {}
        self.open_scopes: set[int] = set()
        self.chunk, self.latency, self.fail = chunk, latency, fail
        self._replies, self._score, self._chat = replies, score, chat
        self._max_context = max_context

    @property
    def capabilities(self) -> Capabilities:
        """Exact tokens, logprobs of output, scores; constraints are checked, not enforced."""
        return Capabilities(
            tokens=True,
            tokenizer=self.tokenizer.fingerprint,
            logprobs=True,
            score=True,
            stop_regex=True,
            constraints=KINDS,
            primes=True,
            max_context=self._max_context,
        )

    @property
    def chat(self) -> Chat | None:
        """The chat format it was given."""
        return self._chat

    def generate(self, request: Request, /) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Reply to a request; see `Backend.generate`."""
        return _Reply(self, request)

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str],
        /,
        *,
        lineage: Lineage = Lineage(),
        namespace: Namespace = Namespace(),
    ) -> Scores:
        """Score continuations by the script."""
        del namespace  # the script does not depend on it
        if isinstance(continuations, str):
            raise OptionError("continuations", "expected a list of strings; write [text] for one")
        if not continuations:
            raise OptionError("continuations", "expected at least one string, got an empty list")
        prompt_ids = self.tokenizer.encode_parts(prompt)
        told = self._told(lineage.parent, continuations)
        found = [self._scored(prompt, prompt_ids, text, told) for text in continuations]
        await self.turn()
        return Scores(tuple(found), Usage(prompt_tokens=len(prompt_ids)))

    async def encode(self, prompt: Prompt, /) -> tuple[int, ...]:
        """The token ids of a prompt."""
        return self.tokenizer.encode_parts(prompt)

    async def prime(
        self,
        prompt: Prompt,
        /,
        *,
        lineage: Lineage = Lineage(),
        namespace: Namespace = Namespace(),
    ) -> Usage:
        """Count the prompt; there is no cache to fill."""
        del lineage, namespace
        self.primed.append(prompt)
        length = len(self.ids_of(prompt))
        await self.turn()
        return Usage(prompt_tokens=length)

    @asynccontextmanager
    async def scope(
        self,
        prefix: Prompt,
        /,
        *,
        namespace: Namespace = Namespace(),
    ) -> AsyncIterator[int]:
        """Open a fork scope and remember its prefix."""
        del namespace  # there is no cache to divide
        self.ids_of(prefix)
        number = len(self.scopes) + 1
        self.scopes[number] = prefix
        self.open_scopes.add(number)
        try:
            yield number
        finally:
            self.open_scopes.discard(number)

    def ids_of(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of a prompt to continue. Raises `PromptError` where there are none or too many."""
        ids = self.tokenizer.encode_parts(prompt)
        if not ids:
            raise PromptError("the prompt is empty; a generation continues at least one token")
        if self._max_context is not None and len(ids) >= self._max_context:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, and the context {self._max_context}"
            )
        return ids

    def reply(self, request: Request) -> str:
        """What the script says to a request that is the next one."""
        replies = self._replies
        if isinstance(replies, str):
            return replies
        if isinstance(replies, Mapping):
            name = request.lineage.parent
            assert name in replies, f"no reply to {name!r}; the script has {list(replies)}"
            return replies[name]
        if isinstance(replies, Sequence):
            count = len(self.requests)
            assert count < len(replies), f"the script has only {len(replies)} replies"
            return replies[count]
        return replies(request)

    async def turn(self) -> None:
        """Let the latency of one delta pass, or give other tasks one turn."""
        if self.latency:
            await anyio.sleep(self.latency)
        else:
            await anyio.lowlevel.checkpoint()

    def _told(self, name: str, continuations: Sequence[str]) -> str | None:
        """The continuation that a script by names says, None if it says nothing of it."""
        script = self._replies
        if self._score is not None or not isinstance(script, Mapping) or name not in script:
            return None
        bare = {text.removeprefix(" "): text for text in continuations}
        reply = script[name].removeprefix(" ")
        assert reply in bare, f"reply {reply!r} is none of the choices {list(continuations)}"
        return bare[reply]

    def _scored(
        self, prompt: Prompt, prompt_ids: Sequence[int], continuation: str, told: str | None
    ) -> Score:
        tokens = self.tokenizer.encode(continuation)
        if not tokens:
            raise PromptError("a continuation is empty: it has no token to score; leave it out")
        total = len(prompt_ids) + len(tokens)
        if self._max_context is not None and total > self._max_context:
            raise ContextLengthError(
                f"the prompt and the continuation have {total} tokens, and the context "
                f"{self._max_context}"
            )
        # Nothing stands before the first token of all, so that it has no probability.
        certain = 0 if prompt_ids else 1
        each = -1.0 if told in {None, continuation} else -9.0
        if self._score is not None and len(tokens) > certain:
            each = self._score(prompt_text(prompt), continuation) / (len(tokens) - certain)
        logprobs = (0.0,) * certain + (each,) * (len(tokens) - certain)
        return Score(text=continuation, tokens=tokens, logprobs=logprobs)


class _Reply:
    """One request: its deltas are known when it starts, and come one by one."""

    def __init__(self, backend: ScriptedBackend, request: Request) -> None:
        self._backend, self._request = backend, request
        self._deltas: Iterator[Delta] = iter(())
        self._finished = False

    async def __aenter__(self) -> AsyncIterator[Delta]:
        backend, request = self._backend, self._request
        prompt = backend.ids_of(request.prompt)
        course = course_of(request)
        if backend.fail is not None:
            backend.fail(request)
        reply, room = backend.reply(request), self._room(prompt)
        output = Output(backend.tokenizer, request, reply, course, room)
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=output.sampled)
        self._deltas = output.deltas(len(backend.requests), usage, backend.chunk)
        backend.requests.append(request)
        backend.running += 1
        backend.peak = max(backend.peak, backend.running)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._backend.running -= 1
        if self._finished:
            self._backend.finished += 1
        else:
            self._backend.aborted += 1

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._finished:
            raise StopAsyncIteration
        await self._backend.turn()
        delta = next(self._deltas)
        self._finished = delta.finish is not None
        return delta

    def _room(self, prompt: Sequence[int]) -> int | None:
        limit = self._backend.capabilities.max_context
        return None if limit is None else limit - len(prompt)
