"""One connection of a client: how long it may take, and what is answered outside of all routes.

Owns   the connections that are open, their number and their times.
Holds  who sends half a request, or reads half an answer, is cut off after a time, and what is no
       HTTP gets the JSON that all errors have. A connection too many is answered, too, so that a
       proxy knows at once to ask another server; it would wait on one that is not taken.
Used   by `serving`. In an application of somebody else's, connections are that application's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from structgen.server.body import LeavesPacked
from structgen.server.call import refused, request_id
from structgen.server.config import ServerConfig
from structgen.server.errors import SERVER, ApiError, of_http, too_slow
from structgen.server.observe.access_log import log_refusal, traceback_of

_UNHEARD = 5.0  # seconds in which a connection too many may ask, to be told so
_LINGERING = 10.0  # seconds in which the rest of a body is read that was answered before
_LIVE = b"GET /live "
_log = logging.getLogger("structgen.server")


class Connections:
    """Makes the connections of a server, as an event loop asks for them."""

    def __init__(self, server: web.Server, config: ServerConfig) -> None:
        self.config = config
        self.open: set[Connection] = set()
        self._server = server
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> Connection:
        """A connection that is about to be made."""
        return Connection(self, self._server, self._loop)

    @property
    def full(self) -> bool:
        """Whether there are as many as there may be."""
        return len(self.open) >= self.config.connections


class Connection(LeavesPacked):
    """A connection: aiohttp's, with limits of time, and with errors in JSON."""

    __slots__ = ("_among", "_head", "_unread", "_wire")

    def __init__(
        self, among: Connections, server: web.Server, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=among.config.idle,
            lingering_time=min(_LINGERING, among.config.transfer),
            access_log=None,  # that there is none is said so
        )
        self._among = among
        self._head: asyncio.TimerHandle | None = None  # runs while half a head is here
        self._unread: asyncio.TimerHandle | None = None  # runs while the client reads nothing
        self._wire: asyncio.Transport | None = None  # also when aiohttp has given it up

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is one of those that are open, or one too many."""
        if self._among.full:
            surplus = _Surplus(self._loop)
            transport.set_protocol(surplus)
            surplus.connection_made(transport)
            return
        self._among.open.add(self)
        self._wire = cast("asyncio.Transport", transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nobody is there any more."""
        self._among.open.discard(self)
        _cancel(self._head)
        _cancel(self._unread)
        self._head = self._unread = self._wire = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came: of a head, that must be whole in time, or of a body, that a route reads."""
        super().data_received(data)
        if not self._waits:
            _cancel(self._head)
            self._head = None
        elif self._head is None and data:
            self._head = self._loop.call_later(self._among.config.transfer, self._refuse_head)

    def pause_writing(self) -> None:
        """The client takes less than there is for it."""
        super().pause_writing()
        if self._wire is not None:
            self._unread = self._loop.call_later(self._among.config.transfer, self._wire.abort)

    def resume_writing(self) -> None:
        """It has taken most of that."""
        _cancel(self._unread)
        self._unread = None
        super().resume_writing()

    @property
    def _waits(self) -> bool:
        """Whether it waits for a head: none is here that is whole, and not yet answered."""
        if self._waiter is None:  # that which answers has not begun, or is answering
            return self._request_count == 0
        return not self._waiter.done() and not self._messages

    def _refuse_head(self) -> None:
        self._head = None
        transport = self.transport
        if transport is None or not self._waits:
            return
        transport.write(_written(too_slow("head", self._among.config.transfer), self.peername))
        self.force_close()

    def _process_keepalive(self) -> None:
        """It was idle for long, unless its next request has begun: that has a time of its own."""
        if self._head is None:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what no route was asked for: what is no HTTP, or a fault of the server."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("a request failed\n%s", traceback_of(exc) if exc else message)
            error = ApiError(status, "the server failed; its log says why", type_=SERVER)
        else:
            error = _malformed(exc, message or "")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, and cannot become an error")
        answer = refused(request, error)
        answer.force_close()
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; one that aiohttp made of an error by itself is made JSON."""
        if isinstance(resp, web.HTTPException) and resp.status >= HTTPStatus.BAD_REQUEST:
            resp = refused(request, of_http(resp))
        return await super().finish_response(request, resp, start_time)


class _Surplus(asyncio.Protocol):
    """A connection too many: it is told so when it asks, and closed.

    That the process lives is true of it, too: else whoever watches that would end the others.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request, for a moment."""
        self._transport = cast("asyncio.Transport", transport)
        self._timer = self._loop.call_later(_UNHEARD, self._transport.close)

    def data_received(self, data: bytes) -> None:
        """Answer, whatever it is."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if data.startswith(_LIVE):
            transport.write(_response(HTTPStatus.OK, b'{"status":"ok"}', {}))
        else:
            transport.write(_written(_too_many(), transport.get_extra_info("peername")))
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """It is gone."""
        _cancel(self._timer)
        self._timer = self._transport = None


def _too_many() -> ApiError:
    return ApiError(
        503,
        "this server has as many connections as it may; try again later, or ask another",
        type_=SERVER,
        code="overloaded",
        retry_after=1,
    )


def _malformed(error: BaseException | None, message: str) -> ApiError:
    """What the parser refuses. Its messages repeat the line, which is nobody's but the client's."""
    if isinstance(error, LineTooLong):
        reason = "its first line, or a header, is too long"
    else:
        reason = " ".join(message.partition("\n\n")[0].split()).rstrip(":") or "it cannot be read"
    return ApiError(400, f"this is no valid HTTP request: {reason}", code="invalid_http")


def _response(status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> bytes:
    """An answer as it goes over the wire, where aiohttp has no request to answer."""
    head = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{k}: {v}" for k, v in head.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _written(error: ApiError, peer: object) -> bytes:
    """An error as an answer to nobody's request, logged."""
    id_ = request_id({})
    remote = str(peer[0]) if isinstance(peer, tuple) else ""
    log_refusal(id_, error, remote=remote)
    headers = {**error.headers, "X-Request-Id": id_}
    return _response(HTTPStatus(error.status), error.body, headers)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
