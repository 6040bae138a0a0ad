"""Tool calls through the official client: chosen, required, named, forbidden, several, streamed."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError, pydantic_function_tool
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceParam,
)
from pydantic import BaseModel, Field

from tests.server.openai_sdk.sdk import MODEL

ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "weather?"}]


class GetWeather(BaseModel):
    """Tells the weather."""

    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=3)]


class SetAlarm(BaseModel):
    """Wakes somebody."""

    hour: Annotated[int, Field(ge=0, le=23)]


TOOLS = [pydantic_function_tool(GetWeather), pydantic_function_tool(SetAlarm)]
WEATHER: ChatCompletionNamedToolChoiceParam = {
    "type": "function",
    "function": {"name": "GetWeather"},
}


def calls_of(message: ChatCompletionMessage) -> list[ChatCompletionMessageFunctionToolCall]:
    """The calls of a message; all are of functions."""
    found = []
    for call in message.tool_calls or ():
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        found.append(call)
    return found


async def biased(client: AsyncOpenAI, text: str) -> dict[str, int]:
    """A bias to the tokens of a text."""
    body = {"prompt": text, "model": MODEL}
    found = await client.post("/tokenize", cast_to=httpx2.Response, body=body)
    return dict.fromkeys(map(str, found.json()["tokens"]), 100)


class TestANamedTool:
    async def test_is_called(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=WEATHER
        )

        [choice] = completion.choices
        [call] = calls_of(choice.message)
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert call.id
        assert call.type == "function"
        assert call.function.name == "GetWeather"
        assert GetWeather.model_validate_json(call.function.arguments).city in {"Oslo", "Rome"}

    async def test_is_called_in_a_stream_piece_by_piece(self, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=WEATHER, temperature=0
        )
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            tools=TOOLS,
            tool_choice=WEATHER,
            temperature=0,
            stream=True,
        )
        chunks = [chunk async for chunk in stream]

        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
        first = deltas[0]
        assert first.id
        assert first.type == "function"
        assert first.function is not None
        assert first.function.name == "GetWeather"
        assert {delta.index for delta in deltas} == {0}
        assert [delta.id for delta in deltas[1:]] == [None] * (len(deltas) - 1)
        [call] = calls_of(whole.choices[0].message)
        arguments = "".join(d.function.arguments or "" for d in deltas if d.function is not None)
        assert arguments == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""

    async def test_that_nobody_declared_is_refused(self, client: AsyncOpenAI) -> None:
        with pytest.raises(BadRequestError, match="Other") as caught:
            await client.chat.completions.create(
                model=MODEL,
                messages=ASKED,
                tools=TOOLS,
                tool_choice={"type": "function", "function": {"name": "Other"}},
            )

        assert caught.value.param == "tool_choice"


class TestAToolChoice:
    async def test_of_required_calls_one_of_the_tools(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            n=4,
            seed=1,
        )

        for choice in completion.choices:
            [call] = calls_of(choice.message)
            assert call.function.name in {"GetWeather", "SetAlarm"}
            assert choice.finish_reason == "tool_calls"

    async def test_of_none_calls_nothing(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice="none", max_tokens=8
        )

        assert completion.choices[0].message.tool_calls is None
        assert completion.choices[0].finish_reason == "length"

    async def test_of_auto_leaves_it_to_the_model(self, client: AsyncOpenAI) -> None:
        called = await client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            tools=TOOLS,
            logit_bias=await biased(client, "{"),
            parallel_tool_calls=False,
        )
        answered = await client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            tools=TOOLS,
            logit_bias=await biased(client, "a"),
            max_tokens=8,
        )

        assert len(calls_of(called.choices[0].message)) == 1
        assert called.choices[0].finish_reason == "tool_calls"
        assert answered.choices[0].message.tool_calls is None
        assert answered.choices[0].message.content == "a" * 8

    async def test_without_tools_is_refused(self, client: AsyncOpenAI) -> None:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=ASKED, tool_choice="required"
            )

        assert caught.value.param == "tool_choice"


class TestSeveralCalls:
    async def test_have_ids_and_indexes_of_their_own(self, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice="required", n=8, seed=1
        )
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            tools=TOOLS,
            tool_choice="required",
            n=8,
            seed=1,
            stream=True,
        )
        streamed: dict[tuple[int, int], list[str]] = {}
        async for chunk in stream:
            for choice in chunk.choices:
                for delta in choice.delta.tool_calls or ():
                    assert delta.function is not None
                    pieces = streamed.setdefault((choice.index, delta.index), [])
                    pieces += [delta.function.name or "", delta.function.arguments or ""]

        calls = {
            (choice.index, number): call
            for choice in whole.choices
            for number, call in enumerate(calls_of(choice.message))
        }
        assert len(calls) > 8
        assert len({call.id for call in calls.values()}) == len(calls)
        assert {place: "".join(pieces) for place, pieces in streamed.items()} == {
            place: call.function.name + call.function.arguments for place, call in calls.items()
        }


class TestParsedCalls:
    async def test_are_objects_of_the_models(self, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.parse(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=WEATHER
        )

        [call] = completion.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, GetWeather)

    async def test_come_as_events_of_a_stream(self, client: AsyncOpenAI) -> None:
        pieces, done = "", []
        async with client.chat.completions.stream(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=WEATHER
        ) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    pieces += event.arguments_delta
                elif event.type == "tool_calls.function.arguments.done":
                    done.append(event)

        [event] = done
        assert event.name == "GetWeather"
        assert event.arguments == pieces
        assert isinstance(event.parsed_arguments, GetWeather)


class TestAConversationWithTools:
    async def test_goes_on_after_a_result(self, client: AsyncOpenAI) -> None:
        asked = await client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=WEATHER, temperature=0
        )
        message = asked.choices[0].message
        [call] = calls_of(message)
        messages: list[ChatCompletionMessageParam] = [
            *ASKED,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": call.function.arguments,
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "clear"})},
        ]
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8
        )

        assert answer.usage is not None
        assert asked.usage is not None
        assert answer.choices[0].message.content is not None
        assert answer.usage.prompt_tokens > len(call.function.arguments)

    async def test_may_send_back_the_message_as_it_came(self, client: AsyncOpenAI) -> None:
        asked = await client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=WEATHER
        )
        message = asked.choices[0].message
        [call] = calls_of(message)
        sent: Any = message  # as the package's own examples do
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[*ASKED, sent, {"role": "tool", "tool_call_id": call.id, "content": "clear"}],
            tools=TOOLS,
            max_tokens=4,
        )

        assert answer.usage is not None


class TestATool:
    async def test_without_parameters_is_called_without_arguments(
        self, client: AsyncOpenAI
    ) -> None:
        ping: ChatCompletionFunctionToolParam = {"type": "function", "function": {"name": "ping"}}
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            tools=[ping],
            tool_choice="required",
            parallel_tool_calls=False,
        )

        [call] = calls_of(completion.choices[0].message)
        assert (call.function.name, json.loads(call.function.arguments)) == ("ping", {})
