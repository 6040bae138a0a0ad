"""The loop around a core: what runs where, what a failure costs, and how it stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch
from torch import Tensor

from structgen.core.batch import Batch, Picked
from structgen.core.core import Core, Failure, Outcome
from structgen.engine.loop import Computer, Loop
from structgen.engine.stream import Mailbox
from structgen.errors import StepFailedError
from structgen.grammar.matcher import Mask
from structgen.request import Delta
from tests.core.fakes import PLAIN, FakeComputer, job, next_token, path_tags

PROMPT = [0, 1, 2, 0, 1]
MODES = [pytest.param(True, id="in a worker"), pytest.param(False, id="inline")]


def outputs(count: int) -> list[int]:
    path = list(PROMPT)
    for _ in range(count):
        path.append(next_token(path_tags(PLAIN, path)[-1]) or 0)
    return path[len(PROMPT) :]


class Rig:
    """A core, a loop, and a mailbox for each request."""

    def __init__(self, computer: Computer, *, worker: bool) -> None:
        self.core = Core(64)
        self.loop = Loop(self.core, computer, self.deliver, threads=1, worker=worker)
        self.mailboxes: dict[int, Mailbox] = {}
        self.deliveries = 0
        self.task = asyncio.create_task(self.loop.run())

    def deliver(self, outcomes: list[Outcome]) -> None:
        self.deliveries += 1
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                self.mailboxes[outcome.request].fail(outcome.error)
            else:
                self.mailboxes[outcome.request].push(outcome)

    def submit(self, prompt: Sequence[int] = PROMPT, max_tokens: int = 4) -> Mailbox:
        number = len(self.mailboxes) + 1
        self.core.submit(job(number, prompt, max_tokens=max_tokens))
        self.mailboxes[number] = mailbox = Mailbox()
        self.loop.wake()
        return mailbox


@asynccontextmanager
async def running(computer: Computer, *, worker: bool = True) -> AsyncIterator[Rig]:
    threads = torch.get_num_threads()
    rig = Rig(computer, worker=worker)
    try:
        yield rig
    finally:
        await rig.loop.stop(rig.task)
        torch.set_num_threads(threads)


async def tokens(mailbox: Mailbox) -> list[int]:
    found: list[int] = []
    while (delta := await mailbox.take()) is not None:
        found += delta.tokens
    return found


class GatedComputer(FakeComputer):
    """A computer whose forwards wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(64)
        self.started = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.done = 0

    def forward(self, batch: Batch) -> Tensor:
        self.started.release()
        assert self.gate.acquire(timeout=30)
        self.done += 1
        return super().forward(batch)

    async def wait_started(self) -> None:
        await asyncio.to_thread(self.started.acquire)


class TestWaits:
    async def test_end_when_the_first_step_begins(self) -> None:
        computer = GatedComputer()
        async with running(computer) as rig:
            rig.loop._waits.arrive(1)
            mailbox = rig.submit(max_tokens=2)
            await computer.wait_started()
            waited = rig.loop._waits._waited[1]
            computer.gate.release(2)
            deltas = [await mailbox.take() for _ in range(2)]

        assert waited > 0
        assert [d.finish and d.finish.waited for d in deltas if d] == [None, waited]

    async def test_of_a_request_that_leaves_in_its_first_step_are_forgotten(self) -> None:
        computer = GatedComputer()
        async with running(computer) as rig:
            rig.loop._waits.arrive(1)
            rig.submit()
            rig.loop._waits.forget(1)
            await computer.wait_started()
            computer.gate.release(9)
            await tokens(rig.mailboxes[1])

            assert rig.loop._waits._waited == {}


@pytest.mark.parametrize("worker", MODES)
class TestALoop:
    async def test_serves_a_request_to_its_end(self, worker: bool) -> None:
        async with running(FakeComputer(64), worker=worker) as rig:
            assert await tokens(rig.submit()) == outputs(4)

    async def test_serves_requests_together(self, worker: bool) -> None:
        async with running(FakeComputer(64), worker=worker) as rig:
            found = await asyncio.gather(*(tokens(rig.submit()) for _ in range(5)))

            assert found == [outputs(4)] * 5
            assert rig.core.totals.steps <= 6

    async def test_rests_without_work_and_takes_it_up_again(self, worker: bool) -> None:
        computer = FakeComputer(64)
        async with running(computer, worker=worker) as rig:
            await tokens(rig.submit())
            for _ in range(20):
                await asyncio.sleep(0)
            rested = computer.steps
            await tokens(rig.submit(max_tokens=1))

        assert rested == 4
        assert computer.steps == 5

    async def test_delivers_once_a_step(self, worker: bool) -> None:
        async with running(FakeComputer(64), worker=worker) as rig:
            await asyncio.gather(*(tokens(rig.submit()) for _ in range(5)))

            assert rig.deliveries == rig.core.totals.steps

    async def test_fails_only_the_requests_of_a_step_that_raised(self, worker: bool) -> None:
        computer = FakeComputer(64, failing={1: MemoryError("no more")})
        async with running(computer, worker=worker) as rig:
            with pytest.raises(StepFailedError, match="no more") as caught:
                await tokens(rig.submit())

            assert isinstance(caught.value.__cause__, MemoryError)
            assert await tokens(rig.submit()) == outputs(4)

    async def test_ends_by_an_error_of_the_core(self, worker: bool) -> None:
        class Unfinished(FakeComputer):
            def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
                picked = super().pick(logits_rv, batch, mask)
                return Picked(picked.tokens_r[:0], picked.logprobs_r, picked.top, picked.broken_r)

        async with running(Unfinished(64), worker=worker) as rig:
            rig.submit()
            await asyncio.wait([rig.task])

            assert isinstance(rig.task.exception(), IndexError)

    async def test_ends_by_an_error_of_who_takes_the_deliveries(self, worker: bool) -> None:
        async with running(FakeComputer(64), worker=worker) as rig:
            rig.submit()
            rig.mailboxes.clear()
            await asyncio.wait([rig.task])

            assert isinstance(rig.task.exception(), KeyError)

    async def test_stops_without_work(self, worker: bool) -> None:
        async with running(FakeComputer(64), worker=worker) as rig:
            await asyncio.sleep(0)

        assert rig.task.done()


class Panic(BaseException):
    """What a panic in a Rust extension looks like from Python."""


class TestAWorker:
    async def test_computes_on_one_thread_that_is_not_the_loops(self) -> None:
        threads: set[threading.Thread] = set()

        class Watched(FakeComputer):
            def forward(self, batch: Batch) -> Tensor:
                threads.add(threading.current_thread())
                return super().forward(batch)

            def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
                threads.add(threading.current_thread())
                return super().pick(logits_rv, batch, mask)

        async with running(Watched(64)) as rig:
            await tokens(rig.submit())

        assert len(threads) == 1
        assert threading.current_thread() not in threads

    async def test_leaves_the_loop_free_while_it_computes(self) -> None:
        computer = GatedComputer()
        async with running(computer) as rig:
            mailbox = rig.submit(max_tokens=1)
            await computer.wait_started()
            two = rig.submit([4, 4], max_tokens=1)
            rig.core.abort(2)
            computer.gate.release()

            assert await tokens(mailbox) == outputs(1)
            assert not two.finished

    async def test_takes_what_was_submitted_meanwhile_into_the_next_step(self) -> None:
        computer = GatedComputer()
        async with running(computer) as rig:
            one = rig.submit(max_tokens=2)
            await computer.wait_started()
            two = rig.submit(max_tokens=1)
            computer.gate.release(5)
            await asyncio.gather(tokens(one), tokens(two))

            assert rig.core.totals.steps == 2

    @pytest.mark.parametrize("error", [StopIteration(), Panic("at the disco"), SystemExit(3)])
    async def test_fails_a_step_by_whatever_is_raised(self, error: BaseException) -> None:
        async with running(FakeComputer(64, failing={1: error})) as rig:
            with pytest.raises(StepFailedError, match=type(error).__name__):
                await tokens(rig.submit())

            assert await tokens(rig.submit()) == outputs(4)


class TestStopping:
    async def test_waits_for_the_step_in_flight(self) -> None:
        computer = GatedComputer()
        async with running(computer) as rig:
            rig.submit()
            await computer.wait_started()
            stop = asyncio.create_task(rig.loop.stop(rig.task))
            for _ in range(10):
                await asyncio.sleep(0)
            early = stop.done()
            computer.gate.release()
            await stop

        assert not early
        assert computer.done == 1

    async def test_starts_no_other_step(self) -> None:
        computer = GatedComputer()
        async with running(computer) as rig:
            rig.submit(max_tokens=9)
            await computer.wait_started()
            computer.gate.release(9)
            await rig.loop.stop(rig.task)

            assert computer.done == 1
            assert rig.core.has_work

    async def test_leaves_no_thread(self) -> None:
        before = set(threading.enumerate())
        async with running(FakeComputer(64)) as rig:
            await tokens(rig.submit())

        names = [t.name for t in threading.enumerate() if t not in before]
        assert [name for name in names if name.startswith("structgen")] == []

    async def test_waits_even_if_it_is_cancelled_and_then_heeds_it(self) -> None:
        computer = GatedComputer()
        async with running(computer) as rig:
            rig.submit()
            await computer.wait_started()
            stop = asyncio.create_task(rig.loop.stop(rig.task))
            for _ in range(3):
                await asyncio.sleep(0)
                stop.cancel()
            await asyncio.sleep(0)
            early = stop.done()
            computer.gate.release()
            await asyncio.wait([stop])

            assert not early
            assert computer.done == 1
            assert stop.cancelled()

    async def test_delivers_what_the_last_step_brought(self) -> None:
        computer = GatedComputer()
        async with running(computer) as rig:
            mailbox = rig.submit(max_tokens=9)
            await computer.wait_started()
            stop = asyncio.create_task(rig.loop.stop(rig.task))
            await asyncio.sleep(0)
            computer.gate.release()
            await stop
            delta = await mailbox.take()

        assert isinstance(delta, Delta)
        assert list(delta.tokens) == outputs(1)
