"""What `@program` makes of a function."""

from __future__ import annotations

import contextvars
import inspect
from typing import Any

import pytest

from structgen.errors import OptionError, UnknownVariableError
from structgen.program.program import program
from structgen.program.state import State
from structgen.testing import ScriptedBackend
from tests.program.bodies import replying


@program
async def judge(s: State, essay: str, *, careful: bool = False) -> float:
    """Judge an essay."""
    s.user(essay)
    with s.assistant():
        return float(await s.gen("score", max_tokens=3)) + careful


@program
async def twice(s: State) -> tuple[float, float]:
    """Run another program inline, two times."""
    first = await judge(s, "one")
    second = await judge.using(temperature=0)(s, "two", careful=True)
    return first, second


class Teacher:
    def __init__(self, name: str) -> None:
        self.name = name

    @program
    async def greet(self, s: State, pupil: str) -> str:
        """Greet a pupil."""
        s += f"{self.name} to {pupil}: "
        return await s.gen("greeting")

    @staticmethod
    @program
    async def shout(s: State, word: str) -> str:
        s += word
        return await s.gen()


class TestRunning:
    async def test_returns_the_value_and_what_was_said(self) -> None:
        result = await judge.run(ScriptedBackend("7"), "Essay", careful=True)

        assert result.value == 8.0
        assert result["score"] == "7"
        assert "score" in result
        assert result.text().endswith("<|im_start|>assistant\n7<|im_end|>\n")
        assert [message.role for message in result.messages()] == ["user", "assistant"]
        assert result.meta("score").tokens == (ord("7"),)
        assert repr(result) == "<Result value=8.0 variables=[score]>"

    async def test_raises_for_an_unknown_variable(self) -> None:
        result = await judge.run(ScriptedBackend("7"), "Essay")

        with pytest.raises(UnknownVariableError, match=r"no variable 'scores'; .* 'score'"):
            result["scores"]

    async def test_needs_a_backend(self) -> None:
        @program
        async def confused(s: State) -> None:
            await judge.run(s, "Essay")  # type: ignore[arg-type]  # the mistake under test

        with pytest.raises(TypeError, match=r"`await judge\(s, ...\)`"):
            await confused.run(ScriptedBackend("7"))

    async def test_keeps_context_variables(self) -> None:
        user = contextvars.ContextVar("user", default="nobody")

        @program
        async def whose(s: State) -> list[str]:
            async def name(_: State, __: int) -> str:
                return user.get()

            return await s.fork(2).map(name)

        user.set("somebody")

        assert (await whose.run(ScriptedBackend())).value == ["somebody"] * 2

    async def test_gives_every_run_a_fresh_state(self) -> None:
        backend = ScriptedBackend("7")

        first = await judge.run(backend, "Essay")
        second = await judge.run(backend, "Essay")

        assert first.text() == second.text()
        assert len({request.lineage.run for request in backend.requests}) == 2


class TestCallingInline:
    async def test_goes_on_with_the_callers_state(self) -> None:
        result = await twice.run(ScriptedBackend("7"))

        assert result.value == (7.0, 8.0)
        assert len(result.messages()) == 4

    async def test_takes_the_options_of_the_program_that_is_called(self) -> None:
        backend = ScriptedBackend("7")

        await twice.using(temperature=1.0).run(backend)

        assert [request.sampling.temperature for request in backend.requests] == [1.0, 0]

    async def test_needs_a_state(self) -> None:
        with pytest.raises(TypeError, match=r"`await judge.run\(backend, ...\)`"):
            await judge(ScriptedBackend("7"), "Essay")  # type: ignore[arg-type]  # the mistake


class TestUsing:
    async def test_makes_another_program(self) -> None:
        backend = ScriptedBackend("7")

        await judge.using(temperature=0.25).using(top_k=2).run(backend, "Essay")
        await judge.run(backend, "Essay")

        options = [(r.sampling.temperature, r.sampling.top_k) for r in backend.requests]
        assert options == [(0.25, 2), (None, None)]

    def test_refuses_options_at_once(self) -> None:
        with pytest.raises(OptionError, match="top_p: must be above 0 and at most 1"):
            judge.using(top_p=2.0)
        with pytest.raises(OptionError, match="heat: unknown option"):
            judge.using(heat=1)  # type: ignore[call-arg]  # the mistake under test


class TestAProgram:
    def test_keeps_name_docstring_and_signature(self) -> None:
        assert judge.__name__ == "judge"
        assert judge.__doc__ == "Judge an essay."
        assert list(inspect.signature(judge).parameters) == ["s", "essay", "careful"]
        assert repr(judge) == f"<program {__name__}.judge>"

    def test_is_made_of_async_functions_only(self) -> None:
        def plain(s: State) -> None: ...

        with pytest.raises(TypeError, match="@program needs an `async def` function"):
            program(plain)  # type: ignore[arg-type]  # the mistake under test

    async def test_can_be_a_method(self) -> None:
        result = await Teacher("Ada").greet.run(replying(greeting="Hi"), "Bob")

        assert result.text() == "Ada to Bob: Hi"

    async def test_that_is_a_method_can_be_called_inline(self) -> None:
        teacher = Teacher("Ada")

        @program
        async def lesson(s: State) -> str:
            return await teacher.greet(s, "Bob")

        assert (await lesson.run(replying(greeting="Hi"))).value == "Hi"

    def test_that_is_a_method_keeps_its_signature(self) -> None:
        greet: Any = Teacher("Ada").greet

        assert list(inspect.signature(greet).parameters) == ["s", "pupil"]
        assert greet.__doc__ == "Greet a pupil."

    async def test_can_be_a_static_method(self) -> None:
        assert (await Teacher.shout.run(ScriptedBackend("!"), "Hey")).text() == "Hey!"
