"""The program language on the engine: what it knows of a program shows in the engine's counters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from structgen import gen, program
from structgen.engine.engine import Engine
from structgen.program.state import State

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
async def engine(long_model: Path) -> AsyncIterator[Engine]:
    async with Engine(long_model, slots=8000, threads=1, chunk_size=256) as opened:
        yield opened


@program
async def spread(s: State, prefix: str, branches: int, warm: bool) -> list[tuple[int, int]]:
    """Fork a long state; returns each branch's prompt tokens and how many were cached."""
    s += prefix
    if warm:
        await s.prime()
    async with s.fork(branches) as forks:
        for index, fork in enumerate(forks):
            fork.append(chr(97 + index))
        await forks.map(lambda fork, _: fork.gen("x", max_tokens=4, **GREEDY))
        usages = [fork.meta("x").usage for fork in forks]
        return [(usage.prompt_tokens, usage.cached_tokens) for usage in usages]


class TestAForkOfALongState:
    @pytest.mark.parametrize("warm", [True, False])
    async def test_computes_the_prefix_once(self, engine: Engine, warm: bool) -> None:
        result = await spread.run(engine, "x" * 1000, 16, warm)

        now = engine.statistics()
        assert now.prefilled_tokens == 1000 + 16
        assert [prompt for prompt, _ in result.value] == [1001] * 16
        cached = [cached for _, cached in result.value]
        # Cold, the branch that comes first computes it for the others.
        assert cached == [1000] * 16 if warm else [0] + [1000] * 15

    async def test_in_one_batch_each_of_several_prefixes_is_computed_once(
        self, engine: Engine
    ) -> None:
        @program
        async def ask(s: State, prefix: str, item: str) -> None:
            s += prefix * 300
            s += item
            await s.gen(max_tokens=2, **GREEDY)

        await ask.run_batch(engine, [(prefix, item) for item in "abcdef" for prefix in "xyz"])

        assert engine.statistics().prefilled_tokens == 3 * 300 + 18


class TestTextThatFollows:
    async def test_is_computed_in_the_step_after_the_one_that_ends_the_generation(
        self, engine: Engine
    ) -> None:
        @program
        async def two(s: State) -> None:
            s += "abc" + gen("x", max_tokens=4, **GREEDY)
            s += " and then " + gen("y", max_tokens=3, **GREEDY)

        await two.run(engine)

        # Four tokens and three: no step goes by between them.
        assert engine.statistics().steps == 4 + 3

    async def test_is_there_when_the_program_comes_back_to_it(self, engine: Engine) -> None:
        @program
        async def tool(s: State) -> tuple[int, int]:
            s += "abc" + gen("x", max_tokens=4, **GREEDY) + "; the tool says: "
            await s
            while engine.statistics().requests_finished < 2:  # noqa: ASYNC110 - as long as a tool
                await asyncio.sleep(0)
            await s.gen("y", max_tokens=2, **GREEDY)
            usage = s.meta("y").usage
            return usage.prompt_tokens, usage.cached_tokens

        prompt, cached = (await tool.run(engine)).value

        assert (prompt, cached) == (3 + 4 + 17, 3 + 4 + 16)

    async def test_that_nothing_follows_is_not_computed(self, engine: Engine) -> None:
        @program
        async def last(s: State) -> None:
            s += "abc" + gen("x", max_tokens=4, **GREEDY) + " The end."

        await last.run(engine)

        assert engine.statistics().prefilled_tokens == 3


class TestSamples:
    async def test_share_one_prefill(self, engine: Engine) -> None:
        @program
        async def several(s: State) -> list[str]:
            s += "x" * 500
            return await s.gen(n=5, max_tokens=3, temperature=1.0, ignore_eos=True)

        result = await several.using(seed=3).run(engine)
        again = await several.using(seed=3).run(engine)

        assert len(set(result.value)) > 1
        assert again.value == result.value
        assert engine.statistics().prefilled_tokens == 500 + 4 + 5


class TestThreads:
    async def test_stay_the_same_for_a_tree_of_thought(self, engine: Engine) -> None:
        @program
        async def tree(s: State) -> int:
            s += "root"
            seen = 0

            async def grow(state: State, depth: int) -> None:
                nonlocal seen
                await state.gen(max_tokens=3, **GREEDY)
                seen = max(seen, threading.active_count())
                if depth:
                    async with state.fork(3) as branches:
                        for index, branch in enumerate(branches):
                            branch.append(str(index))
                        await branches.map(lambda branch, _: grow(branch, depth - 1))

            await grow(s, 3)
            return seen

        before = threading.active_count()

        assert (await tree.run(engine)).value <= before + 1  # the engine's worker
