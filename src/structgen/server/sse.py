"""Server-sent events: `data: ...` lines of a response that stays open.

Holds  the response begins with its first event, so that an error before it can have a status of
       its own; where that takes long, a comment begins it and keeps the connection awake. One
       write at a time.
Used   by `call`. The format is that of the HTML standard, section 9.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web

from structgen.server.errors import ApiError
from structgen.waiting import outlast

_PING = b": ping\n\n"
_SLICE = 1 << 20  # bytes that are sent in one go, in some 2 ms


class EventStream:
    """The events of one response, sent by one task."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        keep_alive: float,
        *,
        error_event: str = "",
    ) -> None:
        """The stream of one response.

        keep_alive    seconds of silence before a comment is sent
        error_event   name of the event that ends it by an error
        """
        self._error_event = error_event
        self._request, self._keep_alive = request, keep_alive
        self._response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would hold events back
            }
        )
        self._loop = asyncio.get_running_loop()
        self._ping: asyncio.Task[None] | None = None
        self._sending = False
        self._last = self._loop.time()
        self._timer = self._loop.call_later(keep_alive, self._silent)

    @property
    def begun(self) -> bool:
        """Whether anything was sent: the status is 200, then."""
        return self._response.prepared

    async def send(self, data: bytes, event: str = "") -> None:
        """Send one event; `data` is one line. Waits while the client reads slowly."""
        head = f"event: {event}\n".encode() if event else b""
        self._sending = True
        try:
            if self._ping is not None:
                await self._ping
            await self._write(head + b"data: " + data + b"\n\n")
        finally:
            self._sending = False

    async def done(self) -> web.StreamResponse:
        """Send what OpenAI's clients take for the end, and end."""
        await self.send(b"[DONE]")
        return await self.end()

    async def end(self) -> web.StreamResponse:
        """End the response."""
        await self.close()
        await self._response.write_eof()
        return self._response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Send an error as the last event, and end. What follows it would look like success."""
        await self.send(error.body, self._error_event)
        return await self.end()

    async def close(self) -> None:
        """End the keep-alive; nothing is sent."""
        self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()
            await outlast(self._ping)

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        for at in range(0, len(data), _SLICE):
            if at:
                await asyncio.sleep(0)  # a client that reads fast is not waited for
            await self._response.write(data[at : at + _SLICE])
        self._last = self._loop.time()

    def _silent(self) -> None:
        """Send a comment if nothing else was sent for so long; and look again."""
        rest = self._last + self._keep_alive - self._loop.time()
        if rest <= 0 and not self._sending and self._ping is None:
            self._ping = asyncio.create_task(self._pinged(), name="structgen keep-alive")
        self._timer = self._loop.call_later(rest if rest > 0 else self._keep_alive, self._silent)

    async def _pinged(self) -> None:
        try:
            await self._write(_PING)
        except ConnectionResetError:
            pass  # the next event finds out, too, and ends the call
        finally:
            self._ping = None
