"""`return_token_ids`: every token that was drawn, whatever of its text is kept; as vLLM has it."""

from __future__ import annotations

import string
from typing import Any

import pytest

from tests.server.served import Serve, Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "return_token_ids": True}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
END = 258


async def letters(served: Served) -> dict[str, Any]:
    """Options with which the tiny model writes readable text, the same each time."""
    ids = await served.engine.encode(string.ascii_lowercase)
    return {**GREEDY, "logit_bias": {str(token): 100 for token in ids}}


async def said(served: Served, path: str, **options: Any) -> tuple[str, list[int], int]:
    """Text, token ids and the number of tokens that the usage counts."""
    answer = await served.post(path, {**BODIES[path], **options})
    assert answer.status == 200, answer.text
    (choice,) = answer.json["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return text, choice["token_ids"], answer.json["usage"]["completion_tokens"]


async def streamed(served: Served, path: str, **options: Any) -> list[int]:
    answer = await served.post(path, {**BODIES[path], **options, "stream": True})
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    return [token for choice in choices for token in choice["token_ids"]]


class TestTheTokenIds:
    @BOTH
    async def test_have_the_token_that_ended_the_text(self, serve: Serve, path: str) -> None:
        bias = {"logit_bias": {str(END): 100}, "return_token_ids": True}
        async with serve() as served:
            assert await said(served, path, **bias) == ("", [END], 1)
            assert await streamed(served, path, **bias) == [END]

    @BOTH
    async def test_have_a_stop_that_a_client_named(self, serve: Serve, path: str) -> None:
        async with serve() as served:
            options = await letters(served)
            _, ids, _ = await said(served, path, **options)
            text, found, count = await said(served, path, **options, stop_token_ids=[ids[4]])
            decoded = served.engine.decode(found)

        assert count == len(found)
        assert found[-1] == ids[4]
        assert decoded.startswith(text)
        assert len(decoded) == len(text) + 1

    @BOTH
    async def test_have_the_tokens_of_a_stop_string(self, serve: Serve, path: str) -> None:
        async with serve() as served:
            options = await letters(served)
            whole, ids, _ = await said(served, path, **options)
            stop = whole[10:13]
            end = whole.index(stop) + len(stop)
            for keep in (False, True):
                options |= {"stop": stop, "include_stop_str_in_output": keep}
                text, found, count = await said(served, path, **options)

                assert text == whole[: end if keep else end - len(stop)]
                assert (found, count) == (ids[:end], end)
                assert served.engine.decode(found) == whole[:end]
            assert await streamed(served, path, **options) == ids[:end]

    @BOTH
    async def test_are_all_of_a_text_that_was_cut_off(self, serve: Serve, path: str) -> None:
        async with serve() as served:
            text, found, count = await said(served, path, **await letters(served))

            assert served.engine.decode(found) == text
        assert count == len(found) == 24
