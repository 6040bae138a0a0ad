"""`POST /v1/completions`: text that goes on from a prompt, or from each of several.

Holds  an answer in one piece is the events of a stream, joined. The text of a prompt is ordinary
       text: no control token is read in it.
Used   by `app`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast
from uuid import uuid4

import anyio.to_thread
import msgspec
from aiohttp import web
from msgspec import UNSET

from structgen.errors import OptionError
from structgen.request import Constraint, Request, Text, TokenLogprob, Tokens
from structgen.sampling import check_whole
from structgen.server.call import Call
from structgen.server.openai.choices import attempted, read_all, streamed
from structgen.server.openai.formats import constraint_of_body
from structgen.server.openai.logprobs import CompletionSpelling, as_json
from structgen.server.openai.pieces import ChoiceReader, Piece
from structgen.server.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from structgen.server.openai.requests import (
    beside,
    check_common,
    encoded,
    model_of,
    request_of,
    requests_of,
    room,
)
from structgen.server.openai.wire import CompletionBody, refuse, whole

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MOST_LOGPROBS = 20
MANY_PIECES = 20  # of an answer, which take a few ms with all their log-probabilities
SLOW_ENTRIES = 4_000  # of log-probabilities, which take some 10 ms: more are written in a thread


class _Prompt(msgspec.Struct, frozen=True):
    """A prompt as it is sent, and as an echo repeats it."""

    ids: tuple[int, ...]
    text: str


class _Completions:
    """One call of the route: what was asked for, and what every part of the answer repeats."""

    def __init__(self, call: Call, body: CompletionBody) -> None:
        self.call, self.body = call, body
        self.engine = call.service.engine
        self.id = f"cmpl-{uuid4().hex}"
        self.created = int(time.time())
        self.model = model_of(call, body.model)
        self.n = 1
        self.prompts: list[_Prompt] = []
        self.requests: list[Request] = []
        self.writers: list[_Writer] = []
        self.scored: dict[int, tuple[TokenLogprob, ...]] = {}  # log-probabilities of each prompt
        self._waiting: list[tuple[int, Piece]] = []

    async def prepare(self) -> None:
        """Make the requests. Raises for all that cannot be served."""
        call, body = self.call, self.body
        call.names.update(prompt="prompt", top_logprobs="logprobs", prompt_logprobs="logprobs")
        self.n = check_common(call, body, count_of(body.prompt))
        given = prompts_of(body.prompt)
        self._check()
        asked = await beside(call, constraint_of_body, body)
        if asked is not None:
            call.names["constraint"] = asked.field
        for each in given:
            self.prompts.append(await self._prompt(each))
            await asyncio.sleep(0)  # many prompts, of which each is short, are long together
        constraint = None if asked is None else asked.constraint
        self.requests = await requests_of(
            len(given) * self.n, lambda number: self._request(number, constraint)
        )

    def _check(self) -> None:
        body = self.body
        check_whole("max_tokens", body.max_tokens, low=0, optional=True)
        check_whole("logprobs", body.logprobs, low=0, high=MOST_LOGPROBS, optional=True)
        if body.max_tokens == 0 and not body.echo and body.logprobs is None:
            raise OptionError(
                "max_tokens", "0 asks for nothing; set echo or logprobs, or give it more"
            )
        refuse("suffix", body.suffix or None, "the model writes on, it fills no gaps; leave it out")
        if body.best_of not in {None, 1, self.n}:
            raise OptionError("best_of", f"expected 1 or n, which is {self.n}: no text is left out")

    async def _prompt(self, given: str | Sequence[int]) -> _Prompt:
        part = Text(given) if isinstance(given, str) else Tokens(tuple(given), "")
        (found,) = await encoded(self.engine, (part,))
        ids = cast("Tokens", found).ids
        if isinstance(given, str):
            return _Prompt(ids, given)
        return _Prompt(ids, self.engine.decode(ids) if self.body.echo else "")

    def _request(self, number: int, constraint: Constraint | None) -> Request:
        body, choice = self.body, number % self.n
        parts = (Tokens(self.prompt_of(number).ids, ""),)
        most = body.max_tokens
        if most is None:
            most = min(max(DEFAULT_MAX_TOKENS, body.min_tokens or 0), room(self.engine, parts))
        want: dict[str, Any] = {}
        if body.logprobs is not None:
            want = {"logprobs": True, "top_logprobs": body.logprobs}
            # Of the first choice only: all of a prompt have the same.
            want["prompt_logprobs"] = 0 if body.echo and choice == 0 else None
        return request_of(
            self.call,
            body,
            parts,
            choice=choice,
            max_tokens=most,
            constraint=constraint,
            **want,
        )

    def prompt_of(self, index: int) -> _Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.n]

    def writer(self, index: int) -> _Writer:
        """A writer of one choice."""
        return _Writer(self, index)

    def reader(self) -> ChoiceReader:
        """A reader of one choice."""
        keep = bool(self.body.include_stop_str_in_output or self.body.no_stop_trim)
        return ChoiceReader(keep_stop=keep)

    def completion(self, choices: list[CompletionChoice]) -> Completion:
        """An answer, or an event of one."""
        return Completion(self.id, self.created, self.model, choices)

    def score(self, index: int, pieces: Sequence[Piece]) -> None:
        """Keep the log-probabilities of a prompt, which the first of its choices brings."""
        for piece in pieces:
            if piece.prompt_logprobs:
                self.scored[index // self.n] = piece.prompt_logprobs

    def waits(self, index: int) -> bool:
        """Whether a choice cannot be told yet, since what its prompt was scored is not known."""
        scores = self.body.echo and self.body.logprobs is not None
        return bool(scores) and index // self.n not in self.scored

    async def events(self, index: int, piece: Piece) -> Sequence[Completion]:
        """What a piece of a choice adds to a stream, and to those that waited for it."""
        self.score(index, [piece])
        if self.waits(index):
            self._waiting.append((index, piece))
            return ()
        pieces = [*self._waiting, (index, piece)]
        self._waiting = [each for each in pieces if self.waits(each[0])]
        told = [each for each in pieces if not self.waits(each[0])]
        return [
            self.completion([await self.writers[number].write(each)])
            for number, each in told
            if each or self.body.return_token_ids
        ]

    def end(self, usage: Usage) -> Completion:
        """The event that says what a stream took."""
        found = self.completion([])
        found.usage = usage
        return found


class _Writer:
    """Writes one choice, piece by piece: its prompt first, where that is echoed."""

    def __init__(self, completions: _Completions, index: int) -> None:
        body, speller = completions.body, completions.call.service.speller
        self._completions, self._body, self._index = completions, body, index
        self._prompt = completions.prompt_of(index)
        self._echo = self._prompt.text if body.echo else ""
        self._prompts = CompletionSpelling(speller, begins=True)
        self._outputs = CompletionSpelling(speller, len(self._echo))
        self._first = True

    async def write(self, piece: Piece) -> CompletionChoice:
        """What a piece adds."""
        first, self._first = self._first, False
        ids, finish = self._body.return_token_ids, piece.finish
        reason = None if finish is None else finish.reason
        return CompletionChoice(
            self._index,
            self._echo + piece.content if first else piece.content,
            "stop" if reason == "abort" else reason,
            await self._logprobs(piece, first=first),
            list(piece.tokens) if ids else UNSET,
            list(self._prompt.ids) if ids and first else UNSET,
        )

    async def _logprobs(self, piece: Piece, *, first: bool) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        entries = list(piece.logprobs)
        if piece.finish is not None and piece.finish.ended is not None:
            entries.append(piece.finish.ended)
        found = self._outputs.of(entries)
        if not first or not self._body.echo:
            return found
        prompt = self._completions.scored[self._index // self._completions.n]
        if len(prompt) * (1 + self._body.logprobs) > SLOW_ENTRIES:
            return _together([await anyio.to_thread.run_sync(self._prompts.of, prompt), found])
        return _together([self._prompts.of(prompt), found])


async def completions(call: Call) -> web.StreamResponse:
    """Go on from a prompt, or from each of several."""
    found = _Completions(call, await call.body(CompletionBody))
    await found.prepare()
    if found.body.stream:
        found.writers = [found.writer(index) for index in range(len(found.requests))]
        readers = [found.reader() for _ in found.requests]
        return await streamed(call, found.body, found.requests, readers, found)

    async def once(requests: Sequence[Request]) -> Completion:
        return await _whole(found, requests)

    return call.answer(await attempted(call, found.requests, once))


def count_of(given: str | list[str | int | list[int]]) -> int:
    """How many prompts a body has, by the first of what is in the list."""
    several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    return len(given) if several else 1


def prompts_of(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a body: text or token ids each.

    Raises `OptionError` for an empty one, and for a list of different things.
    """
    if isinstance(given, str):
        given = [given]
    kinds = set(map(type, given))
    if not kinds:
        raise OptionError("prompt", "expected at least one prompt, got an empty list")
    one = kinds <= {int, float}
    if len(kinds) > 1 and not one:
        raise OptionError("prompt", "expected texts, or token ids, or lists of token ids")
    found = [whole("prompt", each) for each in cast("list[Any]", [given] if one else given)]
    for number, each in enumerate(found):
        if not each:
            which = "it" if len(found) == 1 else f"number {number}"
            raise OptionError("prompt", f"{which} is empty: there is no token to go on from")
    return found


async def _whole(found: _Completions, requests: Sequence[Request]) -> Completion:
    readers = [found.reader() for _ in requests]
    pieces, usage = await read_all(found.call, requests, readers, found.n)
    for index, each in enumerate(pieces):
        found.score(index, each)
    choices: list[Any] = []
    for index, each in enumerate(pieces):
        choice = await _joined(found.writer(index), each)
        # One by one: the log-probabilities of a hundred prompts take long to be written as JSON.
        choices.append(msgspec.Raw(msgspec.json.encode(choice)))
        await asyncio.sleep(0)
    answer = found.completion(choices)
    answer.usage = Usage.of(usage)
    return answer


async def _joined(writer: _Writer, pieces: Sequence[Piece]) -> CompletionChoice:
    """A choice as all of its events together tell it."""
    parts: list[CompletionChoice] = []
    for piece in pieces:
        part = await writer.write(piece)
        if part.logprobs is not None:
            part.logprobs.top_logprobs = [as_json(each) for each in part.logprobs.top_logprobs]
        parts.append(part)
        if len(parts) % MANY_PIECES == 0:
            await asyncio.sleep(0)
    first, *others = parts
    for other in others:
        first.finish_reason = other.finish_reason
        if first.token_ids is not UNSET and other.token_ids is not UNSET:
            first.token_ids += other.token_ids
    first.text = "".join(part.text for part in parts)
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    first.logprobs = _together(logprobs) if logprobs else None
    return first


def _together(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Log-probabilities that follow each other."""
    found = CompletionLogprobs([], [], [], [])
    for part in parts:
        found.tokens += part.tokens
        found.token_logprobs += part.token_logprobs
        found.top_logprobs += part.top_logprobs
        found.text_offset += part.text_offset
    return found
