"""An obvious matcher for the tests: a pattern as a tree, followed by derivatives.

The derivative of a pattern by a character is the pattern of what may follow (Brzozowski,
"Derivatives of regular expressions", JACM 1964). What one character matches is asked of `re`, over
all of Unicode; texts are bytes, so what may follow half a character is known too.

`Vocabulary`s are made here as well: byte by byte, with tokens that straddle characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from structgen.grammar.compiler import Grammar
from structgen.grammar.matcher import Matcher, Vocabulary

LAST = 0x10FFFF
EVERYTHING = "".join(map(chr, range(LAST + 1)))


# ---------------------------------------------------------------- trees


@dataclass(frozen=True)
class Atom:
    """One character; `source` is a pattern for it."""

    source: str


@dataclass(frozen=True)
class Join:
    """Parts one after the other; none: the empty text."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Either:
    """One of the parts; none: nothing matches."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Repeat:
    """From `low` to `high` times; None: without end."""

    part: Tree
    low: int
    high: int | None


@dataclass(frozen=True)
class Shortest:
    """Texts of the part that begin with no other text of the part."""

    part: Tree


Tree = Atom | Join | Either | Repeat | Shortest
EMPTY, NOTHING = Join(()), Either(())


def source(tree: Tree) -> str:
    """The pattern, for `re`."""
    match tree:
        case Atom(text):
            return text
        case Join(parts):
            return "".join(map(source, parts))
        case Either(parts):
            return f"(?:{'|'.join(map(source, parts))})"
        case Repeat(part, low, high):
            return f"(?:{source(part)}){{{low},{'' if high is None else high}}}"
        case Shortest(part):
            return source(part)


def nullable(tree: Tree) -> bool:
    match tree:
        case Atom():
            return False
        case Join(parts):
            return all(map(nullable, parts))
        case Either(parts):
            return any(map(nullable, parts))
        case Repeat(part, low, _):
            return low == 0 or nullable(part)
        case Shortest(part):
            return nullable(part)


@cache
def members(pattern: str) -> NDArray[np.bool_]:
    """For every code point whether the pattern of one character matches it; no surrogate does."""
    found = np.zeros(LAST + 1, np.bool_)
    for match in re.finditer(f"(?:{pattern})+", EVERYTHING):
        found[match.start() : match.end()] = True
    found[0xD800:0xE000] = False
    return found


@cache
def derived(tree: Tree, code: int) -> Tree:
    """What may follow a character; `NOTHING` if no text that matches begins with it."""
    match tree:
        case Atom(text):
            return EMPTY if members(text)[code] else NOTHING
        case Join(parts):
            found = []
            for n, part in enumerate(parts):
                found.append(_join(derived(part, code), *parts[n + 1 :]))
                if not nullable(part):
                    break
            return _either(*found)
        case Either(parts):
            return _either(*(derived(part, code) for part in parts))
        case Repeat(part, low, high):
            rest = Repeat(part, max(low - 1, 0), None if high is None else max(high - 1, 0))
            return _join(derived(part, code), rest) if high != 0 else NOTHING
        case Shortest(part):
            after = NOTHING if nullable(part) else derived(part, code)
            return NOTHING if after == NOTHING else Shortest(after)
    raise AssertionError(tree)


def _join(*parts: Tree) -> Tree:
    flat: list[Tree] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat += part.parts if isinstance(part, Join) else [part]
    return flat[0] if len(flat) == 1 else Join(tuple(flat))


def _either(*parts: Tree) -> Tree:
    flat: dict[Tree, None] = {}
    for part in parts:
        flat |= dict.fromkeys(part.parts if isinstance(part, Either) else [part])
    return next(iter(flat)) if len(flat) == 1 else Either(tuple(flat))


def atoms(tree: Tree) -> Iterator[str]:
    """The patterns of all characters in a tree."""
    match tree:
        case Atom(text):
            yield text
        case Repeat(part) | Shortest(part):
            yield from atoms(part)
        case Join(parts) | Either(parts):
            for part in parts:
                yield from atoms(part)


# ---------------------------------------------------------------- bytes


@dataclass(frozen=True)
class Place:
    """Where a text is in a pattern: a tree for the rest, and bytes of a character begun."""

    tree: Tree
    begun: bytes = b""

    @property
    def complete(self) -> bool:
        return not self.begun and nullable(self.tree)

    def after(self, data: bytes) -> Place | None:
        """Further on, None if no text that matches begins like that."""
        place: Place | None = self
        for byte in data:
            place = place and place._step(byte)
        return place

    @cache  # noqa: B019 - places live as long as the tests
    def _step(self, byte: int) -> Place | None:
        begun = self.begun + bytes([byte])
        scope = _begun_by(begun)
        if scope is None:
            return None
        low, high = scope
        if low == high and chr(low).encode() == begun:
            tree = derived(self.tree, low)
            return None if tree == NOTHING else Place(tree)
        # Characters that the same parts of the pattern match lead to the same place.
        kinds = _kinds(frozenset(atoms(self.tree)), low, high)
        if any(derived(self.tree, code) != NOTHING for code in kinds):
            return Place(self.tree, begun)
        return None


@cache
def _kinds(sources: frozenset[str], low: int, high: int) -> list[int]:
    """One code point of each kind from `low` to `high`: who is in the same of these patterns."""
    kind = np.zeros(high + 1 - low, np.int64)
    for text in sources:
        kind = 2 * kind + members(text)[low : high + 1]
    first: NDArray[np.int64] = np.unique(kind, return_index=True)[1]
    return [low + int(n) for n in first]


@cache
def _begun_by(data: bytes) -> tuple[int, int] | None:
    """The code points whose UTF-8 begins with some bytes."""
    lead = data[0]
    limits = ((1, 0x80), (0, 0xC2), (2, 0xE0), (3, 0xF0), (4, 0xF5))
    length = next((length for length, limit in limits if lead < limit), 0)
    if len(data) > length or any(not 0x80 <= byte < 0xC0 for byte in data[1:]):
        return None
    bits = lead if length == 1 else lead & (0x7F >> length)
    low = reduce(lambda value, byte: value << 6 | byte & 0x3F, data[1:], bits)
    low <<= 6 * (length - len(data))
    high = low | (1 << 6 * (length - len(data))) - 1
    least = (0, 0, 0x80, 0x800, 0x10000)[length]
    low, high = max(low, least), min(high, LAST)
    return (low, high) if low <= high else None


# ---------------------------------------------------------------- vocabularies


def vocabulary_of(
    tokens: Sequence[bytes], *, textless: Sequence[int] = (), size: int | None = None
) -> Vocabulary:
    """The tokens, with `size` logits."""
    return Vocabulary(tokens, textless, len(tokens) if size is None else size)


def legal(matcher: Matcher) -> list[int]:
    """The tokens that a mask allows."""
    row = np.full(matcher.words, -1, np.int32)
    matcher.fill(row)
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def follow(grammar: Grammar, tokens: Sequence[int]) -> Matcher:
    """A matcher that has accepted some tokens."""
    matcher = grammar.matcher()
    for token in tokens:
        matcher.accept(token)
    return matcher


# ---------------------------------------------------------------- patterns at random

LETTERS = ("a", "b", "0", " ", "\n", "é", "你", "😀", "K", "ß")
ATOMS = (
    *map(re.escape, LETTERS),
    ".",
    r"\w",
    r"\W",
    r"\d",
    r"\s",
    "[^a]",
    "[^é\\n]",
    "[a-c0-9]",
    "[\\u4e00-\\u9fff]",
    "[^\\W\\d]",
    "(?i:k)",
    "(?i:[^s-z])",
    "(?s:.)",
    "(?a:\\w)",
    "[\\U0001f000-\\U0001ffff]",
)


def _above(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(lambda parts: Join(tuple(parts))),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: Either(tuple(parts))),
        st.builds(
            lambda part, low, more: Repeat(part, low, None if more is None else low + more),
            inner,
            st.integers(0, 3),
            st.none() | st.integers(0, 3),
        ),
    )


TREES: st.SearchStrategy[Tree] = st.recursive(
    st.sampled_from(ATOMS).map(Atom), _above, max_leaves=8
)
