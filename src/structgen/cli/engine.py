"""The engine that a command runs on, and the event loop that it runs in."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from structgen.cli.leftovers import tasks_left

if TYPE_CHECKING:
    from structgen.engine.engine import Engine

T = TypeVar("T")
# From the name of a model and the engine's options to an engine, which loads when it is entered.
OpenEngine = Callable[..., "AbstractAsyncContextManager[Engine]"]


class Opening(NamedTuple):
    """An engine that will be entered, and when the work on it began."""

    engine: AbstractAsyncContextManager[Engine]
    started: float

    @classmethod
    def of(cls, open_engine: OpenEngine, model: str, options: Mapping[str, Any]) -> Opening:
        """Open an engine; the time that this takes counts as loading."""
        started = time.perf_counter()
        return cls(open_engine(model, **options), started)


def open_engine(model: str, **options: Any) -> AbstractAsyncContextManager[Engine]:
    """An `Engine` whose model is here: what has to be fetched is fetched, with a progress bar.

    Blocks: call it before the event loop runs, so that an interruption ends a download at once.
    Torch is imported after the model was found, because a wrong name need not wait for it.
    """
    from structgen.cli.fetching import locate

    path = locate(model)
    with without_collections():
        from structgen.engine.engine import Engine

    engine = Engine(path, **options)
    engine.model = model  # as it was asked for: where its files are is nothing for clients
    return engine


@contextmanager
def without_collections() -> Iterator[None]:
    """Import what is large: all of it stays, and looking for garbage is a fifth of the time."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under uvloop where that is installed, else under asyncio's own loop."""
    with _runner() as runner:
        return runner.run(main)


def run_guarded_loop(
    main: Coroutine[Any, Any, T],
    tell: Callable[[BaseException], None],
    left: list[str] | None = None,
) -> T:
    """Run a coroutine to its end, also where another task, or a callback, calls `sys.exit()`.

    An event loop raises that, and stops. Here `tell` hears of it, and the loop goes on: a task that
    a program has started must not end a server. A Ctrl-C that no signal handler of the loop takes
    ends it, as ever.

    left   gets the names of tasks that would not end: then the loop is left as it is
    """
    runner = _runner()
    loop = runner.get_loop()
    left = [] if left is None else left
    task = loop.create_task(main)
    pressed = False
    try:
        return _guarded(loop, task, tell)
    except KeyboardInterrupt:
        pressed = True  # the loop is broken off: it can be closed, and no more
        raise
    finally:
        if not pressed:
            left += _guarded(loop, loop.create_task(tasks_left()), tell)
        if not left:
            runner.close()


def _guarded(
    loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], tell: Callable[[BaseException], None]
) -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            pressed = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            own = task.done() and not task.cancelled() and task.exception() is error
            if own or (pressed and isinstance(error, KeyboardInterrupt)):
                raise
            tell(error)


def _runner() -> asyncio.Runner:
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    return asyncio.Runner(loop_factory=factory)
