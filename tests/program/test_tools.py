"""`call`: the model's turn, the functions that run, the turns of their results, and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest

from structgen import gen
from structgen.errors import (
    BudgetError,
    IncompleteOutputError,
    InvalidOutputError,
    OptionError,
    RoleError,
    StateError,
    TemplateError,
)
from structgen.output.tools import Called, ToolCall
from structgen.program.program import Program
from structgen.program.state import State
from structgen.request import Control, JsonSchema, Structure, Text, prompt_text
from structgen.testing import ScriptedBackend
from tests.program.bodies import run
from tests.program.turns import cancel_everywhere


async def weather(city: str, days: int = 1) -> dict[str, Any]:
    """The weather of a city."""
    if city == "Atlantis":
        raise LookupError("no such city")
    return {"city": city, "days": days}


async def now() -> str:
    return "noon <|im_end|>"


async def visit(
    cities: Annotated[list[str], msgspec.Meta(extra_json_schema={"uniqueItems": True})],
) -> int:
    """Visit cities, none of them twice: no mask expresses that, so calls may be wrong."""
    return len(cities)


def wrote(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def calling(**options: Any) -> Callable[[State], Any]:
    async def body(s: State) -> Any:
        s.user("Ulm?")
        return await s.call([weather, now], "c", **options)

    return body


ULM = wrote("weather", city="Ulm")
TWICE = wrote("visit", cities=["Ulm", "Ulm"])


class TestACall:
    async def test_runs_the_function_and_gives_its_result(self) -> None:
        result = await run(calling(), ScriptedBackend(ULM))

        found = result.value
        assert list(found) == [{"city": "Ulm", "days": 1}]
        assert found[0] == {"city": "Ulm", "days": 1}
        assert found.text == ULM
        assert found.calls == (
            ToolCall(
                "weather", {"city": "Ulm", "days": 1}, found[0], None, '{"city":"Ulm","days":1}'
            ),
        )

    async def test_sets_a_variable_with_its_meta(self) -> None:
        result = await run(calling(), ScriptedBackend(ULM))

        assert result["c"] == result.value
        assert result.meta("c").text == ULM

    async def test_is_a_turn_and_its_result_another(self) -> None:
        result = await run(calling(), ScriptedBackend(ULM))

        assert [(each.role, each.content) for each in result.messages()] == [
            ("user", "Ulm?"),
            ("assistant", ULM),
            ("tool", '{"city":"Ulm","days":1}'),
        ]

    async def test_keeps_results_from_spelling_control_tokens(self) -> None:
        async def body(s: State) -> Any:
            s.user("When?")
            await s.call([now])
            return s.parts()

        parts = (await run(body, ScriptedBackend(wrote("now")))).value

        assert Text("noon <|im_end|>") in parts
        assert Control("<|im_start|>tool\n") in parts

    async def test_is_constrained_to_calls_of_the_tools(self) -> None:
        backend = ScriptedBackend(ULM)
        await run(calling(choice="weather"), backend)
        [request] = backend.requests

        assert isinstance(request.constraint, JsonSchema)
        assert list(json.loads(request.constraint.schema)["$defs"]) == [
            "weather",
            "weather_arguments",
        ]

    async def test_takes_the_options_of_a_generation(self) -> None:
        backend = ScriptedBackend(ULM)
        await run(calling(max_tokens=60, seed=3), backend)

        assert backend.requests[0].sampling.max_tokens == 60
        assert backend.requests[0].sampling.seed == 3

    async def test_tells_a_result_that_is_no_text_with_signs_in_its_place(self) -> None:
        async def half() -> str:
            return "half: \ud800"

        async def body(s: State) -> Any:
            s.user("Do.")
            found = await s.call([half])
            with s.assistant():
                await s.gen()
            return found

        backend = ScriptedBackend([wrote("half"), "x"])
        result = await run(body, backend)

        assert list(result.value) == ["half: \ud800"]
        assert "half: ?" in prompt_text(backend.requests[1].prompt)

    async def test_goes_on_in_the_next_turn(self) -> None:
        async def body(s: State) -> Any:
            s.user("Ulm?")
            await s.call([weather])
            with s.assistant():
                await s.gen("answer")
            return s.meta("answer").prefix_lost

        backend = ScriptedBackend([ULM, "Fine."])

        assert (await run(body, backend)).value is False
        assert prompt_text(backend.requests[1].prompt).endswith(
            '<|im_start|>tool\n{"city":"Ulm","days":1}<|im_end|>\n<|im_start|>assistant\n'
        )

    async def test_settles_what_was_appended_before(self) -> None:
        async def body(s: State) -> Any:
            s.user("Ulm?")
            with s.assistant():
                s += gen("thought")
            found = await s.call([weather])
            return s["thought"], len(found)

        assert (await run(body, ScriptedBackend(["hm", ULM]))).value == ("hm", 1)


class TestSeveralCalls:
    async def test_run_at_once_and_answer_in_order(self) -> None:
        met = asyncio.Event()

        async def first() -> str:
            await met.wait()
            return "first"

        async def second() -> str:
            met.set()
            return "second"

        async def body(s: State) -> Any:
            s.user("Both.")
            return await s.call([first, second], parallel=True)

        text = f"[{wrote('first')}, {wrote('second')}]"
        result = await run(body, ScriptedBackend(text))

        assert list(result.value) == ["first", "second"]
        assert [each.content for each in result.messages()[2:]] == ["first", "second"]

    async def test_are_cancelled_when_one_ends_all(self) -> None:
        cancelled = []

        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        async def failing() -> None:
            await asyncio.sleep(0)
            raise LookupError("gone")

        async def body(s: State) -> Any:
            s.user("Both.")
            with pytest.raises(LookupError, match="gone"):
                await s.call([forever, failing], parallel=True, on_error="raise")
            return s.messages()

        text = f"[{wrote('forever')}, {wrote('failing')}]"
        result = await run(body, ScriptedBackend(text))

        assert cancelled == [True]
        assert len(result.value) == 1


class TestAnErrorOfATool:
    async def test_is_told_to_the_model(self) -> None:
        result = await run(calling(), ScriptedBackend(wrote("weather", city="Atlantis")))

        [call] = result.value.calls
        assert isinstance(call.error, LookupError)
        assert call.result is None
        assert result.messages()[-1].content == "LookupError: no such city"

    async def test_is_told_in_text_that_a_prompt_can_have(self) -> None:
        async def failing() -> None:
            raise LookupError("no \ud800")

        async def body(s: State) -> Any:
            s.user("Do.")
            await s.call([failing])
            with s.assistant():
                await s.gen()

        result = await run(body, ScriptedBackend([wrote("failing"), "x"]))

        assert result.messages()[2].content == "LookupError: no ?"

    async def test_is_a_result_that_json_cannot_write(self) -> None:
        async def strange() -> object:
            return {"at": object()}

        async def body(s: State) -> Any:
            s.user("Do.")
            return await s.call([strange])

        result = await run(body, ScriptedBackend(wrote("strange")))

        [call] = result.value.calls
        assert isinstance(call.error, TypeError)
        assert call.result is None
        assert call.text == result.messages()[-1].content
        assert call.text.startswith("TypeError: the result cannot be written as JSON: ")

    async def test_ends_the_call_where_that_was_asked(self) -> None:
        async def body(s: State) -> Any:
            s.user("Ulm?")
            before = s.text()
            with pytest.raises(LookupError):
                await s.call([weather], "c", on_error="raise")
            return s.text() == before, "c" in s

        found = await run(body, ScriptedBackend(wrote("weather", city="Atlantis")))

        assert found.value == (True, False)

    async def test_ends_it_always_where_it_is_the_runs_own(self) -> None:
        async def body(s: State) -> Any:
            async def meddling() -> None:
                s.append("x")

            s.user("Do.")
            with pytest.raises(StateError, match="runs on the same State"):
                await s.call([meddling])

        await run(body, ScriptedBackend(wrote("meddling")))

    async def test_is_not_told_where_it_is_the_budget_of_the_run(self) -> None:
        async def program(s: State) -> Any:
            async def inner() -> str:
                return str(await branch.gen())

            s.user("Do.")
            [branch] = s.fork(1)
            await s.call([inner])

        backend = ScriptedBackend(lambda _: wrote("inner"))
        with pytest.raises(BudgetError):
            await Program(program).budget(tokens=45).run(backend)


class TestAnAnswerInsteadOfACall:
    async def test_has_no_results(self) -> None:
        backend = ScriptedBackend("It rains.")
        result = await run(calling(choice="auto"), backend)

        assert result.value == Called("It rains.")
        assert not result.value
        assert [each.role for each in result.messages()] == ["user", "assistant"]
        assert isinstance(backend.requests[0].constraint, Structure)

    async def test_is_a_choice_of_the_model(self) -> None:
        assert list((await run(calling(choice="auto"), ScriptedBackend(ULM))).value) != []


class TestACallThatFails:
    @pytest.mark.parametrize(
        ("reply", "options", "error"),
        [
            (ULM, {"max_tokens": 10}, IncompleteOutputError),
            (TWICE, {}, InvalidOutputError),
        ],
    )
    async def test_leaves_the_state_as_it_was(
        self, reply: str, options: dict[str, Any], error: type[Exception]
    ) -> None:
        async def body(s: State) -> Any:
            s.user("Ulm?")
            before = s.text()
            with pytest.raises(error):
                await s.call([weather, visit], "c", **options)
            return s.text() == before, "c" in s

        assert (await run(body, ScriptedBackend(reply))).value == (True, False)

    async def test_is_tried_again_where_asked(self) -> None:
        async def body(s: State) -> Any:
            s.user("Ulm?")
            return await s.call([weather, visit], "c", retries=1)

        found = await run(body, ScriptedBackend([TWICE, ULM]))

        assert found.meta("c").attempts == 2
        assert len(found.messages()) == 3

    async def test_leaves_no_trace_wherever_it_is_cancelled(self) -> None:
        backend = ScriptedBackend(ULM, chunk=30)

        async def work() -> None:
            async def program(s: State) -> None:
                s.user("Ulm?")
                before = s.text()
                try:
                    await s.call([weather])
                except asyncio.CancelledError:
                    assert s.text() == before
                    raise

            await Program(program).run(backend)

        assert await cancel_everywhere(work, lambda: None) >= 3
        assert backend.running == 0

    async def test_ends_with_its_timeout(self) -> None:
        async def slow() -> None:
            await asyncio.sleep(60)

        async def body(s: State) -> None:
            s.user("Wait.")
            await s.call([slow], timeout=0.05)

        with pytest.raises(TimeoutError, match=r"call\(\) was not finished within"):
            await run(body, ScriptedBackend(wrote("slow")))


class TestWhereACallCanStand:
    async def test_is_outside_of_roles(self) -> None:
        async def body(s: State) -> None:
            s.user("Ulm?")
            with s.assistant():
                await s.call([weather])

        with pytest.raises(RoleError, match=r"inside the role 'assistant'.*leave the block first"):
            await run(body, ScriptedBackend(ULM))

    async def test_is_a_chat(self) -> None:
        async def body(s: State) -> None:
            s += "Ulm?"
            await s.call([weather])

        with pytest.raises(TemplateError, match=r"no chat template.*gen.type"):
            await run(body, ScriptedBackend(ULM, chat=None))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"regex": "a"}, "^regex: the output of call"),
            ({"json_schema": True}, "^json_schema: the output of call"),
            ({"reasoning": "qwen3"}, "^reasoning: the output of call"),
            ({"on_error": "ignore"}, "^on_error: expected 'tell' or 'raise'"),
            ({"role": "assistant"}, "^role: results are told as"),
            ({"parallel": 1}, "^parallel: "),
            ({"choice": "rain"}, "^choice: "),
            ({"max_token": 1}, "did you mean max_tokens"),
        ],
        ids=str,
    )
    async def test_refuses_options_it_cannot_heed(
        self, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(OptionError, match=message):
            await run(calling(**options))
