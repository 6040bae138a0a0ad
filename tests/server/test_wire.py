"""The fields of bodies: whole numbers, however they are written, and how many values they have."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from structgen.errors import OptionError
from structgen.server.config import ServerConfig
from structgen.server.openai.wire import (
    MOST,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from structgen.server.programs import ProgramBody
from tests.server.served import Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {
        **HI,
        "max_completion_tokens": 6.0,
        "logprobs": True,
        "top_logprobs": 2.0,
    },
    COMPLETIONS: {"prompt": [97.0, 98.0], "max_tokens": 6.0, "logprobs": 2.0, "best_of": 2.0},
}
BOTH_HAVE = {
    "n": 2.0,
    "seed": 3.0,
    "top_k": 5.0,
    "min_tokens": 2.0,
    "priority": -1.0,
    "stop_token_ids": [7.0, 258],
}


def as_integers(value: Any) -> Any:
    """The same value, its whole numbers without a point."""
    if isinstance(value, float):
        return int(value)
    if isinstance(value, list):
        return [as_integers(each) for each in value]
    if isinstance(value, dict):
        return {name: as_integers(each) for name, each in value.items()}
    return value


class TestAWholeNumber:
    @pytest.mark.parametrize("path", list(WHOLE))
    async def test_may_be_written_with_a_point(self, serve: Serve, path: str) -> None:
        body = {**WHOLE[path], **BOTH_HAVE}
        async with serve() as served:
            plain = await served.post(path, as_integers(body))
            pointed = await served.post(path, body)

        assert pointed.status == 200, pointed.text
        for name in ("text", "message", "finish_reason"):
            found, expected = (
                [choice.get(name) for choice in each.json["choices"]] for each in (pointed, plain)
            )
            assert found == expected

    async def test_may_be_a_power_of_ten(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(names=("m",))) as served:
            body = '{"model": "m", "prompt": "a", "max_tokens": 1e1, "ignore_eos": true}'
            answer = await served.post(COMPLETIONS, body)

        assert answer.json["usage"]["completion_tokens"] == 10

    async def test_may_stand_in_lists_of_prompts_and_tokens(self, serve: Serve) -> None:
        async with serve() as served:
            prompts = {"prompt": [[97.0], [98.0, 99]], "max_tokens": 1}
            assert (await served.post(COMPLETIONS, prompts)).status == 200
            plain = await served.post("/detokenize", {"tokens": [97, 98]})
            pointed = await served.post("/detokenize", {"tokens": [97.0, 98]})

        assert pointed.json == plain.json

    @pytest.mark.parametrize(
        ("path", "name", "value"),
        [
            *((CHAT, name, 1.5) for name in ("n", "seed", "max_tokens", "top_k", "top_logprobs")),
            *((COMPLETIONS, name, 0.5) for name in ("logprobs", "best_of", "min_tokens")),
            (COMPLETIONS, "stop_token_ids", [3, 1.5]),
            (COMPLETIONS, "prompt", [97, 1.5]),
            (COMPLETIONS, "prompt", [[97], [1.5]]),
            ("/detokenize", "tokens", [1.5]),
        ],
    )
    async def test_is_whole(self, serve: Serve, path: str, name: str, value: Any) -> None:
        body = {CHAT: HI, COMPLETIONS: {"prompt": "a"}, "/detokenize": {}}[path]
        async with serve() as served:
            answer = await served.post(path, {**body, name: value})

        assert (answer.status, answer.error["param"]) == (400, name)
        assert f"{name}: expected a whole number, got " in answer.error["message"]

    def test_may_be_too_large_for_a_float(self) -> None:
        body = msgspec.json.decode(
            b'{"model": "m", "prompt": "a", "seed": 1%s}' % (b"0" * 30), type=CompletionBody
        )

        assert body.seed == 10**30


BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any], str]] = {
    "chat_template_kwargs": (ChatBody, HI, "chat_template_kwargs"),
    "choice": (CompletionBody, {"prompt": "a"}, "structured_outputs.choice"),
    "logit_bias": (CompletionBody, {"prompt": "a"}, "logit_bias"),
    "messages": (ChatBody, {}, "messages"),
    "stop": (CompletionBody, {"prompt": "a"}, "stop"),
    "stop_regex": (CompletionBody, {"prompt": "a"}, "stop_regex"),
    "stop_token_ids": (ChatBody, HI, "stop_token_ids"),
    "structures": (ChatBody, HI, "response_format.structures"),
    "tokens": (DetokenizeBody, {}, "tokens"),
    "tools": (TokenizeBody, {}, "tools"),
    "triggers": (ChatBody, HI, "response_format.triggers"),
}
VALUES: dict[str, Any] = {
    "messages": {"role": "user", "content": "a"},
    "stop_token_ids": 5,
    "structures": {},
    "tokens": 5,
    "tools": {"type": "function"},
}


def holding(name: str, count: int) -> bytes:
    """A body that has so many values in a field."""
    _, other, path = BODIES[name]
    values: Any = [VALUES.get(name, "a")] * count
    if name in {"chat_template_kwargs", "logit_bias"}:
        values = dict.fromkeys(map(str, range(count)), 1)
    *outer, last = path.split(".")
    found: dict[str, Any] = {last: values}
    for field in outer:
        kind = {"type": "structural_tag"} if field == "response_format" else {}
        found = {field: {**kind, **found}}
    return json.dumps({"model": "m", **other, **found}).encode()


class TestALimit:
    def test_is_that_of_every_list_and_map(self) -> None:
        assert BODIES.keys() == MOST.keys()

    @pytest.mark.parametrize("name", list(MOST))
    def test_is_the_most_that_a_field_may_have(self, name: str) -> None:
        type_, _, _ = BODIES[name]
        msgspec.json.decode(holding(name, MOST[name]), type=type_)

        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.json.decode(holding(name, MOST[name] + 1), type=type_)
        assert isinstance(caught.value.__cause__, OptionError)
        assert f"are more than {MOST[name]:,}; send fewer" in str(caught.value)

    async def test_is_refused_by_the_name_of_its_field(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(names=("m",))) as served:
            for name in ("choice", "triggers", "logit_bias"):
                path = CHAT if BODIES[name][0] is ChatBody else COMPLETIONS
                answer = await served.post(path, holding(name, MOST[name] + 1))

                assert (answer.status, answer.error["param"]) == (400, BODIES[name][2])

    async def test_of_a_chat_counts_parts_and_calls(self, serve: Serve) -> None:
        call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
        parts = {
            "role": "user",
            "content": [{"type": "text", "text": "a"}] * (MOST["messages"] // 2),
        }
        calls = {"role": "assistant", "tool_calls": [call] * (MOST["messages"] // 2)}
        async with serve() as served:
            answer = await served.post(CHAT, {"messages": [parts, calls]})

        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "are more than 10,000" in answer.error["message"]


class TestTheOptionsOfAProgram:
    def test_are_numbers_as_everywhere(self) -> None:
        data = b'{"options": {"max_tokens": 4.0, "seed": 1e3}, "budget": {"tokens": 9.0}}'
        body = msgspec.json.decode(data, type=ProgramBody)

        assert body.options is not None
        assert body.budget is not None
        found = (body.options.max_tokens, body.options.seed, body.budget.tokens)
        assert [str(each) for each in found] == ["4", "1000", "9"]

    def test_have_the_limits_of_other_bodies(self) -> None:
        stops = json.dumps(["a"] * (MOST["stop"] + 1)).encode()
        with pytest.raises(msgspec.ValidationError, match="stop: 1,025 values are more than"):
            msgspec.json.decode(b'{"options": {"stop": %s}}' % stops, type=ProgramBody)


class TestAMessage:
    """Of its parts and calls, too, no field is dropped in silence."""

    @pytest.mark.parametrize(
        ("message", "field"),
        [
            ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "content[0].x"),
            (
                {"role": "user", "content": [{"type": "text", "text": "a", "image_url": "b"}]},
                "content[0].image_url",
            ),
            (
                {"role": "user", "content": [{"type": "text", "text": "a", "refusal": "b"}]},
                "content[0].refusal",
            ),
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "x": 1}]},
                "tool_calls[0].x",
            ),
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "x": 1}}]},
                "tool_calls[0].function.x",
            ),
        ],
        ids=["part", "media", "refusal", "call", "function"],
    )
    async def test_is_refused_for_what_is_not_read(
        self, serve: Serve, message: dict[str, Any], field: str
    ) -> None:
        async with serve() as served:
            answer = await served.post(CHAT, {"messages": [message]})

        assert answer.status == 400
        assert field.rpartition(".")[2] in answer.error["param"]
        assert answer.error["param"].startswith("messages[")

    async def test_may_have_what_clients_send_back(self, serve: Serve) -> None:
        part = {"type": "text", "text": "a", "annotations": [], "cache_control": {"type": "e"}}
        function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
        call = {"id": "1", "type": "function", "index": 0, "function": function}
        answered = dict.fromkeys(("refusal", "audio", "function_call", "annotations", "parsed"))
        said = {**answered, "role": "assistant", "content": [part], "reasoning_content": "hm"}
        messages = [*HI["messages"], {**said, "tool_calls": [call]}, *HI["messages"]]
        async with serve() as served:
            answer = await served.post(CHAT, {"messages": messages, "max_tokens": 1})

        assert answer.status == 200, answer.text

    async def test_of_half_a_character_is_told_so(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(names=("m",))) as served:
            answer = await served.post(COMPLETIONS, b'{"model":"m","prompt":"a\\ud83d"}')

        assert answer.status == 400
        assert r"\ud83d is half of a surrogate pair" in answer.error["message"]
