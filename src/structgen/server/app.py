"""The routes of a server, in an application of its own or in somebody else's.

Owns   the table of routes: path, handler, who may call it.
Used   by applications that embed a server, and by `serving`, which runs one.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import HttpVersion11, web

from structgen.program.program import Program
from structgen.server.call import cors_answer, framed, refused
from structgen.server.config import ServerConfig
from structgen.server.errors import no_route, of_http
from structgen.server.routes import ROUTES
from structgen.server.service import EngineSource, Service

SERVICE = web.AppKey("structgen_service", Service)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    engine: EngineSource,
    *,
    programs: Iterable[Program[..., Any]] = (),
    config: ServerConfig = ServerConfig(),
) -> web.Application:
    """An application that serves an engine and programs, and nothing else.

    Run it with `handler_cancellation=True` (`web.run_app`, `web.AppRunner`), so that a client who
    leaves ends at once what it asked for; without it that is found out at the next write.
    Other arguments and errors as in `add_routes`.
    """
    app = web.Application(client_max_size=config.max_body, middlewares=[_json_errors])
    add_routes(app, engine, programs=programs, config=config)
    return app


def add_routes(
    app: web.Application,
    engine: EngineSource,
    *,
    programs: Iterable[Program[..., Any]] = (),
    config: ServerConfig = ServerConfig(),
) -> Service:
    """Add the routes of a server to an application; returns what they share.

    engine     an `Engine` that is open whenever the application runs, or the `web.AppKey` under
               which the application keeps one: requests that come before it are told to wait
    programs   served at `/v1/programs/NAME`, by the names of their functions

    Raises `ValueError` for two programs of one name, `TypeError` for what is no program, and
    `OptionError` for one whose arguments cannot be given in JSON.
    """
    service = Service(engine, programs, config)
    service.attach(app)
    app[SERVICE] = service
    app.on_shutdown.append(_drained)
    for route in ROUTES:
        handler = framed(service, route.handle, route.access)
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            app.router.add_route(method, route.path, handler, expect_handler=_expected)
    if config.allowed_origins:
        for path in dict.fromkeys(route.path for route in ROUTES):
            app.router.add_route("OPTIONS", path, cors_answer(service))
    return service


async def _drained(app: web.Application) -> None:
    """The application ends: nothing new comes, and what runs has its time."""
    service = app[SERVICE]
    await service.drain(service.config.drain)


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What aiohttp answers by itself, no such route and the like, in the form of all errors."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        if isinstance(error, web.HTTPNotFound):
            answer = refused(request, no_route(request.path, _meant(request.path)))
        else:
            answer = refused(request, of_http(error))
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer


def _meant(path: str) -> str | None:
    """The route that a path is nearest to: with `/v1`, with one of them only, or without the rest.

    The base URL of clients ends in `/v1`, and that is forgotten, or added by the client as well.
    """
    tail = re.sub("/+", "/", path).strip("/").rpartition("v1/")[2]
    for found in (f"/v1/{tail}", f"/{tail}"):
        if found != path and any(_is_of(found, route.path) for route in ROUTES):
            return found
    return None


def _is_of(path: str, route: str) -> bool:
    fixed, open_, _ = route.partition("{")
    return path.startswith(fixed) and path != fixed if open_ else path == fixed


async def _expected(request: web.Request) -> web.StreamResponse | None:
    """Tell a client to send its body, where it asks for that first; no other wish is known."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() != "100-continue":
        return refused(request, of_http(web.HTTPExpectationFailed()))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer has not begun
    return None
