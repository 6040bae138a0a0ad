"""Which characters one item of a Python pattern matches, as ranges of code points.

Holds  `matched` says what `re` says, for every code point of the running Python's Unicode tables:
       what cannot be read off the item (`\\w`, anything under IGNORECASE) is found by asking `re`.
       Surrogates are in no range: no text that a model writes has any.
Used   by `dialect`.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

# Private to CPython, and the only thing that reads a pattern exactly as `re` does. It has kept
# these names from 3.11 to 3.14; `tests/grammar` compares what is made of it with `re` itself.
PARSER: Any = import_module("re._parser")
COMPILER: Any = import_module("re._compiler")
OPS: Any = import_module("re._constants")

Op = Any  # one of the constants in `OPS`
Item = Any  # of a parsed pattern: an `Op` and what it is about
Ranges = tuple[tuple[int, int], ...]  # sorted, apart from each other, both ends included

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
EVERYTHING: Ranges = ((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, LAST))
_BLOCK = 0x4000  # code points looked at in one call of `re`, which holds the interpreter lock
_CASED_END = 0x20000  # no letter from there on has another case


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort and join ranges; surrogates are left out."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return tuple(piece for each in joined for piece in _without_surrogates(*each))


def complement(ranges: Ranges) -> Ranges:
    """Every code point that is in none of `ranges`."""
    found: list[tuple[int, int]] = []
    at = 0
    for low, high in (*ranges, (LAST + 1, LAST + 1)):
        if at < low:
            found.append((at, low - 1))
        at = high + 1
    return union(found)


def contains(ranges: Ranges, code: int) -> bool:
    """Whether a code point is in one of the ranges."""
    at = bisect(ranges, (code, LAST))
    return at > 0 and ranges[at - 1][0] <= code <= ranges[at - 1][1]


def inside(flags: int, argument: Item) -> int:
    """The flags that are in force in a group.

    flags      those around it
    argument   of the SUBPATTERN, as the parser has it
    """
    _, added, removed, _ = argument
    if added & PARSER.TYPE_FLAGS:  # one of ASCII, LOCALE and UNICODE takes the place of another
        flags &= ~PARSER.TYPE_FLAGS
    return int((flags | added) & ~removed)


def matched(op: Op, argument: Item, flags: int) -> Ranges:
    """What an item that stands for one character matches.

    op, argument   LITERAL, NOT_LITERAL, ANY or IN, as the parser has them
    flags          the flags of `re` that are in force there
    """
    argument = tuple(argument) if op is OPS.IN else argument
    return _matched(op, argument, flags & (re.ASCII | re.IGNORECASE | re.DOTALL))


@lru_cache(maxsize=1024)
def _matched(op: Op, argument: Item, flags: int) -> Ranges:
    plain = _plain(op, argument, flags)
    if not flags & re.IGNORECASE or op is OPS.ANY:
        return plain
    # What has no case is matched by the same items with the flag as without it.
    pattern = _compiled([(op, list(argument) if op is OPS.IN else argument)], flags)
    folded = [(ord(each), ord(each)) for each in _cased() if pattern.match(each)]
    return union([*intersection(plain, _caseless()), *folded])


def _plain(op: Op, argument: Item, flags: int) -> Ranges:
    """The same without regard to IGNORECASE."""
    if op is OPS.ANY:
        return EVERYTHING if flags & re.DOTALL else complement(((10, 10),))
    if op is OPS.LITERAL:
        return union([(argument, argument)])
    if op is OPS.NOT_LITERAL:
        return complement(((argument, argument),))
    assert op is OPS.IN, op
    found: list[tuple[int, int]] = []
    negated = False
    for kind, value in argument:
        if kind is OPS.NEGATE:
            negated = True
        elif kind is OPS.LITERAL:
            found.append((value, value))
        elif kind is OPS.RANGE:
            found.append(value)
        else:
            assert kind is OPS.CATEGORY, kind
            found += _category(value, flags & re.ASCII)
    return complement(union(found)) if negated else union(found)


@cache
def _category(category: Op, flags: int) -> Ranges:
    """The members of `\\d`, `\\w`, `\\s` or their opposites."""
    item = (OPS.IN, [(OPS.CATEGORY, category)])
    pattern = _compiled([(OPS.MAX_REPEAT, (1, OPS.MAXREPEAT, [item]))], flags)
    found: list[tuple[int, int]] = []
    for start in range(0, LAST + 1, _BLOCK):
        block = "".join(map(chr, range(start, min(start + _BLOCK, LAST + 1))))
        found += [(start + m.start(), start + m.end() - 1) for m in pattern.finditer(block)]
    return union(found)


@cache
def _cased() -> str:
    """Characters that another one may stand for under IGNORECASE; some more do no harm."""
    found: set[str] = set()
    for code in range(_CASED_END):
        character = chr(code)
        for other in (character.lower(), character.upper(), character.title()):
            if other != character:
                found.update(character, other)
    return "".join(sorted(found))


@cache
def _caseless() -> Ranges:
    return complement(union((ord(each), ord(each)) for each in _cased()))


def _compiled(items: list[Item], flags: int) -> re.Pattern[str]:
    """A pattern of parsed items."""
    state = PARSER.State()
    state.flags = flags if flags & re.ASCII else flags | re.UNICODE
    state.str = ""
    pattern: re.Pattern[str] = COMPILER.compile(
        PARSER.SubPattern(state, [_parsed(item, state) for item in items]), state.flags
    )
    return pattern


def _parsed(item: Item, state: Item) -> Item:
    op, argument = item
    if op is OPS.MAX_REPEAT:
        low, high, body = argument
        return op, (low, high, PARSER.SubPattern(state, body))
    return item


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Every code point that is in both."""
    return complement(union([*complement(one), *complement(other)]))


def _without_surrogates(low: int, high: int) -> list[tuple[int, int]]:
    first, last = _SURROGATES
    parts = [(low, min(high, first - 1)), (max(low, last + 1), high)]
    return [part for part in parts if part[0] <= part[1]]
