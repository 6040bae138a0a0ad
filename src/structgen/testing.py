"""A backend without a model, for tests of programs and of whatever uses a backend.

Owns   a script of replies, and counts of what was asked. It keeps the contract of `Backend`,
       held to it by the conformance suite that the engine passes too.

    backend = ScriptedBackend({"score": "7"})
    result = await judge.run(backend, "An essay.")
    assert result["score"] == "7"
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType

import anyio
import anyio.lowlevel
import msgspec

from structgen.backend import Capabilities
from structgen.chat import CHATML, Chat
from structgen.errors import ConstraintError, OptionError, PromptError, UnsupportedError
from structgen.grammar.automaton import Search, automaton_of
from structgen.request import (
    Choice,
    Control,
    Delta,
    Finish,
    Image,
    JsonSchema,
    Lineage,
    Namespace,
    Part,
    Prompt,
    Regex,
    Request,
    Score,
    Scores,
    Text,
    TokenLogprob,
    Tokens,
    Usage,
    prompt_text,
)
from structgen.sampling import ModelDefaults

Script = str | Sequence[str] | Mapping[str, str] | Callable[[Request], str]
_BASE = 0x110000  # one more than the largest code point
END_ID = _BASE
FINGERPRINT = "structgen-scripted"


class ScriptedTokenizer:
    """A tokenizer whose ids can be read: a token is up to `size` characters.

    A token of one character is its code point; a longer one is 1 and its code points as digits
    in base 0x110000. Control text is one token with a negative id, so that no text can ever
    spell it. Every part is cut from its own beginning: like real tokens, those of two parts
    differ from those of the parts joined.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.fingerprint = f"{FINGERPRINT}-{size}"

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of ordinary text."""
        return tuple(_number(text[i : i + self.size]) for i in range(0, len(text), self.size))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens and the end token have none."""
        return "".join(_characters(token) for token in ids if token >= 0 and token != END_ID)

    def encode_parts(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Ids of a prompt. Raises `PromptError` for tokens that are not what they claim to be."""
        return tuple(token for part in parts for token in self._encode_part(part))

    def _encode_part(self, part: Part) -> tuple[int, ...]:
        match part:
            case Text(text):
                return self.encode(text)
            case Control(text):
                return (-1 - _number(text),)
            case Tokens(ids, text, fingerprint):
                if fingerprint not in {"", self.fingerprint}:
                    raise PromptError(
                        f"tokens of {fingerprint!r} in a prompt for {self.fingerprint}"
                    )
                if self.decode(ids) != text:
                    raise PromptError(
                        f"tokens that spell {self.decode(ids)!r} claim to be {text!r}"
                    )
                return ids
            case Image():
                raise UnsupportedError("the scripted backend sees no images; describe them as text")


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
    `ignore_eos`, or to reach `min_tokens`, it is repeated. Every token of it has log-probability
    0: the script is certain. A reply that contradicts the request's regex, and a request that
    the script has no reply for, are mistakes of the test and raise `AssertionError`. So does one
    that is none of the request's choices, or no JSON where a schema asks for it.

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
            constraints=frozenset({"regex", "choice", "json_schema"}),
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
            raise PromptError(
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
            raise PromptError(
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
        _refuse(request)
        if backend.fail is not None:
            backend.fail(request)
        output = _Output(backend.tokenizer, request, backend.reply(request), self._room(prompt))
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


class _Output:
    """What a reply becomes under the options of a request: kept tokens, a tail, an end."""

    def __init__(
        self, tokenizer: ScriptedTokenizer, request: Request, reply: str, room: int | None
    ) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._sampling = sampling = ModelDefaults().fill(request.sampling)
        limit = sampling.max_tokens
        assert limit is not None, "defaults are filled in"
        self._limit = limit if room is None else min(limit, room)
        patterns = sampling.stop_regex
        self._search = Search(automaton_of(patterns)) if patterns else None
        self.tokens: list[int] = []
        self.tail = ""
        self.sampled = 0
        self.finish = Finish(reason="length")
        self._sample(reply)

    def deltas(self, number: int, usage: Usage, chunk: int) -> Iterator[Delta]:
        """The output in deltas of `chunk` tokens; the last carries the end."""
        finish = msgspec.structs.replace(self.finish, usage=usage)
        last = max(0, (len(self.tokens) - 1) // chunk * chunk)
        for start in range(0, last, chunk):
            yield self._delta(number, self.tokens[start : start + chunk])
        delta = self._delta(number, self.tokens[last:])
        yield msgspec.structs.replace(
            delta, text=delta.text + self.tail, tail=self.tail, finish=finish
        )

    def _delta(self, number: int, tokens: Sequence[int]) -> Delta:
        want = self._request.want
        logprobs: tuple[TokenLogprob, ...] = ()
        if want.logprobs or want.top_logprobs:
            logprobs = tuple(
                TokenLogprob(token, 0.0, ((token, 0.0),) if want.top_logprobs else ())
                for token in tokens
            )
        text = self._tokenizer.decode(tokens)
        return Delta(request=number, tokens=tuple(tokens), text=text, logprobs=logprobs)

    def _sample(self, reply: str) -> None:
        sampling, text = self._sampling, ""
        for token in self._script(reply):
            self.sampled += 1
            enough = self.sampled >= sampling.min_tokens
            if enough and (token == END_ID or token in sampling.stop_token_ids):
                self.finish = Finish(reason="stop", matched=token)
                break
            self.tokens.append(token)
            before, text = text, text + self._tokenizer.decode([token])
            if found := self._first_stop(text, len(before), count=enough):
                self._cut(*found)
                break
            if self.sampled == self._limit:
                break
        if self.finish.matched == END_ID:
            self._check(text)

    def _script(self, reply: str) -> Iterator[int]:
        """The tokens that a model that follows the script samples, without end if it must."""
        tokens = self._tokenizer.encode(reply)
        yield from tokens
        while self._sampling.ignore_eos or self.sampled < self._sampling.min_tokens - 1:
            yield from tokens or self._tokenizer.encode(" ")
        yield END_ID

    def _first_stop(self, text: str, start: int, *, count: bool) -> tuple[int, str] | None:
        """The first stop that ends behind `start`, if stops count; and where it begins."""
        found = _first_stop(text, start, self._sampling.stop) if count else None
        if self._search is not None:
            read, length = self._search.scan(text[start:], allow=count)
            first = (start + read - length, text[start + read - length : start + read])
            if length and (found is None or _rank(first) < _rank(found)):
                return first
        return found

    def _cut(self, at: int, stop: str) -> None:
        """Keep the tokens that end before the stop at `at`; what is left before it is the tail."""
        self.finish = Finish(reason="stop", matched=stop)
        size = self._tokenizer.size
        text = self._tokenizer.decode(self.tokens)
        while self.tokens and len(self._tokenizer.decode(self.tokens)) > at:
            self.tokens.pop()
        self.tail = text[len(self._tokenizer.decode(self.tokens)) : at]
        assert len(self.tail) < size, "the tail is shorter than a token"

    def _check(self, text: str) -> None:
        match self._request.constraint:
            case Regex(pattern):
                assert re.fullmatch(pattern, text), f"reply {text!r} is not of regex {pattern!r}"
            case Choice(options):
                assert text in options, f"reply {text!r} is none of the choices {options}"
            case JsonSchema():
                # That it fits the schema is found by whoever reads it as a value of the type.
                try:
                    json.loads(text)
                except ValueError:
                    raise AssertionError(f"reply {text!r} is no JSON") from None


def _first_stop(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop that ends behind `start`, and where it begins; the longest of several."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text.endswith(stop, 0, end)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def _rank(found: tuple[int, str]) -> tuple[int, int]:
    """The order of stops: what ends first, then what begins first."""
    at, stop = found
    return at + len(stop), at


def _refuse(request: Request) -> None:
    match request.constraint:
        case None:
            pass
        case Regex(pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConstraintError(f"regex {pattern!r}: {error}") from None
        case Choice() | JsonSchema():
            pass
        case other:
            raise UnsupportedError(f"the scripted backend cannot check {type(other).__name__}")
    if request.sampling.stop_regex:
        automaton_of(request.sampling.stop_regex)
    if request.want.prompt_logprobs is not None:
        raise UnsupportedError("the scripted backend has no log-probabilities of prompts")


def _number(characters: str) -> int:
    """One token's id; see `ScriptedTokenizer`."""
    if len(characters) == 1:
        return ord(characters)
    number = 1
    for character in characters:
        number = number * _BASE + ord(character)
    return number


def _characters(token: int) -> str:
    if token < _BASE:
        return chr(token)
    found: list[str] = []
    while token > 1:
        token, digit = divmod(token, _BASE)
        found.append(chr(digit))
    return "".join(reversed(found))
