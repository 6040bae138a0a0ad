"""The engine loop: plan, compute, commit, for as long as there is work.

Owns   the one task that drives the core and the one worker thread that computes.
Holds  this is the only file that knows a thread; the worker sees frozen batches, never the core.
Used   by `engine`, which starts and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from structgen.core.batch import Batch, Picked
from structgen.core.core import Core, Failure, Outcome


class Computer(Protocol):
    """What the worker calls; `Runner`, or a fake in tests."""

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the batch's logit rows."""
        ...

    def pick(self, logits_rv: Tensor, batch: Batch) -> Picked:
        """Tokens from logits."""
        ...


class Loop:
    """Drives a core: the forward runs in a worker thread, everything else on the event loop.

    What a step brought is delivered before the next one is planned, so the coroutines that wait
    for it run under the next forward.
    """

    def __init__(
        self,
        core: Core,
        computer: Computer,
        deliver: Callable[[list[Outcome]], None],
        *,
        threads: int,
        worker: bool,
    ) -> None:
        """`deliver` is called on the event loop after each step, with that step's outcomes."""
        self._core, self._computer, self._deliver = core, computer, deliver
        self._work = asyncio.Event()
        self._stopping = False
        self._worker = None
        if worker:
            self._worker = ThreadPoolExecutor(
                1, "structgen-worker", initializer=torch.set_num_threads, initargs=(threads,)
            )
        else:
            torch.set_num_threads(threads)

    @property
    def busy(self) -> asyncio.Event:
        """Set while there is work."""
        return self._work

    def wake(self) -> None:
        """There may be work."""
        self._work.set()

    async def run(self) -> None:
        """Serve until `stop`. Raises what the core raises: that is a fault of the engine."""
        while not self._stopping:
            if not self._core.has_work:
                self._work.clear()
                await self._work.wait()
                continue
            batch = self._core.plan()
            if batch is None:
                continue
            outcomes = await self._step(batch)
            self._deliver(outcomes)
            if self._worker is None or _frees_a_program(outcomes):
                # A program that got its answer sends its next request within a few callbacks;
                # let it, so that the request is in the next step and not in the one after.
                await asyncio.sleep(0)
                await asyncio.sleep(0)

    async def stop(self, task: asyncio.Task[None]) -> None:
        """End the loop after the step in flight; the worker must not outlive its memory.

        A cancellation that arrives meanwhile is heeded when that is done.
        """
        self._stopping = True
        self._work.set()
        try:
            await outlast(task)
        finally:
            if self._worker is not None:
                # Joined in a thread: a step may be running yet, if the task was cancelled.
                shutdown = anyio.to_thread.run_sync(self._worker.shutdown)
                await outlast(asyncio.ensure_future(shutdown))

    async def _step(self, batch: Batch) -> list[Outcome]:
        try:
            if self._worker is None:
                picked = self._compute(batch)
            else:
                loop = asyncio.get_running_loop()
                picked = await loop.run_in_executor(self._worker, self._compute_apart, batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to these requests
            return self._core.fail(batch, error)
        return self._core.commit(batch, picked)

    def _compute(self, batch: Batch) -> Picked:
        return self._computer.pick(self._computer.forward(batch), batch)

    def _compute_apart(self, batch: Batch) -> Picked:
        try:
            return self._compute(batch)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # A future refuses StopIteration, and the loop would wait for ever; what is no
            # Exception (a Rust panic, say) would end the loop unseen.
            raise RuntimeError(f"the computation raised {error!r}") from error


async def outlast(task: asyncio.Future[Any]) -> None:
    """Wait until a task is done, however it ends; a cancellation is heeded after that."""
    cancelled: asyncio.CancelledError | None = None
    # The shield keeps anyio's cancellation out, but not a plain `Task.cancel`.
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if not task.cancelled():
        task.exception()  # looked at, or asyncio would report it as lost where it is not needed
    if cancelled is not None:
        raise cancelled


def _frees_a_program(outcomes: list[Outcome]) -> bool:
    return any(isinstance(o, Failure) or o.finish is not None for o in outcomes)
