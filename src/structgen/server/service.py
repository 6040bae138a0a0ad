"""What all routes of one server share: the engine, the programs, who is served at the moment.

Owns   the calls that are being answered, and the end of them when the server is told to stop.
Used   by `app`, which makes one for each application, and by every route.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import anyio
from aiohttp import web

from structgen.engine.engine import Engine
from structgen.errors import EngineClosedError, EngineError
from structgen.program.program import Program
from structgen.server.config import ServerConfig
from structgen.server.endpoint import endpoints
from structgen.server.errors import SERVER, ApiError
from structgen.server.keys import Keys
from structgen.server.observe.metrics import Metrics
from structgen.server.openai.logprobs import Speller

EngineSource = Engine | web.AppKey[Engine]
_LEAVING = 1.0  # seconds in which a call that was cancelled should be gone


class Service:
    """One server: its engine, what it serves besides, and its calls.

    draining   it was told to stop, and takes no more work
    created    when it was made, in seconds since 1970
    document   the OpenAPI document of its routes, once somebody has asked for it
    """

    def __init__(
        self, source: EngineSource, programs: Iterable[Program[..., Any]], config: ServerConfig
    ) -> None:
        """`source` is an engine, or the key under which the application has it once it is open.

        Raises what `endpoints` raises for programs that cannot be served.
        """
        self._source = source
        self._app: web.Application | None = None
        self.config = config
        self.programs = endpoints(programs)
        self.keys = Keys(config)
        self.metrics = Metrics(self)
        self.draining = False
        self.created = int(time.time())
        self.document: dict[str, Any] | None = None
        self._speller: Speller | None = None
        self._scopes: set[anyio.CancelScope] = set()
        self._left: anyio.Event | None = None  # set at the end of a call, while one drains
        self._patience: anyio.CancelScope | None = None

    @property
    def speller(self) -> Speller:
        """How tokens are written."""
        tokenizer = self.engine.loaded.checkpoint.tokenizer
        if self._speller is None or self._speller.tokenizer is not tokenizer:
            self._speller = Speller(tokenizer)
        return self._speller

    def attach(self, app: web.Application) -> None:
        """The application whose routes these are."""
        self._app = app

    @property
    def engine(self) -> Engine:
        """The engine, open. Raises `EngineClosedError` while there is none."""
        source, app = self._source, self._app
        found = source if isinstance(source, Engine) else app.get(source) if app else None
        try:
            if found is not None and found.loaded is not None:
                return found
        except EngineClosedError:
            if self.draining:
                raise shutting_down() from None
        raise EngineClosedError("the model is not loaded yet; try again later")

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model; the first is what answers call it."""
        if self.config.names:
            return self.config.names
        engine = self.engine
        return tuple(dict.fromkeys((engine.model, engine.loaded.checkpoint.name)))

    # ------------------------------------------------------------ calls

    @property
    def live(self) -> int:
        """Calls that are being answered."""
        return len(self._scopes)

    @property
    def ready(self) -> bool:
        """Whether it takes work."""
        try:
            return not self.draining and self.engine.loaded is not None
        except EngineError:
            return False

    def check_open(self) -> None:
        """Raise `ApiError` once the server was told to stop."""
        if self.draining:
            raise shutting_down()

    def enter(self, scope: anyio.CancelScope) -> None:
        """A call begins. Raises `ApiError` once the server was told to stop."""
        self.check_open()
        self._scopes.add(scope)

    def leave(self, scope: anyio.CancelScope) -> None:
        """A call has been answered, or was left."""
        self._scopes.discard(scope)
        if self._left is not None:
            self._left.set()

    async def drain(self, seconds: float) -> None:
        """Take no more work, let calls end, and end by force those that have not after that."""
        self.draining = True
        with anyio.move_on_after(seconds) as self._patience:
            await self._wait_idle()
        for scope in list(self._scopes):
            scope.cancel()
        with anyio.move_on_after(_LEAVING):
            await self._wait_idle()

    def hurry(self) -> None:
        """End a drain that is under way at once."""
        if self._patience is not None:
            self._patience.cancel()

    async def _wait_idle(self) -> None:
        while self._scopes:
            self._left = anyio.Event()
            await self._left.wait()


def shutting_down() -> ApiError:
    """What a call is told that comes too late, or takes too long."""
    return ApiError(
        503, "the server is shutting down", type_=SERVER, code="shutting_down", retry_after=5
    )
