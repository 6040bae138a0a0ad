"""Requests that write nothing: they read their prompt, for its log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from structgen.engine.engine import Engine
from structgen.errors import ConstraintError, ContextLengthError, OptionError, PromptError
from structgen.options import request_from
from structgen.request import Text, join_deltas

PROMPT = "the quick brown fox"


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 2000, "threads": 1, "dtype": "float32", **options})


class TestReadingAPrompt:
    async def test_writes_nothing(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            completion = await engine.generate(PROMPT, max_tokens=0, logprobs=True)

        assert (completion.text, completion.tokens, completion.logprobs) == ("", (), ())
        assert (completion.finish.reason, completion.finish.complete) == ("length", False)
        assert completion.usage.prompt_tokens == len(PROMPT)
        assert completion.usage.completion_tokens == 0

    async def test_gives_the_log_probabilities_that_scores_have(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            read = await engine.generate(PROMPT, max_tokens=0, prompt_logprobs=0)
            (score,) = await engine.score(PROMPT[0], [PROMPT[1:]])
            ids = await engine.encode(PROMPT)

        first, *others = read.prompt_logprobs
        assert tuple(entry.token for entry in read.prompt_logprobs) == ids
        assert first.logprob is None
        assert [entry.logprob for entry in others] == pytest.approx(score.logprobs, abs=1e-4)

    async def test_gives_what_a_longer_output_gives(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, radix=False) as engine:
            options: Any = {"prompt_logprobs": 3, "top_logprobs": 2}
            short = await engine.generate(PROMPT, max_tokens=0, **options)
            longer = await engine.generate(PROMPT, max_tokens=2, **options)

        assert len(short.prompt_logprobs) == len(PROMPT) - 3
        assert all(len(entry.top) == 2 for entry in short.prompt_logprobs)
        assert short.prompt_logprobs == longer.prompt_logprobs

    async def test_comes_in_one_delta(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, chunk_size=4) as engine:
            request = request_from((Text(PROMPT),), {"max_tokens": 0, "prompt_logprobs": 0})
            async with engine.generate(request) as deltas:
                found = [delta async for delta in deltas]

        assert len(found) == 1
        assert len(join_deltas(found).prompt_logprobs) == len(PROMPT)

    async def test_leaves_it_in_the_cache(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.generate(PROMPT, max_tokens=0)
            again = await engine.generate(PROMPT, max_tokens=1)
            now = engine.statistics()

        assert again.usage.cached_tokens == len(PROMPT) - 1
        assert (now.running, now.waiting, now.slots_held) == (0, 0, 0)

    async def test_may_fill_the_context(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            full = await engine.generate("x" * 512, max_tokens=0)
            with pytest.raises(ContextLengthError, match="512 prompt tokens and max_tokens=1 make"):
                await engine.generate("x" * 512, max_tokens=1)
            with pytest.raises(ContextLengthError, match="513, more than the context of 512"):
                await engine.generate("x" * 513, max_tokens=0)

        assert full.usage.prompt_tokens == 512

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"regex": "a+"}, OptionError, "max_tokens: it is 0, and an output that meets a"),
            ({"min_tokens": 1}, OptionError, "min_tokens: 1 is more than max_tokens"),
            ({"stop_regex": "(abc"}, ConstraintError, "abc"),
        ],
        ids=["a constraint", "min_tokens", "a broken pattern"],
    )
    async def test_refuses_what_asks_for_an_output(
        self, tiny_model: Path, options: Any, error: type[Exception], message: str
    ) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(error, match=message):
                await engine.generate(PROMPT, max_tokens=0, **options)

            assert engine.statistics().steps == 0

    async def test_refuses_an_empty_prompt(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(PromptError, match="empty"):
                await engine.generate("", max_tokens=0)
