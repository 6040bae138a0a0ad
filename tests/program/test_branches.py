"""Forking a state, working on its branches, joining them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from structgen.chat import Message
from structgen.errors import (
    ConcurrentUseError,
    ConstraintError,
    JoinError,
    OptionError,
    StateClosedError,
    StateError,
    UnknownVariableError,
)
from structgen.program.state import State
from structgen.request import Request, Text
from structgen.testing import ScriptedBackend
from tests.program.bodies import run


def echo(request: Request) -> str:
    """Reply with the last word of the prompt, so that every branch gets its own."""
    last = request.prompt[-1]
    assert isinstance(last, Text)
    return last.text.split()[-1].upper()


class TestAFork:
    async def test_makes_states_that_go_on_from_here(self) -> None:
        async def body(s: State) -> Any:
            s += "say "
            branches = s.fork(2)
            branches += lambda i: f"word{i}"
            await asyncio.gather(*(branch.gen("x") for branch in branches))
            return [branch.text() for branch in branches], branches["x"], s.text()

        result = await run(body, ScriptedBackend(echo))

        assert result.value == (
            ["say word0WORD0", "say word1WORD1"],
            ["WORD0", "WORD1"],
            "say ",
        )

    async def test_of_an_empty_state_works(self) -> None:
        async def body(s: State) -> Any:
            one, two = s.fork(2)
            one += "one"
            two += "two"
            await asyncio.gather(one.gen("v"), two.gen("v"))
            s += "done"
            return one["v"], two["v"], "v" in s, s.text(), one.text()

        result = await run(body, ScriptedBackend(echo))

        assert result.value == ("ONE", "TWO", False, "done", "oneONE")

    async def test_of_one_is_a_copy(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            s["a"] = 1
            copy = s.fork(1)[0]
            copy["a"] = 2
            copy += "y"
            return s["a"], s.text(), copy["a"], copy.text()

        assert (await run(body)).value == (1, "x", 2, "xy")

    @pytest.mark.parametrize("n", [0, -1, 1.5, True])
    async def test_of_less_than_one_is_refused(self, n: Any) -> None:
        async def body(s: State) -> None:
            s.fork(n)

        with pytest.raises(OptionError, match=r"fork\(n\) makes n >= 1 branches"):
            await run(body)

    async def test_keeps_parts_apart_that_stood_before_it(self) -> None:
        async def body(s: State) -> Any:
            s += "before"
            branch = s.copy()
            branch += " after"
            s += " too"
            return branch.parts(), s.parts()

        result = await run(body)

        assert result.value == (
            (Text("before"), Text(" after")),
            (Text("before"), Text(" too")),
        )

    async def test_gives_branches_their_paths(self) -> None:
        async def body(s: State) -> Any:
            return [inner.branch for outer in s.fork(2) for inner in outer.fork(2)]

        assert (await run(body)).value == [(0, 0), (0, 1), (1, 0), (1, 1)]

    async def test_inherits_why_a_variable_is_missing(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            with pytest.raises(ConstraintError):
                await s.gen("a", regex="(")
            return s.copy()["a"]

        with pytest.raises(UnknownVariableError, match="because generating it failed"):
            await run(body)

    async def test_of_a_thousand_levels_is_read_without_recursion(self) -> None:
        async def body(s: State) -> Any:
            for _ in range(5000):
                s += "x"
                s = s.copy()
            return len(s.text())

        assert (await run(body)).value == 5000


class TestBranches:
    async def test_are_a_sequence_of_states(self) -> None:
        async def body(s: State) -> Any:
            branches = s.fork(3)
            return len(branches), [b.branch for b in branches], branches[-1].branch, branches[1:]

        length, paths, last, rest = (await run(body)).value

        assert (length, paths, last, len(rest)) == (3, [(0,), (1,), (2,)], (2,), 2)

    async def test_take_text_for_all_or_for_each(self) -> None:
        async def body(s: State) -> Any:
            branches = s.fork(2)
            branches += "all "
            branches += lambda i: f"each {i} "
            branches[1] += "one"
            return [branch.text() for branch in branches]

        assert (await run(body)).value == ["all each 0 ", "all each 1 one"]

    async def test_cannot_be_replaced(self) -> None:
        async def body(s: State) -> None:
            branches = s.fork(2)
            branches[0] = branches[1]

        with pytest.raises(TypeError, match="cannot be replaced"):
            await run(body)

    async def test_say_which_variable_one_of_them_lacks(self) -> None:
        async def body(s: State) -> Any:
            branches = s.fork(2)
            branches[0]["a"] = 1
            return branches["a"]

        with pytest.raises(UnknownVariableError, match="no variable 'a'"):
            await run(body)


class TestMapping:
    async def test_returns_results_in_branch_order(self) -> None:
        async def body(s: State) -> Any:
            s += "say "

            async def work(branch: State, index: int) -> str:
                branch += f"word{index}"
                return await branch.gen()

            return await s.fork(3).map(work)

        assert (await run(body, ScriptedBackend(echo))).value == ["WORD0", "WORD1", "WORD2"]

    async def test_runs_branches_at_once(self) -> None:
        backend = ScriptedBackend("abcdefgh")

        async def body(s: State) -> None:
            s += "x"
            await s.fork(3).map(lambda branch, _: branch.gen())

        await run(body, backend)

        assert backend.peak == 3

    async def test_cancels_the_others_when_one_fails(self) -> None:
        def fail(request: Request) -> None:
            if request.lineage.branch == (1,):
                raise ConstraintError("no")

        backend = ScriptedBackend("abcdefgh", fail=fail, latency=60)

        async def body(s: State) -> None:
            s += "x"
            await s.fork(3).map(lambda branch, _: branch.gen())

        with pytest.raises(ExceptionGroup) as caught:
            await run(body, backend)

        assert [str(error) for error in caught.value.exceptions] == ["no"]
        assert (backend.running, backend.finished) == (0, 0)


class TestAForkScope:
    async def test_is_open_for_the_block(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> Any:
            s += "shared"
            async with s.fork(2):
                inside = set(backend.open_scopes)
            return inside, set(backend.open_scopes)

        result = await run(body, backend)

        assert result.value == ({1}, set())
        assert backend.scopes == {1: (Text("shared"),)}

    async def test_is_named_by_every_request_of_its_branches(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "shared"
            await s.gen()
            async with s.fork(2) as branches:
                await branches.map(lambda branch, _: branch.gen())
            await branches[0].gen()

        await run(body, backend)

        assert [request.lineage.scope for request in backend.requests] == [0, 1, 1, 0]

    async def test_nests(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "shared"
            async with s.fork(2) as outer:
                branch = outer[1]
                branch += "more"
                async with branch.fork(2) as inner:
                    await inner[0].gen()
                await inner[0].gen()

        await run(body, backend)

        assert [request.lineage.scope for request in backend.requests] == [2, 1]
        assert [request.lineage.branch for request in backend.requests] == [(1, 0), (1, 0)]

    async def test_of_an_empty_prefix_is_not_opened(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            async with s.fork(2):
                pass

        await run(body, backend)

        assert backend.scopes == {}

    async def test_closes_when_the_block_raises(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "x"
            async with s.fork(2):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await run(body, backend)

        assert (len(backend.scopes), backend.open_scopes) == (1, set())

    async def test_that_is_open_cannot_be_opened_again(self) -> None:
        async def body(s: State) -> None:
            branches = s.fork(2)
            async with branches, branches:
                pass

        with pytest.raises(StateError, match="open already"):
            await run(body)

    async def test_does_not_outlive_its_program(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "x"
            await s.fork(2).__aenter__()

        await run(body, backend)

        assert (len(backend.scopes), backend.open_scopes) == (1, set())


class TestJoiningByGather:
    async def test_lists_new_variables_in_branch_order(self) -> None:
        async def body(s: State) -> Any:
            s += "say "
            s["old"] = "untouched"
            branches = s.fork(2)
            branches += lambda i: f"word{i}"
            for branch in branches:
                branch["old"] = "changed"
            await branches.map(lambda branch, _: branch.gen("x"))
            await branches.join()
            return s["x"], s["old"], s.text()

        result = await run(body, ScriptedBackend(echo))

        assert result.value == (["WORD0", "WORD1"], "untouched", "say ")

    async def test_refuses_a_list_with_a_hole_and_sets_nothing(self) -> None:
        async def body(s: State) -> Any:
            branches = s.fork(2)
            for branch in branches:
                branch["whole"] = 1
            branches[0]["a"] = 1
            with pytest.raises(JoinError, match="branch 1 would leave a hole in the list 'a'"):
                await branches.join("gather")
            return "whole" in s

        assert (await run(body)).value is False

    async def test_says_why_a_branch_lacks_the_variable(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            branches = s.fork(2)
            await branches[0].gen("a")
            with pytest.raises(ConstraintError):
                await branches[1].gen("a", regex="(abc")
            await branches.join()

        with pytest.raises(JoinError, match=r"ConstraintError.*\(abc"):
            await run(body)

    async def test_refuses_branches_at_work(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            branches = s.fork(2)
            async with branches[1].stream("a"):
                await branches.join()

        with pytest.raises(ConcurrentUseError, match=r"join\(\) while stream\('a'\) runs"):
            await run(body)


class TestJoiningByAppend:
    async def test_appends_what_each_branch_said(self) -> None:
        async def body(s: State) -> Any:
            s += "say "
            branches = s.fork(2)
            branches += lambda i: f"word{i} "
            await branches.map(lambda branch, _: branch.gen("x"))
            await branches.join("append")
            return s.text(), "x" in s

        result = await run(body, ScriptedBackend(echo))

        assert result.value == ("say word0 WORD0word1 WORD1", False)

    async def test_keeps_the_exact_tokens(self) -> None:
        backend = ScriptedBackend("abcdefgh", token_size=3)

        async def body(s: State) -> Any:
            s += "x"
            branches = s.fork(2)
            await branches.map(lambda branch, _: branch.gen())
            await branches.join("append")
            return s.parts(), branches[0].parts()

        joined, branch = (await run(body, backend)).value

        assert joined == (*branch, branch[-1])

    async def test_keeps_roles(self) -> None:
        async def body(s: State) -> Any:
            branches = s.fork(2)
            for index, branch in enumerate(branches):
                branch.user(f"word{index}")
            await branches.join("append")
            return s.messages()

        result = await run(body)

        assert result.value == [Message("user", "word0"), Message("user", "word1")]

    async def test_works_inside_a_role_that_was_open_at_the_fork(self) -> None:
        async def body(s: State) -> Any:
            with s.assistant():
                branches = s.fork(2)
                branches += lambda i: f"word{i} "
                await branches.join("append")
            return s.messages()

        assert (await run(body)).value == [Message("assistant", "word0 word1 ")]

    async def test_refuses_a_parent_that_went_on(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            branches = s.fork(2)
            s += "y"
            await branches.join("append")

        with pytest.raises(JoinError, match="the parent has said more since the fork"):
            await run(body)

    async def test_refuses_a_second_time(self) -> None:
        async def body(s: State) -> None:
            branches = s.fork(2)
            branches += "x"
            await branches.join("append")
            await branches.join("append")

        with pytest.raises(JoinError, match="since the fork"):
            await run(body)

    async def test_refuses_a_branch_inside_its_own_role(self) -> None:
        async def body(s: State) -> None:
            branches = s.fork(2)
            with branches[1].assistant():
                await branches.join("append")

        with pytest.raises(JoinError, match="branch 1 is inside its role 'assistant'"):
            await run(body)

    async def test_refuses_other_modes(self) -> None:
        async def body(s: State) -> None:
            await s.fork(2).join("splice")  # type: ignore[arg-type]  # the mistake under test

        with pytest.raises(OptionError, match="mode: expected 'gather' or 'append', got 'splice'"):
            await run(body)


class TestAFailingBranchUnderGather:
    """A program like one in the field: the reason used to be lost, and siblings with it."""

    async def outcome(self, backend: ScriptedBackend) -> Any:
        async def body(s: State) -> Any:
            s += "1, 2, 3,"
            f = s.fork(3)
            results = await asyncio.gather(
                f[0].gen("x"),
                f[1].gen("x", regex="(abc"),
                f[2].gen("x"),
                return_exceptions=True,
            )
            with pytest.raises(UnknownVariableError, match="'x'") as missing:
                f[1]["x"]
            return results, f[0]["x"], f[2]["x"], missing.value

        return (await run(body, backend)).value

    async def test_raises_the_reason_and_leaves_its_siblings_alone(self) -> None:
        results, first, third, _ = await self.outcome(ScriptedBackend(" 4, 5, 6"))

        assert isinstance(results[1], ConstraintError)
        assert "(abc" in str(results[1])
        assert first == third == " 4, 5, 6"

    async def test_is_the_reason_of_the_missing_variable(self) -> None:
        results, _, _, missing = await self.outcome(ScriptedBackend(" 4, 5, 6"))

        assert missing.__cause__ is results[1]

    async def test_leaves_nothing_running(self) -> None:
        backend = ScriptedBackend(" 4, 5, 6")

        await self.outcome(backend)

        assert backend.running == 0


async def test_branches_cannot_be_joined_after_the_program() -> None:
    async def body(s: State) -> Any:
        return s.fork(2)

    branches = (await run(body)).value

    with pytest.raises(StateClosedError, match=r"join\(\) after the program"):
        await branches.join()
