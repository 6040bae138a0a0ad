"""Faults that a hostile or careless program once found in the language, and the right outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import pytest

from structgen import assistant_end, gen, record, separate_reasoning, user, user_end
from structgen.errors import (
    BudgetError,
    ConcurrentUseError,
    DeadlineError,
    OptionError,
    RoleError,
    StateError,
    UnknownVariableError,
)
from structgen.events import BranchClosed, BranchOpened, Event, RunEnded
from structgen.program.program import Program
from structgen.program.run import Run
from structgen.program.state import State
from structgen.request import Request
from structgen.testing import ScriptedBackend
from tests.program.bodies import replying, run


class Gated(ScriptedBackend):
    """Replies stop after their first delta until the gate of their variable is open."""

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__("abcdefgh", chunk=1, **options)
        self.gates = {name: asyncio.Event() for name in names}

    @asynccontextmanager
    async def _held(self, request: Request) -> AsyncIterator[AsyncIterator[Any]]:
        async with super().generate(request) as deltas:
            yield self._gated(deltas, self.gates.get(request.lineage.parent))

    def generate(self, request: Request, /) -> Any:
        return self._held(request)

    async def _gated(self, deltas: AsyncIterator[Any], gate: asyncio.Event | None) -> Any:
        async for delta in deltas:
            yield delta
            if gate is not None:
                await gate.wait()


def fail_in(block: AbstractContextManager[None], *, entered: bool = False) -> None:
    """Leave a block by an error, which is what it should pass on."""
    if not entered:
        block.__enter__()
    error = ValueError("inside")
    with contextlib.suppress(ValueError):
        assert not block.__exit__(ValueError, error, None)


class TestSamples:
    async def test_that_fail_are_told_at_once(self) -> None:
        asked: list[Request] = []

        class Second(Gated):
            async def _gated(self, deltas: Any, _: Any) -> Any:
                asked.append(deltas)
                number = len(asked)
                async for delta in deltas:
                    if number == 2:
                        raise OSError("the second")
                    yield delta
                    await asyncio.Event().wait()  # the others never end

        async def body(s: State) -> str:
            s += "A "
            with pytest.raises(OSError, match="the second"):
                await s.gen("a", n=3)
            return s.text()

        backend = Second()
        assert (await run(body, backend)).value == "A "
        assert backend.running == 0

    async def test_all_count_for_the_budget(self) -> None:
        async def body(s: State) -> None:
            s += "A "
            await s.gen(n=8, max_tokens=100, ignore_eos=True)

        backend = ScriptedBackend("abcdefgh", chunk=1)
        with pytest.raises(BudgetError):
            await Program(body).budget(tokens=20).run(backend)
        # A request may never be read: what it may generate is bounded when it is sent.
        assert all(request.sampling.max_tokens == 21 for request in backend.requests)


class TestBudgets:
    @pytest.mark.parametrize("form", ["map", "block", "swallowed"])
    async def test_end_the_run_by_their_own_error_alone(self, form: str) -> None:
        async def body(s: State) -> None:
            s += "A "
            long: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
            if form == "map":
                await s.fork(3).map(lambda branch, _: branch.gen(**long))
            elif form == "block":
                async with s.fork(3) as branches:
                    for branch in branches:
                        branch.append(gen(**long))
            else:
                with pytest.raises(BudgetError):
                    await s.gen(**long)

        with pytest.raises(BudgetError):
            await Program(body).budget(tokens=20).run(ScriptedBackend("abcdefgh", chunk=1))


class TestTimeouts:
    @staticmethod
    async def stream(s: State) -> None:
        async with s.stream("y", timeout=0.01):
            pass

    @pytest.mark.parametrize("operation", ["gen", "select", "stream"])
    async def test_bind_what_is_run_before_the_call(self, operation: str) -> None:
        timed: Any = {
            "gen": lambda s: s.gen("y", timeout=0.01),
            "select": lambda s: s.select("y", ["a", "b"], timeout=0.01),
            "stream": self.stream,
        }[operation]

        async def body(s: State) -> None:
            s += "A " + gen("slow")
            with pytest.raises(DeadlineError, match=r"timeout of 0\.01 s"):
                await timed(s)
            s.discard()

        async with asyncio.timeout(5):
            await run(body, Gated("slow"))


class TestJoining:
    async def test_looks_at_the_parent_again_after_settling(self) -> None:
        backend = Gated("slow", "x")

        async def body(s: State) -> None:
            s += "A "
            branches = s.fork(2)
            for branch in branches:
                branch.append(gen("x"))
            join = asyncio.create_task(branches.join("append"))
            await asyncio.sleep(0)
            going = asyncio.create_task(s.gen("slow"))
            await asyncio.sleep(0)
            backend.gates["x"].set()
            with pytest.raises(ConcurrentUseError, match=r"join\(\) while gen\('slow'\)"):
                await join
            backend.gates["slow"].set()
            await going

        async with asyncio.timeout(5):
            await run(body, backend)

    async def test_with_errors_takes_only_those_of_the_branches(self) -> None:
        def fail(request: Request) -> None:
            if request.lineage.parent == "plan":
                raise OSError("no plan")

        async def body(s: State) -> Any:
            s += "A "
            with pytest.raises(OSError, match="no plan"):
                await s.gen("plan")
            branches = s.fork(2)
            for branch in branches:
                branch.append(gen("x"))
            await branches.join(return_exceptions=True)
            return "plan" in s, s["x"]

        assert (await run(body, ScriptedBackend("b", fail=fail))).value == (False, ["b", "b"])

    @pytest.mark.parametrize("second", [gen(), gen("x")])
    async def test_with_errors_loses_none(self, second: Any) -> None:
        seen: dict[tuple[int, ...], int] = {}

        def fail(request: Request) -> None:
            branch = request.lineage.branch
            seen[branch] = seen.get(branch, 0) + 1
            if branch == (1,) and seen[branch] == 2:
                raise OSError("the second")

        async def body(s: State) -> None:
            s += "A "
            branches = s.fork(2)
            for branch in branches:
                branch.append(gen("x") + second)
            with pytest.raises(ExceptionGroup, match="no list has a place") as info:
                await branches.join(return_exceptions=True)
            assert isinstance(info.value.exceptions[0], OSError)

        await run(body, ScriptedBackend("b", fail=fail))


class TestAppending:
    @pytest.mark.parametrize("pending", [False, True])
    async def test_is_all_or_nothing(self, pending: bool) -> None:
        async def body(s: State) -> Any:
            s += "A "
            if pending:
                s += gen("x")
            with pytest.raises(RoleError):
                s += user("Hi") + assistant_end()
            with pytest.raises(RoleError):
                s.user("a" + user("hi"))
            s.user("fine")
            await s
            return [message.content for message in s.messages()]

        assert (await run(body)).value == ["fine"]

    async def test_is_as_deep_as_a_loop_is_long(self) -> None:
        async def body(s: State) -> int:
            long = "" + user("0")
            for number in range(1, 5000):
                long += user(str(number))
            s += long
            return len(s.messages())

        assert (await run(body)).value == 5000

    async def test_uses_nothing_up(self) -> None:
        once: Any = (each for each in ["c"])  # no sequence, as checkers would say
        twice = gen("a", stop=once)

        def add(state: State, what: Any) -> State:
            state += what
            return state

        async def adding(s: State) -> Any:
            s += "A "
            again: Any = (each for each in ["c"])
            with s.using(stop=again):
                found: list[Any] = [await s.copy().gen(), await s.copy().gen(n=2)]
            return [*found, (await add(s.copy(), twice))["a"], (await add(s.copy(), twice))["a"]]

        assert (await run(adding, ScriptedBackend("abcd"))).value == [
            "ab",
            ["ab", "ab"],
            "ab",
            "ab",
        ]

    @pytest.mark.parametrize("said", [(None,), ("a", "b")], ids=str)
    async def test_of_nothing_or_two_things_is_a_mistake(self, said: Any) -> None:
        async def body(s: State) -> None:
            with pytest.raises(TypeError, match=r"cannot append NoneType|takes one content"):
                s.user(*said)

        await run(body)

    async def test_reasoning_is_given_once(self) -> None:
        with pytest.raises(OptionError, match="has 'kimi' already"):
            separate_reasoning(gen("a", reasoning="kimi"), "qwen3")


class TestScopes:
    async def test_whose_beginning_was_dropped_say_so(self) -> None:
        async def body(s: State) -> None:
            s += "A " + gen("x")
            scope = s.var_scope("v")
            scope.__enter__()
            s.discard()
            with pytest.raises(StateError, match="dropped by discard"):
                scope.__exit__(None, None, None)

        await run(body)

    async def test_of_one_name_are_told_apart(self) -> None:
        async def body(s: State) -> Any:
            with s.var_scope("v"):
                s += "A"
                fail_in(s.var_scope("v"))
                s += "B"
            return s["v"]

        assert (await run(body)).value == "AB"

    async def test_need_a_name(self) -> None:
        async def body(s: State) -> None:
            nobody: Any = None
            with pytest.raises(TypeError, match="name of a variable"):
                s[nobody] = 4
            with pytest.raises(TypeError, match="name of a variable"):
                s.var_scope(nobody).__enter__()

        await run(body)


class TestRoleBlocks:
    async def test_that_fail_after_their_end_was_appended(self) -> None:
        async def body(s: State) -> Any:
            block = s.user()
            assert block is not None
            block.__enter__()
            s += gen("x") + user_end()
            fail_in(block, entered=True)
            s.append("!")
            await s
            return [message.content for message in s.messages()]

        async def said(s: State) -> Any:
            s += "A "
            return await body(s)

        assert (await run(said, replying(x="one"))).value == ["one"]

    async def test_left_while_a_settle_fails_in_them_tell_its_error(self) -> None:
        class Late(Gated):
            async def _gated(self, deltas: Any, gate: Any) -> Any:
                async for delta in deltas:
                    await gate.wait()
                    yield delta
                    raise OSError("no route")

        backend = Late("z")

        async def body(s: State) -> None:
            s += "A " + gen("z")
            block = s.user()
            assert block is not None
            block.__enter__()
            task = asyncio.create_task(s.settle())
            await asyncio.sleep(0)
            with pytest.raises(ConcurrentUseError, match="await it inside the block"):
                block.__exit__(None, None, None)
            backend.gates["z"].set()
            with pytest.raises(OSError, match="no route"):
                await task
            s.discard()

        await run(body, backend)


class TestDefaultOptions:
    async def test_of_two_tasks_on_one_state_end_in_any_order(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "A "
            first, second = s.using(temperature=0.1), s.using(temperature=0.7)
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            await s.gen()
            second.__exit__(None, None, None)
            await s.gen()

        await run(body, backend)

        assert [each.sampling.temperature for each in backend.requests] == [0.7, None]


class TestResults:
    async def test_have_every_variable_by_its_name(self) -> None:
        async def body(s: State) -> None:
            s += "A "
            s["set"] = 3
            await s.gen("generated")

        result = await run(body, ScriptedBackend("a"))

        assert result.variables == {"set": 3, "generated": "a"}

    async def test_hold_no_backend(self) -> None:
        def fail(request: Request) -> None:
            if request.lineage.parent == "x":
                raise OSError("no route")

        async def body(s: State) -> None:
            s += "A "
            with pytest.raises(OSError, match="no route"):
                await s.gen("x")

        backend = ScriptedBackend("a", fail=fail)
        watch = weakref.ref(backend)
        result = await run(body, backend)
        del backend
        gc.collect()

        assert watch() is None
        with pytest.raises(UnknownVariableError, match="failed with OSError: no route"):
            result["x"]


class TestEvents:
    async def test_close_every_branch_and_end_every_run(self) -> None:
        events: list[Event] = []

        async def body(s: State) -> None:
            s += "A "
            await s.fork(3).map(lambda branch, _: branch.gen())
            async with s.fork(2) as branches:
                await branches[0].gen()

        with record():
            async with Program(body).stream(ScriptedBackend("a")) as stream:
                events = [event async for event in stream]

        opened = [event.state for event in events if isinstance(event, BranchOpened)]
        closed = [event.state for event in events if isinstance(event, BranchClosed)]
        assert len(opened) == 5
        assert sorted(closed) == sorted(opened)
        assert isinstance(events[-1], RunEnded)

    @pytest.mark.parametrize("turns", range(1, 30))
    async def test_end_a_run_that_is_cancelled_at_any_moment(self, turns: int) -> None:
        events: list[Event] = []

        async def body(s: State) -> None:
            s += "A " + gen("a") + " and more"
            await s

        async def start() -> None:
            await Program(body)._run(ScriptedBackend("abcd"), (), {}, events.append)

        task = asyncio.create_task(start())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        assert not events or isinstance(events[-1], RunEnded)


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"regex": 5}, "regex: expected a string"),
            ({"regex": b"a"}, "regex: expected a string"),
            ({"ignore_eos": "no"}, "ignore_eos: expected True or False"),
            ({"logprobs": "no"}, "logprobs: expected True or False"),
        ],
        ids=str,
    )
    def test_are_refused_where_they_are_written(
        self, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(OptionError, match=message):
            gen("a", **options)

    async def test_no_backend_is_refused_before_any_item(self) -> None:
        async def body(_: State) -> None: ...

        made: Any = Program(body)
        for wrong in (None, ScriptedBackend):
            with pytest.raises(TypeError, match="takes an engine or another backend"):
                await made.run_batch(wrong, iter([(), ()]))
            with pytest.raises(TypeError, match="takes an engine or another backend"):
                made.stream(wrong)

    async def test_an_async_key_cannot_vote(self) -> None:
        async def key(value: str) -> str:
            return value

        async def body(s: State) -> None:
            s += "A "
            with pytest.raises(ExceptionGroup) as info:
                await s.fork(2).vote(lambda branch, _: branch.gen(), key=key)
            assert "key function is async" in str(info.value.exceptions[0])

        await run(body)

    def test_attributes_of_the_function_are_its_own(self) -> None:
        async def body(s: State) -> None: ...

        marked: Any = body
        marked.limits, marked.options = 5, "x"

        assert Program(body).limits == Run.__init__.__defaults__[0]  # type: ignore[index]  # it has
        assert Program(body).options == {}

    async def test_arguments_of_the_call_come_before_bound_ones(self) -> None:
        async def body(_: State, one: int, two: int) -> Any:
            return one, two

        bound: Any = Program(body).bind(one=1, two=2)

        assert (await bound.run(ScriptedBackend(), 10)).value == (10, 2)


class TestBeginners:
    async def test_who_return_a_coroutine_are_told(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            return s.gen("x")

        with pytest.raises(TypeError, match=r"returned the coroutine .*gen.*write `return await"):
            await run(body)

    def test_who_take_an_expression_for_its_value_are_told(self) -> None:
        with pytest.raises(TypeError, match="not an f-string"):
            f"It is {gen('x')}"
        with pytest.raises(TypeError, match="has no value yet"):
            bool(gen("x"))

    async def test_whose_script_names_a_choice_get_it(self) -> None:
        async def body(s: State) -> Any:
            s += "A: "
            return await s.select("x", ["a", "b", "c"])

        assert (await run(body, replying(x="b"))).value == "b"
        with pytest.raises(AssertionError, match="none of the choices"):
            await run(body, replying(x="d"))
