"""Watching a program while it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from structgen.errors import StateError, StructgenError
from structgen.events import Event, Listener, RunEnded, RunStarted, TextDelta
from structgen.program.result import Result
from structgen.program.state import State
from structgen.program.watch import RunStream
from structgen.request import Usage
from structgen.testing import ScriptedBackend
from tests.program.bodies import run, until
from tests.program.turns import Clean, cancel_everywhere, turns

pytestmark = pytest.mark.timeout(20)

Tell = Callable[[str, str], None]
Body = Callable[[State, Tell], Awaitable[Any]]
NAME: ContextVar[str] = ContextVar("name", default="")


def watched(body: Body, backend: ScriptedBackend | None = None) -> RunStream[Any]:
    """A stream of a program that tells of text by `tell(name, text)`."""

    async def start(listener: Listener) -> Result[Any]:
        def tell(name: str, text: str) -> None:
            channel: Any = "reasoning" if name.startswith("~") else "answer"
            name = name.removeprefix("~")
            listener(delta(name, text, channel))

        async def program(s: State) -> Any:
            return await body(s, tell)

        listener(RunStarted(run="r", at=0.0, program="p"))
        try:
            return await run(program, backend)
        finally:
            listener(RunEnded(run="r", at=0.0, usage=Usage()))

    return RunStream(start)


def delta(name: str, text: str, channel: Any = "answer") -> TextDelta:
    return TextDelta(run="r", at=0.0, call=1, state=0, name=name, text=text, channel=channel)


async def three(_s: State, tell: Tell) -> str:
    """Three pieces of two variables."""
    for name, text in [("a", "one "), ("b", "two "), ("a", "three")]:
        tell(name, text)
        await asyncio.sleep(0)
    return "done"


async def failing(_s: State, tell: Tell) -> None:
    tell("a", "one")
    await asyncio.sleep(0)
    raise ZeroDivisionError("no")


async def endless(_s: State, tell: Tell) -> None:
    tell("a", "one")
    await asyncio.Event().wait()


async def joined(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, TextDelta)]


class TestTheEvents:
    async def test_come_in_order_from_the_first_to_the_last(self) -> None:
        async with watched(three) as stream:
            events = [event async for event in stream]

        assert [type(event) for event in events] == [RunStarted, *[TextDelta] * 3, RunEnded]
        assert texts(events) == ["one ", "two ", "three"]

    async def test_come_while_the_program_runs(self) -> None:
        go_on = asyncio.Event()

        async def body(_s: State, tell: Tell) -> None:
            tell("a", "one")
            await go_on.wait()

        async with watched(body) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    go_on.set()

        assert stream.result.value is None

    async def test_are_the_same_for_every_reader(self) -> None:
        async with watched(three) as stream:
            first, second = await asyncio.gather(*(_all(stream) for _ in range(2)))
            late = [event async for event in stream]

        assert first == second == late
        assert len(late) == 5

    async def test_can_be_read_on_after_a_timeout(self) -> None:
        go_on = asyncio.Event()

        async def body(_s: State, tell: Tell) -> None:
            tell("a", "one")
            await go_on.wait()
            tell("a", "two")

        async with watched(body) as stream:
            events = aiter(stream)
            read = [await anext(events), await anext(events)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(events)
            go_on.set()
            read += [event async for event in events]

        assert texts(read) == ["one", "two"]

    async def test_may_come_from_another_thread(self) -> None:
        async def start(listener: Listener) -> Result[Any]:
            thread = threading.Thread(target=lambda: listener(delta("a", "x")))
            thread.start()
            await asyncio.to_thread(thread.join)
            await heard.wait()
            return await run(_nothing)

        heard = asyncio.Event()
        async with RunStream(start) as stream:
            async for _ in stream:
                heard.set()

        assert stream.result.value is None


async def _all(stream: RunStream[Any]) -> list[Event]:
    return [event async for event in stream]


async def _nothing(_s: State) -> None:
    pass


class TestTheText:
    async def test_is_that_of_one_variable(self) -> None:
        async with watched(three) as stream:
            assert await joined(stream.text("a")) == "one three"
            assert await joined(stream.text("b")) == "two "
            assert await joined(stream.text("c")) == ""

    async def test_is_all_text_without_a_name(self) -> None:
        async with watched(three) as stream:
            assert await joined(stream.text()) == "one two three"

    async def test_comes_piece_by_piece_to_who_keeps_up(self) -> None:
        async with watched(three) as stream:
            assert [piece async for piece in stream.text()] == ["one ", "two ", "three"]

    async def test_comes_in_one_piece_to_who_is_late(self) -> None:
        async with watched(three) as stream:
            async for _ in stream:
                pass
            assert [piece async for piece in stream.text()] == ["one two three"]

    async def test_is_of_the_channel_that_is_asked_for(self) -> None:
        async def body(_s: State, tell: Tell) -> None:
            tell("~a", "hm")
            tell("a", "yes")

        async with watched(body) as stream:
            assert await joined(stream.text("a")) == "yes"
            assert await joined(stream.text("a", channel="reasoning")) == "hm"

    async def test_goes_on_until_the_program_has_ended(self) -> None:
        go_on = asyncio.Event()

        async def body(_s: State, tell: Tell) -> str:
            tell("a", "one")
            await go_on.wait()
            return "long after"

        async with watched(body) as stream:
            async for _ in stream.text("a"):
                asyncio.get_running_loop().call_soon(go_on.set)
            value = stream.result.value

        assert value == "long after"


class TestTheResult:
    async def test_is_there_after_the_block(self) -> None:
        async with watched(three) as stream:
            await joined(stream.text())

        assert stream.result.value == "done"

    async def test_is_not_there_while_the_program_runs(self) -> None:
        async with watched(three) as stream:
            with pytest.raises(StateError, match="still running, and has no result yet: read to"):
                _ = stream.result

    async def test_is_not_there_when_the_block_was_left_early(self) -> None:
        async with watched(endless) as stream:
            pass

        with pytest.raises(StateError, match=r"left before its program had ended.*read to the end"):
            _ = stream.result

    async def test_is_not_there_before_the_block(self) -> None:
        with pytest.raises(StateError, match=r"not started: write `async with program\.stream"):
            _ = watched(three).result

    async def test_raises_what_the_program_raised(self) -> None:
        async with watched(failing) as stream:
            await until(lambda: stream._task is not None and stream._task.done())
            with pytest.raises(ZeroDivisionError):
                _ = stream.result


class TestAnErrorOfTheProgram:
    @pytest.mark.parametrize("read", [_all, lambda stream: joined(stream.text("b"))])
    async def test_is_raised_after_all_that_came_before(self, read: Any) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            async with watched(failing) as stream:
                await read(stream)

        assert caught.value.__context__ is None
        assert not hasattr(caught.value, "__notes__")

    async def test_is_not_raised_again_at_the_end_of_the_block(self) -> None:
        async with watched(failing) as stream:
            with pytest.raises(ZeroDivisionError):
                await joined(stream.text())

    async def test_is_raised_to_every_reader(self) -> None:
        async with watched(failing) as stream:
            outcomes = await asyncio.gather(_all(stream), _all(stream), return_exceptions=True)

        assert [type(each) for each in outcomes] == [ZeroDivisionError] * 2

    async def test_is_raised_once_to_a_reader(self) -> None:
        async with watched(failing) as stream:
            pieces = stream.text()
            with pytest.raises(ZeroDivisionError):
                await joined(pieces)

            assert await joined(pieces) == ""

    async def test_is_raised_at_the_end_of_the_block_if_nobody_has_read_it(self) -> None:
        with pytest.raises(ZeroDivisionError):
            async with watched(failing) as stream:
                await until(lambda: stream._task is not None and stream._task.done())

    async def test_is_a_note_of_another_error_that_ends_the_block(self) -> None:
        async def work() -> None:
            async with watched(failing) as stream:
                await until(lambda: stream._task is not None and stream._task.done())
                raise KeyError

        with pytest.raises(KeyError) as caught:
            await work()

        assert "had failed before: ZeroDivisionError('no')" in caught.value.__notes__[0]

    async def test_that_looks_like_a_cancellation_is_told_apart(self) -> None:
        async def body(_s: State, _tell: Tell) -> None:
            raise asyncio.CancelledError

        with pytest.raises(StructgenError, match="the program was cancelled from within"):
            async with watched(body) as stream:
                await joined(stream.text())

    async def test_that_looks_like_the_end_is_told_apart(self) -> None:
        async def body(_s: State, _tell: Tell) -> None:
            raise StopAsyncIteration

        with pytest.raises(RuntimeError, match="the program raised StopAsyncIteration"):
            async with watched(body) as stream:
                await joined(stream.text())


async def by_break(stream: RunStream[Any]) -> None:
    async for _ in stream.text():
        break


async def by_error(stream: RunStream[Any]) -> None:
    async for _ in stream.text():
        raise ZeroDivisionError


async def by_return(_stream: RunStream[Any]) -> None:
    return


class TestLeavingEarly:
    @pytest.mark.parametrize("leave", [by_break, by_error, by_return])
    async def test_aborts_the_requests_of_the_program(self, leave: Any) -> None:
        clean, backend = Clean(), ScriptedBackend("abcdefgh", latency=60)

        async def body(s: State, tell: Tell) -> None:
            s += "x"
            generation = asyncio.ensure_future(s.gen("a"))
            await until(lambda: backend.running == 1)
            tell("a", "one")
            await generation

        try:
            async with watched(body, backend) as stream:
                await until(lambda: backend.running == 1)
                await leave(stream)
            raised = False
        except ZeroDivisionError:
            raised = True

        assert (backend.running, backend.aborted) == (0, 1)
        assert raised == (leave is by_error)
        await turns(3)
        assert clean.left() == set()

    async def test_waits_until_the_program_has_cleaned_up(self) -> None:
        cleaned = False

        async def body(_s: State, _tell: Tell) -> None:
            nonlocal cleaned
            try:
                await asyncio.Event().wait()
            finally:
                await turns(5)
                cleaned = True

        async with watched(body):
            await turns(3)

        assert cleaned

    async def test_stops_a_reader_in_another_task(self) -> None:
        async with watched(endless) as stream:
            reader = asyncio.create_task(_all(stream))
            await turns(5)

        with pytest.raises(StateError, match="was left before its program had ended"):
            await reader

    async def test_reports_an_error_that_the_program_makes_of_it(self) -> None:
        reported: list[Any] = []

        async def body(_s: State, _tell: Tell) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise ZeroDivisionError

        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        try:
            async with watched(body):
                await turns(3)
        finally:
            loop.set_exception_handler(before)

        assert [type(error) for error in reported] == [ZeroDivisionError]

    async def test_before_the_program_began_is_no_error(self) -> None:
        async with watched(three):
            pass

    async def test_by_a_cancelled_scope_cleans_up(self) -> None:
        backend = ScriptedBackend("abcdefgh", latency=60)

        async def body(s: State, _tell: Tell) -> None:
            s += "x"
            await s.gen()

        with anyio.CancelScope() as scope:
            async with watched(body, backend) as stream:
                await until(lambda: backend.running == 1)
                scope.cancel()
                await _all(stream)

        assert scope.cancelled_caught
        assert (backend.running, backend.aborted) == (0, 1)

    async def test_by_cancellation_at_any_moment_leaves_nothing(self) -> None:
        backend = ScriptedBackend("abcdefgh")

        async def body(s: State, tell: Tell) -> None:
            s += "x"
            async with s.stream("a") as pieces:
                async for piece in pieces:
                    tell("a", str(piece))

        async def work() -> None:
            async with watched(body, backend) as stream:
                await joined(stream.text("a"))

        def check() -> None:
            assert backend.running == 0

        assert await cancel_everywhere(work, check) > 3

    async def test_heeds_a_cancellation_that_comes_while_it_cleans_up(self) -> None:
        cleaning = asyncio.Event()

        async def body(_s: State, _tell: Tell) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaning.set()
                await turns(5)

        async def work() -> None:
            async with watched(body):
                await turns(3)

        task = asyncio.create_task(work())
        await cleaning.wait()
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()

    async def test_by_a_second_cancellation_still_cleans_up(self) -> None:
        cleaning, cleaned = asyncio.Event(), asyncio.Event()

        async def body(_s: State, _tell: Tell) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaning.set()
                await turns(9)
                cleaned.set()

        async def work() -> None:
            async with watched(body) as stream:
                await _all(stream)

        task = asyncio.create_task(work())
        await turns(5)
        task.cancel()
        await cleaning.wait()
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        assert cleaned.is_set()


class TestTheBlock:
    async def test_is_needed(self) -> None:
        stream = watched(three)

        with pytest.raises(StateError, match=r"write `async with program\.stream"):
            aiter(stream)
        with pytest.raises(StateError, match=r"write `async with program\.stream"):
            stream.text()

    async def test_is_entered_once(self) -> None:
        async with watched(three) as stream:
            with pytest.raises(StateError, match="opened before; call stream"):
                await stream.__aenter__()

    async def test_keeps_context_variables(self) -> None:
        async def body(_s: State, _tell: Tell) -> str:
            return NAME.get()

        NAME.set("Ada")
        async with watched(body) as stream:
            await _all(stream)

        assert stream.result.value == "Ada"

    async def test_leaves_no_task(self) -> None:
        clean = Clean()

        async with watched(three) as stream:
            await _all(stream)

        assert clean.left() == set()


async def test_many_streams_do_not_wait_for_each_other() -> None:
    """Each piece wakes one reader, once: 200 streams take as many turns as one."""

    async def turns_of(count: int) -> int:
        async def work() -> None:
            async with watched(three) as stream:
                await joined(stream.text())

        ticks = 0
        readers: Coroutine[Any, Any, Any] = _gathered([work() for _ in range(count)])
        task = asyncio.create_task(readers)
        while not task.done():
            ticks += 1
            await asyncio.sleep(0)
        return ticks

    assert await turns_of(200) <= await turns_of(1) + 2


async def _gathered(works: list[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*works)
