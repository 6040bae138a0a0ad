"""`sys.exit()` in a task that a program has: it is for whoever waits, and ends no event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from structgen import gen
from structgen.program.program import Program
from structgen.program.run import Run
from structgen.program.state import State
from structgen.program.tasks import all_of, cut, failure_of, result_of, start
from structgen.testing import ScriptedBackend
from tests.program.bodies import run
from tests.program.turns import turns

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]
Exit = type[SystemExit] | type[KeyboardInterrupt]


async def leaving(s: State) -> None:
    s += "a"
    sys.exit(3)


class Branching:
    """Branches of which the second exits, and the others wait for ever."""

    def __init__(self, kind: Exit = SystemExit) -> None:
        self.kind = kind
        self.cancelled = 0

    async def work(self, _: State, index: int) -> str:
        if index == 1:
            await turns(2)
            raise self.kind(3)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "never"


async def read(program: Program[..., Any], backend: ScriptedBackend) -> None:
    async with program.stream(backend) as running:
        async for _ in running:
            pass


async def read_batch(program: Program[..., Any], backend: ScriptedBackend) -> None:
    async with program.iter_batch(backend, [()]) as results:
        async for _ in results:
            pass


async def glance(program: Program[..., Any]) -> None:
    async with program.stream(ScriptedBackend("a")) as running:
        async for _ in running:
            break


class TestAnExitOnABranch:
    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
    @pytest.mark.parametrize("how", ["map", "race", "vote", "best_of"])
    async def test_is_raised_as_it_is_when_the_others_have_ended(
        self, how: str, kind: Exit
    ) -> None:
        branching = Branching(kind)

        async def body(s: State) -> None:
            s += "a"
            score = (lambda *_: 1.0,) if how == "best_of" else ()
            await getattr(s.fork(3), how)(branching.work, *score)

        with pytest.raises(kind, match="3"):
            await run(body)

        assert branching.cancelled == 2

    async def test_ends_a_race_that_another_branch_has_won(self) -> None:
        async def work(_: State, index: int) -> int:
            try:
                await turns(index * 3)
            finally:
                if index == 1:
                    sys.exit(3)
            return index

        async def body(s: State) -> None:
            s += "a"
            await s.fork(2).race(work)

        with pytest.raises(SystemExit):
            await run(body)

    @pytest.mark.parametrize("join", [False, True])
    async def test_may_come_of_a_callback_of_a_generation(self, join: bool) -> None:
        async def body(s: State) -> None:
            s += "a"
            branches = s.fork(2)
            branches += gen("x", n=2, pick=lambda _: sys.exit(3))
            await (branches.join(return_exceptions=True) if join else branches.settle())

        with pytest.raises(SystemExit):
            await run(body)


class TestAnExitInATaskOfOurs:
    async def test_ends_a_call_of_several_tools(self) -> None:
        async def leave() -> str:
            """Leaves."""
            sys.exit(3)

        async def body(s: State) -> None:
            await s.call([leave], parallel=True)

        one = '{"name": "leave", "arguments": {}}'
        with pytest.raises(SystemExit):
            await run(body, ScriptedBackend(f"[{one}, {one}]"))

    @pytest.mark.parametrize("reading", [read, read_batch, lambda p, b: p.run_batch(b, [(), ()])])
    async def test_is_raised_where_the_runs_are_read(
        self, reading: Callable[[Program[..., Any], ScriptedBackend], Awaitable[object]]
    ) -> None:
        with pytest.raises(SystemExit):
            await reading(Program(leaving), ScriptedBackend("a"))

    async def test_is_not_lost_where_a_stream_is_left_early(self) -> None:
        async def lingering(s: State) -> None:
            s += "a"
            try:
                await asyncio.Event().wait()
            finally:
                sys.exit(3)

        with pytest.raises(SystemExit):
            await glance(Program(lingering))

    async def test_is_nobodys_where_nobody_waits_for_the_task(self) -> None:
        run_ = Run(ScriptedBackend("a"))

        async def leave() -> None:
            sys.exit(3)

        run_.aside(leave)
        await turns(3)
        await run_.end()


class TestATask:
    async def test_tells_its_exit_and_lets_the_loop_go_on(self) -> None:
        async def leave() -> None:
            sys.exit(3)

        task = start(leave)
        await asyncio.wait([task])

        assert isinstance(failure_of(task, "it"), SystemExit)
        with pytest.raises(SystemExit):
            result_of(task)

    async def test_that_was_cancelled_before_it_began_leaves_no_coroutine(self) -> None:
        begun: list[int] = []

        async def work() -> None:
            begun.append(1)

        await cut([start(work)])

        assert begun == []

    async def test_beside_others_fails_in_a_group(self) -> None:
        async def fail() -> None:
            raise LookupError("a")

        with pytest.raises(ExceptionGroup) as caught:
            await all_of([fail, fail])

        assert [type(each) for each in caught.value.exceptions] == [LookupError] * 2
