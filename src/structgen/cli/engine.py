"""The engine that a command runs on, and the event loop that it runs in."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from structgen.engine.engine import Engine

T = TypeVar("T")
# From the name of a model and the engine's options to an engine that loads when it is entered.
OpenEngine = Callable[..., "AbstractAsyncContextManager[Engine]"]


def open_engine(model: str, **options: Any) -> AbstractAsyncContextManager[Engine]:
    """An `Engine`. This imports torch, for which help and mistakes need not wait."""
    from structgen.engine.engine import Engine

    return Engine(model, **options)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under uvloop where that is installed, else under asyncio's own loop."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
