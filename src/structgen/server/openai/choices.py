"""The choices of one answer: read side by side, made again where they must be, counted, streamed.

Holds  the choices of one prompt stand together, prompt by prompt, the same number of each.
Used   by both generating routes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from structgen import request
from structgen.errors import OutputError
from structgen.request import Request
from structgen.server.answers import Answers
from structgen.server.call import Call
from structgen.server.openai.pieces import ChoiceReader, Piece
from structgen.server.openai.replies import ChatChunk, Completion, Usage
from structgen.server.openai.requests import with_seed
from structgen.server.openai.wire import Generating

T = TypeVar("T")
Event = ChatChunk | Completion


class Told(Protocol):
    """An answer that is told as a stream."""

    async def events(self, index: int, piece: Piece) -> Sequence[Event]:
        """What the next piece of a choice adds; none if there is nothing to tell of it yet."""
        ...

    def end(self, usage: Usage) -> Event:
        """The event without a choice, which says what all of it took."""
        ...


async def attempted(
    call: Call, requests: Sequence[Request], once: Callable[[Sequence[Request]], Awaitable[T]]
) -> T:
    """An answer in one piece; one that is whole, but breaks its constraint, is made again."""
    # Without chance it would be the same again.
    chance = any(each.sampling.temperature != 0 for each in requests)
    attempts = call.service.config.retries if chance else 0
    for attempt in range(attempts):
        try:
            return await once([with_seed(each, attempt) for each in requests])
        except OutputError:
            continue
    return await once([with_seed(each, attempts) for each in requests])


async def read_all(
    call: Call, requests: Sequence[Request], readers: Sequence[ChoiceReader], n: int
) -> tuple[list[list[Piece]], request.Usage]:
    """The pieces of every choice, to its end, and what all of them cost; `n` of each prompt."""
    pieces: list[list[Piece]] = [[] for _ in requests]
    async with _answers(call, requests, n) as answers:
        async for index, delta in answers:
            call.came(delta)
            pieces[index].append(readers[index].read(delta))
    return pieces, answers.usage


async def streamed(
    call: Call,
    body: Generating,
    requests: Sequence[Request],
    readers: Sequence[ChoiceReader],
    told: Told,
) -> web.StreamResponse:
    """Tell every piece as it comes, and at the end the usage, if the body asks for it."""
    options = body.stream_options
    counted = options is not None and bool(options.include_usage)
    encoder, stream = msgspec.json.Encoder(), call.stream()
    async with _answers(call, requests, body.n or 1) as answers:
        async for index, delta in answers:
            call.came(delta)
            for event in await told.events(index, readers[index].read(delta)):
                if counted:
                    event.usage = None
                await stream.send(encoder.encode(event))
    if counted:
        await stream.send(encoder.encode(told.end(Usage.of(answers.usage))))
    return await stream.done()


@asynccontextmanager
async def _answers(call: Call, requests: Sequence[Request], n: int) -> AsyncIterator[Answers]:
    """The choices of one answer; what they cost is noted however they end."""
    answers = Answers(call.service.engine, requests, n)
    try:
        async with answers:
            yield answers
    finally:
        call.charge(answers.usage)
