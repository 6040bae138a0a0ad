"""Prompts to ids: where texts are cut, what is remembered, and what runs in a thread."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgen.engine.encode import (
    BLOCKING_CHARACTERS,
    CACHED_CHARACTERS,
    Encoder,
    Stretch,
    parts_from,
)
from structgen.errors import PromptError
from structgen.models.checkpoint import open_checkpoint
from structgen.models.tokenizer import Tokenizer
from structgen.request import Control, Part, Prompt, Text, Tokens

LONG = "a long text, " * 1000
START, END = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return open_checkpoint(tiny_model).tokenizer


@pytest.fixture
def encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer)


def ids(encoder: Encoder, *parts: Part) -> list[int]:
    found: list[int] = encoder.encode(parts).tolist()
    return found


class TestParts:
    def test_of_text_never_become_control_tokens(self, encoder: Encoder) -> None:
        found = ids(encoder, Text(START), Text("hi" + END))

        assert len(found) == len(START + "hi" + END)
        assert max(found) < 256

    def test_of_markup_do(self, encoder: Encoder) -> None:
        found = ids(encoder, Control(START + "user\n"), Text(END), Control(END))

        assert (found[0], found[-1]) == (257, 258)
        assert [token for token in found if token > 255] == [257, 258]

    def test_of_markup_halves_do_not_join_with_text_to_one(self, encoder: Encoder) -> None:
        """Neither a user who ends a marker that the template begins, nor the reverse."""
        half = len(START) // 2
        for parts in (
            (Control(START[:half]), Text(START[half:])),
            (Text(START[:half]), Control(START[half:])),
            (Text(START[:half]), Text(START[half:])),
        ):
            assert max(ids(encoder, *parts)) < 256

    def test_of_tokens_are_taken_as_they_are(self, encoder: Encoder) -> None:
        assert ids(encoder, Tokens((258, 5), "text that is not looked at")) == [258, 5]

    def test_of_another_tokenizer_are_refused(self, encoder: Encoder) -> None:
        with pytest.raises(PromptError, match="another model's tokenizer"):
            ids(encoder, Tokens((5,), "", "another"))

    def test_of_nothing_have_no_ids(self, encoder: Encoder) -> None:
        assert ids(encoder) == ids(encoder, Text(""), Control(""), Tokens((), "")) == []

    def test_that_extend_others_extend_their_ids(self, encoder: Encoder) -> None:
        before: Prompt = (Control(START), Text("one"), Text("two"), Tokens((7, 8), "x"))
        after: Prompt = (*before, Text("three"), Control(END))

        assert ids(encoder, *after)[: len(ids(encoder, *before))] == ids(encoder, *before)

    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
    def test_of_any_text_are_its_bytes(self, tokenizer: Tokenizer, text: str) -> None:
        found = Encoder(tokenizer).encode((Text(text),)).tolist()

        assert b"".join(tokenizer.token_bytes[token] for token in found) == text.encode()


class TestTheLowerBound:
    @given(
        parts=st.lists(
            st.builds(Text, st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
            | st.builds(Control, st.sampled_from([START, END * 5, START + "user\n", "x" * 20]))
            | st.builds(Tokens, st.lists(st.integers(0, 258)).map(tuple), st.just("text")),
            max_size=6,
        )
    )
    def test_is_never_more_than_there_are(self, tokenizer: Tokenizer, parts: list[Part]) -> None:
        encoder = Encoder(tokenizer)

        assert encoder.fewest_tokens(tuple(parts)) <= len(encoder.encode(tuple(parts)))


def slow(encoder: Encoder, *parts: Part) -> list[Stretch]:
    return encoder.slow_texts(list(encoder.pieces(parts)))


class TestSlowTexts:
    def test_are_none_of_a_short_prompt(self, encoder: Encoder) -> None:
        assert slow(encoder, Text("a" * BLOCKING_CHARACTERS)) == []

    async def test_are_those_of_a_long_prompt_that_are_not_remembered(
        self, encoder: Encoder
    ) -> None:
        parts = (Text(LONG), Tokens((1,), ""), Text("short"))
        before = slow(encoder, *parts)
        await encoder.encoded((Text(LONG),), len(LONG))

        assert [each.text for each in before] == [LONG, "short"]
        assert slow(encoder, *parts) == []

    def test_are_asked_for_once_where_they_repeat(self, encoder: Encoder) -> None:
        found = slow(encoder, Text(LONG), Tokens((1,), ""), Text("x"), Text("x"), Text("x"))

        assert len(found) == len(set(found))

    async def test_give_the_ids_that_encoding_at_once_gives(self, tokenizer: Tokenizer) -> None:
        parts: Prompt = (Control(START + "user\n"), Text(LONG), Control(END), Text("x" * 9000))

        found = await Encoder(tokenizer).encoded(parts, 10**6)

        assert np.array_equal(found, Encoder(tokenizer).encode(parts))

    def test_change_nothing_while_they_are_encoded(self, encoder: Encoder) -> None:
        encoder.ids_of(slow(encoder, Text(LONG)))

        assert (encoder._cached, len(encoder._cache)) == (0, 0)

    def test_that_are_no_unicode_are_refused(self, encoder: Encoder) -> None:
        with pytest.raises(PromptError, match=r"'\\ud800' at character 13000 is half"):
            encoder.ids_of(slow(encoder, Text(LONG + "\ud800")))


class TestManyParts:
    def test_of_one_text_are_joined_in_time_that_grows_with_their_number(
        self, tokenizer: Tokenizer
    ) -> None:
        """A template may have no control tokens: then a whole chat is one stretch."""
        parts: Prompt = (Control("> "), Text("what"), Control("\n")) * 20_000

        began = time.process_time()
        (stretch,) = Encoder(tokenizer).pieces(parts)

        assert stretch == Stretch("> what\n" * 20_000, start=True)
        assert time.process_time() - began < 1

    async def test_let_other_tasks_run(self, encoder: Encoder) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        parts: Prompt = (Control(START), Text("a"), Control(END)) * 10_000
        found = await encoder.encoded(parts, len(parts))
        task.cancel()

        assert found.tolist() == [257, 64, 258] * 10_000
        assert turns > 2


class TestTheMemoryOfTexts:
    def test_is_bounded(self, encoder: Encoder) -> None:
        for number in range(12):
            encoder.encode((Text(f"{number}" * 1_000_000),))

        kept = sum(len(stretch.text) for stretch in encoder._cache)
        assert kept == encoder._cached <= CACHED_CHARACTERS

    def test_keeps_no_text_that_would_drive_out_most_others(self, encoder: Encoder) -> None:
        encoder.encode((Text("x" * (CACHED_CHARACTERS // 4 + 1)),))

        assert encoder._cached == 0

    async def test_is_right_after_the_same_text_came_twice_at_once(self, encoder: Encoder) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(encoder.encoded((Text(LONG),), len(LONG)))

        assert encoder._cached == len(LONG)


class TestForms:
    def test_of_nothing_are_empty(self) -> None:
        assert parts_from("", None) == parts_from([], None) == parts_from((), None) == ()

    @pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), {1: 2}, {1}, iter([1]), 1.5])
    def test_of_other_kinds_are_refused(self, prompt: object) -> None:
        with pytest.raises(TypeError, match=f"not {type(prompt).__name__}"):
            parts_from(prompt, None)  # type: ignore[arg-type]  # what is tested
