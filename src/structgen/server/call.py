"""One request of a client, and the frame in which its route runs.

Owns   who is allowed in, the request's id, its end by the drain, and errors as answers.
Holds  a route's error is an answer of its own status if nothing was sent yet, else the last event
       of the stream. A client that leaves cancels the route, which ends what it started.
Used   by `app`: every route is an `async def route(call) -> response`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Literal, TypeVar
from uuid import uuid4

import anyio
import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from structgen.request import Delta, Namespace, Usage
from structgen.server.body import LeavesPacked, Unpacker, check_counts, decoded
from structgen.server.errors import (
    ENCODINGS,
    SERVER,
    ApiError,
    api_error,
    broken_body,
    of_http,
    of_validation,
    too_large,
    too_slow,
    unsupported_encoding,
)
from structgen.server.keys import Holder
from structgen.server.observe.access_log import log_call, log_refusal, traceback_of
from structgen.server.observe.metrics import Generation
from structgen.server.observe.tracing import spanned
from structgen.server.service import Service, shutting_down
from structgen.server.sse import EventStream

T = TypeVar("T")
Route = Callable[["Call"], Awaitable[web.StreamResponse]]
Access = Literal["open", "user", "admin"]
"""Who may call a route: everybody, who has a key (where there are keys), who has an admin's."""

GONE = 499  # in logs and metrics only: the client left before it was answered
_LINGERING = 1.0  # seconds in which the rest of a body is read that aiohttp unpacks
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_log = logging.getLogger("structgen.server")


class Call:
    """A request that is being answered.

    id        from the header X-Request-Id, or a new one; the answer's header repeats it
    holder    whoever's key it came with
    names     from an option's own name to the field that it was read from, for errors
    usage     tokens that it has cost, for logs and metrics
    waited    seconds until something of it was computed; None until that is known
    first_token   seconds until its first token came, None before
    finishes  why each of its generations ended
    route     the path as it stands in the table of routes: "/v1/models/{id}"
    program   that it runs, if it runs one
    asked     its body, once that was read
    size      bytes of its body
    failure   what it was answered by, if that was an error
    """

    def __init__(self, service: Service, request: web.Request, access: Access = "user") -> None:
        self.service, self.request, self.access = service, request, access
        self.id = request_id(request.headers)
        self.started = time.perf_counter()
        resource = request.match_info.route.resource
        self.route = resource.canonical if resource is not None else request.path
        runs = request.method == "POST" and "/programs/" in self.route
        named = request.match_info["name"] if runs else ""
        self.program = named if named in service.programs else ""  # it goes into logs as it is
        self.asked: object = None
        self.size = 0
        self.failure: ApiError | None = None
        self.generations: dict[int, Generation] = {}
        self.holder: Holder | None = None
        self.names: dict[str, str] = {}
        self.usage = Usage()
        self.waited: float | None = None
        self.first_token: float | None = None
        self.finishes: list[str] = []
        self._stream: EventStream | None = None
        self._broken = False  # the rest of its body would be read for ever

    def namespace(self, salt: str | None = None) -> Namespace:
        """Whose cache it may use: that of its key, divided by the salt if it has one."""
        tenant = self.holder.tenant if self.holder else ""
        if salt:
            # The cache keeps it for as long as what it divides: megabytes of salt would add up.
            tenant += ":" + blake2b(salt.encode(), digest_size=16).hexdigest()
        return Namespace(tenant=tenant)

    def came(self, delta: Delta) -> None:
        """A delta of one of its generations came; for logs and metrics."""
        now = time.perf_counter()
        self.service.metrics.came(self, delta, now)
        if self.first_token is None and delta.tokens:
            self.first_token = now - self.started
        if delta.finish is not None:
            self.finishes.append(delta.finish.reason)
            if self.waited is None:
                self.waited = delta.finish.waited

    def charge(self, usage: Usage) -> None:
        """Something that it asked for has cost so much, whether or not it came to its end."""
        self.usage += usage

    @property
    def cost(self) -> int:
        """Tokens that it has used, whether or not it came to its end."""
        drawn = sum(generation.tokens for generation in self.generations.values())
        return max(self.usage.prompt_tokens + self.usage.completion_tokens, drawn)

    def stream(self, *, error_event: str = "") -> EventStream:
        """The stream of events that answers it; nothing is sent before its first event.

        error_event   name of the event that ends it by an error
        """
        headers = {"X-Request-Id": self.id, **cors(self)}
        self._stream = EventStream(
            self.request, headers, self.service.config.keep_alive, error_event=error_event
        )
        return self._stream

    def answer(self, body: object, status: int = 200) -> web.Response:
        """An answer in JSON."""
        return web.Response(
            status=status, body=msgspec.json.encode(body), content_type="application/json"
        )

    async def body(self, type_: type[T]) -> T:
        """The body, read as JSON of this type.

        Raises `ApiError` for one that is no JSON or of another form, that is too large, or that
        does not come in time.
        """
        self._check_type()
        self._check_encoding()
        data = await self._read()
        self.size = len(data)
        await check_counts(data, type_)
        try:
            body = decoded(data, type_)
        except msgspec.ValidationError as error:
            raise of_validation(error, getattr(type_, "__struct_fields__", ())) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        self.asked = body
        return body

    def _check_type(self) -> None:
        """Refuse a body that is not said to be JSON.

        A page of another origin can send one of some other type without being asked whether it
        may; with this one, browsers ask ahead.
        """
        found = self.request.content_type
        if "Content-Type" not in self.request.headers:
            found = "missing"
        if found != "application/json":
            raise ApiError(
                415,
                f"the content type is {found}; send JSON, as Content-Type: application/json",
                code="unsupported_media_type",
            )

    def _check_encoding(self) -> None:
        """Refuse a body that is packed in a way that is not undone here."""
        if self._encoding not in ENCODINGS:
            raise unsupported_encoding(self._encoding)

    async def _read(self) -> bytes:
        most, seconds = self.service.config.max_body, self.service.config.transfer
        if (self.request.content_length or 0) > most:
            raise too_large(most)
        found, sent = bytearray(), 0
        unpacker = self._unpacker()
        try:
            async with asyncio.timeout(seconds):
                async for piece in self.request.content.iter_chunked(1 << 16):
                    sent += len(piece)
                    for part in (piece,) if unpacker is None else unpacker.unpacked(piece):
                        found += part
                        if max(len(found), sent) > most:
                            raise too_large(most)
                        # What is here already would be unpacked without any waiting.
                        await asyncio.sleep(0)
            if unpacker is not None and sent:
                unpacker.check_whole()
        except TimeoutError:
            self._broken = True
            raise too_slow("body", seconds) from None
        except RequestPayloadError:
            raise broken_body("its chunks, or its compression, are broken") from None
        except ValueError as error:
            raise broken_body(f"its compression is broken: {error}") from None
        return bytes(found)

    @property
    def _encoding(self) -> str:
        """How its body is packed, as its headers say."""
        given = self.request.headers.getall("Content-Encoding", ())
        return ", ".join(given).strip().lower()

    def _unpacker(self) -> Unpacker | None:
        """What unpacks its body; None where it is not packed, or aiohttp unpacks it."""
        packed = self._encoding not in {"", "identity"}
        return Unpacker(self._encoding) if packed and self._is_ours else None

    @property
    def _is_ours(self) -> bool:
        """Whether its connection is one of ours, and not of an application of somebody else's."""
        return isinstance(self.request.protocol, LeavesPacked)

    async def cut(self, response: web.StreamResponse) -> None:
        """Send the answer, and end a connection on which aiohttp would unpack what is not read.

        It reads the rest of a body after the answer, and of one that is packed it would unpack
        all without letting anybody else have a turn.
        """
        rest = self.request.content
        if self._is_ours or self._encoding in {"", "identity"} or rest.is_eof():
            return
        if not response.prepared:
            response.force_close()
        await response.prepare(self.request)
        await response.write_eof()
        # Closed at once, the connection would be reset, and the client might not see its answer.
        with suppress(TimeoutError, RequestPayloadError):
            async with asyncio.timeout(_LINGERING):
                while not rest.is_eof():
                    await rest.readany()
                    await asyncio.sleep(0)
        self.request.protocol.force_close()

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Answer by an error, in the stream if that has begun."""
        self.failure = error
        if self._stream is not None and self._stream.begun:
            return await self._stream.fail(error)
        response = error.response()
        if self._broken:
            response.force_close()
        return response

    async def close(self) -> None:
        """Nothing is sent any more."""
        if self._stream is not None:
            await self._stream.close()


def framed(
    service: Service, route: Route, access: Access
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A route as aiohttp calls it."""

    async def handler(request: web.Request) -> web.StreamResponse:
        call = Call(service, request, access)
        status = GONE
        try:
            with spanned(call):
                response = await _answered(call, route)
            status = response.status
            await call.cut(response)
        except ConnectionResetError:
            # A write found out before the call was cancelled. Raised, it would be logged by aiohttp
            # as a fault of ours; of an answer it finds out, too, that nobody is there.
            return web.Response(status=status)
        finally:
            _note_end(call, status)
        return response

    return handler


def _note_end(call: Call, status: int) -> None:
    """Tell everybody who counts that a call has ended; 499 for one whose client left."""
    seconds = time.perf_counter() - call.started
    if call.holder is not None:
        call.holder.leave(call.cost)
    call.service.metrics.ended(call, status, seconds)
    log_call(call, status, seconds)


async def _answered(call: Call, route: Route) -> web.StreamResponse:
    try:
        response = await _run(call, route)
    except ConnectionResetError:
        raise  # the client left, and a write found out
    except web.HTTPException as error:
        response = await call.fail(of_http(error))
    except Exception as error:  # noqa: BLE001 - a client must hear of it, whatever it is
        failure = api_error(error, call.names)
        if failure is None:
            _log.error("request %s failed\n%s", call.id, traceback_of(error))
            failure = ApiError(500, "the server failed; its log says why", type_=SERVER)
        response = await call.fail(failure)
    finally:
        await call.close()
    if not response.prepared:
        response.headers["X-Request-Id"] = call.id
        response.headers.update(cors(call))
    if call.service.draining:
        response.force_close()  # whoever has more to ask must ask somebody else
    return response


async def _run(call: Call, route: Route) -> web.StreamResponse:
    service = call.service
    call.holder = service.keys.holder(call.request.headers.get("Authorization"), call.access)
    if call.holder is None:
        return await route(call)
    call.holder.begin()
    response: web.StreamResponse | None = None
    with anyio.CancelScope() as scope:
        service.enter(scope)
        try:
            response = await route(call)
        finally:
            service.leave(scope)
    if response is None:
        raise shutting_down()
    return response


def refused(request: web.BaseRequest, error: ApiError) -> web.Response:
    """The answer to what no route takes, logged."""
    answer = error.response()
    answer.headers["X-Request-Id"] = id_ = request_id(request.headers)
    log_refusal(
        id_,
        error,
        remote=request.remote,
        method=request.method,
        path=request.rel_url.raw_path,
    )
    return answer


def request_id(headers: Mapping[str, str]) -> str:
    """The id that a client gave a request, or a new one."""
    given = headers.get("X-Request-Id", "")
    return given if _ID.fullmatch(given) else f"req-{uuid4().hex}"


def cors_answer(service: Service) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """What a browser is told that asks ahead whether a page may call a route."""

    async def handler(request: web.Request) -> web.StreamResponse:
        headers = cors(Call(service, request, "open"))
        if headers:
            asked = request.headers.get("Access-Control-Request-Headers", "")
            headers |= {
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": asked or "Authorization, Content-Type",
                "Access-Control-Max-Age": "600",
            }
        return web.Response(status=204, headers=headers)

    return handler


def cors(call: Call) -> dict[str, str]:
    """The headers that let a page of an allowed origin read the answer."""
    origin = call.request.headers.get("Origin")
    allowed = call.service.config.allowed_origins
    if origin is None or not ({"*", origin} & set(allowed)):
        return {}
    return {
        "Access-Control-Allow-Origin": "*" if "*" in allowed else origin,
        "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
        **({} if "*" in allowed else {"Vary": "Origin"}),
    }
