"""What the document says of a body that its types do not, and what the server says of the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from structgen.server import ServerConfig
from structgen.server.openai.bounds import whole_numbers
from structgen.server.openai.wire import MOST
from tests.server.served import Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"model": "tiny", "prompt": "a", "max_tokens": 2}
SCHEMA = {"name": "x", "schema": {"type": "boolean"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def formatted(**fields: Any) -> dict[str, Any]:
    return {"response_format": fields}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TAKEN: list[dict[str, Any]] = [
    {"logit_bias": {"0": 1, "99": -100, "258": 5}},
    {"stop_token_ids": [0, 258]},
    {"max_tokens": 16.0},
    {"skip_special_tokens": True, "modalities": ["text"]},
    said({"role": "assistant", "content": None, "tool_calls": [CALL]}),
    said({"role": "user", "content": [{"type": "text", "text": "a"}]}),
    said({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}),
    formatted(type="text"),
    formatted(type="json_object", json_schema=None),
    formatted(type="json_schema", json_schema=SCHEMA),
    {"structured_outputs": {"regex": "a+", "json": None}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [TOOL], "tool_choice": "none"},
]
REFUSED: list[dict[str, Any]] = [
    {"logit_bias": {"259": 1}},
    {"logit_bias": {"0": 101}},
    {"logit_bias": dict.fromkeys(map(str, range(MOST["logit_bias"] + 1)), 1)},
    {"stop_token_ids": [259]},
    {"stop": ["a"] * (MOST["stop"] + 1)},
    {"stop_regex": ["a"] * (MOST["stop_regex"] + 1)},
    {"max_tokens": 1.5},
    {"max_tokens": 5000},
    {"skip_special_tokens": False},
    {"modalities": ["audio"]},
    {"chat_template_kwargs": {"thinking": True}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    said({"role": "user"}),
    said({"role": "user", "content": [{"type": "text"}]}),
    said({"role": "user", "content": [{"type": "image_url", "text": "a"}]}),
    formatted(type="json_schema"),
    formatted(type="json_object", format={"type": "const_string", "value": "a"}),
    formatted(type="structural_tag", triggers=["a"]),
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a+", "json": {}}},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": [TOOL] * (MOST["tools"] + 1)},
]


def is_valid(found: Any, path: str, body: Any) -> bool:
    content = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    whole = {**content["schema"], "components": found["components"]}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(body))


def examples(found: Any) -> Iterator[tuple[str, Any]]:
    for path, item in found["paths"].items():
        body = item.get("post", {}).get("requestBody", {"content": {}})
        for content in body["content"].values():
            for example in content.get("examples", {}).values():
                yield path, example["value"]


class TestABound:
    async def test_is_what_the_server_holds_a_chat_to(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(names=("tiny",))) as served:
            found = (await served.get("/openapi.json")).json
            for bodies, taken in ((TAKEN, True), (REFUSED, False)):
                for fields in bodies:
                    body = {**HI, **fields}
                    answer = await served.post(CHAT, body)

                    assert (answer.status == 200) is taken, (str(fields)[:80], answer.text[:200])
                    assert is_valid(found, CHAT, body) is taken, str(fields)[:80]

    @pytest.mark.parametrize(
        ("prompt", "taken"),
        [
            ("a", True),
            ([5, 258], True),
            ([5.0], True),
            (["a"] * 9, False),
            ([5, 259], False),
            ([], False),
            ([[5], []], False),
        ],
    )
    async def test_is_what_the_server_holds_prompts_to(
        self, serve: Serve, prompt: Any, taken: bool
    ) -> None:
        async with serve(config=ServerConfig(names=("tiny",), max_choices=8)) as served:
            found = (await served.get("/openapi.json")).json
            body = {**TEXT, "prompt": prompt}

            assert is_valid(found, COMPLETIONS, body) is taken
            assert ((await served.post(COMPLETIONS, body)).status == 200) is taken


class TestAnExample:
    async def test_can_be_sent_as_it_is(self, serve: Serve) -> None:
        async with serve() as served:
            found = (await served.get("/openapi.json")).json
            sent = list(examples(found))
            for path, body in sent:
                answer = await served.send("POST", path, json.dumps(body))

                assert answer.status == 200, (path, body, answer.text)
                assert is_valid(found, path, body)
        assert {path for path, _ in sent} == {CHAT, COMPLETIONS}


class TestThePatternOfWholeNumbers:
    @pytest.mark.parametrize("last", [0, 1, 9, 10, 19, 99, 100, 258, 1000, 49151])
    def test_is_of_all_up_to_the_last(self, last: int) -> None:
        pattern = re.compile(whole_numbers(last))
        near = {*range(min(last, 400) + 1), last // 2, last - 1, last} - {-1}

        assert [each for each in near if not pattern.search(str(each))] == []
        others = [*range(last + 1, last + 300), last * 10 + 10, "00", "-1", "", "1.0"]
        assert [each for each in others if pattern.search(str(each))] == []
