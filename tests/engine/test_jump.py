"""Jump-forward on the engine: fewer steps, the same outputs, and forced tokens like all others."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from structgen.engine.constraints import Constraints
from structgen.engine.engine import Engine
from structgen.errors import GenerationError, InvalidOutputError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Vocabulary
from structgen.grammar.source import Judge
from structgen.request import Completion, Constraint
from tests.core.fakes import Strict

PROMPT = "the quick brown fox"
PATTERNS = (
    r'\{"name": "[a-z]{3,9}", "age": [0-9]{2}, "member": (true|false)\}',
    "(?:yes, certainly|no, certainly not)",
    "[a-c]{2}-{20}[a-c]{2}",
    "(?:[0-9]km; ){3}end",
)
RECORD = (
    r'\{"name": "[A-Z][a-z]{2,9}", "family_name": "[A-Z][a-z]{2,9}", "year_of_birth": 19[0-9]{2}, '
    r'"profession": "[a-z]{3,12}", "is_married": (true|false)\}'
)


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 4000, "threads": 1, **options})


async def all_of(engine: Engine, **options: Any) -> list[Completion]:
    """One output of each pattern and seed, all at once."""
    return await asyncio.gather(
        *(
            engine.generate(PROMPT, **{"regex": pattern, "seed": seed, "max_tokens": 90, **options})
            for pattern in PATTERNS
            for seed in range(3)
        )
    )


class TestJumping:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("further", [{}, {"logprobs": True}, {"stop": ["e"]}], ids=str)
    async def test_changes_no_output(
        self, tiny_model: Path, temperature: float, further: dict[str, Any]
    ) -> None:
        options = {"temperature": temperature, **further}
        async with new_engine(tiny_model) as engine:
            jumped, steps = await all_of(engine, **options), engine.statistics().steps
        async with new_engine(tiny_model, jump_forward=False) as engine:
            drawn, more = await all_of(engine, **options), engine.statistics().steps

        assert [done.tokens for done in jumped] == [done.tokens for done in drawn]
        assert [done.text for done in jumped] == [done.text for done in drawn]
        for one, two in zip(jumped, drawn, strict=True):
            assert one.finish.reason == two.finish.reason
            assert one.finish.matched == two.finish.matched
            assert one.finish.complete == two.finish.complete
            assert one.usage.completion_tokens == two.usage.completion_tokens
            assert [entry.logprob for entry in one.logprobs] == pytest.approx(
                [entry.logprob for entry in two.logprobs], abs=1e-4
            )
        assert steps < more
        assert {done.finish.forced for done in drawn} == {0}
        assert min(done.finish.forced for done in jumped) > 0

    async def test_streams_the_same_text(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            whole = await engine.generate(PROMPT, regex=PATTERNS[0], seed=1, max_tokens=90)
            async with engine.stream(PROMPT, regex=PATTERNS[0], seed=1, max_tokens=90) as deltas:
                found = [delta async for delta in deltas]

        assert "".join(delta.text for delta in found) == whole.text
        assert len(found) < len(whole.tokens) - whole.finish.forced + 2

    async def test_takes_one_step_where_all_is_forced(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(PROMPT, regex="certainly not", max_tokens=90)
            statistics = engine.statistics()

        assert done.text == "certainly not"
        assert done.finish.complete
        assert done.finish.forced == statistics.forced_tokens == len("certainly not")
        assert statistics.steps == 1
        assert statistics.prefilled_tokens == len(PROMPT)

    async def test_can_be_cut_off(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(PROMPT, regex="certainly not", max_tokens=5)

        assert (done.text, done.finish.reason, done.finish.complete) == ("certa", "length", False)

    async def test_is_cached_for_the_next_prompt(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(PROMPT, regex="[ab]{2}certainly[ab]{2}", max_tokens=90)
            again = await engine.generate(PROMPT + done.text, max_tokens=1)

        # All but the last token, which nothing was drawn after.
        assert again.usage.cached_tokens == len(PROMPT + done.text) - 1

    async def test_goes_on_under_pressure(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            roomy = await all_of(engine)
        async with new_engine(tiny_model, slots=140, chunk_size=16) as engine:
            await all_of(engine, max_tokens=1)  # compiles, so that all can come at once
            engine._core.schedule._expected = 0.1  # as after a long time without retraction
            tight = await all_of(engine)
            retractions = engine.statistics().retractions

        assert retractions > 0
        assert [done.tokens for done in tight] == [done.tokens for done in roomy]

    async def test_is_counted(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            found = await all_of(engine)
            statistics = engine.statistics()

        assert statistics.forced_tokens == sum(done.finish.forced for done in found)
        assert statistics.generated_tokens == sum(done.usage.completion_tokens for done in found)
        assert statistics.prefilled_tokens <= len(found) * len(PROMPT)


def judged(judge: Judge) -> Any:
    """A compiler of constraints whose outputs are judged."""

    def compiling(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
        grammar = compile_constraint(constraint, vocabulary)
        grammar.source = msgspec.structs.replace(grammar.source, judge=judge)
        return grammar

    return compiling


class TestTheFinalCheck:
    @pytest.mark.parametrize(
        ("judge", "kind", "message"),
        [
            (Strict(), InvalidOutputError, "does not keep its constraint: /: oddness"),
            (Strict(raises=True), GenerationError, "the final check of the output failed"),
        ],
    )
    async def test_fails_an_output_and_no_other(
        self, tiny_model: Path, judge: Judge, kind: type[GenerationError], message: str
    ) -> None:
        async with new_engine(tiny_model) as engine:
            engine._constraints = Constraints(engine.loaded.vocabulary, judged(judge))
            odd, even, cut = await asyncio.gather(
                *(
                    engine.generate(PROMPT, regex=regex, max_tokens=6)
                    for regex in ("[ab]{3}", "[ab]{4}", "[ab]{7}")
                ),
                return_exceptions=True,
            )
            statistics = engine.statistics()

        assert isinstance(odd, kind)
        assert re.search(message, str(odd))
        assert isinstance(even, Completion)
        assert even.finish.complete
        assert isinstance(cut, Completion)
        assert not cut.finish.complete
        assert (statistics.requests_failed, statistics.requests_finished) == (1, 2)

    async def test_leaves_the_text_with_its_error(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            engine._constraints = Constraints(engine.loaded.vocabulary, judged(Strict()))
            with pytest.raises(InvalidOutputError) as caught:
                await engine.generate(PROMPT, regex="odd", max_tokens=6)

        assert caught.value.text == "odd"


@pytest.mark.slow
class TestTheDefaultModel:
    async def test_is_spared_half_of_a_record_s_tokens(self, default_model: Path) -> None:
        async with Engine(default_model, dtype="float32", slots=2000) as engine:
            found = await asyncio.gather(
                *(
                    engine.generate(
                        f"{number}. A record of somebody, as JSON:\n",
                        regex=RECORD,
                        max_tokens=120,
                        temperature=0.0,
                    )
                    for number in range(4)
                )
            )

        forced = sum(done.finish.forced for done in found)
        assert all(re.fullmatch(RECORD, done.text) for done in found)
        assert forced >= 0.4 * sum(done.usage.completion_tokens for done in found)
