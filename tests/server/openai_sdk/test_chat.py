"""Chats through the official client, answered at once."""

from __future__ import annotations

import string

import anyio
import httpx2
import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI
from openai.types.chat import ChatCompletion

from tests.server.openai_sdk.sdk import HI, LETTERS, MODEL
from tests.server.served import Served


async def tokens_of(client: AsyncOpenAI, text: str) -> list[str]:
    """The tokens of a text, as keys of `logit_bias`."""
    body = {"prompt": text, "model": MODEL}
    found = await client.post("/tokenize", cast_to=httpx2.Response, body=body)
    return [str(token) for token in found.json()["tokens"]]


class TestAChat:
    async def test_is_a_chat_completion(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=8, temperature=0
        )

        [choice] = completion.choices
        assert completion.id.startswith("chatcmpl-")
        assert completion.model == MODEL
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "length"
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 8
        assert completion.usage.total_tokens == completion.usage.prompt_tokens + 8

    async def test_says_how_much_of_its_prompt_was_cached(self, client: AsyncOpenAI) -> None:
        async def counts() -> tuple[int, int | None]:
            completion = await client.chat.completions.create(
                model=MODEL, messages=HI, max_tokens=1
            )
            assert completion.usage is not None
            details = completion.usage.prompt_tokens_details
            assert details is not None
            return completion.usage.prompt_tokens, details.cached_tokens

        (tokens, cold), (_, warm) = await counts(), await counts()

        assert (cold, warm) == (0, tokens - 1)

    async def test_takes_every_role_and_content_in_parts(self, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "What is 2+2?", "name": "ada"},
                {"role": "assistant", "content": "4"},
                {"role": "user", "content": "And 3+3?"},
            ],
            max_completion_tokens=12,
            temperature=0,
        )
        parts = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is "},
                        {"type": "text", "text": "2+2?"},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
                {"role": "user", "content": "And 3+3?"},
            ],
            max_completion_tokens=12,
            temperature=0,
        )

        assert whole.usage is not None
        assert parts.usage is not None
        assert parts.usage.prompt_tokens == whole.usage.prompt_tokens
        assert parts.choices[0].message.content == whole.choices[0].message.content

    async def test_has_as_many_choices_as_were_asked_for(self, client: AsyncOpenAI) -> None:
        async def drawn(seed: int) -> list[str | None]:
            completion = await client.chat.completions.create(
                model=MODEL, messages=HI, n=3, seed=seed, max_tokens=16
            )
            assert [choice.index for choice in completion.choices] == [0, 1, 2]
            return [choice.message.content for choice in completion.choices]

        first, again, other = await drawn(7), await drawn(7), await drawn(8)

        assert len(set(first)) == 3
        assert again == first
        assert other != first

    async def test_ends_before_a_stop_string(self, client: AsyncOpenAI) -> None:
        async def answer(stop: str | list[str] | None) -> tuple[str, str]:
            completion = await client.chat.completions.create(
                model=MODEL,
                messages=HI,
                stop=stop,
                max_tokens=24,
                seed=3,
                logit_bias=dict.fromkeys(letters, 100),
            )
            [choice] = completion.choices
            assert choice.message.content is not None
            return choice.message.content, choice.finish_reason

        letters = await tokens_of(client, string.ascii_lowercase)
        whole, _ = await answer(None)
        stop = whole[10:12]

        assert await answer(stop) == (whole[: whole.index(stop)], "stop")
        assert await answer([stop]) == await answer(stop)

    async def test_heeds_a_logit_bias_and_penalties(self, client: AsyncOpenAI) -> None:
        a, b = await tokens_of(client, "ab")
        plain = await client.chat.completions.create(
            model=MODEL, messages=HI, logit_bias={a: 100}, max_tokens=6, temperature=0
        )
        alternating = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            logit_bias={a: 100, b: 100},
            frequency_penalty=2,
            presence_penalty=2,
            max_tokens=40,
            temperature=0,
        )

        assert plain.choices[0].message.content == "a" * 6
        assert set(alternating.choices[0].message.content or "") == {"a", "b"}

    async def test_takes_what_users_of_other_servers_send(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            user="ada",
            metadata={"ticket": "12"},
            store=False,
            extra_body={
                "structured_outputs": {"choice": ["sunny", "rainy"]},
                "top_k": 20,
                "min_p": 0.01,
                "repetition_penalty": 1.1,
                "cache_salt": "tenant",
            },
        )

        assert completion.choices[0].message.content in {"sunny", "rainy"}


class TestLogprobs:
    async def test_are_of_the_tokens_that_were_written(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            logprobs=True,
            top_logprobs=3,
            temperature=0,
            extra_body=LETTERS,
        )

        [choice] = completion.choices
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        spelled = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert spelled.decode() == choice.message.content
        for entry in choice.logprobs.content:
            tops = [top.logprob for top in entry.top_logprobs]
            assert len(tops) == 3
            assert tops == sorted(tops, reverse=True)
            assert entry.logprob <= 0

    async def test_have_no_alternatives_where_none_were_asked_for(
        self, client: AsyncOpenAI
    ) -> None:
        completion = await client.chat.completions.create(
            model=MODEL, messages=HI, logprobs=True, max_tokens=5
        )

        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [entry.top_logprobs for entry in logprobs.content] == [[]] * 5


class TestHeaders:
    async def test_name_the_request(self, client: AsyncOpenAI) -> None:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HI, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
        )

        assert raw.headers["x-request-id"] == "mine-1"
        assert raw.headers["content-type"] == "application/json"
        completion = raw.parse()
        assert isinstance(completion, ChatCompletion)
        assert completion._request_id == "mine-1"

    async def test_name_it_anew_where_the_client_did_not(self, client: AsyncOpenAI) -> None:
        found = [
            await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1)
            for _ in range(2)
        ]
        first, second = (completion._request_id for completion in found)

        assert first
        assert second
        assert first != second


class TestModels:
    async def test_are_listed(self, client: AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == [MODEL]

    async def test_can_be_looked_up(self, client: AsyncOpenAI) -> None:
        model = await client.models.retrieve(MODEL)

        assert (model.id, model.object) == (MODEL, "model")
        with pytest.raises(NotFoundError) as caught:
            await client.models.retrieve("other")
        assert caught.value.code == "model_not_found"


class TestTheSynchronousClient:
    async def test_is_served_from_a_thread(self, served: Served) -> None:
        def chat() -> str:
            http = httpx2.Client(verify=False)
            with OpenAI(
                base_url=f"{served.url}/v1",
                api_key="none",
                max_retries=0,
                http_client=http,
                _strict_response_validation=True,
            ) as client:
                whole = client.chat.completions.create(
                    model=MODEL, messages=HI, temperature=0, extra_body=LETTERS
                )
                with client.chat.completions.create(
                    model=MODEL, messages=HI, temperature=0, extra_body=LETTERS, stream=True
                ) as chunks:
                    streamed = [chunk.choices[0].delta.content or "" for chunk in chunks]
                assert "".join(streamed) == whole.choices[0].message.content
                return "".join(streamed)

        assert len(await anyio.to_thread.run_sync(chat)) == 24
