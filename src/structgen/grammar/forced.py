"""Forced text as tokens, in the spelling that the tokenizer has for the whole text.

A constraint often leaves no choice about the next bytes: the keys of an object, the rest of a word.
These need no forward pass each. But how they are cut into tokens matters: a model knows texts as
its tokenizer cuts them, and continues badly from any other cut. So

- the forced bytes are encoded together with the last tokens before them, and the cut is used if a
  token ends where they begin;
- from the end, tokens are left out as far as a longer token, which the constraint allows, would
  span the end of what is forced: there the tokenizer might have cut otherwise.

What is given out is only ever appended; nothing is encoded again, and nothing taken back.

Owns   the memory of which tokens begin with a given end of a text.
Used   by the matchers.

The idea is "jump-forward" of SGLang (Zheng et al., 2024), without its encoding of the output anew;
that tokens at the end must wait is what Guidance calls "fast-forward tokens".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

CONTEXT = 4  # tokens before the forced text that are encoded with it
LONGEST_END = 16  # bytes before the end at which a spanning token may begin
KEPT_ENDS = 4096

Encode = Callable[[str], Sequence[int]]
Mask = NDArray[np.int32]


class Longer(msgspec.Struct, frozen=True):
    """The tokens that begin with some text and go on.

    rests    what is behind that text, where it is a token itself: its ids
    others   the first bytes of what is behind it elsewhere, as ids
    """

    rests: NDArray[np.int64]
    others: NDArray[np.int64]


class Spelling:
    """How a tokenizer writes forced bytes; one for a vocabulary, shared by all threads."""

    def __init__(self, tokens: Sequence[bytes], encode: Encode) -> None:
        """`tokens`: the bytes of every token that a text may hold, b"" for others."""
        self._tokens, self._encode = tokens, encode
        self._sorted = sorted((data, token) for token, data in enumerate(tokens) if data)
        self._ids = dict(reversed(self._sorted))
        self._longest = max((len(data) for data, _ in self._sorted), default=0)
        self._longer: dict[bytes, Longer | None] = {}

    def encoded(self, before: Sequence[int], forced: bytes) -> list[int]:
        """The tokens of forced bytes after the last tokens `before` of the output."""
        text = _whole_characters(forced)
        if not text:
            return []
        context = b"".join(self._tokens[token] for token in before[-CONTEXT:])
        try:
            ids = self._behind(len(context), self._encode((context + text).decode()))
        except UnicodeDecodeError:  # the context begins inside a character
            ids = None
        ids = list(self._encode(text.decode())) if ids is None else ids
        # A tokenizer that does not give back the very bytes (it normalises) cannot be used here.
        return ids if b"".join(self._tokens[token] for token in ids) == text else []

    def kept(self, ids: Sequence[int], allowed: Mask) -> list[int]:
        """Those of some forced tokens that the tokenizer would write whatever follows them.

        allowed   mask of what may follow them
        """
        forced = b"".join(self._tokens[token] for token in ids)
        cut = len(forced)
        for start in range(max(0, len(forced) - LONGEST_END), len(forced)):
            longer = self._longer_than(forced[start:])
            if longer is not None and (_any(allowed, longer.rests) or _any(allowed, longer.others)):
                cut = start
                break
        kept: list[int] = []
        end = 0
        for token in ids:
            end += len(self._tokens[token])
            if end > cut:
                break
            kept.append(token)
        return kept

    def _behind(self, length: int, ids: Sequence[int]) -> list[int] | None:
        """The tokens behind the first `length` bytes; None if one of them spans that place."""
        end = 0
        for index, token in enumerate(ids):
            if end == length:
                return list(ids[index:])
            end += len(self._tokens[token])
        return None

    def _longer_than(self, text: bytes) -> Longer | None:
        if len(text) >= self._longest:
            return None
        if text not in self._longer:
            if len(self._longer) >= KEPT_ENDS:
                self._longer.clear()
            self._longer[text] = self._found(text)
        return self._longer[text]

    def _found(self, text: bytes) -> Longer | None:
        rests: set[int] = set()
        others: set[int] = set()
        for data, _ in self._sorted[bisect_left(self._sorted, (text, -1)) :]:
            if not data.startswith(text):
                break
            if rest := data[len(text) :]:
                token = self._ids.get(rest)
                if token is not None:
                    rests.add(token)
                elif (first := self._ids.get(rest[:1])) is not None:
                    others.add(first)
        if not rests and not others:
            return None
        return Longer(np.array(sorted(rests), np.int64), np.array(sorted(others), np.int64))


def _any(mask: Mask, tokens: NDArray[np.int64]) -> bool:
    words = mask.view(np.uint32)[tokens >> 5]
    return bool(((words >> (tokens & 31).astype(np.uint32)) & 1).any())


def _whole_characters(data: bytes) -> bytes:
    """The bytes without a character at their end that is not finished."""
    for end in range(len(data), max(len(data) - 4, -1), -1):
        try:
            data[:end].decode()
        except UnicodeDecodeError:
            continue
        return data[:end]
    return b""
