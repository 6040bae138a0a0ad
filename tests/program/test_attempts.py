"""Outputs that are cut off, or whole and wrong: which error, and what retries do."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NewType

import msgspec
import pytest

from structgen import gen
from structgen.errors import (
    BudgetError,
    IncompleteOutputError,
    InvalidOutputError,
    OptionError,
)
from structgen.program.program import Program
from structgen.program.state import State
from structgen.testing import ScriptedBackend
from tests.program.bodies import run


class Even(msgspec.Struct):
    """Its schema cannot say that the number is even, so only reading finds out."""

    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("odd")


UNIQUE = {"type": "array", "uniqueItems": True}
ODD, EVEN = '{"number":3}', '{"number":4}'


def asking(**options: Any) -> Any:
    async def body(s: State) -> Any:
        s += "A "
        return await s.gen("a", **options)

    return body


class TestAnOutputThatIsCutOff:
    @pytest.mark.parametrize(
        ("type_", "reply", "most"),
        [
            (Even, EVEN, 5),
            (Literal["left", "right"], "left", 3),
            (list[int], "[1,2,3]", 6),
        ],
    )
    async def test_is_an_error_that_has_the_text(self, type_: Any, reply: str, most: int) -> None:
        with pytest.raises(IncompleteOutputError, match=r"gen\('a'\) was cut off by max_t") as info:
            await run(asking(type=type_, max_tokens=most), ScriptedBackend(reply))

        assert info.value.text == reply[:most]

    async def test_is_not_cut_by_a_stop_inside_of_it(self) -> None:
        found = await run(asking(type=list[int], stop=","), ScriptedBackend("[1,2,3]"))

        assert found.value == [1, 2, 3]

    @pytest.mark.parametrize(
        ("type_", "reply", "options", "value"),
        [
            (int, "1234", {"max_tokens": 2}, 12),
            (list[int], "[1,2]", {"max_tokens": 5}, [1, 2]),
            (int, "12.5", {"stop": "."}, 12),
        ],
    )
    async def test_is_none_where_it_is_whole_all_the_same(
        self, type_: Any, reply: str, options: dict[str, Any], value: object
    ) -> None:
        found = await run(asking(type=type_, **options), ScriptedBackend(reply))

        assert found.value == value

    async def test_of_a_text_is_no_error(self) -> None:
        text = NewType("text", str)

        assert (await run(asking(type=text, max_tokens=2), ScriptedBackend("abc"))).value == "ab"

    @pytest.mark.parametrize(
        ("options", "complete"),
        [
            ({"max_tokens": 2}, False),
            ({"stop": "c"}, True),
            ({}, True),
            ({"regex": "[a-z]+", "max_tokens": 2}, True),
            ({"regex": "[a-z]{2}", "max_tokens": 2}, True),
            ({"regex": "[a-z]{8}", "max_tokens": 2}, False),
            ({"regex": "[a-z]{8}", "stop": "c"}, True),
        ],
    )
    async def test_without_a_type_says_so_in_its_meta(
        self, options: dict[str, Any], complete: bool
    ) -> None:
        result = await run(asking(**options), ScriptedBackend("abcdefgh"))

        assert result.meta("a").finish.complete is complete

    async def test_is_not_tried_again(self) -> None:
        backend = ScriptedBackend(EVEN)

        with pytest.raises(IncompleteOutputError):
            await run(asking(type=Even, max_tokens=3, retries=5), backend)

        assert len(backend.requests) == 1


class TestAnOutputThatIsWrong:
    @pytest.mark.parametrize(
        ("options", "wrong", "right"),
        [
            ({"type": Even}, ODD, EVEN),
            ({"json_schema": UNIQUE}, "[1,1]", "[1,2]"),
            (
                {"type": Annotated[list[int], msgspec.Meta(extra_json_schema=UNIQUE)]},
                "[1,1]",
                "[1]",
            ),
        ],
        ids=["type", "final check", "bound"],
    )
    async def test_is_tried_again_as_often_as_was_asked(
        self, options: dict[str, Any], wrong: str, right: str
    ) -> None:
        backend = ScriptedBackend([wrong, wrong, right])
        result = await run(asking(**options, retries=2), backend)

        assert result.meta("a").text == right
        assert result.meta("a").attempts == 3
        with pytest.raises(InvalidOutputError) as info:
            await run(asking(**options, retries=1), ScriptedBackend([wrong, wrong, right]))
        assert info.value.text == wrong

    async def test_is_not_tried_again_by_itself(self) -> None:
        backend = ScriptedBackend([ODD, EVEN])

        with pytest.raises(InvalidOutputError, match="no Even: odd"):
            await run(asking(type=Even), backend)

        assert len(backend.requests) == 1

    async def test_names_path_and_keyword_of_the_final_check(self) -> None:
        with pytest.raises(InvalidOutputError, match="uniqueItems"):
            await run(asking(json_schema=UNIQUE), ScriptedBackend("[1,1]"))

    async def test_leaves_the_state_as_it_was(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            with pytest.raises(InvalidOutputError):
                await s.gen("a", type=Even, retries=1)
            return s.text(), "a" in s, await s.gen("a", type=Even), s.text()

        found = await run(body, ScriptedBackend([ODD, ODD, EVEN]))

        assert found.value == ("A ", False, Even(4), "A " + EVEN)

    async def test_costs_what_all_attempts_cost(self) -> None:
        result = await run(asking(type=Even, retries=3), ScriptedBackend([ODD, ODD, EVEN]))

        alone = len(EVEN) + 1  # the end token
        assert result.meta("a").usage.completion_tokens == alone
        assert result.usage.completion_tokens == 3 * alone
        assert result.usage.prompt_tokens == 3 * len("A ")

    async def test_of_some_samples_is_tried_again_alone(self) -> None:
        backend = ScriptedBackend([EVEN, ODD, EVEN, '{"number":6}'])

        found = await run(asking(type=Even, n=3, retries=1, pick=1), backend)

        assert found.value == [Even(4), Even(6), Even(4)]
        assert found.meta("a").attempts == 2
        assert backend.finished == 4

    async def test_that_was_appended_is_tried_again_too(self) -> None:
        async def body(s: State) -> Any:
            s += "A " + gen("a", type=Even, retries=1)
            await s
            return s["a"]

        assert (await run(body, ScriptedBackend([ODD, EVEN]))).value == Even(4)


class TestTheSeedsOfRetries:
    async def seeds(self, **options: Any) -> list[tuple[float | None, int | None]]:
        backend = ScriptedBackend([ODD, ODD, EVEN])
        await run(asking(type=Even, retries=2, **options), backend)
        return [(each.sampling.temperature, each.sampling.seed) for each in backend.requests]

    async def test_are_derived_from_that_of_the_call(self) -> None:
        first, *others = await self.seeds(seed=5)

        assert first == (None, 5)
        assert len({first, *others}) == 3
        assert await self.seeds(seed=5) == [first, *others]

    async def test_are_none_where_the_call_has_none(self) -> None:
        assert await self.seeds(temperature=0.5) == [(0.5, None)] * 3

    async def test_of_a_greedy_call_are_drawn_at_a_temperature(self) -> None:
        found = await self.seeds(temperature=0)

        assert [temperature for temperature, _ in found] == [0, 0.7, 0.7]
        assert found[1] != found[2]
        assert await self.seeds(temperature=0) == found


class TestRetries:
    @pytest.mark.parametrize("retries", [-1, 101, 1.0, True])
    async def test_are_a_small_number(self, retries: Any) -> None:
        with pytest.raises(OptionError, match=r"^retries: "):
            await run(asking(retries=retries))

    async def test_are_not_for_streams(self) -> None:
        async def body(s: State) -> None:
            s += "A "
            s.stream("x", retries=1)

        with pytest.raises(OptionError, match=r"^retries: it needs the whole output"):
            await run(body)

    async def test_keep_the_budget_of_the_run(self) -> None:
        async def program(s: State) -> Any:
            s += "A "
            return await s.gen("a", type=Even, retries=9)

        backend = ScriptedBackend(ODD)
        with pytest.raises(BudgetError):
            await Program(program).budget(tokens=40).run(backend)

        assert sum(each.sampling.max_tokens or 0 for each in backend.requests[-1:]) <= 40
        assert len(backend.requests) < 6

    async def test_end_with_the_timeout(self) -> None:
        backend = ScriptedBackend(ODD, latency=0.01)

        with pytest.raises(TimeoutError):
            await run(asking(type=Even, retries=99, timeout=0.1), backend)

        assert backend.running == 0
