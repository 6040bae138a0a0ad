"""Expressions: appended now, run when the state is awaited."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

import pytest

from structgen import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    image,
    select,
    separate_reasoning,
    system,
    user,
)
from structgen.errors import (
    OptionError,
    PendingError,
    RoleError,
    StateError,
    UnknownVariableError,
    UnsupportedError,
)
from structgen.program.program import Program
from structgen.program.state import State
from structgen.request import Request
from structgen.testing import ScriptedBackend
from tests.program.bodies import replying, run


class TestAwaitingAState:
    async def test_runs_what_was_appended_in_order(self) -> None:
        async def body(s: State) -> Any:
            s += "A " + gen("a") + " B " + gen("b") + " C"
            await s
            return s.text(), s["a"], s["b"]

        result = await run(body, replying(a="one", b="two"))

        assert result.value == ("A one B two C", "one", "two")

    async def test_sends_nothing_before(self) -> None:
        backend = replying(a="one")

        async def body(s: State) -> int:
            s += "A " + gen("a")
            await asyncio.sleep(0)
            before = len(backend.requests)
            await s
            return before

        assert (await run(body, backend)).value == 0
        assert len(backend.requests) == 1

    async def test_is_the_state(self) -> None:
        async def body(s: State) -> bool:
            s += "A " + gen("a")
            return (await s) is s and (await s.settle()) is s

        assert (await run(body)).value

    @pytest.mark.parametrize("eager", ["gen", "select", "stream", "fork", "tokens", "prime"])
    async def test_is_done_by_whatever_is_awaited_next(self, eager: str) -> None:
        async def body(s: State) -> Any:
            s += "A " + gen("a")
            match eager:
                case "gen":
                    await s.gen("b")
                case "select":
                    await s.select("b", ["two", "y"])
                case "stream":
                    async with s.stream("b") as pieces:
                        assert [piece async for piece in pieces]
                case "fork":
                    async with s.fork(1) as (branch,):
                        assert branch["a"] == "one"
                case "tokens":
                    assert len(await s.tokens()) == len("A one")
                case _:
                    assert (await s.prime()).prompt_tokens == len("A one")
            return s["a"]

        assert (await run(body, replying(a="one", b="two"))).value == "one"

    async def test_happens_at_the_end_of_the_program(self) -> None:
        async def body(s: State) -> None:
            s += user("Hi") + assistant("I say " + gen("a"))

        result = await run(body, replying(a="hello"))

        assert result["a"] == "hello"
        assert [m.content for m in result.messages()] == ["Hi", "I say hello"]

    async def test_settles_branches_together(self) -> None:
        backend = replying(a="one")

        async def body(s: State) -> Any:
            s += "A "
            branches = s.fork(3)
            branches += lambda i: f"{i}: " + gen("a")
            await asyncio.gather(*branches)
            return branches["a"]

        assert (await run(body, backend)).value == ["one"] * 3
        assert backend.peak == 3

    async def test_tries_again_what_failed(self) -> None:
        failures = iter([OSError("no route"), None])

        def fail(_: Request) -> None:
            if (error := next(failures)) is not None:
                raise error

        async def body(s: State) -> Any:
            s += "A " + gen("a") + "!"
            with pytest.raises(OSError, match="no route"):
                await s
            with pytest.raises(PendingError, match="'a' has been appended but not generated"):
                s["a"]
            await s
            return s.text()

        assert (await run(body, ScriptedBackend("one", fail=fail))).value == "A one!"

    async def test_does_not_happen_after_discard(self) -> None:
        backend = replying(a="one")

        async def body(s: State) -> Any:
            s += "A " + gen("a")
            s.discard()
            return "a" in s, s.text()

        assert (await run(body, backend)).value == (False, "A ")
        assert not backend.requests

    async def test_that_is_cancelled_leaves_no_trace(self) -> None:
        async def body(s: State) -> Any:
            s += "A " + gen("a")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await s
            await s
            return s.text()

        assert (await run(body, replying(a="one"))).value == "A one"


class TestReadingTooEarly:
    @pytest.mark.parametrize(
        ("read", "message"),
        [
            (lambda s: s["a"], r"'a' has been appended but not generated yet; write `await s`"),
            (lambda s: s.meta("a"), "write `await s` before"),
            (lambda s: s.text(), r"the text of a state on which gen\('a'\) was appended"),
            (lambda s: s.messages(), "the messages of a state"),
            (lambda s: s.parts(), "write `await s` first"),
            (lambda s: s.copy(), r"copy\(\) of a state"),
            (lambda s: s.fork(2)[0], "branches of a state"),
            (lambda s: list(s.fork(2)), "branches of a state on which"),
        ],
    )
    async def test_says_to_await(self, read: Any, message: str) -> None:
        async def body(s: State) -> None:
            s += "A " + gen("a")
            with pytest.raises(PendingError, match=message):
                read(s)

        await run(body, replying(a="one"))

    async def test_of_an_unknown_variable_names_those_that_exist(self) -> None:
        async def body(s: State) -> None:
            s += "A " + gen("a")
            await s
            with pytest.raises(UnknownVariableError, match="no variable 'b'; this state has 'a'"):
                s["b"]

        await run(body, replying(a="one"))

    async def test_of_the_value_that_waits_to_be_replaced(self) -> None:
        async def body(s: State) -> None:
            s += "A "
            await s.gen("a")
            s += gen("a")
            assert "a" not in s
            with pytest.raises(PendingError, match="'a'"):
                s["a"]

        await run(body, replying(a="one"))


class TestRoles:
    async def test_can_be_begun_and_ended_apart(self) -> None:
        async def whole(s: State) -> None:
            s += user("Hi")
            s += assistant("I say " + gen("a"))

        async def apart(s: State) -> None:
            s += user("Hi")
            s += assistant_begin() + "I say "
            s += gen("a") + assistant_end()

        one, two = [await run(body, replying(a="hello")) for body in (whole, apart)]

        assert one.text() == two.text()
        assert one.messages() == two.messages()

    async def test_as_blocks_wait_like_everything_else(self) -> None:
        async def body(s: State) -> Any:
            s.user("Hi")
            with s.assistant():
                s += "I say " + gen("a")
            s.user("Go on")
            await s
            return [(m.role, m.content) for m in s.messages()]

        result = await run(body, replying(a="hello"))

        assert result.value == [("user", "Hi"), ("assistant", "I say hello"), ("user", "Go on")]

    @pytest.mark.parametrize("pending", [False, True])
    async def test_do_not_nest(self, pending: bool) -> None:
        async def body(s: State) -> None:
            s += user("Hi")
            s += assistant_begin()
            if pending:
                s += gen("a")
            with pytest.raises(RoleError, match=r"user\(\) inside the role 'assistant'"):
                s += user("Go on")
            s += assistant_end()

        await run(body, replying(a="hello"))

    async def test_end_only_what_was_begun(self) -> None:
        async def body(s: State) -> None:
            s += user("Hi")
            with pytest.raises(RoleError, match=r"assistant_end\(\) outside of any role"):
                s += assistant_end()
            s += system("Be brief") + gen("a")
            with pytest.raises(RoleError, match="end the role that was begun"):
                s += assistant_end()

        await run(body, replying(a="hello"))


class TestVariableScopes:
    @pytest.mark.parametrize("pending", [False, True])
    async def test_keep_what_was_said_in_them(self, pending: bool) -> None:
        async def body(s: State) -> Any:
            s += "A "
            if pending:
                s += gen("z")
            with s.var_scope("v"):
                s += "B " + gen("a") + " C"
            s += " D"
            await s
            return s["v"]

        assert (await run(body, replying(a="one", z="zed"))).value == "B one C"

    async def test_nest(self) -> None:
        async def body(s: State) -> Any:
            with s.var_scope("outer"):
                s += "A "
                with s.var_scope("inner"):
                    s += "B"
            return s["outer"], s["inner"]

        assert (await run(body)).value == ("A B", "B")

    async def test_leave_the_markup_of_roles_aside(self) -> None:
        async def body(s: State) -> Any:
            with s.var_scope("v"):
                s.user("Hi. ")
                s.assistant("Hello.")
            return s["v"]

        assert (await run(body)).value == "Hi. Hello."

    async def test_set_nothing_after_an_error_and_say_why(self) -> None:
        async def body(s: State) -> None:
            def raise_in(scope: AbstractContextManager[None]) -> None:
                with scope:
                    s.append("A ")
                    raise ValueError("no tool")

            scope = s.var_scope("v")
            with pytest.raises(ValueError, match="no tool"):
                raise_in(scope)
            with pytest.raises(UnknownVariableError, match="failed with ValueError: no tool"):
                s["v"]

        await run(body)

    async def test_are_pending_like_what_is_in_them(self) -> None:
        async def body(s: State) -> None:
            with s.var_scope("v"):
                s += "A " + gen("a")
            with pytest.raises(PendingError, match="'v'"):
                s["v"]

        await run(body, replying(a="one"))


WRONG: Any = gen  # checkers would refuse what is tried with it
WRONG_SELECT: Any = select


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: gen("a", temperature=-1), "temperature: must be"),
            (lambda: WRONG("a", max_token=3), "max_token: unknown option"),
            (lambda: gen("a", n=0), "n: must be at least 1"),
            (lambda: gen("a", n=2, pick=2), "pick: must be between 0 and 1"),
            (lambda: gen("a", pick=len), "pick: it picks among n samples"),
            (lambda: gen("a", timeout=0), "timeout: must be"),
            (lambda: gen("a", reasoning="gpt-1"), "reasoning: unknown 'gpt-1'; the families are"),
            (lambda: gen("a", reasoning="qwen3", type=int), "reasoning: a constraint binds"),
            (lambda: gen("a", regex="a+", type=int), "regex: type= has a form of its own"),
            (lambda: gen("a", choices=[]), "choices: there must be at least one"),
            (lambda: gen("a", choices=["x"], max_tokens=3), "max_tokens: gen.choices=..."),
            (lambda: gen("a", choices=["x"], n=2), "n: gen.choices=..."),
            (lambda: gen("a", by="sum"), "by: it decides between choices"),
            (lambda: select("a"), "choices: write select"),
            (lambda: select("a", ["x", "x"]), "choices: "),
            (lambda: WRONG_SELECT("a", ["x"], by="luck"), "by: unknown 'luck'; the methods"),
            (
                lambda: WRONG_SELECT("a", ["x"], max_tokens=2),
                "max_tokens: unknown option of",
            ),
            (lambda: select("a", ["x"], temperature=1, by="greedy_token_selection"), "by: "),
        ],
    )
    def test_is_refused_where_it_is_written(self, make: Any, message: str) -> None:
        with pytest.raises(OptionError, match=message):
            make()

    def test_images_say_so(self) -> None:
        with pytest.raises(UnsupportedError, match="describe the image as text"):
            image("taxi.png")

    async def test_a_scope_that_ends_inside_another(self) -> None:
        async def body(s: State) -> None:
            one, two = s.var_scope("one"), s.var_scope("two")
            one.__enter__()
            two.__enter__()
            with pytest.raises(StateError, match="scopes end in the reverse"):
                one.__exit__(None, None, None)

        await run(body)


class TestSeparateReasoning:
    async def test_is_an_option_of_the_gens_in_it(self) -> None:
        async def body(s: State) -> Any:
            s += user("Hi")
            s += assistant(separate_reasoning(gen("a"), "qwen3"))
            await s
            return s["a"], s["a_reasoning_content"]

        backend = replying(a="<think>\nwhy\n</think>\n\nbecause")

        assert (await run(body, backend)).value == ("because", "why")

    def test_refuses_what_is_constrained(self) -> None:
        with pytest.raises(OptionError, match="reasoning has no form"):
            separate_reasoning(gen("a", type=int), "qwen3")


class TestWhatIsForgotten:
    async def test_on_a_branch_is_a_warning_that_names_it(self) -> None:
        async def body(s: State) -> None:
            s += "A "
            branch = s.fork(2)[1]
            branch += gen("lost")

        with pytest.warns(ResourceWarning, match=r"gen\('lost'\) on branch \[1\]"):
            await run(body)

    async def test_is_nothing_where_the_program_failed(self) -> None:
        async def body(s: State) -> None:
            s += "A " + gen("a")
            raise ValueError("before")

        with pytest.raises(ValueError, match="before"):
            await run(body)

    async def test_is_nothing_in_the_scope_of_a_fork(self) -> None:
        async def program(s: State) -> Any:
            s += "A "
            async with s.fork(2) as branches:
                for branch in branches:
                    branch.append(gen("a"))
            return branches["a"]

        assert (await Program(program).run(replying(a="one"))).value == ["one", "one"]


class TestJoiningWithErrors:
    async def test_keeps_their_places_and_tries_nothing_again(self) -> None:
        def fail(request: Request) -> None:
            if request.lineage.branch == (1,):
                raise OSError("no route")

        backend = ScriptedBackend("one", fail=fail)

        async def body(s: State) -> Any:
            s += "A "
            async with s.fork(3) as branches:
                for branch in branches:
                    branch.append(gen("a"))
                await branches.join(return_exceptions=True)
            return s["a"]

        one, error, three = (await run(body, backend)).value

        assert (one, three) == ("one", "one")
        assert isinstance(error, OSError)


class TestStreams:
    @pytest.mark.parametrize("option", [{"n": 2}, {"retries": 1}, {"choices": ["a"]}])
    async def test_refuse_what_needs_the_whole_output(self, option: Any) -> None:
        async def body(s: State) -> None:
            s += "A "
            with pytest.raises(OptionError, match="needs the whole output"):
                s.stream("a", **option)

        await run(body)
