"""What was measured on the default model, over HTTP: greedy texts, token counts.

The engine's own figures are in `tests/cases`; here they have to come out of a socket.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cases.probes import COUNT
from tests.server.served import Answer, Served, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STOPPED: dict[str, Any] = {
    "prompt": COUNT.prompt,
    "temperature": 0,
    "max_tokens": 32,
    "stop": ["10, 1"],
}


def asked(content: Any, **options: Any) -> dict[str, Any]:
    """A greedy chat of one message."""
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 32, **options}


def contents(chunks: list[Any]) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def both(served: Served, path: str, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """The answer in one piece and as a stream, at the same time."""
    whole, streamed = await asyncio.gather(
        served.post(path, body), served.post(path, {**body, "stream": True})
    )
    assert (whole.status, streamed.status) == (200, 200)
    return whole, streamed


class TestAStopThatSpansTokens:
    async def test_is_never_seen_by_a_client(self, default_model: Path) -> None:
        async with serving(default_model) as served:
            options = {"stream_options": {"include_usage": True}}
            whole, streamed = await asyncio.gather(
                served.post(COMPLETIONS, STOPPED),
                served.post(COMPLETIONS, {**STOPPED, "stream": True, **options}),
            )

        *events, last = streamed.chunks
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(choice["text"] for choice in choices) == " 9, "
        assert whole.json["choices"][0]["text"] == " 9, "
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
            "stop"
        ]
        assert choices[-1]["finish_reason"] == "stop"
        assert last["usage"]["completion_tokens"] == 9
        assert whole.json["usage"]["completion_tokens"] == 9
        assert streamed.events[-1] == "[DONE]"


class TestAChat:
    async def test_has_the_same_text_and_usage_in_every_form(self, default_model: Path) -> None:
        body = asked("What is 2+2?")
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        async with serving(default_model) as served:
            whole, plain, told = await asyncio.gather(
                served.post(CHAT, body),
                served.post(CHAT, {**body, "stream": True}),
                served.post(CHAT, {**body, **counted}),
            )

        usage = whole.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (37, 12)
        assert usage["total_tokens"] == 49
        text = whole.json["choices"][0]["message"]["content"]
        assert "<|im_end|>" not in text
        assert contents(plain.chunks) == contents(told.chunks) == text
        assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in plain.chunks)
        *others, last = told.chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12
        assert all(chunk["usage"] is None for chunk in others)

    async def test_is_told_from_one_role_to_one_end(self, default_model: Path) -> None:
        async with serving(default_model) as served:
            answer = await served.post(CHAT, asked("What is 2+2?", max_tokens=3, stream=True))

        chunks = answer.chunks
        choices = [chunk["choices"][0] for chunk in chunks]
        roles = [choice["delta"].get("role") for choice in choices]
        assert roles == ["assistant"] + [None] * (len(choices) - 1)
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(choices) - 1) + ["length"]
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1

    async def test_has_log_probabilities_that_spell_its_text(self, default_model: Path) -> None:
        body = asked("What is 1+1?", max_tokens=5, logprobs=True, top_logprobs=3)
        async with serving(default_model) as served:
            whole, streamed = await both(served, CHAT, body)

        (choice,) = whole.json["choices"]
        entries = choice["logprobs"]["content"]
        assert len(entries) == 5
        spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert spelled.decode() == choice["message"]["content"]
        parts = [chunk["choices"][0]["logprobs"] for chunk in streamed.chunks]
        others = [entry for part in parts if part for entry in part["content"]]
        assert [entry["token"] for entry in others] == [entry["token"] for entry in entries]
        values = [entry["logprob"] for entry in entries]
        assert [entry["logprob"] for entry in others] == pytest.approx(values, abs=1e-3)
        assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)

    async def test_takes_its_text_in_parts_and_a_plain_stop(self, default_model: Path) -> None:
        parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
        async with serving(default_model) as served:
            whole, apart, one, several = await asyncio.gather(
                served.post(CHAT, asked("What is 2+2?", max_completion_tokens=8, max_tokens=None)),
                served.post(CHAT, asked(parts, max_tokens=8, stop=None, n=None, user="")),
                served.post(CHAT, asked("What is 2+2?", max_tokens=8, stop="4")),
                served.post(CHAT, asked("What is 2+2?", max_tokens=8, stop=["4"], logit_bias={})),
            )

        assert apart.json["usage"]["prompt_tokens"] == whole.json["usage"]["prompt_tokens"] == 37
        assert apart.json["choices"] == whole.json["choices"]
        assert one.json["choices"] == several.json["choices"]
        assert "4" not in one.json["choices"][0]["message"]["content"]
        assert whole.json["usage"]["completion_tokens"] <= 8


class TestTheCache:
    """It is told in the usage, and changes no token."""

    async def test_shows_in_the_usage_alone(self, default_model: Path) -> None:
        body = {"prompt": COUNT.prompt, "temperature": 0, "max_tokens": 4, "logprobs": 0}
        async with serving(default_model) as served:
            first = await served.post(COMPLETIONS, body)
            second = await served.post(COMPLETIONS, body)

        counts = [each.json["usage"] for each in (first, second)]
        assert [each["prompt_tokens"] for each in counts] == [23, 23]
        cached = [each["prompt_tokens_details"]["cached_tokens"] for each in counts]
        assert cached == [0, 22]
        one, two = (each.json["choices"][0]["logprobs"] for each in (first, second))
        assert one["tokens"] == two["tokens"]
        assert one["token_logprobs"] == pytest.approx(two["token_logprobs"], abs=1e-3)
