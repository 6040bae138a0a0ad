"""Whether a server is alive, whether it takes work, how much it has, and its cache.

    /live      it answers: 200 for as long as it can be asked
    /health    the model is loaded, and its steps go on: 200, else 503 with the reason
    /ready     /health, and it was not told to stop

Used   by `routes`. Who watches a server asks by the second, so nothing here waits for the engine.
"""

from __future__ import annotations

import functools
import importlib.metadata

import msgspec
from aiohttp import web

from structgen.server.call import Call
from structgen.server.errors import SERVER, ApiError


class Alive(msgspec.Struct, frozen=True):
    """It is."""

    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    """Which release this is."""

    version: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How much work there is.

    running, waiting   requests of the engine; waiting_tokens those that wait have
    calls              that are being answered
    slots_held         tokens of the cache that work holds, of slots_total
    stalled            seconds without a step, while there is work
    """

    running: int
    waiting: int
    waiting_tokens: int
    calls: int
    slots_held: int
    slots_total: int
    stalled: float
    draining: bool


class Flushed(msgspec.Struct, frozen=True):
    """What was dropped from the cache; what requests use stays."""

    dropped_tokens: int


async def live(call: Call) -> web.StreamResponse:
    """Answer."""
    return call.answer(Alive())


async def health(call: Call) -> web.StreamResponse:
    """Say whether the engine works."""
    _check_engine(call)
    return call.answer(Alive())


async def ready(call: Call) -> web.StreamResponse:
    """Say whether it takes work."""
    call.service.check_open()
    _check_engine(call)
    return call.answer(Alive())


async def version(call: Call) -> web.StreamResponse:
    """Say which release this is."""
    return call.answer(Version(_release()))


async def load(call: Call) -> web.StreamResponse:
    """Say how much work there is."""
    statistics = call.service.engine.statistics()
    return call.answer(
        Load(
            running=statistics.running,
            waiting=statistics.waiting,
            waiting_tokens=statistics.waiting_tokens,
            calls=call.service.live,
            slots_held=statistics.slots_held,
            slots_total=statistics.slots_total,
            stalled=round(statistics.stalled, 3),
            draining=call.service.draining,
        )
    )


async def metrics(call: Call) -> web.StreamResponse:
    """All figures, for Prometheus."""
    accept = call.request.headers.get("Accept", "")
    body, content_type = call.service.metrics.exposition(accept)
    return web.Response(body=body, headers={"Content-Type": content_type})


async def flush_cache(call: Call) -> web.StreamResponse:
    """Drop every cached prefix that nobody uses."""
    return call.answer(Flushed(call.service.engine.flush_cache()))


@functools.cache
def _release() -> str:
    return importlib.metadata.version("structgen-lm")


def _check_engine(call: Call) -> None:
    """Raise `ApiError` 503 for an engine whose steps do not end, `EngineError` for none at all."""
    limit, stalled = call.service.config.stall, call.service.engine.statistics().stalled
    if stalled > limit:
        raise ApiError(
            503,
            f"the engine has had work, but ended no step, for {stalled:.0f} s; more than {limit:g}",
            type_=SERVER,
            code="stalled",
        )
