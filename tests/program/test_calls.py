"""What a single call can do: samples, types, choices, reasoning, limits of time."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
import pytest

from structgen import gen
from structgen.errors import (
    BudgetError,
    DeadlineError,
    IncompleteOutputError,
    InvalidOutputError,
    OptionError,
    UnknownVariableError,
    UnsupportedError,
)
from structgen.program.program import Program
from structgen.program.state import State
from structgen.request import Text, Tokens, prompt_text
from structgen.testing import ScriptedBackend
from tests.program.bodies import replying, run


class TestSamples:
    async def test_make_a_list_of_which_one_goes_into_the_text(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            values = await s.gen("a", n=3)
            return values, s["a"], s.text(), [each.text for each in s.meta("a").samples]

        result = await run(body, ScriptedBackend(["one", "two", "three"]))

        three = ["one", "two", "three"]
        assert result.value == (three, three, "A one", three)

    @pytest.mark.parametrize("pick", [1, lambda values: values.index("two")])
    async def test_let_the_caller_pick_another(self, pick: Any) -> None:
        async def body(s: State) -> Any:
            s += "A "
            await s.gen("a", n=3, pick=pick)
            return s.text(), s.meta("a").text

        result = await run(body, ScriptedBackend(["one", "two", "three"]))

        assert result.value == ("A two", "two")

    @pytest.mark.parametrize("index", [3, -1, "0", True])
    async def test_refuse_an_index_that_is_none(self, index: Any) -> None:
        async def body(s: State) -> Any:
            s += "A "
            with pytest.raises(OptionError, match="pick: the function returned"):
                await s.gen("a", n=3, pick=lambda _: index)
            return s.text()

        assert (await run(body)).value == "A "

    async def test_run_at_once_with_seeds_of_their_own(self) -> None:
        backend = ScriptedBackend("x")

        async def body(s: State) -> None:
            s += "A "
            await s.gen("a", n=4)

        await run(body, backend, seed=7)
        first = [request.sampling.seed for request in backend.requests]
        await run(body, backend, seed=7)

        assert backend.peak == 4
        assert len(set(first)) == 4
        assert [request.sampling.seed for request in backend.requests[4:]] == first

    async def test_can_be_one_and_typed(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            return await s.gen(n=1, type=int)

        assert (await run(body, ScriptedBackend("42"))).value == [42]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class City(msgspec.Struct):
    name: str
    population: int

    def __post_init__(self) -> None:
        if self.population < 0:
            raise ValueError("fewer than nobody")


class TestTypes:
    @pytest.mark.parametrize(
        ("type_", "reply", "value"),
        [
            (str, "text", "text"),
            (int, "-12", -12),
            (float, "2.5", 2.5),
            (bool, "True", True),
            (Literal["a", "b"], "b", "b"),
            (Colour, "blue", Colour.BLUE),
            (City, '{"name":"Ulm","population":126}', City("Ulm", 126)),
            (list[int], "[1,2]", [1, 2]),
        ],
    )
    async def test_make_the_value_of_the_reply(self, type_: Any, reply: str, value: Any) -> None:
        async def body(s: State) -> Any:
            s += "A "
            got = await s.gen("a", type=type_)
            assert s["a"] == got
            return got, s.text()

        assert (await run(body, ScriptedBackend(reply))).value == (value, f"A {reply}")

    async def test_that_the_reply_is_none_of_leave_the_state_alone(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            with pytest.raises(InvalidOutputError) as info:
                await s.gen("a", type=City)
            with pytest.raises(UnknownVariableError, match="failed with InvalidOutputError"):
                s["a"]
            return info.value.text, s.text()

        reply = '{"name":"Ulm","population":-1}'

        assert (await run(body, ScriptedBackend(reply))).value == (reply, "A ")

    async def test_that_were_cut_off_say_by_what(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            with pytest.raises(IncompleteOutputError, match="was cut off by max_tokens") as info:
                await s.gen("a", type=City, max_tokens=5)
            return info.value.text

        reply = '{"name":"Ulm","population":126}'

        assert (await run(body, ScriptedBackend(reply))).value == reply[:5]


class TestSelecting:
    @staticmethod
    def scores(_: str, choice: str) -> float:
        return {"yes": -1.0, "no": -4.0, "maybe so": -2.0}[choice.strip()]

    async def test_takes_the_best_by_the_method(self) -> None:
        async def body(s: State) -> Any:
            s += "Q"
            mean = await s.copy().select(choices=["yes", "no", "maybe so"])
            total = await s.copy().select(choices=["yes", "no", "maybe so"], by="sum")
            return mean, total

        result = await run(body, ScriptedBackend(score=self.scores))

        assert result.value == ("maybe so", "yes")

    async def test_keeps_the_tokens_that_were_scored(self) -> None:
        async def body(s: State) -> Any:
            s += "Q:"
            await s.select("a", [" yes", " no"])
            return s.parts(), s["a"], s.text()

        backend = ScriptedBackend(score=self.scores)
        parts, value, text = (await run(body, backend)).value

        ids, mark = backend.tokenizer.encode(" yes"), backend.tokenizer.fingerprint
        assert parts == (Text("Q:"), Tokens(ids, " yes", mark))
        assert (value, text) == (" yes", "Q: yes")

    async def test_gives_a_last_space_to_the_choices(self) -> None:
        seen = []

        def score(prompt: str, choice: str) -> float:
            seen.append((prompt, choice))
            return self.scores(prompt, choice)

        async def body(s: State) -> Any:
            s += "Q: "
            await s.select("a", ["yes", "no"])
            return s["a"], s.text(), s.meta("a").choices[0].text

        result = await run(body, ScriptedBackend(score=score))

        assert seen == [("Q:", " yes"), ("Q:", " no")]
        assert result.value == ("yes", "Q: yes", "yes")

    @pytest.mark.parametrize(
        ("text", "choices", "heal"),
        [
            ("Q: ", ["yes", "no"], False),
            ("Q:  ", ["yes", "no"], True),
            ("Q: ", [" yes", "no"], True),
            ("Q:\n", ["yes", "no"], True),
            (" ", ["yes", "no"], True),
        ],
    )
    async def test_leaves_other_text_as_it_is(
        self, text: str, choices: list[str], heal: bool
    ) -> None:
        seen = []

        def score(prompt: str, choice: str) -> float:
            seen.append((prompt, choice))
            return self.scores(prompt, choice)

        async def body(s: State) -> Any:
            s += text
            await s.select("a", choices, heal=heal)
            return s.text()

        result = await run(body, ScriptedBackend(score=score))

        assert seen == [(text, choice) for choice in choices]
        assert result.value == text + choices[0]

    async def test_heals_a_space_after_what_was_generated(self) -> None:
        async def body(s: State) -> Any:
            s += "Q"
            await s.gen("x")
            s += " "
            await s.select("a", ["yes", "no"])
            return prompt_text(s.parts()), s["a"]

        assert (await run(body, replying(x="A:"))).value[0] in {"QA: yes", "QA: no"}

    async def test_tells_all_about_every_choice(self) -> None:
        async def body(s: State) -> Any:
            s += "Q"
            await s.select("a", ["yes", "no"], by="sum")
            return s.meta("a")

        meta = (await run(body, ScriptedBackend(score=self.scores))).value

        assert [each.text for each in meta.choices] == ["yes", "no"]
        assert [each.total for each in meta.choices] == pytest.approx([-1.0, -4.0])
        assert sum(each.probability for each in meta.choices) == pytest.approx(1.0)
        assert meta.by == "sum"
        assert meta.usage.prompt_tokens == 1

    async def test_draws_from_the_distribution_by_the_seed(self) -> None:
        async def body(s: State) -> Any:
            s += "Q"
            return [
                await s.copy().select(choices=["yes", "no"], temperature=3.0) for _ in range(40)
            ]

        backend = ScriptedBackend(score=self.scores)
        one = (await run(body, backend, seed=1)).value
        again = (await run(body, backend, seed=1)).value
        other = (await run(body, backend, seed=2)).value

        assert one == again != other
        assert 20 < one.count("yes") < 40

    async def test_needs_a_backend_that_scores(self) -> None:
        class Mute(ScriptedBackend):
            @property
            def capabilities(self) -> Any:
                return msgspec.structs.replace(super().capabilities, score=False)

        async def body(s: State) -> None:
            s += "Q"
            with pytest.raises(UnsupportedError, match="cannot score choices"):
                await s.select("a", ["yes", "no"])

        await run(body, Mute())

    async def test_is_what_gen_does_with_choices(self) -> None:
        async def body(s: State) -> Any:
            s += "Q"
            return await s.gen("a", choices=["yes", "no"], by="sum"), s.meta("a").by

        assert (await run(body, ScriptedBackend(score=self.scores))).value == ("yes", "sum")


class TestReasoning:
    REPLY = "<think>\nwhy\n</think>\n\nbecause"

    async def test_goes_to_a_variable_of_its_own(self) -> None:
        async def body(s: State) -> Any:
            s += "Q"
            answer = await s.gen("a", reasoning="qwen3")
            return answer, s["a"], s["a_reasoning_content"], s.text()

        result = await run(body, replying(a=self.REPLY))

        assert result.value == ("because", "because", "why", "Q" + self.REPLY)

    async def test_is_told_from_the_answer_piece_by_piece(self) -> None:
        async def body(s: State) -> Any:
            s += "Q"
            async with s.stream("a", reasoning="qwen3") as pieces:
                read = [(piece.channel, str(piece)) async for piece in pieces]
            return read, s["a"], s["a_reasoning_content"]

        read, answer, thoughts = (await run(body, replying(a=self.REPLY))).value

        assert "".join(text for channel, text in read if channel == "answer") == answer
        assert "".join(text for channel, text in read if channel == "reasoning") == thoughts
        assert (answer, thoughts) == ("because", "why")


async def timed_stream(s: State) -> None:
    async with s.stream("a", timeout=0.01) as pieces:
        [piece async for piece in pieces]


async def timed_settle(s: State) -> None:
    s += gen("a", timeout=0.01)
    await s


TIMED: dict[str, Callable[[State], Awaitable[Any]]] = {
    "gen": lambda s: s.gen("a", timeout=0.01),
    "stream": timed_stream,
    "select": lambda s: s.select("a", ["x", "y"], timeout=0.01),
    "settle": timed_settle,
}


class TestTimeouts:
    @pytest.mark.parametrize("operation", TIMED)
    async def test_end_the_call_by_an_error_and_leave_the_state(self, operation: str) -> None:
        class Slow(ScriptedBackend):
            async def turn(self) -> None:
                await asyncio.sleep(3600)

        backend = Slow("x")

        async def body(s: State) -> Any:
            s += "Q"
            with pytest.raises(DeadlineError, match=r"within its timeout of 0\.01 s"):
                await TIMED[operation](s)
            s.discard()
            return s.text()

        assert (await run(body, backend)).value == "Q"
        assert backend.running == 0

    async def test_are_timeouts(self) -> None:
        assert issubclass(DeadlineError, TimeoutError)


class TestBudgets:
    async def test_of_tokens_end_the_run(self) -> None:
        async def body(s: State) -> None:
            s += "Q"
            for _ in range(100):
                await s.gen(max_tokens=8, ignore_eos=True)

        backend = ScriptedBackend("abcdefgh")

        with pytest.raises(BudgetError, match="more than its budget of 20 tokens") as info:
            await Program(body).budget(tokens=20).run(backend)
        assert info.value.budget == "tokens"
        assert len(backend.requests) == 3
        assert backend.running == 0

    async def test_of_tokens_cut_the_branches_that_are_live(self) -> None:
        errors: list[BaseException] = []

        async def body(s: State) -> None:
            s += "Q"

            async def work(branch: State) -> None:
                try:
                    await branch.gen(max_tokens=1000, ignore_eos=True)
                except BudgetError as error:
                    errors.append(error)
                    raise

            await asyncio.gather(*(work(each) for each in s.fork(3)), return_exceptions=True)
            await s.gen()

        backend = ScriptedBackend("abcdefgh", chunk=1)
        with pytest.raises(BudgetError):
            await Program(body).budget(tokens=30).run(backend)
        assert len(errors) == 3
        assert (backend.running, backend.aborted) == (0, 3)

    async def test_of_seconds_end_the_run(self) -> None:
        async def body(s: State) -> None:
            s += "Q"
            await asyncio.sleep(3600)

        with pytest.raises(BudgetError, match=r"within its budget of 0\.01 s") as info:
            await Program(body).budget(seconds=0.01).run(ScriptedBackend())
        assert info.value.budget == "seconds"

    async def test_are_not_for_inline_calls(self) -> None:
        async def part(s: State) -> None:
            s += "Q"

        async def body(s: State) -> None:
            with pytest.raises(OptionError, match="budget: it is kept by a run"):
                await Program(part).budget(tokens=5)(s)

        await run(body)


class TestBinding:
    async def test_is_like_partial(self) -> None:
        async def body(_: State, one: int, two: int = 2, *, three: int = 3) -> Any:
            return one, two, three

        bound: Any = Program(body).bind(two=20, three=30)

        assert (await bound.run(ScriptedBackend(), 1)).value == (1, 20, 30)
        assert (await bound.run(ScriptedBackend(), 1, three=31)).value == (1, 20, 31)
        assert (await bound.bind(one=10).run(ScriptedBackend())).value == (10, 20, 30)

    async def test_refuses_names_that_the_program_lacks(self) -> None:
        async def body(s: State, one: int) -> None: ...

        with pytest.raises(TypeError, match="body has no parameter 'two'; it has one"):
            Program(body).bind(two=2)
