"""A server in the test's own event loop, on a socket of its own, and a client of it."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from aiohttp import ClientSession, web

from structgen import Engine
from structgen.program.program import Program
from structgen.server.app import SERVICE, make_app
from structgen.server.call import Access, Route, framed
from structgen.server.config import ServerConfig
from structgen.server.service import Service

Serve = Callable[..., AbstractAsyncContextManager["Served"]]
GENERATING = ("/v1/chat/completions", "/v1/completions")
LARGE = 1 << 20  # a body that the client would rather read from a file
ENGINE_OPTIONS: dict[str, Any] = {"slots": 4000, "threads": 1, "dtype": "float32"}


class Answer(msgspec.Struct, frozen=True):
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        """The body, which is JSON."""
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """What it says went wrong; all four keys are there."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[str]:
        """The data of its events, `[DONE]` included; comments are left out."""
        blocks = self.text.split("\n\n")
        assert blocks.pop() == "", "the last event is cut off"
        lines = [line for block in blocks for line in block.split("\n")]
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def chunks(self) -> list[Any]:
        """The JSON of its events; the last of them was `[DONE]`, which is left out."""
        *chunks, done = self.events
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


class Served:
    """A server that runs: where it is, a client of it, and what it serves."""

    def __init__(self, url: str, client: ClientSession, engine: Engine, service: Service) -> None:
        self.url, self.client, self.engine, self.service = url, client, engine, service

    async def get(self, path: str, **headers: str) -> Answer:
        """GET a path; `headers` are written with underscores."""
        return await self.send("GET", path, **headers)

    async def post(self, path: str, body: object = None, **headers: str) -> Answer:
        """POST a body: bytes and strings as they are, everything else as JSON.

        One for a generating route that names no model gets the name of the one there is.
        """
        if path in GENERATING and isinstance(body, dict):
            body = {"model": self.service.names[0], **body}
        return await self.send("POST", path, body, **headers)

    def named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A body that names the model."""
        return {"model": self.service.names[0], **body}

    async def send(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """Send a request and read the whole answer."""
        data: Any = body if isinstance(body, bytes | str | None) else json.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            named.setdefault("Content-Type", "application/json")
        if data is not None and len(data) > LARGE:
            data = io.BytesIO(data if isinstance(data, bytes) else data.encode())
        async with self.client.request(method, path, data=data, headers=named) as response:
            text = await response.text()
            return Answer(response.status, response.headers, text)


@asynccontextmanager
async def serving(
    model: Path,
    *,
    programs: Iterable[Program[..., Any]] = (),
    config: ServerConfig | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve a model on 127.0.0.1; `options` are the engine's."""
    async with Engine(model, **{**ENGINE_OPTIONS, **options}) as engine:
        app = make_app(engine, programs=programs, config=config or ServerConfig())
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with ClientSession(url) as client:
                yield Served(url, client, engine, app[SERVICE])
        finally:
            await runner.cleanup()


@asynccontextmanager
async def serving_route(
    route: Route, model: Path, *, config: ServerConfig | None = None, access: Access = "user"
) -> AsyncIterator[Served]:
    """Serve one route of the test's own at `/`, of a server whose engine is never opened."""
    engine = Engine(model)
    app = web.Application()
    service = Service(engine, (), config or ServerConfig())
    app.router.add_route("*", "/", framed(service, route, access))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession(url) as client:
            yield Served(url, client, engine, service)
    finally:
        await runner.cleanup()


async def wait_until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until something holds; fail where it does not in time."""
    with anyio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)
