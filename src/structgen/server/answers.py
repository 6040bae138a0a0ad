"""Several generations at once, their deltas in the order in which they come.

Holds  all are submitted before the first delta is read, so that what is refused is refused before
       anything was sent. Leaving ends those that still run; the first error ends all.
Used   by the routes that take `n` or a list of prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self

from structgen.engine.engine import Engine
from structgen.engine.stream import DeltaStream
from structgen.request import Delta, Request, Usage
from structgen.waiting import outlast


class Answers(AbstractAsyncContextManager["Answers"], AsyncIterator[tuple[int, Delta]]):
    """Deltas of some requests: `async for index, delta in answers`, until all have ended.

    async with Answers(engine, requests, n) as answers:
        async for index, delta in answers: ...
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], n: int) -> None:
        """`requests` are told apart by their index: `n` of one prompt, then `n` of the next."""
        self._engine, self._requests, self._n = engine, requests, n
        self._streams: list[DeltaStream] = []
        self._stack = AsyncExitStack()
        self._came: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        self._only: AsyncIterator[Delta] | None = None
        self._open = 0

    async def __aenter__(self) -> Self:
        streams = self._streams
        try:
            for request in self._requests:
                if streams:
                    await asyncio.sleep(0)  # hundreds take long together
                streams.append(
                    await self._stack.enter_async_context(self._engine.generate(request))
                )
        except BaseException:
            await self._stack.aclose()
            raise
        self._open = len(streams)
        if len(streams) == 1:
            self._only = streams[0]  # no task stands between it and its reader
        else:
            self._readers = [
                asyncio.create_task(self._read(index, stream), name="structgen answer")
                for index, stream in enumerate(streams)
            ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for reader in self._readers:
                reader.cancel()
            if self._readers:
                await outlast(asyncio.gather(*self._readers, return_exceptions=True))
        finally:
            await self._stack.aclose()

    @property
    def usage(self) -> Usage:
        """What all of them have cost, whether or not they came to their ends, once they were left.

        The prompt of `n` counts once.
        """
        return usage_of([stream.usage for stream in self._streams], self._n)

    async def __anext__(self) -> tuple[int, Delta]:
        if self._only is not None:
            return 0, await anext(self._only)
        while self._open:
            index, came = await self._came.get()
            if isinstance(came, BaseException):
                raise came
            if came is not None:
                return index, came
            self._open -= 1
        raise StopAsyncIteration

    async def _read(self, index: int, stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                self._came.put_nowait((index, delta))
        except Exception as error:  # noqa: BLE001 - the reader of all of them raises it
            self._came.put_nowait((index, error))
        else:
            self._came.put_nowait((index, None))


def usage_of(each: Sequence[Usage], n: int) -> Usage:
    """Tokens of some prompts and the `n` generations of each, one after another; some may never
    have begun."""
    total = Usage()
    for start in range(0, len(each), n):
        begun = [usage for usage in each[start : start + n] if usage.prompt_tokens]
        if begun:
            total += Usage(
                prompt_tokens=begun[0].prompt_tokens,
                # The first finds what was cached before; the others find its prompt, too.
                cached_tokens=min(usage.cached_tokens for usage in begun),
                completion_tokens=sum(usage.completion_tokens for usage in begun),
            )
    return total
