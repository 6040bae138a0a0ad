"""A few requests of the official client to the default model, whose answers are known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from structgen.server.config import ServerConfig
from tests.server.openai_sdk.sdk import MODEL, client_of
from tests.server.served import serving

pytestmark = pytest.mark.slow
SUM: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 2+2?"}]


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=3)]


@pytest.fixture
async def client(default_model: Path) -> AsyncIterator[AsyncOpenAI]:
    """A client of the default model in float32."""
    config = ServerConfig(names=(MODEL,))
    async with (
        serving(default_model, config=config, slots=2000) as served,
        client_of(served) as client,
    ):
        yield client


class TestTheDefaultModel:
    async def test_answers_a_chat_and_counts_its_tokens(self, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(
            model=MODEL, messages=SUM, temperature=0, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=SUM,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = [chunk async for chunk in stream]

        [choice] = whole.choices
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == choice.message.content
        assert "4" in text
        assert "<|im_end|>" not in text
        assert choice.finish_reason == "stop"
        for usage in (whole.usage, last.usage):
            assert usage is not None
            counted = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
            assert counted == (37, 12, 49)
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert "".join(entry.token for entry in tokens).removesuffix("<|im_end|>") == text

    async def test_fills_in_a_model(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "The weather in Rome for two days, as JSON."}],
            response_format=Weather,
            temperature=0,
        )

        assert isinstance(completion.choices[0].message.parsed, Weather)
