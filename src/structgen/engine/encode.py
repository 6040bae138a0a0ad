"""Prompt parts to token ids: the one place where text meets the tokenizer.

Owns   the seam policy. Two texts that follow each other, and a text that follows tokens, are
       encoded apart: a prompt that extends another in parts extends it in ids too, and the radix
       tree finds it. Markup and the text beside it are encoded together, because that is how the
       model was trained to read them: the ids of a chat are those of its whole rendering.
Holds  `Text` never becomes a control token, whatever it spells; only `Control` does.
Used   by `engine`, on the event loop for short prompts, in a thread for long ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import assert_never

import msgspec
import numpy as np

from structgen.engine.radix import NO_IDS, Ids
from structgen.errors import PromptError, UnsupportedError
from structgen.models.tokenizer import Tokenizer
from structgen.request import Control, Image, Part, Prompt, Text, Tokens

BLOCKING_CHARACTERS = 8_192  # more than this is encoded in a thread: some 10 ms of work
CACHED_CHARACTERS = 8_000_000  # texts whose ids are remembered, in all


class Stretch(msgspec.Struct, frozen=True):
    """Text to encode in one go. `start`: it begins a text, which SentencePiece marks by a space."""

    text: str
    start: bool


class Encoder:
    """Encodes parts, remembering the ids of recent texts.

    Branches of a program send the same long prefix again and again; its texts are looked up,
    not encoded again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[Stretch, Ids] = OrderedDict()
        self._cached = 0
        self._longest_token = max(map(len, tokenizer.token_bytes), default=1)

    def would_block(self, parts: Prompt) -> bool:
        """Whether encoding these parts takes long enough to disturb an event loop."""
        if sum(len(part.text) for part in parts if isinstance(part, Text | Control)) <= (
            BLOCKING_CHARACTERS
        ):
            return False
        stretches = [s for s in self._stretches(parts) if isinstance(s, Stretch)]
        fresh = sum(len(s.text) for s in stretches if s not in self._cache)
        return fresh > BLOCKING_CHARACTERS

    def fewest_tokens(self, parts: Prompt) -> int:
        """A lower bound on the number of tokens, found without encoding."""
        texts = sum(len(part.text) for part in parts if isinstance(part, Text | Control))
        ids = sum(len(part.ids) for part in parts if isinstance(part, Tokens))
        return ids + texts // self._longest_token

    def encode(self, parts: Prompt) -> Ids:
        """Ids of a prompt; a tokenizer that begins texts with a BOS token gets its one BOS.

        Raises `PromptError` for ids of another vocabulary, `UnsupportedError` for images.
        """
        pieces = [
            self._encode(each) if isinstance(each, Stretch) else each
            for each in self._stretches(parts)
        ]
        ids = np.concatenate([NO_IDS, *pieces])
        bos = self._tokenizer.bos_id
        given = bool(parts) and isinstance(parts[0], Tokens)
        if bos is not None and ids.size and ids[0] != bos and not given:
            ids = np.concatenate([np.array([bos], np.int64), ids])
        return ids

    def continuation(self, text: str) -> Ids:
        """Ids of a text that continues another one."""
        return np.array(self._tokenizer.encode(text, start=False), np.int64)

    def _stretches(self, parts: Prompt) -> list[Stretch | Ids]:
        """Split a prompt into texts to encode and ids that are known."""
        found: list[Stretch | Ids] = []
        start = True
        before: type | None = None
        for part in parts:
            joins = Control in {before, type(part)}
            for section in self._sections(part):
                if not isinstance(section, str):
                    found.append(np.array(section, np.int64, ndmin=1))
                    start = isinstance(section, int) and self._tokenizer.prefixed_throughout
                elif joins and found and isinstance(last := found[-1], Stretch):
                    found[-1] = Stretch(last.text + section, last.start)
                elif section:
                    found.append(Stretch(section, start))
                    start = False
            before = type(part)
        return found

    def _sections(self, part: Part) -> list[int | str] | list[str] | list[Ids]:
        """A part as control tokens (int), text (str) and given ids, in order."""
        match part:
            case Text():
                return [part.text]
            case Control():
                return self._tokenizer.sections(part.text)
            case Tokens():
                return [self._checked(part)]
            case Image():
                raise UnsupportedError(
                    "this model sees no images; describe the image in text instead"
                )
            case _:
                assert_never(part)

    def _encode(self, stretch: Stretch) -> Ids:
        ids = self._cache.get(stretch)
        if ids is None:
            found = self._tokenizer.encode(stretch.text, start=stretch.start)
            ids = np.array(found, np.int64)
            self._remember(stretch, ids)
        return ids

    def _remember(self, stretch: Stretch, ids: Ids) -> None:
        if len(stretch.text) > CACHED_CHARACTERS // 4 or stretch in self._cache:
            return
        self._cache[stretch] = ids
        self._cached += len(stretch.text)
        while self._cached > CACHED_CHARACTERS:
            dropped, _ = self._cache.popitem(last=False)
            self._cached -= len(dropped.text)

    def _checked(self, part: Tokens) -> Ids:
        tokenizer = self._tokenizer
        if part.tokenizer not in {"", tokenizer.fingerprint}:
            raise PromptError(
                "the prompt holds tokens of another model's tokenizer; send them as text"
            )
        try:
            ids = np.array(part.ids, np.int64)
        except (OverflowError, TypeError, ValueError):
            raise PromptError("prompt tokens: expected whole numbers") from None
        if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
            bad = int(ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0])
            raise PromptError(
                f"prompt token {bad} is not in the vocabulary of {tokenizer.vocab_size}"
            )
        return ids


def ids_prompt(ids: Sequence[int]) -> Prompt:
    """A prompt of given token ids; the engine takes them as they are."""
    return (Tokens(tuple(ids), ""),) if ids else ()
