"""Prompt parts to token ids: the one place where text meets the tokenizer.

Owns   the seam policy: each part is encoded by itself, once. So a prompt that extends another
       in parts extends it in ids too, and the radix tree finds it; joining the text first and
       encoding it as a whole would change tokens at the seams.
Holds  `Text` never becomes a control token, whatever it spells; only `Control` does.
Used   by `engine`, on the event loop for short prompts, in a thread for long ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import assert_never

import numpy as np

from structgen.engine.radix import NO_IDS, Ids
from structgen.errors import PromptError, UnsupportedError
from structgen.models.tokenizer import Tokenizer
from structgen.request import Control, Image, Part, Prompt, Text, Tokens

BLOCKING_CHARACTERS = 8_192  # more than this is encoded in a thread: some 10 ms of work
CACHED_CHARACTERS = 8_000_000  # texts whose ids are remembered, in all


class Encoder:
    """Encodes parts, remembering the ids of recent texts.

    Branches of a program send the same long prefix again and again; its parts are looked up,
    not encoded again. Thread-safe as far as it is used: a call in a thread fills the cache with
    whole entries only.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[tuple[bool, bool, str], Ids] = OrderedDict()
        self._cached = 0
        self._longest_token = max(map(len, tokenizer.token_bytes), default=1)

    def would_block(self, parts: Prompt) -> bool:
        """Whether encoding these parts takes long enough to disturb an event loop."""
        fresh = 0
        for index, part in enumerate(parts):
            if isinstance(part, Text | Control) and _key(part, index) not in self._cache:
                fresh += len(part.text)
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
        pieces = [self._encode_part(part, index) for index, part in enumerate(parts)]
        ids = np.concatenate([NO_IDS, *pieces])
        bos = self._tokenizer.bos_id
        given = bool(parts) and isinstance(parts[0], Tokens)
        if bos is not None and ids.size and ids[0] != bos and not given:
            ids = np.concatenate([np.array([bos], np.int64), ids])
        return ids

    def continuation(self, text: str) -> Ids:
        """Ids of a text that continues another one."""
        return np.array(self._tokenizer.encode(text, start=False), np.int64)

    def _encode_part(self, part: Part, index: int) -> Ids:
        match part:
            case Text() | Control():
                return self._encode_text(part, index)
            case Tokens():
                return self._check(part)
            case Image():
                raise UnsupportedError(
                    "this model sees no images; describe the image in text instead"
                )
            case _:
                assert_never(part)

    def _encode_text(self, part: Text | Control, index: int) -> Ids:
        key = _key(part, index)
        ids = self._cache.get(key)
        if ids is None:
            if isinstance(part, Control):
                found = self._tokenizer.encode_control(part.text)
            else:
                found = self._tokenizer.encode(part.text, start=index == 0)
            ids = np.array(found, np.int64)
            self._remember(key, ids)
        return ids

    def _remember(self, key: tuple[bool, bool, str], ids: Ids) -> None:
        if len(key[2]) > CACHED_CHARACTERS // 4:
            return
        self._cache[key] = ids
        self._cached += len(key[2])
        while self._cached > CACHED_CHARACTERS:
            (_, _, text), _ = self._cache.popitem(last=False)
            self._cached -= len(text)

    def _check(self, part: Tokens) -> Ids:
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


def _key(part: Text | Control, index: int) -> tuple[bool, bool, str]:
    return isinstance(part, Control), index == 0, part.text


def ids_prompt(ids: Sequence[int]) -> Prompt:
    """A prompt of given token ids; the engine takes them as they are."""
    return (Tokens(tuple(ids), ""),) if ids else ()
