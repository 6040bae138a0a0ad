"""Completions of plain prompts through the official client."""

from __future__ import annotations

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.server.openai_sdk.sdk import LETTERS, MODEL, client_of
from tests.server.served import Served

PROMPT = "1, 2, 3,"


class TestACompletion:
    async def test_continues_a_prompt(self, client: AsyncOpenAI) -> None:
        completion = await client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)

        [choice] = completion.choices
        assert completion.id.startswith("cmpl-")
        assert completion.object == "text_completion"
        assert choice.finish_reason == "length"
        assert completion.usage is not None
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (8, 16)

    async def test_takes_several_prompts_as_text_or_ids(self, client: AsyncOpenAI) -> None:
        answer = await client.post(
            "/tokenize", cast_to=httpx2.Response, body={"prompt": PROMPT, "model": MODEL}
        )
        ids = answer.json()["tokens"]
        texts = await client.completions.create(
            model=MODEL, prompt=[PROMPT, "10 9 8"], n=2, seed=3, max_tokens=30, extra_body=LETTERS
        )
        lists = await client.completions.create(
            model=MODEL, prompt=[ids, ids], max_tokens=12, temperature=0
        )
        one = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0
        )

        assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
        assert [len(choice.text) for choice in texts.choices] == [24] * 4
        assert [choice.text for choice in lists.choices] == [one.choices[0].text] * 2

    async def test_may_begin_with_its_prompt(self, client: AsyncOpenAI) -> None:
        echoed = await client.completions.create(
            model=MODEL, prompt=PROMPT, echo=True, temperature=0, max_tokens=30, extra_body=LETTERS
        )

        assert echoed.choices[0].text.startswith(PROMPT)
        assert len(echoed.choices[0].text) == len(PROMPT) + 24

    async def test_has_logprobs_in_the_layout_of_its_route(self, client: AsyncOpenAI) -> None:
        completion = await client.completions.create(
            model=MODEL, prompt=PROMPT, logprobs=2, temperature=0, max_tokens=30, extra_body=LETTERS
        )

        [choice] = completion.choices
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert "".join(found.tokens) == choice.text
        assert found.text_offset is not None
        assert found.text_offset[:24] == list(range(24))
        assert found.top_logprobs is not None
        assert found.token_logprobs is not None
        for token, logprob, tops in zip(
            found.tokens, found.token_logprobs, found.top_logprobs, strict=True
        ):
            assert tops[token] == pytest.approx(logprob)

    async def test_without_a_prompt_is_refused(self, client: AsyncOpenAI) -> None:
        with pytest.raises(BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="")

        assert caught.value.param == "prompt"


class TestAStreamedCompletion:
    """The package's type has no place for the `null` that stands for an end that is not there yet,
    which the API itself sends; so the client of these does not validate."""

    async def test_is_the_whole_one_in_pieces(self, served: Served) -> None:
        async with client_of(served, strict=False) as client:
            whole = await client.completions.create(
                model=MODEL, prompt=PROMPT, temperature=0, max_tokens=30, extra_body=LETTERS
            )
            stream = await client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                temperature=0,
                max_tokens=30,
                extra_body=LETTERS,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]

        *texts, last = chunks
        assert "".join(chunk.choices[0].text for chunk in texts) == whole.choices[0].text
        assert [chunk.choices[0].finish_reason for chunk in texts] == (
            [None] * (len(texts) - 1) + ["stop"]
        )
        assert last.choices == []
        assert last.usage is not None
        assert whole.usage is not None
        assert last.usage.completion_tokens == whole.usage.completion_tokens

    async def test_tells_logprobs_of_the_prompt_it_begins_with(self, served: Served) -> None:
        async with client_of(served, strict=False) as client:
            completion = await client.completions.create(
                model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0
            )

        found = completion.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.token_logprobs[0] is None  # nothing stands before it
        assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
        assert len(found.token_logprobs) == len(PROMPT) + 1
