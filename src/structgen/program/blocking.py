"""Programs for code that is not async: an event loop in a thread of its own.

Owns   the thread, its loop, and the backend while it is open there.
Holds  when the block of `blocking` is left, all programs that were run in it have ended, the
       backend is closed, and thread and loop are gone. A Ctrl-C while somebody waits cancels the
       program first and is raised when it has ended.
Used   by `Program.run_sync`.

Not built on anyio's blocking portal, because a Ctrl-C while that one starts leaves its thread
behind, and a cancelled call there is not waited for.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from structgen.backend import Backend
from structgen.errors import EngineClosedError, EngineError, StateError
from structgen.program.tasks import cut, failure_of, kept

T = TypeVar("T")
Start = Callable[[Any], Coroutine[Any, Any, T]]
LEFT = "the block of blocking(...) was left while this program ran, and it was cancelled"
Reason = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


def run_sync(start: Start[T], backend: Backend | Blocked) -> T:
    """Run `start(backend)` to its end on an event loop of its own, and return what it returns.

    backend   one that is not open is opened for this call and closed after it; one of `blocking`
              is used as it is, on its own loop. A backend that is no async context manager needs
              no opening.

    Where the calling thread has an event loop, as in a notebook, that loop waits meanwhile.

    Raises what `start` raises, and `EngineError` for an engine that is open on another loop.
    """
    if isinstance(backend, Blocked):
        return backend.run(start)
    with Blocked(backend) as opened:
        return opened.run(start)


def blocking(backend: Backend) -> Blocked:
    """Keep a backend open for code that is not async, on an event loop in a thread of its own.

        with blocking(Engine("smollm2-135m")) as engine:
            result = haiku.run_sync(engine, "rain")
            completion = engine.run(lambda e: e.generate("1, 2, 3,", max_tokens=8))

    Any thread may use it, several at once. Leaving the block ends what still runs there.
    """
    return Blocked(backend)


class Blocked:
    """A backend that lives on an event loop in a thread of its own; `blocking` makes it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # A daemon: an interpreter that a second Ctrl-C ends does not wait for it.
        self._thread = threading.Thread(
            target=self._run_loop, name="structgen blocking", daemon=True
        )
        self._entered = False
        self._scope: AbstractAsyncContextManager[Backend] | None = None
        self._reason: Reason = (None, None, None)
        self._opened: Future[None] = Future()
        self._closed: Future[None] = Future()
        # Under the lock: whether the thread has come to its loop, or need not any more, since a
        # Ctrl-C may come while it starts; and whether it takes calls, so that none is sent to a
        # loop that has ended.
        self._lock = threading.Lock()
        self._alive = self._abandoned = self._accepting = False
        # Only the loop's own thread touches what follows.
        self._calls: dict[asyncio.Task[Any], Future[Any]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._stopped = False

    # ------------------------------------------------------------ the block

    def __enter__(self) -> Self:
        if self._entered:
            raise StateError("this block was entered before; call blocking() again")
        self._scope, self._entered = _to_open(self._backend), True
        self._context = contextvars.copy_context()
        try:
            self._thread.start()
            self._opened.result()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reason = kind, error, trace
        self._close()
        if (failure := self._closed.exception()) is not None:
            raise failure

    def run(self, start: Start[T]) -> T:
        """Run `start(backend)` on the loop of this backend, and wait for what it returns.

        The context variables of the calling thread are those of the program.
        """
        if threading.current_thread() is self._thread:
            raise StateError(
                "run_sync() inside of a program would wait for the loop that it stands on; "
                "write `await program.run(backend, ...)` there"
            )
        outcome: Future[T] = Future()
        try:
            self._send(start, outcome)
            return outcome.result()
        except BaseException:
            self._withdraw(outcome)
            raise

    def _send(self, start: Start[T], outcome: Future[T]) -> None:
        with self._lock:
            if not self._accepting:
                raise EngineClosedError(
                    "this backend is not open: use it inside `with blocking(...) as engine:`"
                )
            self._loop.call_soon_threadsafe(self._begin, start, outcome)

    def _withdraw(self, outcome: Future[Any]) -> None:
        """If it was the wait that was interrupted: cancel the call, and wait until it has ended."""
        with self._lock:
            if outcome.done() or not self._accepting:
                return
            self._loop.call_soon_threadsafe(self._cancel, outcome)
        outcome.exception()

    def _close(self) -> None:
        """End what runs, close the backend, and wait for the thread."""
        with self._lock:
            self._accepting = False
            self._abandoned = not self._alive
        if not self._abandoned:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    # ------------------------------------------------------------ in the loop's thread

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                with self._lock:
                    if self._abandoned:
                        return
                    self._alive = True
                runner.run(self._serve(), context=self._context)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for this
            if not self._opened.done():
                self._opened.set_exception(error)
            self._closed.set_exception(error)
        else:
            self._closed.set_result(None)

    async def _serve(self) -> None:
        """Keep the backend open until the block is left."""
        self._serving = asyncio.current_task()
        assert self._serving is not None
        if self._stopped:
            return
        if self._scope is not None:
            try:
                self._backend = await self._scope.__aenter__()
            except EngineError as error:
                error.add_note(
                    "run_sync() opens a backend for one call; to keep it for several, write "
                    "`with blocking(Engine(...)) as engine:` and pass that"
                )
                raise
        self._accepting = True
        self._opened.set_result(None)
        try:
            await self._loop.create_future()  # until it is cancelled by `_stop`
        except asyncio.CancelledError:
            self._serving.uncancel()
        self._stopped = True
        with self._lock:
            self._accepting = False
        try:
            await cut(self._calls)
        finally:
            if self._scope is not None:
                await self._scope.__aexit__(*self._reason)

    def _stop(self) -> None:
        """End `_serve`, once: it must not be disturbed while it closes the backend."""
        if self._serving is not None and not self._stopped:
            self._serving.cancel()
        self._stopped = True

    def _begin(self, start: Start[Any], outcome: Future[Any]) -> None:
        """Start a call, in a copy of the context of the thread that sent it."""
        if not self._accepting:
            outcome.set_exception(EngineClosedError(LEFT))
            return
        # An exit is meant for the thread that waits.
        task = self._loop.create_task(kept(lambda: start(self._backend)))
        self._calls[task] = outcome
        task.add_done_callback(self._end)

    def _cancel(self, outcome: Future[Any]) -> None:
        for task, waiting in self._calls.items():
            if waiting is outcome:
                task.cancel()
                return
        if not outcome.done():  # interrupted before it was sent
            outcome.set_exception(asyncio.CancelledError())

    def _end(self, task: asyncio.Task[Any]) -> None:
        """Hand over what a call has ended with."""
        outcome = self._calls.pop(task)
        error = failure_of(task, "the program")
        if task.cancelled() and not self._accepting:
            error = EngineClosedError(LEFT)
        if error is None:
            outcome.set_result(task.result())
        else:
            outcome.set_exception(error)


def _to_open(backend: Backend) -> AbstractAsyncContextManager[Backend] | None:
    """What has to be entered before a backend can be used, if anything.

    A backend that is an async context manager raises `EngineClosedError` from `capabilities`
    while it is not open.
    """
    if not isinstance(backend, AbstractAsyncContextManager):
        return None
    try:
        _ = backend.capabilities
    except EngineClosedError:
        return backend
    raise EngineError(
        f"this backend ({type(backend).__name__}) is open already, on another event loop: there, "
        "write `await program.run(engine, ...)`; for code that is not async, pass one that is "
        "not open, or `with blocking(Engine(...)) as engine:`"
    )
