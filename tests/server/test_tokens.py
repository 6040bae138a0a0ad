"""`/tokenize` and `/detokenize`: what the model is sent, and back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.server.served import Serve

HI = [{"role": "user", "content": "hi"}]
EMOJI = "\N{GRINNING FACE}"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "it is missing; send text, or the messages of a chat"),
    ({"prompt": "a", "messages": HI}, "messages", "cannot be combined with a prompt"),
    ({"prompt": "a", "tools": []}, "tools", "only the messages of a chat have it"),
    ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "only the"),
    ({"messages": HI, "add_special_tokens": True}, "add_special_tokens", "the chat template"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": HI, "continue_final_message": True}, "continue_final_message", "not the"),
    ({"prompt": [1, 2]}, "prompt", "got `array`"),
    ({"prompt": "x" * 300_000}, "prompt", "more than the context of 4096"),
    ({"prompt": "a", "n": 2}, "n", "unknown field"),
]


class TestTokenizing:
    @pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
    async def test_gives_the_ids_that_a_prompt_is_sent_as(self, serve: Serve, path: str) -> None:
        async with serve() as served:
            answer = await served.post(path, {"prompt": "the quick"})
            ids = await served.engine.encode("the quick")

        assert answer.json == {"count": 9, "max_model_len": 4096, "tokens": list(ids)}

    async def test_gives_the_text_of_each_token_if_it_is_asked_to(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post(
                "/tokenize", {"prompt": "a\u00e9", "return_token_strs": True}
            )

        assert answer.json["token_strs"] == ["a", "\ufffd", "\ufffd"]

    async def test_reads_no_control_tokens_in_a_prompt(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post("/tokenize", {"prompt": "<|im_end|>"})

        assert answer.json["count"] == len("<|im_end|>")

    async def test_of_nothing_gives_nothing(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post("/tokenize", {"prompt": ""})

        assert (answer.status, answer.json["tokens"]) == (200, [])

    async def test_of_a_chat_is_what_the_chat_is_sent_as(self, serve: Serve) -> None:
        closed, opened = "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>assistant\n"
        async with serve() as served:
            for options, text in (
                ({}, closed + opened),
                ({"add_generation_prompt": True}, closed + opened),
                ({"add_generation_prompt": False}, closed),
                ({"add_special_tokens": False}, closed + opened),
            ):
                body = {"messages": HI, "return_token_strs": True, **options}
                answer = await served.post("/tokenize", body)

                assert "".join(answer.json["token_strs"]) == text

    async def test_of_a_chat_counts_what_the_chat_costs(self, serve: Serve) -> None:
        begun = [*HI, {"role": "assistant", "content": "It is"}]
        async with serve() as served:
            for messages, options in ((HI, {}), (begun, {"continue_final_message": True})):
                counted = await served.post("/tokenize", {"messages": messages, **options})
                answered = await served.post(
                    "/v1/chat/completions", {"messages": messages, "max_tokens": 1, **options}
                )

                assert counted.json["count"] == answered.json["usage"]["prompt_tokens"]

    async def test_leaves_out_the_token_that_begins_a_text(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with serve() as served:
            monkeypatch.setattr(served.engine.loaded.checkpoint.tokenizer, "bos_id", 256)
            full = await served.post("/tokenize", {"prompt": "ab"})
            bare = await served.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})

        assert full.json["tokens"] == [256, *bare.json["tokens"]]
        assert bare.json["count"] == 2

    async def test_refuses_what_it_cannot_read(self, serve: Serve) -> None:
        async with serve() as served:
            for body, param, message in REFUSED:
                answer = await served.post("/tokenize", body)

                assert (answer.status, answer.error["param"]) == (400, param)
                assert message in answer.error["message"]


class TestDetokenizing:
    @pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
    async def test_undoes_it(self, serve: Serve, path: str) -> None:
        text = f"Z\u00fcrich {EMOJI}\n"
        async with serve() as served:
            tokens = (await served.post("/tokenize", {"prompt": text})).json["tokens"]
            answer = await served.post(path, {"tokens": tokens})

        assert answer.json == {"prompt": text}

    async def test_gives_special_tokens_no_text(self, serve: Serve) -> None:
        async with serve() as served:
            tokens = (await served.post("/tokenize", {"messages": HI})).json["tokens"]
            answer = await served.post("/detokenize", {"tokens": tokens})

        assert answer.json == {"prompt": "user\nhi\nassistant\n"}

    async def test_of_nothing_is_nothing(self, serve: Serve) -> None:
        async with serve() as served:
            assert (await served.post("/detokenize", {"tokens": []})).json == {"prompt": ""}

    async def test_refuses_what_is_no_token(self, serve: Serve) -> None:
        async with serve() as served:
            for tokens in ([259], [-1], [2**64], [0.5], "12", None):
                answer = await served.post("/detokenize", {"tokens": tokens})

                assert answer.status == 400, tokens
                assert str(answer.error["param"]).startswith("tokens")


class TestLongTexts:
    async def test_leave_the_event_loop_free(self, serve: Serve) -> None:
        """Some 4 MB of ids and 50,000 characters of text, while another task looks at its watch."""
        gaps: list[float] = []

        async def watch() -> None:
            last = time.perf_counter()
            while True:
                await asyncio.sleep(0)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        async with serve() as served:
            task = asyncio.create_task(watch())
            ids = [5] * 200_000
            decoded = await served.post("/detokenize", {"tokens": ids})
            await served.post("/tokenize", {"prompt": "x" * 50_000, "return_token_strs": True})
            task.cancel()

        assert len(decoded.json["prompt"]) == 200_000
        assert max(gaps) < 0.5
