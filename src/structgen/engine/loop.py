"""The engine loop: plan, compute, commit, for as long as there is work.

Owns   the one task that drives the core and the one worker thread that computes.
Holds  this is the only file that knows a thread; the worker sees frozen batches, never the core.
Used   by `engine`, which starts and ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import anyio.to_thread
import msgspec
import torch
from torch import Tensor

from structgen.core.batch import Batch, Picked
from structgen.core.core import Core, Failure, Outcome
from structgen.engine.memory import Tidying
from structgen.grammar.matcher import Mask
from structgen.waiting import outlast


class Computer(Protocol):
    """What the worker calls; `Runner`, or a fake in tests."""

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the batch's logit rows."""
        ...

    def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
        """Tokens from logits; `mask` is there if rows of the batch are bound to one."""
        ...


class Waits:
    """How long requests waited for the first step that computed something of them."""

    def __init__(self) -> None:
        # The seconds that it waited; until then, minus the time at which it came.
        self._waited: dict[int, float] = {}

    def arrive(self, request: int) -> None:
        """A request was submitted."""
        self._waited[request] = -time.perf_counter()

    def start(self, requests: Iterable[int]) -> None:
        """A step is about to compute the first of these requests."""
        now = time.perf_counter()
        for request in requests:
            if request in self._waited:  # if not, it was abandoned a moment ago
                self._waited[request] += now

    def stamp(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes of a step; those that end a request say how long it waited."""
        return [self._stamped(outcome) for outcome in outcomes]

    def forget(self, request: int) -> None:
        """A request was left."""
        self._waited.pop(request, None)

    def _stamped(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Failure) or outcome.finish is None:
            return outcome
        waited = self._waited.get(outcome.request, 0.0)
        finish = msgspec.structs.replace(outcome.finish, waited=waited)
        return msgspec.structs.replace(outcome, finish=finish)


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
        waits: Waits | None = None,
    ) -> None:
        """`deliver` is called on the event loop after each step, with that step's outcomes.

        waits   of the requests whose arrival was noted there, the loop notes the first steps
        """
        self._core, self._computer, self._deliver = core, computer, deliver
        self._waits = waits or Waits()
        self._tidying = Tidying()
        self._work = asyncio.Event()
        self._progress = time.perf_counter()
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

    @property
    def stalled(self) -> float:
        """Seconds since there was work and no step has ended; 0 while there is none."""
        return time.perf_counter() - self._progress if self._work.is_set() else 0.0

    def wake(self) -> None:
        """There may be work."""
        if not self._work.is_set():
            self._progress = time.perf_counter()
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
            self._waits.start(self._core.admitted)
            outcomes = await self._step(batch)
            self._progress = time.perf_counter()
            self._deliver(self._waits.stamp(outcomes))
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
                picked = self._compute(batch, lambda: self._core.mask(batch))
            else:
                # The worker asks for the masks between forward and pick, and by then has them.
                handed: Future[Mask | None] = Future()
                loop = asyncio.get_running_loop()
                computed = loop.run_in_executor(
                    self._worker, self._compute_apart, batch, handed.result
                )
                self._hand_over(batch, handed)
                picked = await computed
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to these requests
            return self._core.fail(batch, error)
        return self._core.commit(batch, picked)

    def _hand_over(self, batch: Batch, handed: Future[Mask | None]) -> None:
        """Make the masks of the step that the worker computes; it waits until there is an answer.

        So an error must reach it, too: it leaves the step by way of the worker.
        """
        try:
            handed.set_result(self._core.mask(batch) if batch.masks else None)
        except Exception as error:  # noqa: BLE001 - see above
            handed.set_exception(error)
        finally:
            handed.cancel()  # of no effect where there is an answer

    def _compute(self, batch: Batch, mask: Callable[[], Mask | None]) -> Picked:
        self._tidying.between_steps()
        logits_rv = self._computer.forward(batch)
        if (made := mask()) is None:
            return self._computer.pick(logits_rv, batch)
        return self._computer.pick(logits_rv, batch, made)

    def _compute_apart(self, batch: Batch, mask: Callable[[], Mask | None]) -> Picked:
        try:
            return self._compute(batch, mask)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # A future refuses StopIteration, and the loop would wait for ever; what is no
            # Exception (a Rust panic, say) would end the loop unseen.
            raise RuntimeError(f"the computation raised {error!r}") from error


def _frees_a_program(outcomes: list[Outcome]) -> bool:
    return any(isinstance(o, Failure) or o.finish is not None for o in outcomes)
