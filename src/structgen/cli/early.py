"""What is answered while a server is still being loaded: its imports alone take seconds.

Owns   a thread with an event loop of its own, on copies of the sockets; both end with the scope.
Holds  every request is answered, and its connection closed: `/live` by 200, all else by the 503
       that the server itself gives until its model is there. Imports nothing large.
Used   by `serve`, up to the moment when the server itself takes connections.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self, cast
from uuid import uuid4

import msgspec

_END = b"\r\n\r\n"  # of a head
_LIVE = (b"GET /live ", b"HEAD /live ")
_MOST = 1 << 16  # bytes of a head
_SECONDS = 5.0  # in which a request must come, and what is left of its body is read
_ROUNDS = 100  # in which it is looked whether all are gone
_ALIVE = msgspec.json.encode({"status": "ok"})
_NOT_READY = msgspec.json.encode(
    {
        "error": {
            "message": "the model is not loaded yet; try again later",
            "type": "server_error",
            "param": None,
            "code": "not_ready",
        }
    }
)


class EarlyAnswers:
    """Answers on sockets that listen, as long as the scope is open; they stay open themselves."""

    def __init__(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None) -> None:
        self._sockets, self._tls = sockets, tls
        self._loop = asyncio.new_event_loop()
        self._handed_over, self._ended = asyncio.Event(), False
        self._here: set[_Early] = set()
        # Of its own: in the main thread, imports would be in its way.
        self._thread = threading.Thread(target=self._work, name="structgen early answers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tell(self._end)
        self._thread.join()

    def hand_over(self) -> None:
        """Take no more connections: somebody else does, now. Those that are here are answered."""
        self._tell(self._handed_over.set)

    def _tell(self, what: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended, since nobody was here any more
            self._loop.call_soon_threadsafe(what)

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as taking, AsyncExitStack() as stack:
            for each in self._sockets:
                own = stack.enter_context(each.dup())
                own.setblocking(False)
                # A server of asyncio's own would drop those that it has just taken when it closes.
                self._loop.add_reader(own, self._take, own, taking)
                stack.callback(self._loop.remove_reader, own)
            await self._handed_over.wait()
        for _ in range(_ROUNDS):
            if self._here and not self._ended:
                await asyncio.sleep(_SECONDS / _ROUNDS)

    def _take(self, own: socket.socket, taking: asyncio.TaskGroup) -> None:
        try:
            taken, _ = own.accept()
        except OSError:
            return  # it has gone again, or is taken by somebody else
        taking.create_task(self._connect(taken))

    async def _connect(self, taken: socket.socket) -> None:
        taken.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Early(self._here), taken, ssl=self._tls
            )
        except OSError:  # no TLS, or not to its end
            taken.close()

    def _end(self) -> None:
        for each in list(self._here):
            each.abort()
        self._ended = True
        self._handed_over.set()


class _Early(asyncio.Protocol):
    """A connection, for one request."""

    def __init__(self, here: set[_Early]) -> None:
        self._here, self._head = here, b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request, for a moment."""
        self._here.add(self)
        self._transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self.abort)

    def data_received(self, data: bytes) -> None:
        """Answer as soon as the head is here; a body is read, and forgotten."""
        if self._transport is None or _END in self._head:
            return
        self._head += data
        if _END not in self._head and len(self._head) < _MOST:
            return
        self._transport.write(_answer(self._head))
        self._head = _END
        # Closed now, with bytes of a body unread, the connection would be reset, and the client
        # would not see its answer.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """It is gone."""
        self._here.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._transport = self._timer = None

    def abort(self) -> None:
        """Close it, whatever was not sent yet."""
        if self._transport is not None:
            self._transport.abort()


def _answer(head: bytes) -> bytes:
    alive = head.startswith(_LIVE)
    body = _ALIVE if alive else _NOT_READY
    lines = [
        "HTTP/1.1 200 OK" if alive else "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        f"X-Request-Id: req-{uuid4().hex}",
        *([] if alive else ["Retry-After: 5"]),
    ]
    answer = "\r\n".join(lines).encode() + _END
    return answer if head.startswith(b"HEAD ") else answer + body
