"""Log-probabilities as the two routes write them: names of tokens, offsets, the likeliest."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from structgen.models.checkpoint import open_checkpoint
from structgen.models.tokenizer import Tokenizer
from structgen.request import TokenLogprob
from structgen.server.openai import chat
from structgen.server.openai.logprobs import (
    CompletionSpelling,
    Speller,
    chat_logprobs,
    written_logprobs,
)
from structgen.server.openai.replies import ChatLogprobs
from tests.server.served import Serve

EMOJI = "\N{GRINNING FACE}"


@pytest.fixture(scope="module")
def tokenizer(tiny_chat_model: Path) -> Tokenizer:
    return open_checkpoint(tiny_chat_model).tokenizer


@pytest.fixture
def speller(tokenizer: Tokenizer) -> Speller:
    return Speller(tokenizer)


def entries(tokenizer: Tokenizer, text: str) -> list[TokenLogprob]:
    """Of the bytes of a text, each of log-probability -1."""
    return [TokenLogprob(token, -1.0) for token in tokenizer.encode(text)]


class TestLogprobsThatAreWritten:
    def test_are_bytes_already_and_the_same(self, tokenizer: Tokenizer) -> None:
        """So an answer of a hundred thousand of them holds up nobody while it is put together."""
        speller, whole = Speller(tokenizer), entries(tokenizer, f"aé{EMOJI}b")
        plain, written = chat_logprobs(speller, whole), written_logprobs(speller, whole)

        assert msgspec.json.encode(written) == msgspec.json.encode(plain)
        assert all(isinstance(each, msgspec.Raw) for each in list[object](written.content))


class TestTheNameOfAToken:
    def test_is_its_text(self, tokenizer: Tokenizer, speller: Speller) -> None:
        assert speller.name_of(tokenizer.encode("a")[0]) == "a"

    def test_is_its_markup_if_it_is_a_control_token(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        token = tokenizer.token_id("<|im_end|>")

        assert token is not None
        assert speller.name_of(token) == "<|im_end|>"
        assert speller.written(token) == b""

    def test_is_its_bytes_if_they_are_no_character(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        names = [speller.name_of(token) for token in tokenizer.encode(EMOJI)]

        assert names == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]

    def test_is_one_of_its_own_for_every_token(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        names = [speller.name_of(token) for token in range(tokenizer.vocab_size)]

        assert len(set(names)) == tokenizer.vocab_size


class TestOffsets:
    def test_count_characters(self, tokenizer: Tokenizer, speller: Speller) -> None:
        found = CompletionSpelling(speller).of(entries(tokenizer, f"aé{EMOJI}b"))

        assert found.text_offset == [0, 1, 1, 2, 2, 2, 2, 3]

    def test_go_on_where_the_last_piece_ended(self, tokenizer: Tokenizer, speller: Speller) -> None:
        spelling, whole = CompletionSpelling(speller, 10), entries(tokenizer, f"{EMOJI}ab")

        offsets = [spelling.of([entry]).text_offset[0] for entry in whole]

        assert offsets == [10, 10, 10, 10, 11, 12]

    def test_count_what_is_no_character_as_the_text_shows_it(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        broken = [*entries(tokenizer, EMOJI)[:2], *entries(tokenizer, "ab")]
        text = tokenizer.decode([entry.token for entry in broken])

        offsets = CompletionSpelling(speller).of(broken).text_offset

        assert [text[offset:] for offset in offsets[2:]] == ["\ufffdab", "b"]

    def test_count_no_control_token(self, tokenizer: Tokenizer, speller: Speller) -> None:
        token = tokenizer.token_id("<|im_start|>")
        assert token is not None
        marked = [TokenLogprob(token, None), *entries(tokenizer, "ab")]

        assert CompletionSpelling(speller).of(marked).text_offset == [0, 0, 1]

    def test_leave_out_the_space_that_a_tokenizer_strips(
        self, tokenizer: Tokenizer, speller: Speller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tokenizer, "strips_first_space", True)
        spaced = entries(tokenizer, " a b")

        begins = CompletionSpelling(speller, begins=True).of(spaced)
        goes_on = CompletionSpelling(speller).of(spaced)

        assert begins.text_offset == [0, 0, 1, 2]
        assert goes_on.text_offset == [0, 1, 2, 3]


class TestTheLikeliest:
    def top(self, speller: Speller, entry: TokenLogprob) -> dict[str, float]:
        (found,) = CompletionSpelling(speller).of([entry]).top_logprobs
        assert found is not None
        return found

    def test_come_best_first_and_the_token_with_them(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        a, b, c = tokenizer.encode("abc")

        found = self.top(speller, TokenLogprob(c, -3.0, ((a, -1.0), (b, -2.0))))

        assert list(found.items()) == [("a", -1.0), ("b", -2.0), ("c", -3.0)]

    def test_have_the_tokens_own_value_to_the_last_bit(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        a, b = tokenizer.encode("ab")
        own = math.nextafter(-1.0, 0.0)

        found = self.top(speller, TokenLogprob(a, own, ((a, -1.0), (b, -2.0))))

        assert found == {"a": own, "b": -2.0}

    def test_are_the_token_alone_if_no_others_were_wanted(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        (token,) = tokenizer.encode("a")

        assert self.top(speller, TokenLogprob(token, -2.0)) == {"a": -2.0}

    def test_stand_apart_where_they_are_no_characters(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        first, second, *_ = tokenizer.encode(EMOJI)

        found = self.top(speller, TokenLogprob(first, -1.0, ((first, -1.0), (second, -2.0))))

        assert list(found) == ["bytes:\\xf0", "bytes:\\x9f"]

    def test_are_finite(self, tokenizer: Tokenizer, speller: Speller) -> None:
        a, b = tokenizer.encode("ab")
        entry = TokenLogprob(a, -math.inf, ((b, 0.0), (a, -math.inf)))

        assert self.top(speller, entry) == {"b": 0.0, "a": -9999.0}
        assert CompletionSpelling(speller).of([entry]).token_logprobs == [-9999.0]
        assert chat_logprobs(speller, [entry]).content[0].logprob == -9999.0

    def test_of_the_first_token_of_all_are_unknown(
        self, tokenizer: Tokenizer, speller: Speller
    ) -> None:
        found = CompletionSpelling(speller).of([TokenLogprob(tokenizer.encode("a")[0], None)])

        assert (found.token_logprobs, found.top_logprobs) == ([None], [None])


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
}


class TestOfAChat:
    """Their form; those of a real model are in `test_figures`."""

    async def test_are_one_for_each_token(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post("/v1/chat/completions", {**CHAT, "logprobs": True})

        (choice,) = answer.json["choices"]
        content = choice["logprobs"]["content"]
        assert len(content) == answer.json["usage"]["completion_tokens"] == 12
        assert all(entry["top_logprobs"] == [] for entry in content)
        spelled = b"".join(bytes(entry["bytes"]) for entry in content)
        assert spelled.decode(errors="replace") == choice["message"]["content"]

    async def test_name_the_likeliest_in_order(self, serve: Serve) -> None:
        body = {**CHAT, "logprobs": True, "top_logprobs": 3}
        async with serve() as served:
            answer = await served.post("/v1/chat/completions", body)

        for entry in answer.json["choices"][0]["logprobs"]["content"]:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert entry["top_logprobs"][0]["token"] == entry["token"]
            assert entry["logprob"] <= 0

    async def test_are_the_same_in_a_stream(self, serve: Serve) -> None:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2}
        async with serve(radix=False) as served:
            whole = await served.post("/v1/chat/completions", body)
            chunks = (await served.post("/v1/chat/completions", {**body, "stream": True})).chunks

        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        found = [entry for part in parts if part is not None for entry in part["content"]]
        assert found == whole.json["choices"][0]["logprobs"]["content"]

    async def test_are_written_beside_the_event_loop_if_they_are_many(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        beside: list[bool] = []

        def seen(speller: Speller, found: Sequence[TokenLogprob]) -> ChatLogprobs:
            beside.append(threading.current_thread() is not threading.main_thread())
            return written_logprobs(speller, found)

        monkeypatch.setattr(chat, "written_logprobs", seen)
        body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        async with serve() as served:
            for count in (2, 60):
                wanted = {"logprobs": True, "top_logprobs": 20, "max_tokens": count}
                await served.post("/v1/chat/completions", {**body, **wanted})

        assert beside == [False, True]

    async def test_that_cannot_be_had_are_refused(self, serve: Serve) -> None:
        async with serve() as served:
            for number, wanted in ((3, None), (21, True), (-1, True)):
                body = {**CHAT, "top_logprobs": number, "logprobs": wanted}
                answer = await served.post("/v1/chat/completions", body)

                assert (answer.status, answer.error["param"]) == (400, "top_logprobs")


class TestOfAnEnd:
    async def test_come_last_and_are_no_text(self, serve: Serve) -> None:
        body = {"prompt": "abc", "max_tokens": 5, "logprobs": 1, "logit_bias": {"258": 100}}
        async with serve() as served:
            answer = await served.post("/v1/completions", body)
            entries = (await served.engine.score("abc", ["x"])).each

        (choice,) = answer.json["choices"]
        assert entries
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert choice["logprobs"]["tokens"] == ["<|im_end|>"]
        assert choice["logprobs"]["token_logprobs"][0] < 0
        assert choice["logprobs"]["text_offset"] == [0]
