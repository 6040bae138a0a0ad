"""The requests of lm-evaluation-harness, model `local-completions`, read as it reads the answers.

It sends a context and its continuation as token ids, and asks for an echo with log-probabilities
and one token more; of the answer it takes what lies between the context and that token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.server.served import Serve, Served

PAIRS = [
    ("the quick brown", " fox"),
    ("one two three", " four five"),
    ("a", "b"),
    ("caf\u00e9 \N{GRINNING FACE}", " na\u00efve"),
]
SENT: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}


def parsed(answer: Any, contexts: Sequence[int]) -> list[tuple[float, bool]]:
    """Sum of the log-probabilities and whether each was the likeliest, by continuation."""
    found: list[tuple[float, bool]] = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, context in zip(choices, contexts, strict=True):
        assert context > 0
        values = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy))
    return found


async def ids_of(served: Served) -> list[tuple[list[int], list[int]]]:
    """The ids of each pair; every continuation is encoded by itself."""
    return [
        (list(await served.engine.encode(before)), list(await served.engine.encode(after)))
        for before, after in PAIRS
    ]


class TestLikelihoods:
    @pytest.mark.parametrize("together", [True, False], ids=["one list", "one by one"])
    async def test_are_the_scores_of_the_engine(self, serve: Serve, together: bool) -> None:
        async with serve() as served:
            ids = await ids_of(served)
            scores = [await served.engine.score(before, [after]) for before, after in PAIRS]
            prompts = [before + after for before, after in ids]
            contexts = [len(before) for before, _ in ids]
            if together:
                answer = await served.post("/v1/completions", {**SENT, "prompt": prompts})
                found = parsed(answer.json, contexts)
            else:
                found = []
                for prompt, context in zip(prompts, contexts, strict=True):
                    answer = await served.post("/v1/completions", {**SENT, "prompt": prompt})
                    found += parsed(answer.json, [context])

        for (total, _), (score,) in zip(found, scores, strict=True):
            assert total == pytest.approx(score.total, abs=1e-3)
            assert math.isfinite(total)

    async def test_know_what_greedy_decoding_says(self, serve: Serve) -> None:
        async with serve() as served:
            before = list(await served.engine.encode("the quick"))
            said = await served.engine.generate(
                before, temperature=0, max_tokens=6, ignore_eos=True
            )
            other = [*said.tokens[:-1], (said.tokens[-1] + 1) % 256]
            prompts = [[*before, *said.tokens], [*before, *other]]
            answer = await served.post("/v1/completions", {**SENT, "prompt": prompts})

        assert [greedy for _, greedy in parsed(answer.json, [len(before)] * 2)] == [True, False]

    async def test_are_there_where_the_next_token_is_the_end(self, serve: Serve) -> None:
        """The token that is asked for on top may be an end token: it has its place all the same."""
        async with serve() as served:
            (ids, *_) = await ids_of(served)
            body = {**SENT, "prompt": ids[0] + ids[1], "logit_bias": {"258": 100}}
            answer = await served.post("/v1/completions", body)
            (score,) = await served.engine.score(PAIRS[0][0], [PAIRS[0][1]])

        (choice,) = answer.json["choices"]
        assert choice["finish_reason"] == "stop"
        assert parsed(answer.json, [len(ids[0])])[0][0] == pytest.approx(score.total, abs=1e-3)

    async def test_of_the_prompt_alone_have_one_entry_for_each_token(self, serve: Serve) -> None:
        async with serve() as served:
            prompts = [before + after for before, after in await ids_of(served)]
            body = {**SENT, "prompt": prompts, "max_tokens": 0}
            answer = await served.post("/v1/completions", body)

        for prompt, choice in zip(prompts, answer.json["choices"], strict=True):
            assert {len(values) for values in choice["logprobs"].values()} == {len(prompt)}


class TestGeneration:
    async def test_stops_where_it_was_told(self, serve: Serve) -> None:
        async with serve() as served:
            whole = await served.engine.generate("the quick", temperature=0, max_tokens=30)
            stop = whole.text[4:6]
            body = {"prompt": ["the quick"], "max_tokens": 30, "temperature": 0, "seed": 1234}
            answer = await served.post("/v1/completions", {**body, "stop": [stop, "<|im_end|>"]})

        (choice,) = answer.json["choices"]
        assert choice["text"] == whole.text[: whole.text.index(stop)]
        assert choice["finish_reason"] == "stop"
