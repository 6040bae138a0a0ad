"""Answers that are parsed into pydantic models by the official client, and JSON in other ways."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from openai import AsyncOpenAI, BadRequestError, LengthFinishReasonError
from openai.types.shared_params import ResponseFormatJSONSchema
from pydantic import BaseModel, Field

from tests.server.openai_sdk.sdk import HI, MODEL


class Mood(Enum):
    CALM = "calm"
    WILD = "wild"


class Place(BaseModel):
    city: Literal["Oslo", "Rome", "Zürich"]
    code: Annotated[str, Field(pattern="^[A-Z]{2}$")]


class Forecast(BaseModel):
    """What a user of the package would ask for: nested, with an enum, a list and an option."""

    place: Place
    days: Annotated[int, Field(ge=1, le=3)]
    mood: Mood
    sunny: bool
    rain: Annotated[list[Literal["drizzle", "hail"]], Field(max_length=2)]
    gusts: Annotated[int, Field(ge=0, le=99)] | None


SCHEMA: ResponseFormatJSONSchema = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"answer": {"enum": ["yes", "no"]}},
            "required": ["answer"],
            "additionalProperties": False,
        },
    },
}


class TestParse:
    async def test_gives_an_object_of_the_model(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.parse(
            model=MODEL, messages=HI, response_format=Forecast, n=2, seed=1
        )

        for choice in completion.choices:
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Forecast)
            assert json.loads(choice.message.content or "") == choice.message.parsed.model_dump(
                mode="json"
            )

    # The package warns of its own objects where it writes them as JSON.
    @pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
    async def test_makes_messages_that_can_be_sent_again(self, client: AsyncOpenAI) -> None:
        """Users append what they got to the chat; it has the parsed object beside the text."""
        first = await client.chat.completions.parse(
            model=MODEL, messages=HI, response_format=Place, temperature=0
        )
        message = first.choices[0].message
        assert message.parsed is not None
        again: Any = [*HI, message, {"role": "user", "content": "And now?"}]

        second = await client.chat.completions.create(model=MODEL, messages=again, max_tokens=2)

        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.prompt_tokens > first.usage.prompt_tokens

    async def test_says_that_an_answer_was_cut_off(self, client: AsyncOpenAI) -> None:
        with pytest.raises(LengthFinishReasonError):
            await client.chat.completions.parse(
                model=MODEL, messages=HI, response_format=Forecast, max_tokens=3
            )

    async def test_of_a_stream_gives_the_same_object(self, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.parse(
            model=MODEL, messages=HI, response_format=Forecast, temperature=0
        )
        async with client.chat.completions.stream(
            model=MODEL, messages=HI, response_format=Forecast, temperature=0
        ) as stream:
            parsed = [event.parsed async for event in stream if event.type == "content.done"]
            final = await stream.get_final_completion()

        assert parsed == [whole.choices[0].message.parsed]
        assert final.choices[0].message.parsed == parsed[0]


class TestAResponseFormat:
    async def test_of_a_schema_is_met(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(
            model=MODEL, messages=HI, response_format=SCHEMA
        )

        answer = json.loads(completion.choices[0].message.content or "")
        assert answer in ({"answer": "yes"}, {"answer": "no"})

    async def test_of_any_object_is_one_or_says_that_it_was_cut_off(
        self, client: AsyncOpenAI
    ) -> None:
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            response_format={"type": "json_object"},
            max_tokens=200,
            n=4,
            seed=2,
        )

        for choice in completion.choices:
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content or ""), dict)

    async def test_of_text_constrains_nothing(self, client: AsyncOpenAI) -> None:
        plain, text = [
            await client.chat.completions.create(
                model=MODEL,
                messages=HI,
                max_tokens=8,
                temperature=0,
                response_format={"type": "text"},
            ),
            await client.chat.completions.create(
                model=MODEL, messages=HI, max_tokens=8, temperature=0
            ),
        ]

        assert text.choices[0].message.content == plain.choices[0].message.content

    async def test_that_is_no_schema_is_refused_by_its_field(self, client: AsyncOpenAI) -> None:
        broken: ResponseFormatJSONSchema = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "strng"}},
        }
        with pytest.raises(BadRequestError, match="strng") as caught:
            await client.chat.completions.create(model=MODEL, messages=HI, response_format=broken)

        assert caught.value.param == "response_format.json_schema.schema"
        assert caught.value.code == "invalid_constraint"
