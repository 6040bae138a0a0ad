"""Streams as the simplest clients read them: bytes from a socket, and no field looked at twice.

Such clients take each network read for one event, read `choices[0].delta` unasked, and join what
they find. So: each event is one chunk of the response and one line of data, and has a choice.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from structgen.server.config import ServerConfig
from tests.server.served import Serve, Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CONFIG = ServerConfig(names=("tiny",))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Raw(msgspec.Struct, frozen=True):
    """What came over a socket: the head, and the chunks as they were sent."""

    head: str
    chunks: list[bytes]

    @property
    def events(self) -> list[Any]:
        """The JSON of all chunks but the last; each must be one event."""
        *chunks, done = self.chunks
        assert done == b"data: [DONE]\n\n"
        for chunk in chunks:
            assert chunk.startswith(b"data: {")
            assert chunk.endswith(b"}\n\n")
            assert chunk.count(b"\n") == 2
            assert chunk.count(b"\r") == 0
        return [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]


async def raw(served: Served, path: str, body: dict[str, Any]) -> Raw:
    """Send a request and read its response without a client library."""
    parts = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        data = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST {path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        )
        writer.write("\r\n".join((*head, "", "")).encode() + data)
        answered = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert "\r\nTransfer-Encoding: chunked" in answered, answered
        chunks = []
        while size := int(await reader.readline(), 16):
            chunks.append(await reader.readexactly(size))
            assert await reader.readexactly(2) == b"\r\n"
        return Raw(answered, chunks)
    finally:
        writer.close()
        await writer.wait_closed()


class TestAChatStream:
    @pytest.mark.parametrize(
        "fields",
        [
            pytest.param({}, id="plain"),
            pytest.param({"n": 3}, id="choices"),
            pytest.param({"logprobs": True, "top_logprobs": 2}, id="logprobs"),
            pytest.param({"stop": ["e", "a", " "], "temperature": 2}, id="stop"),
            pytest.param({"regex": "[a-z]{9}"}, id="constraint"),
            pytest.param({"tools": [WEATHER], "tool_choice": "required"}, id="tools"),
        ],
    )
    async def test_is_one_event_a_chunk_each_with_a_choice(
        self, serve: Serve, fields: dict[str, Any]
    ) -> None:
        async with serve(config=CONFIG) as served:
            answer = await raw(served, CHAT, {**HI, "max_tokens": 200, "seed": 1, **fields})

        assert answer.head.startswith("HTTP/1.1 200 ")
        assert "\r\nContent-Type: text/event-stream" in answer.head
        assert "\r\nX-Request-Id: " in answer.head
        ends: dict[int, str] = {}
        for event in answer.events:
            choice = event["choices"][0]
            assert len(event["choices"]) == 1
            assert "usage" not in event
            assert isinstance(choice["delta"], dict)
            assert choice["index"] not in ends, "nothing follows the end of a choice"
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice["finish_reason"]
        assert sorted(ends) == list(range(fields.get("n", 1)))
        assert len({(e["id"], e["created"], e["model"], e["object"]) for e in answer.events}) == 1

    async def test_has_usage_in_one_more_event_only_if_it_was_asked_for(self, serve: Serve) -> None:
        async with serve(config=CONFIG) as served:
            body = {**HI, "max_tokens": 6, "stream_options": {"include_usage": True}}
            *events, last = (await raw(served, CHAT, body)).events

        assert [event["usage"] for event in events] == [None] * len(events)
        assert all(event["choices"] for event in events)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 6

    async def test_begins_with_the_role_and_a_content(self, serve: Serve) -> None:
        async with serve(config=CONFIG) as served:
            first, *rest = (await raw(served, CHAT, {**HI, "max_tokens": 4})).events

        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert isinstance(first["choices"][0]["delta"]["content"], str)
        assert all("role" not in event["choices"][0]["delta"] for event in rest)

    async def test_never_cuts_a_character(self, serve: Serve) -> None:
        """Every token of this model is a byte, so each of these characters is four tokens."""
        async with serve(config=CONFIG) as served:
            answer = await raw(served, CHAT, {**HI, "regex": "(😀|🚀){3}"})

        pieces = [event["choices"][0]["delta"].get("content", "") for event in answer.events]
        assert set("".join(pieces)) <= {"😀", "🚀"}
        assert len("".join(pieces)) == 3

    async def test_never_shows_the_beginning_of_a_stop_string(self, serve: Serve) -> None:
        async with serve(config=CONFIG) as served:
            body = {**HI, "seed": 3, "logit_bias": dict.fromkeys(await letters(served), 100)}
            whole = await joined(served, {**body, "max_tokens": 40})
            stop = whole[12:17]
            cut = await joined(served, {**body, "max_tokens": 40, "stop": stop})

        assert cut == whole[: whole.index(stop)]


class TestACompletionStream:
    async def test_is_one_event_a_chunk_each_with_a_text(self, serve: Serve) -> None:
        async with serve(config=CONFIG) as served:
            body = {"model": "tiny", "prompt": ["1, 2,", "3, 2,"], "max_tokens": 5, "echo": True}
            answer = await raw(served, COMPLETIONS, body)

        texts = {0: "", 1: ""}
        for event in answer.events:
            [choice] = event["choices"]
            texts[choice["index"]] += choice["text"]
            assert "usage" not in event
        assert texts[0].startswith("1, 2,")
        assert texts[1].startswith("3, 2,")


async def letters(served: Served) -> list[str]:
    """The tokens of all letters."""
    return [str(token) for token in await served.engine.encode("abcdefghijklmnopqrstuvwxyz")]


async def joined(served: Served, body: dict[str, Any]) -> str:
    """The text of a stream, as it would be shown."""
    events = (await raw(served, CHAT, body)).events
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)
