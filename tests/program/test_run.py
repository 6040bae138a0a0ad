"""Requests never outlive the program that made them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import pytest

from structgen.errors import GenerationError, StateClosedError
from structgen.program.program import program
from structgen.program.state import State
from structgen.request import Delta, Finish, Request, Text, Tokens, Usage
from structgen.testing import ScriptedBackend
from tests.program.bodies import run, until


class TestWhenAProgramEnds:
    async def test_what_a_failed_gather_left_behind_is_aborted(self) -> None:
        backend = ScriptedBackend("abcdefgh", latency=60)

        async def fail() -> None:
            await until(lambda: backend.running == 2)
            raise ZeroDivisionError

        async def body(s: State) -> None:
            s += "x"
            await asyncio.gather(*(branch.gen() for branch in s.fork(2)), fail())

        with pytest.raises(ZeroDivisionError):
            await run(body, backend)

        assert (backend.running, backend.aborted) == (0, 2)

    async def test_a_task_that_nobody_awaits_is_told(self) -> None:
        backend = ScriptedBackend("abcdefgh", latency=60)
        tasks: list[asyncio.Task[str]] = []

        async def body(s: State) -> None:
            s += "x"
            tasks.append(asyncio.create_task(s.gen()))
            await until(lambda: backend.running == 1)

        await run(body, backend)
        await asyncio.wait(tasks)

        assert isinstance(tasks[0].exception(), StateClosedError)
        assert not tasks[0].cancelled()

    async def test_a_task_that_reads_a_stream_is_told_and_may_live_on(self) -> None:
        backend = ScriptedBackend("abcdefgh", latency=60)
        done = asyncio.Event()

        async def read(s: State) -> str:
            with suppress(StateClosedError):
                async with s.stream() as pieces:
                    async for _ in pieces:
                        pass
            await done.wait()
            return "alive"

        async def body(s: State) -> asyncio.Task[str]:
            s += "x"
            task = asyncio.create_task(read(s))
            await until(lambda: backend.running == 1)
            return task

        task = (await run(body, backend)).value
        left = backend.running
        done.set()

        assert (left, await task) == (0, "alive")

    async def test_a_stream_whose_reader_is_busy_elsewhere_is_aborted(self) -> None:
        backend = ScriptedBackend("abcdefgh")
        done = asyncio.Event()

        async def read(s: State) -> None:
            async with s.stream() as pieces:
                await anext(aiter(pieces))
                await done.wait()

        async def body(s: State) -> asyncio.Task[None]:
            s += "x"
            task = asyncio.create_task(read(s))
            await until(lambda: backend.running == 1)
            return task

        task = (await run(body, backend)).value
        left = (backend.running, backend.aborted)
        done.set()
        await asyncio.wait([task])

        assert left == (0, 1)
        assert isinstance(task.exception(), StateClosedError)

    async def test_a_stream_that_was_never_left_is_aborted(self) -> None:
        backend = ScriptedBackend("abcdefgh")

        async def body(s: State) -> AsyncExitStack:
            s += "x"
            stack = AsyncExitStack()
            await stack.enter_async_context(s.stream())
            return stack

        await run(body, backend)

        assert (backend.running, backend.aborted) == (0, 1)

    async def test_cancellation_aborts_what_runs(self) -> None:
        backend = ScriptedBackend("abcdefgh", latency=60)

        async def body(s: State) -> None:
            s += "x"
            await asyncio.gather(*(branch.gen() for branch in s.fork(2)))

        task = asyncio.create_task(run(body, backend))
        await until(lambda: backend.running == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert (backend.running, backend.aborted) == (0, 2)

    async def test_a_cancelled_scope_around_it_cannot_keep_it_from_cleaning_up(self) -> None:
        backend = ScriptedBackend("abcdefgh", latency=60)
        tasks: list[asyncio.Task[str]] = []

        async def body(s: State) -> None:
            s += "x"
            tasks.append(asyncio.create_task(s.gen()))
            await until(lambda: backend.running == 1)
            await anyio.sleep_forever()

        with anyio.move_on_after(0.01):
            await run(body, backend)
        left = backend.running
        await asyncio.wait(tasks)

        assert left == 0
        assert isinstance(tasks[0].exception(), StateClosedError)

    async def test_a_task_that_retries_for_ever_does_not_block_the_loop(self) -> None:
        async def retry(s: State) -> None:
            while True:
                with suppress(StateClosedError):
                    await s.gen()

        async def body(s: State) -> asyncio.Task[None]:
            s += "x"
            return asyncio.create_task(retry(s))

        task = (await run(body)).value
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()


class TestAnAbandonedAsyncGenerator:
    async def test_aborts_the_stream_inside_it(self) -> None:
        backend = ScriptedBackend("abcdefgh")

        async def pieces(s: State) -> AsyncIterator[str]:
            async with s.stream() as found:
                async for piece in found:
                    yield piece

        async def body(s: State) -> Any:
            s += "x"
            async for _ in pieces(s):
                break
            gc.collect()
            await until(lambda: backend.running == 0)
            return backend.aborted, s.text()

        assert (await run(body, backend)).value == (1, "x")


class TestUsage:
    async def test_is_summed_over_all_branches(self) -> None:
        async def body(s: State) -> None:
            s += "four"
            await s.fork(2).map(lambda branch, _: branch.gen(max_tokens=3))

        result = await run(body)

        assert result.usage == Usage(prompt_tokens=8, completion_tokens=6)

    async def test_counts_what_was_read_of_an_aborted_stream(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            async with s.stream() as pieces:
                await anext(aiter(pieces))

        assert (await run(body)).usage == Usage(completion_tokens=4)


class Deltas(ScriptedBackend):
    """A backend that sends given deltas, for what no script can make."""

    def __init__(self, *deltas: Delta) -> None:
        super().__init__("x")
        self.deltas = deltas

    def generate(self, request: Request, /) -> Any:
        self.requests.append(request)
        return _Given(self.deltas)


class _Given:
    def __init__(self, deltas: tuple[Delta, ...]) -> None:
        self._deltas = iter(deltas)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *reason: object) -> None:
        pass

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Delta:
        for delta in self._deltas:
            return delta
        raise StopAsyncIteration


class TestABackendThatEndsARequest:
    async def body(self, s: State) -> str:
        s += "x"
        return await s.gen()

    async def test_without_an_end_is_an_error(self) -> None:
        with pytest.raises(GenerationError, match="without saying why"):
            await run(self.body, Deltas(Delta(request=1, text="a")))

    async def test_by_abort_is_an_error(self) -> None:
        with pytest.raises(GenerationError, match="aborted the request before it was finished"):
            await run(self.body, Deltas(Delta(request=1, finish=Finish(reason="abort"))))

    async def test_without_tokens_is_kept_as_text(self) -> None:
        async def body(s: State) -> Any:
            await self.body(s)
            return s.parts()

        delta = Delta(request=1, text="ab", finish=Finish(reason="stop"))

        assert (await run(body, Deltas(delta))).value == (Text("x"), Text("ab"))


class TestAStreamLeftInsideACharacter:
    async def parts(self, *deltas: Delta) -> Any:
        async def body(s: State) -> Any:
            s += "x"
            async with s.stream("a") as pieces:
                async for piece in pieces:
                    if piece.endswith("!"):
                        break
            return s["a"], s.parts()[1:]

        return (await run(body, Deltas(*deltas))).value

    async def test_keeps_whole_deltas_as_tokens_and_the_rest_as_text(self) -> None:
        value, parts = await self.parts(
            Delta(request=1, tokens=(1, 2), text="ab"),
            Delta(request=1, tokens=(3,), text="c", partial=True),
            Delta(request=1, tokens=(4, 5), text="d!", partial=True),
            Delta(request=1, tokens=(6,), text="e", finish=Finish(reason="stop")),
        )

        assert value == "abcd!"
        assert parts == (Tokens((1, 2), "ab", "structgen-scripted-1"), Text("cd!"))

    async def test_keeps_all_tokens_where_the_text_has_caught_up(self) -> None:
        _, parts = await self.parts(
            Delta(request=1, tokens=(1, 2), text="ab", partial=True),
            Delta(request=1, tokens=(3,), text="c!"),
            Delta(request=1, finish=Finish(reason="stop")),
        )

        assert parts == (Tokens((1, 2, 3), "abc!", "structgen-scripted-1"),)


async def test_a_thousand_live_programs_share_one_thread() -> None:
    backend = ScriptedBackend("abcdefgh")

    async def body(s: State) -> str:
        s += "x"
        return await s.gen()

    before = threading.active_count()
    await asyncio.gather(*(run(body, backend) for _ in range(1_000)))

    assert (backend.peak, backend.finished) == (1_000, 1_000)
    assert threading.active_count() == before


class TestWhatIsNoBackend:
    async def test_is_refused_with_what_to_write(self) -> None:
        @program
        async def empty(s: State) -> None:
            s += "x"

        with pytest.raises(TypeError, match="takes an engine or another backend first, got str"):
            await empty.run("smollm2-135m")  # type: ignore[arg-type]  # the mistake under test
