"""Stop patterns from the request to the last delta: on the tiny model, and on the real one."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from structgen.engine.engine import Engine
from structgen.errors import ConstraintError
from structgen.request import Completion
from tests.grammar.patterns import first_end

PROMPT = "1, 2, 3, 4, 5, 6, 7, 8,"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def output(completion: Completion) -> tuple[str, tuple[int, ...], str, str | int | None, int]:
    """What a stop decides about a completion."""
    finish = completion.finish
    sampled = finish.usage.completion_tokens
    return completion.text, completion.tokens, completion.tail, finish.matched, sampled


class TestOnTheTinyModel:
    @pytest.fixture
    async def engine(self, tiny_model: Path) -> AsyncIterator[Engine]:
        async with Engine(tiny_model, slots=2000, threads=1) as engine:
            yield engine

    @pytest.mark.parametrize("pattern", [r"\w\W", r"[^a-z]{3}", "(?:.|\n){9}[A-Z]", r"\B.\b."])
    async def test_the_output_ends_before_the_first_match(
        self, engine: Engine, pattern: str
    ) -> None:
        whole = (await engine.generate(PROMPT, max_tokens=60, **GREEDY)).text
        end, length = first_end([pattern], whole)
        assert length, f"the model wrote {whole!r}: nothing matches"

        async with engine.stream(PROMPT, max_tokens=60, stop_regex=pattern, **GREEDY) as stream:
            deltas = [delta async for delta in stream]

        assert "".join(delta.text for delta in deltas) == whole[: end - length]
        finish = deltas[-1].finish
        assert finish is not None
        assert (finish.reason, finish.matched) == ("stop", whole[end - length : end])

    @pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 4), (7, 9)])
    async def test_a_pattern_that_is_a_string_does_what_the_stop_string_does(
        self, engine: Engine, start: int, end: int
    ) -> None:
        stop = (await engine.generate(PROMPT, max_tokens=30, **GREEDY)).text[start:end]

        by_string = await engine.generate(PROMPT, max_tokens=30, stop=stop, **GREEDY)
        pattern = re.escape(stop)
        by_pattern = await engine.generate(PROMPT, max_tokens=30, stop_regex=pattern, **GREEDY)

        assert by_string.finish.matched == stop
        assert output(by_pattern) == output(by_string)

    async def test_a_match_does_not_count_before_min_tokens(self, engine: Engine) -> None:
        completion = await engine.generate(
            PROMPT, max_tokens=8, min_tokens=8, stop_regex=r"(?:.|\n)", **GREEDY
        )

        assert completion.usage.completion_tokens == 8

    @pytest.mark.parametrize("pattern", ["a*", "(?=a)", "a{3000}", "(?:a{100}){100}"])
    async def test_a_pattern_that_is_refused_costs_nothing(
        self, engine: Engine, pattern: str
    ) -> None:
        before = engine.statistics()

        with pytest.raises(ConstraintError, match=re.escape(f"stop_regex {pattern!r}: ")):
            await engine.generate(PROMPT, stop_regex=["ok", pattern])

        assert engine.statistics() == before

    async def test_it_says_that_it_can(self, engine: Engine) -> None:
        assert engine.capabilities.stop_regex


@pytest.mark.slow
class TestOnTheRealModel:
    async def test_a_match_that_spans_tokens_is_cut_as_the_stop_string_is(
        self, default_model: Path
    ) -> None:
        async with Engine(default_model, dtype="float32", slots=500) as engine:
            by_pattern = await engine.generate(
                PROMPT, max_tokens=32, temperature=0, stop_regex=r"1[0-9], 1"
            )
            by_string = await engine.generate(PROMPT, max_tokens=32, temperature=0, stop="10, 1")

        assert output(by_pattern) == output(by_string)
        assert (by_pattern.text, by_pattern.finish.matched) == (" 9, ", "10, 1")
        assert by_pattern.usage.completion_tokens == 9
