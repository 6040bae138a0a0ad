"""Forced text as tokens, in the spelling that the tokenizer has for the whole text.

A constraint often leaves no choice about the next bytes: the keys of an object, the rest of a word.
These need no forward pass each. But how they are cut into tokens matters: a model knows texts as
its tokenizer cuts them, and continues badly from any other cut. So

- the forced bytes are encoded together with the last tokens before them, and the cut is used if a
  token ends where they begin;
- a token may span the end of what is forced. For every place where one that the constraint allows
  could begin, the bytes up to there are encoded too; the tokens on which all of these cuts agree
  are the ones that the whole text has, whatever follows.

What is given out is only ever appended; nothing is encoded again, and nothing taken back.

Holds  where the tokenizer cuts a text, it cuts what is on each side as it would alone. This is so
       for merges (BPE) and for likeliest pieces (Unigram); the one exception met in practice, that
       the last of several spaces belongs to the word behind them, is taken into account.
Owns   the memory of which tokens begin with a given end of a text, and of what was encoded lately.
Used   by the matchers.

The idea is "jump-forward" of SGLang (Zheng et al., 2024), without its encoding of the output anew;
that tokens at the end must wait is what Guidance calls "fast-forward tokens".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

CONTEXT = 4  # tokens before the forced text that are encoded with it
MOST_FORCED = 512  # bytes looked ahead at once
MOST_KEPT = 4096  # entries of each memory
_FEW = 8  # tokens up to which a look at each is quicker than a row of bits

Key = TypeVar("Key")
Value = TypeVar("Value")
Encode = Callable[[str], Sequence[int]]
Mask = NDArray[np.int32]


class Written(msgspec.Struct, frozen=True):
    """Forced bytes, the bytes of the tokens before them, and the tokens they are written in."""

    context: bytes
    text: bytes
    ids: tuple[int, ...]


class Longer:
    """Tells whether one of the tokens that begin with some text, and go on, may be allowed.

    Once that text is accepted, a mask must allow one of these: what is behind the text, or the
    longest beginning of that which is a token. Where even that is none, one may always be allowed.
    """

    def __init__(self, tokens: set[int | None], size: int) -> None:
        """`size`: number of tokens there are."""
        self._always = None in tokens
        ids = sorted(token for token in tokens if token is not None)
        self._few = [(token >> 5, token & 31) for token in ids] if len(ids) <= _FEW else None
        bits = np.zeros(-(-size // 32) * 32 if self._few is None else 0, np.bool_)
        bits[ids if self._few is None else []] = True
        self._row: Mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def meets(self, allowed: Mask) -> bool:
        """Whether a mask allows one of them."""
        if self._few is None:
            return self._always or bool((self._row & allowed).any())
        return self._always or any(int(allowed[word]) >> bit & 1 for word, bit in self._few)


class Spelling:
    """How a tokenizer writes forced bytes; one for a vocabulary, shared by all threads."""

    def __init__(self, tokens: Sequence[bytes], encode: Encode) -> None:
        """Index a vocabulary: 0.1 s for 50,000 tokens.

        tokens   the bytes of every token that a text may hold, b"" for others
        """
        self._tokens, self._encode = tokens, encode
        # Of tokens with the same bytes, the first.
        self._ids = {data: token for token, data in reversed(list(enumerate(tokens))) if data}
        self._sorted = sorted(self._ids)
        self._longest = max(map(len, self._sorted), default=0)
        self._longer: dict[bytes, Longer | None] = {}
        self._written: dict[tuple[bytes, bytes], tuple[int, ...] | None] = {}
        # Thousands of tokens begin with a space: found here, and not in the first request.
        starts = {data[:1] for data in self._sorted}
        self._single = {start: self._found(start) for start in starts}

    def certain(
        self, before: Iterable[int], forced: bytes, ahead: Callable[[Written], Mask | None]
    ) -> tuple[int, ...]:
        """The tokens of forced bytes that the tokenizer would write whatever follows them.

        before   the last tokens of the output
        ahead    the mask behind what is written; None to give up
        """
        written = self.written(list(before), forced[:MOST_FORCED]) if forced else None
        allowed = None if written is None else ahead(written)
        return () if written is None or allowed is None else self.kept(written, allowed)

    def written(self, before: Sequence[int], forced: bytes) -> Written | None:
        """Forced bytes in tokens, after the last tokens `before` of the output.

        None for what cannot be written: less than a character, or what the tokenizer changes.
        """
        context = b"".join([self._tokens[token] for token in before[-CONTEXT:]])
        text = _whole_characters(context, forced)
        ids = self._spelled(context, text) if text else None
        return None if ids is None else Written(context, text, ids)

    def kept(self, written: Written, allowed: Mask) -> tuple[int, ...]:
        """Those of some forced tokens that the tokenizer would write whatever follows them.

        allowed   mask of what may follow them; as wide as the vocabulary
        """
        context, text = written.context, written.text
        kept = _settled(self._tokens, text, written.ids)
        if self._spelled(b"", text) == written.ids:
            context = b""  # it makes no difference, and what is forced is forced again elsewhere
        for cut in self._cuts(written.context, text, allowed):
            ids = self._spelled(context, text[:cut]) or ()
            kept = _agreed(kept, _settled(self._tokens, text[:cut], ids))
            if not kept:
                break
        return kept

    def _cuts(self, context: bytes, text: bytes, allowed: Mask) -> list[int]:
        """Where the last token that begins in a text may do so, if it spans the text's end."""
        spans = self._starts(text)
        cuts = [start for start, longer in spans if longer.meets(allowed)]
        seen: set[int] = set()
        found: set[int] = set()
        while cuts:
            cut = cuts.pop()
            whole = len(_whole_characters(context, text[:cut]))
            if whole < cut and cut not in seen:
                # It begins inside of a character, before which there are tokens that hold the
                # character's first bytes. Up to these it is the same again.
                cuts += [start for start, _ in self._starts(text[:whole])]
            seen.add(cut)
            found.add(whole)
        return sorted(found)

    def _starts(self, text: bytes) -> list[tuple[int, Longer]]:
        """Where tokens may begin that span the end of a text."""
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        found = ((start, self._longer_than(text[start:])) for start in starts)
        return [(start, longer) for start, longer in found if longer is not None]

    def _spelled(self, context: bytes, text: bytes) -> tuple[int, ...] | None:
        """A text in tokens, where it follows the context; None if it cannot be written."""
        key = (context, text)
        try:
            return self._written[key]
        except KeyError:
            found = self._encoded(context, text)
        _keep(self._written, key, found)
        return found

    def _encoded(self, context: bytes, text: bytes) -> tuple[int, ...] | None:
        start = 0
        while start < len(context) and context[start] & 0xC0 == 0x80:
            start += 1  # the context begins inside a character
        text = _whole_characters(context[start:], text)
        ids = self._behind(len(context) - start, context[start:] + text)
        if ids is None:
            try:
                ids = tuple(self._encode(text.decode()))
            except UnicodeDecodeError:
                return None  # it begins inside a character that was begun with another token
        # A tokenizer that does not give back the very bytes (it normalises) cannot be used here.
        return ids if b"".join([self._tokens[token] for token in ids]) == text else None

    def _behind(self, length: int, text: bytes) -> tuple[int, ...] | None:
        """The tokens behind the first `length` bytes; None if one of them spans that place."""
        try:
            ids = self._encode(text.decode())
        except UnicodeDecodeError:
            return None
        end, index = 0, 0
        while end < length and index < len(ids):
            end += len(self._tokens[ids[index]])
            index += 1
        return tuple(ids[index:]) if end == length else None

    def _longer_than(self, text: bytes) -> Longer | None:
        """The tokens that begin with a text and go on; None if there are none."""
        if len(text) == 1:
            return self._single.get(text)
        try:
            return self._longer[text]
        except KeyError:
            found = self._found(text)
        _keep(self._longer, text, found)
        return found

    def _found(self, text: bytes) -> Longer | None:
        start = bisect_right(self._sorted, text)
        end = bisect_right(self._sorted, text + b"\xff" * self._longest, start)
        rests = [data[len(text) :] for data in self._sorted[start:end]]
        found = set(map(self._ids.get, rests))
        if None in found:  # what is behind the text need not be a token
            found.discard(None)
            found.update(self._beginning(rest) for rest in rests if rest not in self._ids)
        return Longer(found, len(self._tokens)) if found else None

    def _beginning(self, data: bytes) -> int | None:
        """The longest token that the data begin with."""
        ends = range(len(data), 0, -1)
        return next((self._ids[data[:end]] for end in ends if data[:end] in self._ids), None)


def _keep(memory: dict[Key, Value], key: Key, value: Value) -> None:
    """Remember a value; a memory that is full begins anew."""
    if len(memory) >= MOST_KEPT:
        memory.clear()
    memory[key] = value


def _settled(tokens: Sequence[bytes], text: bytes, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens of a text but for those of several spaces at its end.

    The last of these may belong to a word that follows, even if no token is both.
    """
    cut = len(text.rstrip())
    if len(text) - cut < 2:
        return ids
    end = 0
    for index, token in enumerate(ids):
        end += len(tokens[token])
        if end > cut:
            return ids[:index]
    return ids


def _agreed(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that both begin with."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return one[:index]
    return min(one, other, key=len)


def _whole_characters(before: bytes, data: bytes) -> bytes:
    """The data without a character at the end that is not finished."""
    text = before + data
    for size in range(1, min(4, len(text)) + 1):
        if text[-size] & 0xC0 != 0x80:  # the last character begins here
            lead = text[-size]
            length = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data if length == size else data[: max(len(data) - size, 0)]
    return data
