"""Streams: what a reader sees, how it is woken, and that leaving ends the request."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from structgen.engine.stream import DeltaStream, Mailbox
from structgen.errors import GenerationError, StepFailedError
from structgen.request import Delta, Finish


def delta(text: str, *, last: bool = False) -> Delta:
    return Delta(request=1, text=text, finish=Finish(reason="length") if last else None)


class Sender:
    """The other end of streams: who submitted, and who was abandoned in which way."""

    def __init__(self) -> None:
        self.mailboxes: list[Mailbox] = []
        self.abandoned: list[int] = []
        self.abandoned_by_the_collector: list[int] = []

    async def submit(self, mailbox: Mailbox) -> int:
        self.mailboxes.append(mailbox)
        return len(self.mailboxes)

    def stream(self) -> DeltaStream:
        return DeltaStream(
            self.submit, self.abandoned.append, self.abandoned_by_the_collector.append
        )


async def read(mailbox: Mailbox) -> list[str]:
    texts: list[str] = []
    while (found := await mailbox.take()) is not None:
        texts.append(found.text)
    return texts


class Finding:
    """Finds all of a text, once it is let go; or raises."""

    def __init__(self, error: GenerationError | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.texts: list[str] = []
        self.threads: set[threading.Thread] = set()
        self._error = error

    def captures(self, text: str) -> tuple[tuple[str, str], ...]:
        self.texts.append(text)
        self.threads.add(threading.current_thread())
        self.begun.set()
        if self._error is not None:
            raise self._error
        assert self.go.wait(10)
        return (("all", text),)


async def settle() -> None:
    """Let everybody run who can."""
    for _ in range(5):
        await asyncio.sleep(0)


class TestAMailbox:
    async def test_gives_what_came_in_order(self) -> None:
        mailbox = Mailbox()
        mailbox.push(delta("a"))
        mailbox.push(delta("b", last=True))

        assert await read(mailbox) == ["a", "b"]

    async def test_gives_nothing_more_after_the_last(self) -> None:
        mailbox = Mailbox()
        mailbox.push(delta("a", last=True))
        await mailbox.take()

        assert await mailbox.take() is None
        assert await mailbox.take() is None

    async def test_lets_its_reader_wait(self) -> None:
        mailbox = Mailbox()
        reader = asyncio.create_task(read(mailbox))
        await settle()
        waiting = not reader.done()
        mailbox.push(delta("a", last=True))

        assert waiting
        assert await reader == ["a"]

    async def test_wakes_its_reader_once_for_all_that_a_step_brought(self) -> None:
        mailbox = Mailbox()
        wakes = 0

        async def count() -> None:
            nonlocal wakes
            while True:
                await mailbox.take()
                if not mailbox._deltas:
                    wakes += 1
                    if mailbox.finished:
                        return

        reader = asyncio.create_task(count())
        await settle()
        mailbox.push(delta("a"))
        mailbox.push(delta("b"))
        await settle()
        mailbox.push(delta("c", last=True))
        await reader

        assert wakes == 2

    async def test_gives_what_came_before_an_error_and_then_the_error(self) -> None:
        mailbox = Mailbox()
        mailbox.push(delta("a"))
        mailbox.fail(StepFailedError("out of luck"))
        first = await mailbox.take()

        assert first == delta("a")
        for _ in range(2):
            with pytest.raises(StepFailedError, match="out of luck"):
                await mailbox.take()

    async def test_wakes_a_reader_that_waits_by_an_error(self) -> None:
        mailbox = Mailbox()
        reader = asyncio.create_task(read(mailbox))
        await settle()
        mailbox.fail(StepFailedError("out of luck"))

        with pytest.raises(StepFailedError, match="out of luck"):
            await reader

    async def test_knows_no_error_after_the_end(self) -> None:
        mailbox = Mailbox()
        mailbox.push(delta("a", last=True))
        mailbox.fail(StepFailedError("too late"))

        assert await read(mailbox) == ["a"]

    async def test_loses_nothing_when_its_reader_is_cancelled(self) -> None:
        mailbox = Mailbox()
        reader = asyncio.create_task(read(mailbox))
        await settle()
        mailbox.push(delta("a", last=True))
        reader.cancel()
        await asyncio.wait([reader])

        assert await read(mailbox) == ["a"]

    async def test_keeps_the_end_when_its_reader_leaves_while_captures_are_found(self) -> None:
        finder = Finding()
        mailbox = Mailbox()
        mailbox.finder = finder
        mailbox.push(delta("ab"))
        mailbox.push(Delta(request=1, text="c", finish=Finish(reason="stop", complete=True)))
        await mailbox.take()
        reader = asyncio.create_task(mailbox.take())
        async with asyncio.timeout(10):
            await asyncio.to_thread(finder.begun.wait)
        with pytest.raises(GenerationError, match="read it from one task"):
            await mailbox.take()
        reader.cancel()
        await asyncio.wait([reader])  # though the thread goes on
        finder.go.set()
        last = await mailbox.take()

        assert reader.cancelled()
        assert finder.texts == ["abc", "abc"]
        assert threading.current_thread() not in finder.threads
        assert last is not None
        assert last.finish is not None
        assert last.finish.captures == (("all", "abc"),)
        assert await mailbox.take() is None

    async def test_ends_by_the_error_of_captures_that_cannot_be_found(self) -> None:
        mailbox = Mailbox()
        mailbox.finder = Finding(GenerationError("too many ways"))
        mailbox.push(Delta(request=1, text="c", finish=Finish(reason="stop", complete=True)))

        for _ in range(2):
            with pytest.raises(GenerationError, match="too many ways"):
                await mailbox.take()

    async def test_refuses_a_second_reader_instead_of_losing_the_first(self) -> None:
        mailbox = Mailbox()
        reader = asyncio.create_task(read(mailbox))
        await settle()

        with pytest.raises(GenerationError, match="read it from one task"):
            await mailbox.take()
        mailbox.push(delta("a", last=True))
        assert await reader == ["a"]


class TestAStream:
    async def test_submits_when_it_is_entered(self) -> None:
        sender = Sender()
        stream = sender.stream()
        before = len(sender.mailboxes)
        async with stream:
            entered = len(sender.mailboxes)

        assert (before, entered) == (0, 1)

    async def test_gives_its_deltas(self) -> None:
        sender = Sender()
        async with sender.stream() as deltas:
            sender.mailboxes[0].push(delta("a"))
            sender.mailboxes[0].push(delta("b", last=True))
            texts = [found.text async for found in deltas]

        assert texts == ["a", "b"]

    async def test_cannot_be_read_before_it_is_entered(self) -> None:
        with pytest.raises(GenerationError, match="the stream is not open"):
            await anext(Sender().stream())

    async def test_can_be_entered_once(self) -> None:
        stream = Sender().stream()
        async with stream:
            pass

        with pytest.raises(GenerationError, match="entered once"):
            await stream.__aenter__()

    async def test_can_be_entered_again_if_submitting_failed(self) -> None:
        sender = Sender()
        failures = iter([OSError("busy")])

        async def submit(mailbox: Mailbox) -> int:
            for failure in failures:
                raise failure
            return await sender.submit(mailbox)

        stream = DeltaStream(submit, sender.abandoned.append, sender.abandoned.append)
        with pytest.raises(OSError, match="busy"):
            await stream.__aenter__()
        async with stream:
            pass

        assert sender.abandoned == [1]


class TestLeavingAStream:
    async def test_abandons_the_request(self) -> None:
        sender = Sender()
        async with sender.stream():
            pass

        assert sender.abandoned == [1]

    async def test_abandons_it_after_a_break(self) -> None:
        sender = Sender()
        async with sender.stream() as deltas:
            sender.mailboxes[0].push(delta("a"))
            async for _ in deltas:
                break

        assert sender.abandoned == [1]

    async def test_abandons_it_after_an_error(self) -> None:
        sender = Sender()
        with pytest.raises(KeyError):
            async with sender.stream():
                raise KeyError

        assert sender.abandoned == [1]

    async def test_abandons_it_when_its_task_is_cancelled(self) -> None:
        sender = Sender()

        async def consume() -> None:
            async with sender.stream() as deltas:
                async for _ in deltas:
                    pass

        task = asyncio.create_task(consume())
        await settle()
        task.cancel()
        await asyncio.wait([task])

        assert sender.abandoned == [1]

    async def test_lets_nobody_wait_for_more(self) -> None:
        sender = Sender()
        async with sender.stream() as deltas:
            sender.mailboxes[0].push(delta("a"))
        assert (await anext(deltas)).text == "a"

        with pytest.raises(GenerationError, match="was left before it had finished"):
            await anext(deltas)

    async def test_is_nothing_to_the_collector(self) -> None:
        sender = Sender()
        async with sender.stream() as deltas:
            pass
        del deltas
        gc.collect()

        assert sender.abandoned_by_the_collector == []


class TestAStreamThatNobodyLeft:
    async def test_is_abandoned_by_the_collector(self) -> None:
        sender = Sender()
        stream = sender.stream()
        await stream.__aenter__()
        del stream
        gc.collect()

        assert sender.abandoned_by_the_collector == [1]
        assert sender.abandoned == []

    async def test_is_abandoned_when_it_hangs_in_a_cycle(self) -> None:
        sender = Sender()
        stream = sender.stream()
        await stream.__aenter__()
        cycle: list[object] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()

        assert sender.abandoned_by_the_collector == [1]
