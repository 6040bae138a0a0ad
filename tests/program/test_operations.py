"""One operation at a time, what cancelling leaves, and states whose program has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from structgen.errors import (
    ConcurrentUseError,
    StateClosedError,
    UnknownVariableError,
)
from structgen.program.state import State
from structgen.testing import ScriptedBackend
from tests.program.bodies import run, until


class TestOneOperationAtATime:
    async def test_refuses_a_second_generation(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            await asyncio.gather(s.gen("a"), s.gen("b"))

        with pytest.raises(ConcurrentUseError, match=r"gen\('b'\) while gen\('a'\).*fork\(\)"):
            await run(body)

    async def test_refuses_text_meanwhile(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            async with s.stream("a"):
                s += "y"

        with pytest.raises(ConcurrentUseError, match=r"append\(\) while stream\('a'\)"):
            await run(body)

    async def test_refuses_a_fork_meanwhile(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            async with s.stream():
                s.fork(2)

        with pytest.raises(ConcurrentUseError, match=r"fork\(\) while stream\(\)"):
            await run(body)

    async def test_does_not_note_the_refusal_as_the_variables_failure(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            await asyncio.gather(s.gen("a"), s.gen("b"), return_exceptions=True)
            return s["b"]

        with pytest.raises(UnknownVariableError, match="no variable 'b'; this state has 'a'"):
            await run(body)


class TestCancelling:
    async def test_leaves_the_state_as_it_was(self) -> None:
        backend = ScriptedBackend("abcdefgh", latency=60)

        async def body(s: State) -> Any:
            s += "x"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await s.gen("a")
            backend.latency = 0
            s += "y"
            return await s.gen("b"), "a" in s

        result = await run(body, backend)

        assert result.value == ("abcdefgh", False)
        assert result.text() == "xyabcdefgh"

    async def test_aborts_the_request(self) -> None:
        backend = ScriptedBackend("abcdefgh", latency=60)

        async def body(s: State) -> None:
            s += "x"
            task = asyncio.create_task(s.gen("a"))
            await until(lambda: backend.running == 1)
            task.cancel()
            await asyncio.wait([task])

        await run(body, backend)

        assert (backend.aborted, backend.running) == (1, 0)


class TestAfterTheProgram:
    async def kept(self) -> State:
        async def body(s: State) -> State:
            s += "x"
            return s

        value = (await run(body)).value
        assert isinstance(value, State)
        return value

    async def test_a_state_can_be_read(self) -> None:
        s = await self.kept()

        assert s.text() == "x"

    async def test_a_state_cannot_generate(self) -> None:
        s = await self.kept()

        with pytest.raises(StateClosedError, match="has ended"):
            await s.gen()

    async def test_a_state_cannot_be_changed(self) -> None:
        s = await self.kept()

        for change in (lambda: s.append("y"), lambda: s.fork(2), lambda: s.user("Hi")):
            with pytest.raises(StateClosedError, match="has ended"):
                change()
        with pytest.raises(StateClosedError, match="an assignment after"):
            s["a"] = 1
