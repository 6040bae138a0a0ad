"""Running a server as a process does: from its sockets to its end by a signal.

Holds  the sockets listen before the model is read, and what comes meanwhile is told to wait. The
       first SIGTERM or SIGINT lets calls end, for as long as the config says; the second ends the
       process at once. Connections are answered until the engine has ended.
Used   by `structgen serve`. An application of its own adds the routes and runs itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self

import anyio
from aiohttp import web

from structgen.engine.engine import Engine
from structgen.program.program import Program
from structgen.server.app import SERVICE, make_app
from structgen.server.config import ServerConfig
from structgen.server.connection import Connections
from structgen.server.service import Service

BACKLOG = 1024  # connections that wait to be taken
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSING = 0.5  # seconds for connections to close, once their calls have ended
_AT_ONCE = 0.5  # seconds after which a process that was told twice is gone, whatever it does
_log = logging.getLogger("structgen.server")


async def run(
    engine: Engine,
    sockets: Sequence[socket.socket],
    *,
    programs: Iterable[Program[..., Any]] = (),
    config: ServerConfig = ServerConfig(),
    tls: SSLContext | None = None,
    ready: Callable[[Service], None] = lambda _: None,
) -> int:
    """Serve an engine that is not open yet, until a signal; the exit code that this calls for.

    It is 0, or 128 and the number of the second signal if there was one.

    sockets   bound, and listening
    ready     called when the model is loaded and requests are served

    Raises what opening the engine raises, and `EngineDiedError` if it ended by itself.
    """
    app = make_app(engine, programs=programs, config=config)
    service = app[SERVICE]
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSING)
    with _Stop(service.hurry) as stop:
        await runner.setup()
        try:
            assert runner.server is not None
            connections = Connections(runner.server, config)
            for each in sockets:
                await _Site(runner, each, tls, connections).start()
            async with engine:
                if not stop.asked.is_set():
                    ready(service)
                await stop.asked.wait()
                if service.live:
                    _log.info(
                        "stopping: calls that run: %d; they have %g s, a second signal ends them",
                        service.live,
                        config.drain,
                    )
                await service.drain(config.drain)
        finally:
            service.draining = True  # so that what still comes is told so, and not to wait
            await runner.cleanup()
    return 128 + stop.twice if stop.twice else 0


class _Stop:
    """Whether the process was told to stop, by signals.

    asked   once
    twice   the second signal: the process ends in a moment, in an orderly way or not
    """

    def __init__(self, hurry: Callable[[], None]) -> None:
        self.asked = anyio.Event()
        self.twice: signal.Signals | None = None
        self._hurry = hurry
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        for each in _SIGNALS:
            self._loop.add_signal_handler(each, self._came, each)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each in _SIGNALS:
            self._loop.remove_signal_handler(each)

    def _came(self, which: signal.Signals) -> None:
        if not self.asked.is_set():
            self.asked.set()
        elif not self.twice:
            self.twice = which
            self._hurry()
            # A step that computes cannot be interrupted, and the interpreter would wait for it.
            self._loop.call_later(_AT_ONCE, os._exit, 128 + which)


class _Site(web.BaseSite):
    """A socket that listens already, whose connections are ours."""

    def __init__(
        self,
        runner: web.AppRunner,
        each: socket.socket,
        tls: SSLContext | None,
        connections: Connections,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._socket, self._connections = each, connections

    @property
    def name(self) -> str:
        """Where it is."""
        return f"socket:{self._socket.getsockname()}"

    async def start(self) -> None:
        """Begin to take connections."""
        await super().start()
        loop = asyncio.get_running_loop()
        # Not every event loop takes a socket of the one family for one of the other.
        unix = self._socket.family == socket.AF_UNIX
        tls: dict[str, Any] = {}
        if self._ssl_context is not None:
            seconds = self._connections.config.transfer
            tls = {"ssl": self._ssl_context, "ssl_handshake_timeout": seconds}
        self._server = await (loop.create_unix_server if unix else loop.create_server)(
            self._connections, sock=self._socket, backlog=self._backlog, **tls
        )
