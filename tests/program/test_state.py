"""What a program can append to a State, read from it and generate on it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from structgen.chat import CHATML, Rendering, Turn
from structgen.errors import (
    ConstraintError,
    OptionError,
    PromptError,
    UnknownVariableError,
)
from structgen.program.state import State
from structgen.request import Request, Text, Tokens, prompt_text
from structgen.testing import ScriptedBackend
from tests.program.bodies import replying, run


class TestAppending:
    async def test_adds_text(self) -> None:
        async def body(s: State) -> None:
            s += "one, "
            s.append("two")

        result = await run(body)

        assert result.text() == "one, two"

    async def test_makes_one_part_of_text_that_nothing_came_between(self) -> None:
        async def body(s: State) -> Any:
            s += "one, "
            s += "two"
            return s.parts()

        result = await run(body)

        assert result.value == (Text("one, two"),)

    @pytest.mark.parametrize(
        ("value", "cure"),
        [(7, r"str\(value\)"), (None, "only str"), (b"x", "cannot append bytes")],
    )
    async def test_refuses_what_is_not_text(self, value: Any, cure: str) -> None:
        async def body(s: State) -> None:
            s += value

        with pytest.raises(TypeError, match=cure):
            await run(body)

    async def test_says_to_await_a_generation_that_was_appended(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            s += s.gen("a")  # type: ignore[arg-type]  # the mistake under test

        with pytest.raises(TypeError, match=r"write `await s.gen\(...\)` on its own line"):
            await run(body)

    async def test_refuses_another_state(self) -> None:
        async def body(s: State) -> None:
            s += s.copy()  # type: ignore[arg-type]  # the mistake under test

        with pytest.raises(TypeError, match=r"other.text\(\)"):
            await run(body)


class TestVariables:
    async def test_are_set_by_generations_and_assignments(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            await s.gen("a")
            s["b"] = 7
            return s["a"], s["b"], "a" in s, "c" in s

        result = await run(body)

        assert result.value == ("abcdefgh", 7, True, False)

    async def test_that_are_unknown_are_named_beside_those_that_exist(self) -> None:
        async def body(s: State) -> Any:
            s["b"] = 1
            s["c"] = 2
            return s["a"]

        with pytest.raises(UnknownVariableError, match="no variable 'a'; this state has 'b', 'c'"):
            await run(body)

    async def test_that_failed_say_why_and_carry_the_cause(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            with pytest.raises(ConstraintError):
                await s.gen("a", regex="(abc")
            return s["a"]

        with pytest.raises(UnknownVariableError, match=r"'a', .*ConstraintError.*\(abc") as caught:
            await run(body)

        assert isinstance(caught.value.__cause__, ConstraintError)

    async def test_that_failed_and_then_succeeded_have_their_value(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            with pytest.raises(ConstraintError):
                await s.gen("a", regex="(abc")
            await s.gen("a")
            return s["a"]

        assert (await run(body)).value == "abcdefgh"

    async def test_must_have_names(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            await s.gen(12)  # type: ignore[call-overload]  # the mistake under test

        with pytest.raises(TypeError, match="name of a variable is a str, got 12"):
            await run(body)


class TestGenerating:
    async def test_returns_and_appends_the_text(self) -> None:
        async def body(s: State) -> Any:
            s += "start "
            return await s.gen()

        result = await run(body)

        assert (result.value, result.text()) == ("abcdefgh", "start abcdefgh")

    async def test_keeps_the_exact_tokens(self) -> None:
        backend = ScriptedBackend("abcde", token_size=2)

        async def body(s: State) -> Any:
            s += "start "
            await s.gen()
            s += " end"
            return s.parts()

        result = await run(body, backend)

        tokens = Tokens(backend.tokenizer.encode("abcde"), "abcde", backend.tokenizer.fingerprint)
        assert result.value == (Text("start "), tokens, Text(" end"))

    async def test_without_any_text_is_refused_before_the_backend_is_asked(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            await s.gen("a")

        with pytest.raises(PromptError, match="append some text"):
            await run(body, backend)

        assert backend.requests == []

    async def test_refuses_unknown_options(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            await s.gen("a", heat=1)  # type: ignore[call-overload]  # the mistake under test

        with pytest.raises(OptionError, match="heat: unknown option"):
            await run(body)

    async def test_refuses_a_constraint_that_the_backend_does_not_know(self) -> None:
        class Plain(ScriptedBackend):
            @property
            def capabilities(self) -> Any:
                return type(super().capabilities)(tokens=True)

        async def body(s: State) -> None:
            s += "x"
            await s.gen("a", regex="[0-9]+")

        with pytest.raises(ConstraintError, match=r"cannot enforce.*\[0-9\]\+"):
            await run(body, Plain("7"))

    async def test_passes_options_on_over_those_of_the_program(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "x"
            await s.gen(temperature=0.5, stop="y")

        await run(body, backend, temperature=1.0, top_k=3)

        sampling = backend.requests[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.5, 3, ("y",))

    async def test_in_a_using_block_takes_its_options(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "x"
            with s.using(temperature=0):
                await s.gen()
            await s.gen()

        await run(body, backend, temperature=1.0)

        assert [request.sampling.temperature for request in backend.requests] == [0, 1.0]

    async def test_tells_how_it_went(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            await s.gen("a", stop="ef")
            return s.meta("a")

        meta = (await run(body)).value

        assert (meta.text, meta.finish.reason, meta.finish.matched) == ("abcd", "stop", "ef")
        assert (meta.usage.prompt_tokens, meta.usage.completion_tokens) == (1, 6)

    async def test_has_no_meta_for_what_was_assigned(self) -> None:
        async def body(s: State) -> Any:
            s["a"] = 1
            return s.meta("a")

        with pytest.raises(UnknownVariableError, match="'a' was assigned or joined, not generated"):
            await run(body)

    async def test_names_the_run_the_branch_and_the_variable_in_its_request(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "x"
            await s.gen("a")
            await s.fork(2)[1].gen("b")

        await run(body, backend)

        first, second = (request.lineage for request in backend.requests)
        assert (first.branch, first.parent) == ((), "a")
        assert (second.branch, second.parent) == ((1,), "b")
        assert first.run == second.run != ""

    async def test_shows_the_users_line_where_the_backend_refuses(self) -> None:
        def refuse(request: Request) -> None:
            raise OSError(f"no {request.lineage.parent}")

        async def body(s: State) -> None:
            s += "x"
            await s.gen("a")  # the line to show

        with pytest.raises(OSError, match="no a") as caught:
            await run(body, ScriptedBackend(fail=refuse))

        lines = [str(entry.statement) for entry in caught.traceback]
        assert any("the line to show" in line for line in lines)


class TestAStopString:
    async def test_leaves_exactly_what_the_variable_holds(self) -> None:
        backend = ScriptedBackend(["abcdefgh", "x"], token_size=2, chunk=1)

        async def body(s: State) -> None:
            s += "start "
            await s.gen("a", stop="de")
            s += "then "
            await s.gen("b")

        result = await run(body, backend)

        assert result["a"] == "abc"
        assert result.text() == "start abcthen x"

    async def test_keeps_whole_tokens_and_the_rest_as_text(self) -> None:
        backend = ScriptedBackend(["abcdefgh", "x"], token_size=2, chunk=1)

        async def body(s: State) -> None:
            s += "start "
            await s.gen("a", stop="de")
            s += "then "
            await s.gen("b")

        await run(body, backend)

        kinds = [(type(part), prompt_text([part])) for part in backend.requests[1].prompt]
        assert kinds == [(Text, "start "), (Tokens, "ab"), (Text, "c"), (Text, "then ")]


class TestPartsThatWereSent:
    async def test_do_not_grow_by_text_after_a_failure(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> Any:
            s += "sent"
            with pytest.raises(ConstraintError):
                await s.gen(regex="(")
            s += " later"
            return s.parts()

        assert (await run(body, backend)).value == (Text("sent"), Text(" later"))

    async def test_stand_at_the_beginning_of_every_later_prompt(self) -> None:
        backend = ScriptedBackend("reply", token_size=3)

        async def body(s: State) -> None:
            s.system("Be brief.")
            for word in ("one", "two"):
                s.user(word)
                with s.assistant():
                    await s.gen()
                    s += "!"
                    await s.gen()

        await run(body, backend)

        ids = [backend.ids_of(request.prompt) for request in backend.requests]
        assert all(later[: len(sooner)] == sooner for sooner, later in itertools.pairwise(ids))

    async def test_are_reported_lost_when_the_template_changes_them(self) -> None:
        async def body(s: State) -> Any:
            for word in ("one", "two"):
                s.user(word)
                with s.assistant():
                    await s.gen(word)
            return s.meta("one").prefix_lost, s.meta("two").prefix_lost

        forgetful = ScriptedBackend("reply", chat=ForgetfulChat())

        assert (await run(body, forgetful)).value == (False, True)
        assert (await run(body)).value == (False, False)


class ForgetfulChat:
    """A template that drops the replies of earlier turns, as some do with reasoning."""

    def render(self, turns: Sequence[Turn]) -> Rendering:
        kept = [t if t is turns[-1] or t.role != "assistant" else Turn(t.role, ()) for t in turns]
        return CHATML.render(kept)

    def closing(self, turns: Sequence[Turn]) -> str:
        return "<|im_end|>\n" if turns else ""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ForgetfulChat:
        del tools
        return self

    def with_variables(self, variables: Mapping[str, Any]) -> ForgetfulChat:
        del variables
        return self


class TestASeedOfTheProgram:
    async def seeds(self, seed: int | None) -> list[int | None]:
        backend = replying(a="x", b="x")

        async def body(s: State) -> None:
            s += "x"
            await s.gen("a")
            await s.gen("a")
            for _ in range(2):
                for branch in s.fork(2):
                    await branch.gen("b")

        await run(body, backend, seed=seed)
        return [request.sampling.seed for request in backend.requests]

    async def test_gives_each_request_a_seed_of_its_own(self) -> None:
        assert len(set(await self.seeds(7))) == 6

    async def test_gives_the_same_seeds_again(self) -> None:
        assert await self.seeds(7) == await self.seeds(7)

    async def test_gives_other_seeds_for_another(self) -> None:
        assert set(await self.seeds(7)).isdisjoint(await self.seeds(8))

    async def test_is_needed_for_seeds(self) -> None:
        assert set(await self.seeds(None)) == {None}

    async def test_gives_way_to_the_seed_of_one_generation(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "x"
            await s.gen(seed=3)

        await run(body, backend, seed=7)

        assert backend.requests[0].sampling.seed == 3
