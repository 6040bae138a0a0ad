"""Patterns of JSON Schema, which are ECMAScript's, in the words of the mask's backend.

A pattern is searched for, so what is around it is written out. Where readers differ - `\\d`, `\\w`
and `\\s` are of ASCII or of Unicode, `.` stops at one or at four characters - the mask takes what
all of them take. What no automaton can follow (look-around, back-references, `\\b`) is left out,
which lets more through: then the pattern is not `exact`, and the final check decides.

Holds  the source matches every text in which ECMAScript finds the pattern, but for those on which
       readers differ; if it is exact, it matches no others.
Used   by `relaxing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

import msgspec

from structgen.grammar.characters import OPS, PARSER, Item

MOST_CHARACTERS = 4_096  # of a pattern
MOST_WORDS = 4_000  # characters of all words that a text may not be
ANYTHING = "(?s:.*)"

# Of each class the characters that all readers take for one, and those that some do.
_NARROW = {"d": "0-9", "s": r"\x{9}-\x{d}\x{20}", "w": "0-9A-Za-z_"}
_WIDE = {
    "d": r"\p{Nd}",
    "s": r"\x{9}-\x{d}\x{1c}-\x{20}\x{85}\x{a0}\x{feff}\p{Z}",
    "w": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}",
}
_CLASSES = {
    OPS.CATEGORY_DIGIT: ("d", False),
    OPS.CATEGORY_NOT_DIGIT: ("d", True),
    OPS.CATEGORY_SPACE: ("s", False),
    OPS.CATEGORY_NOT_SPACE: ("s", True),
    OPS.CATEGORY_WORD: ("w", False),
    OPS.CATEGORY_NOT_WORD: ("w", True),
}
_OPENING = frozenset({OPS.AT_BEGINNING, OPS.AT_BEGINNING_STRING})
_CLOSING = frozenset({OPS.AT_END, OPS.AT_END_STRING})
_LINE_ENDS = r"[^\n\r\x{2028}\x{2029}]"
# What is spelled otherwise in Python, or means something else there.
_SPELLINGS = re.compile(
    r"\\(?P<category>[pP]\{\^?[A-Za-z_=]+\})|\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\c(?P<control>[A-Za-z])"
    r"|\(\?<(?P<name>[A-Za-z_]\w*)>|\\k<(?P<back>[A-Za-z_]\w*)>|(?P<other>\\.|[\[\]]|[&|~-]{2}|.)",
    re.DOTALL,
)
_FIRST_STAND_IN = 0xF0000  # private use: no pattern has these characters
_COUNT_WITHOUT_LEAST = re.compile(r"\{,\d")


class Translated(msgspec.Struct, frozen=True):
    """A pattern that the whole text has to match, anchors left out; and whether it is the same."""

    source: str
    exact: bool = True


def translated(pattern: str) -> Translated | None:
    """Translate a pattern. None if it cannot be read: then anything must be let through."""
    if len(pattern) > MOST_CHARACTERS or _COUNT_WITHOUT_LEAST.search(pattern):
        return None
    try:
        spelled, stand_ins = _respelled(pattern)
        parsed = PARSER.parse(spelled)
        walk = _Translation(parsed.state.flags, stand_ins)
        source = walk.sequence(list(parsed), _Edge.OPEN, _Edge.OPEN)
    except (re.error, OverflowError, RecursionError, Warning, ValueError):
        return None
    return Translated(
        f"(?i:{source})" if parsed.state.flags & re.IGNORECASE else source, walk.exact
    )


def other_than(words: Iterable[str]) -> str | None:
    """A pattern for every text that is none of these words; None if it would be too long."""
    words = list(words)
    if sum(map(len, words)) > MOST_WORDS:
        return None
    return _other_than(frozenset(words))


def one_of(words: Iterable[str]) -> str:
    """A pattern for exactly these words."""
    return "|".join("".join(_literal(ord(letter)) for letter in word) for word in words)


def of_length(least: int, most: int | None) -> str:
    """A pattern for every text of so many characters."""
    return f"(?s:.){{{least},{'' if most is None else most}}}"


def _other_than(words: frozenset[str]) -> str:
    firsts = sorted({word[0] for word in words if word})
    options = [] if "" in words else [""]
    if firsts:
        options.append(f"[^{''.join(_literal(ord(first)) for first in firsts)}]{ANYTHING}")
        options += [
            _literal(ord(first)) + _other_than(frozenset(w[1:] for w in words if w[:1] == first))
            for first in firsts
        ]
    else:
        options.append(f"(?s:.){ANYTHING}")
    return f"(?:{'|'.join(options)})"


def _respelled(pattern: str) -> tuple[str, dict[int, str]]:
    """The pattern in Python's spelling, and what stands for classes that Python does not have."""
    found: list[str] = []
    stand_ins: dict[int, str] = {}
    inside = False
    for match in _SPELLINGS.finditer(pattern):
        if category := match["category"]:
            stand_ins[_FIRST_STAND_IN + len(stand_ins)] = f"\\{category}"
            found.append(chr(_FIRST_STAND_IN + len(stand_ins) - 1))
        elif code := match["code"]:
            found.append(re.escape(chr(int(code, 16))))
        elif control := match["control"]:
            found.append(f"\\x{ord(control) % 32:02x}")
        elif name := match["name"]:
            found.append(match[0] if inside else f"(?P<{name}>")
        elif name := match["back"]:
            found.append(f"(?P={name})")
        else:
            other = match["other"]
            if other == "[":
                found.append(r"\[" if inside else other)
                inside = True
            elif inside and len(other) == 2 and other[0] != "\\":
                found.append(f"{other[0]}\\{other[1]}")
            else:
                found.append(other)
                inside = inside and other != "]"
    return "".join(found), stand_ins


class _Edge(Enum):
    """Where a part stands: at an end of the pattern, open or anchored; or inside."""

    OPEN = 0
    ANCHORED = 1
    INSIDE = 2


class _Translation:
    """One walk over a parsed pattern."""

    def __init__(self, flags: int, stand_ins: dict[int, str]) -> None:
        self.exact = True
        self._flags, self._stand_ins = flags, stand_ins

    def sequence(self, items: list[Item], left: _Edge, right: _Edge) -> str:
        """Items one after the other, with what may be around them at open edges."""
        while items and self._is_anchor(items[0], _OPENING):
            left, items = self._anchored(left), items[1:]
        while items and self._is_anchor(items[-1], _CLOSING):
            right, items = self._anchored(right), items[:-1]
        if not items:
            return ANYTHING if _Edge.OPEN in {left, right} else ""
        last = len(items) - 1
        return "".join(
            self._placed(
                item, left if n == 0 else _Edge.INSIDE, right if n == last else _Edge.INSIDE
            )
            for n, item in enumerate(items)
        )

    def _placed(self, item: Item, left: _Edge, right: _Edge) -> str:
        op, argument = item
        if op is OPS.SUBPATTERN and _has_anchors(item):
            return self._group(argument, left, right)
        if op is OPS.BRANCH and _has_anchors(item):
            return self._branch(argument, left, right)
        before = ANYTHING if left is _Edge.OPEN else ""
        after = ANYTHING if right is _Edge.OPEN else ""
        return f"{before}{self._item(op, argument)}{after}"

    def _item(self, op: Item, argument: Item) -> str:
        inside = _Edge.INSIDE
        if op in {OPS.LITERAL, OPS.NOT_LITERAL, OPS.ANY, OPS.IN}:
            return self._character(op, argument)
        if op is OPS.SUBPATTERN:
            return self._group(argument, inside, inside)
        if op is OPS.BRANCH:
            return self._branch(argument, inside, inside)
        if op in {OPS.MAX_REPEAT, OPS.MIN_REPEAT, OPS.POSSESSIVE_REPEAT}:
            self.exact = self.exact and op is not OPS.POSSESSIVE_REPEAT
            return self._repeat(*argument)
        self.exact = False
        if op is OPS.ATOMIC_GROUP:
            return f"(?:{self.sequence(list(argument), inside, inside)})"
        # What is asserted of a place takes no characters; of what is repeated nothing is known.
        return "" if op in {OPS.AT, OPS.ASSERT, OPS.ASSERT_NOT} else ANYTHING

    def _character(self, op: Item, argument: Item) -> str:
        if op is OPS.ANY:
            return "(?s:.)" if self._flags & re.DOTALL else _LINE_ENDS
        if op is OPS.IN:
            return self._class(list(argument))
        one = self._stand_ins.get(argument) or _literal(argument)
        return one if op is OPS.LITERAL else f"[^{one}]"

    def _group(self, argument: Item, left: _Edge, right: _Edge) -> str:
        _, added, removed, items = argument
        if (added | removed) & ~re.IGNORECASE:
            raise ValueError("flags that change what anchors and dots are")
        flag = "i" if added & re.IGNORECASE else "-i" if removed & re.IGNORECASE else ""
        return f"(?{flag}:{self.sequence(list(items), left, right)})"

    def _branch(self, argument: Item, left: _Edge, right: _Edge) -> str:
        options = [self.sequence(list(items), left, right) for items in argument[1]]
        return f"(?:{'|'.join(options)})"

    def _repeat(self, least: int, most: Item, items: Item) -> str:
        body = self.sequence(list(items), _Edge.INSIDE, _Edge.INSIDE)
        if (least, most) == (0, 1):
            return f"(?:{body})?"
        if most is OPS.MAXREPEAT:
            return f"(?:{body})" + {0: "*", 1: "+"}.get(least, f"{{{least},}}")
        return f"(?:{body}){{{least},{int(most)}}}"

    def _class(self, items: list[Item]) -> str:
        negated = items[0][0] is OPS.NEGATE
        parts, seen = [], set()
        for op, argument in items[negated:]:
            if op is OPS.LITERAL:
                parts.append(self._stand_ins.get(argument) or _literal(argument))
            elif op is OPS.RANGE:
                parts.append(f"{_literal(argument[0])}-{_literal(argument[1])}")
            else:
                name, other = _CLASSES[argument]
                seen.add((name, other))
                wide = negated != other
                listed = (_WIDE if wide else _NARROW)[name]
                parts.append(f"[^{listed}]" if other else listed)
        if not negated and any((name, not other) in seen for name, other in seen):
            return "(?s:.)"
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _is_anchor(self, item: Item, kinds: frozenset[Item]) -> bool:
        return item[0] is OPS.AT and item[1] in kinds and not self._flags & re.MULTILINE

    def _anchored(self, edge: _Edge) -> _Edge:
        if edge is _Edge.INSIDE:
            self.exact = False
            return edge
        return _Edge.ANCHORED


def _has_anchors(item: Item) -> bool:
    op, argument = item
    if op is OPS.AT:
        return argument in _OPENING or argument in _CLOSING
    if op is OPS.SUBPATTERN:
        return any(map(_has_anchors, argument[3]))
    if op is OPS.BRANCH:
        return any(_has_anchors(part) for items in argument[1] for part in items)
    return False


def _literal(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
