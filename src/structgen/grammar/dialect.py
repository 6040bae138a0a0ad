"""Python's regular expressions in the words of the backend: what is exact, and what is refused.

Python's own parser reads the pattern, and every class of characters is written out as the code
points that `re` matches; so no reading of `\\w`, `.` or `(?i)` other than Python's can slip in.

Holds  a text matches the translation if and only if `re.fullmatch(pattern, text)` finds it; where
       that cannot be had, the pattern is refused by the name of what is in the way. A pattern that
       ends in a lazy repeat and a fixed text (`\\{.*?\\}`) ends at the first match: `lazy`.
Used   by `compiler`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from structgen.errors import ConstraintError
from structgen.grammar.characters import (
    EVERYTHING,
    OPS,
    PARSER,
    Item,
    Op,
    Ranges,
    complement,
    contains,
    inside,
    intersection,
    matched,
)

MOST_CHARACTERS = 4096  # of a pattern
MOST_REPEATS = 4096  # of a counted repeat, and of the product of those inside each other
MOST_SOURCE = 400_000  # characters of the translation, which has classes written out
MOST_OPTIONS = 30_000  # of a choice
MOST_CHOICE = 400_000  # characters of all options together
_SAMPLE = 300  # characters of the text that a compiled pattern is tried on
_STAR = 8  # rounds that the sample takes through a repeat without an end

_POSIX_CLASS = re.compile(
    r"\[[^\]]*(\[:\^?(?:al(?:pha|num)|x?digit|upper|lower|space|blank|punct|word|print|graph|cntrl):\])"
)
_ANCHORS = "anchors only stand at the ends, where they change nothing: the whole output must match"
_NAMES = {
    OPS.GROUPREF: "a back-reference, which no automaton can follow; write the text out",
    OPS.GROUPREF_EXISTS: "a condition on a group; write the alternatives out with |",
    OPS.ATOMIC_GROUP: "an atomic group; write (?:...), which may match in more ways",
    OPS.POSSESSIVE_REPEAT: "a possessive repeat; drop its +, which may match in more ways",
    OPS.FAILURE: "(?!), which never matches; leave that alternative out",
}


class Expression(msgspec.Struct, frozen=True):
    """A translated pattern, or a part of one.

    source    ASCII, in the syntax of Rust's `regex` crate; parts can be written side by side
    void      no text matches
    blank     the empty text matches and no other
    sample    a text that it matches or begins, long where repeats allow that
    counted   product of the counted repeats inside each other
    lazy      the output ends at the first match
    """

    source: str
    void: bool = False
    blank: bool = False
    sample: str = ""
    counted: int = 1
    lazy: bool = False


def from_regex(pattern: str, spelled: Ranges = EVERYTHING) -> Expression:
    """Translate a pattern; it matches texts of the characters `spelled` only.

    Raises `ConstraintError`, quoting the pattern, for what cannot be enforced.
    """
    if not isinstance(pattern, str):
        raise ConstraintError(f"regex: expected a pattern as a string, got {pattern!r:.80}")
    if not pattern:
        raise ConstraintError(
            "regex '': an empty pattern matches the empty text only; leave out the constraint, or "
            "write what the output must match"
        )
    if len(pattern) > MOST_CHARACTERS:
        raise ConstraintError(
            f"regex {pattern[:60]!r}...: {len(pattern)} characters, more than {MOST_CHARACTERS}; "
            "for a list of texts use choices"
        )
    if posix := _POSIX_CLASS.search(pattern):
        raise ConstraintError(
            f"regex {pattern!r:.200}: {posix[1]} is no class in Python, but a set of its letters; "
            "write [A-Za-z], \\d, \\w or \\s"
        )
    try:
        parsed = PARSER.parse(pattern)
        found = _Translation(pattern, parsed.state, spelled).whole(list(parsed))
    except (re.error, OverflowError, FutureWarning) as error:
        raise ConstraintError(f"regex {pattern!r:.200}: {error}") from None
    except RecursionError:
        raise ConstraintError(
            f"regex {pattern!r:.200}: groups are nested too deeply; nest less"
        ) from None
    if found.void:
        raise ConstraintError(
            f"regex {pattern!r:.200}: it matches no text at all, or none of characters that the "
            "model has tokens for"
        )
    if found.blank:
        raise ConstraintError(
            f"regex {pattern!r:.200}: it matches the empty text only; write what is to be generated"
        )
    return found


def from_choice(options: Sequence[str], spelled: Ranges = EVERYTHING) -> Expression:
    """Translate a list of texts. Raises `ConstraintError` for one that cannot be generated."""
    several = isinstance(options, Sequence) and not isinstance(options, str)
    if not several or any(not isinstance(text, str) for text in options):
        raise ConstraintError(f"choices: expected a list of strings, got {options!r:.80}")
    if not any(options):
        raise ConstraintError(
            "choices: there is nothing to choose from; give at least one text that is not empty"
        )
    if len(options) > MOST_OPTIONS:
        raise ConstraintError(
            f"choices: {len(options)} options, more than {MOST_OPTIONS}; choose in two steps"
        )
    if (length := sum(map(len, options))) > MOST_CHOICE:
        raise ConstraintError(
            f"choices: {length} characters in all, more than {MOST_CHOICE}; choose in two steps"
        )
    distinct = sorted(set(options))
    letters = {ord(character): text for text in distinct for character in text}
    for code in sorted(letters):
        if not contains(spelled, code):
            raise ConstraintError(
                f"choices: {letters[code]!r:.80} has {chr(code)!r}, which the model has no tokens "
                "for, or which is half of a surrogate pair; leave that text out"
            )
    sources = ["".join(map(_literal, map(ord, text))) for text in distinct]
    return Expression(_either(sources), sample=max(distinct, key=len)[:_SAMPLE])


# ---------------------------------------------------------------- translation


class _Translation:
    """One walk over a parsed pattern."""

    def __init__(self, pattern: str, state: Item, spelled: Ranges) -> None:
        """`state` is the parser's, which knows the pattern's flags and the widths of groups."""
        self._pattern, self._state, self._spelled = pattern, state, spelled
        self._classes: dict[tuple[Op, str, int], Expression] = {}
        self._written = 0

    def whole(self, items: list[Item]) -> Expression:
        """The whole pattern."""
        found = self.sequence(items, self._state.flags, start=True, end=True)
        return msgspec.structs.replace(found, lazy=self._ends_lazily(items))

    def sequence(self, items: list[Item], flags: int, *, start: bool, end: bool) -> Expression:
        """Items one after the other; `start`, `end`: they begin or end the whole output."""
        solid = [n for n, item in enumerate(items) if self._width(item)[1]]
        first, last = (solid[0], solid[-1]) if solid else (len(items), -1)
        parts = [
            self._item(item, flags, start=start and n <= first, end=end and n >= last)
            for n, item in enumerate(items)
        ]
        return Expression(
            source="".join(part.source for part in parts),
            void=any(part.void for part in parts),
            blank=all(part.blank for part in parts),
            sample="".join(part.sample for part in parts)[:_SAMPLE],
            counted=max((part.counted for part in parts), default=1),
        )

    def _item(self, item: Item, flags: int, *, start: bool, end: bool) -> Expression:
        op, argument = item
        if op in {OPS.LITERAL, OPS.NOT_LITERAL, OPS.ANY, OPS.IN}:
            return self._class(op, argument, flags)
        if op is OPS.SUBPATTERN:
            flags = inside(flags, argument)
            return self.sequence(list(argument[3]), flags, start=start, end=end)
        if op is OPS.BRANCH:
            branches = [
                self.sequence(list(each), flags, start=start, end=end) for each in argument[1]
            ]
            return _branches(branches)
        if op in {OPS.MAX_REPEAT, OPS.MIN_REPEAT}:
            return self._repeat(argument, flags, start=start, end=end)
        if op is OPS.AT:
            return self._anchor(argument, start=start, end=end)
        if op in {OPS.ASSERT, OPS.ASSERT_NOT}:
            side = "ahead" if argument[0] > 0 else "behind"
            raise self._refusal(
                f"a look-{side}, which no mask can follow; write the alternatives out"
            )
        raise self._refusal(
            _NAMES.get(op, f"{op}, which cannot be enforced; write it in another way")
        )

    def _class(self, op: Op, argument: Item, flags: int) -> Expression:
        key = (op, repr(argument), flags)
        found = self._classes.get(key)
        if found is None:
            ranges = matched(op, argument, flags)
            found = self._classes[key] = _characters(
                ranges if self._spelled == EVERYTHING else intersection(ranges, self._spelled)
            )
        # Counted while it is written, so that what is refused for its size costs little.
        self._written += len(found.source)
        if self._written > MOST_SOURCE:
            raise ConstraintError(
                f"regex {self._pattern!r:.200}: its classes of characters, written out, take more "
                f"than {MOST_SOURCE} characters; use smaller classes, such as [a-z] for \\w, or "
                "fewer"
            )
        return found

    def _repeat(self, argument: Item, flags: int, *, start: bool, end: bool) -> Expression:
        low, high, body = argument
        once = high == 1
        part = self.sequence(list(body), flags, start=start and once, end=end and once)
        endless = high is OPS.MAXREPEAT
        rounds = low if endless else high
        counted = part.counted * max(rounds, 1)
        if part.blank or high == 0 or (part.void and not low):
            return Expression("", blank=True)
        if part.void:
            return part
        if counted > MOST_REPEATS:
            raise self._refusal(
                f"{counted} counted repeats (those inside each other multiplied), more than "
                f"{MOST_REPEATS}; write + or *, and bound the length with max_tokens"
            )
        sampled = max(low, _STAR) if endless else rounds
        bounds = f"{{{low},{'' if endless else int(high)}}}"
        return Expression(
            source=f"(?:{part.source}){bounds}",
            sample=(part.sample * min(sampled, _SAMPLE))[:_SAMPLE],
            counted=counted,
        )

    def _anchor(self, anchor: Op, *, start: bool, end: bool) -> Expression:
        if anchor in {OPS.AT_BOUNDARY, OPS.AT_NON_BOUNDARY}:
            raise self._refusal("\\b or \\B, which no mask can follow; write the neighbours out")
        opening = anchor in {OPS.AT_BEGINNING, OPS.AT_BEGINNING_STRING}
        if not (start if opening else end):
            name = "^ or \\A" if opening else "$ or \\Z"
            raise self._refusal(f"{name} inside of it; {_ANCHORS}")
        return Expression("", blank=True)

    def _ends_lazily(self, items: list[Item], *, fixed: bool = False) -> bool:
        """Whether what varies last is a lazy repeat, with a fixed text after it.

        fixed   whether a fixed text follows the items
        """
        for op, argument in reversed(items):
            low, high = self._width((op, argument))
            if op is OPS.MIN_REPEAT and low < high:
                return fixed
            if op is OPS.SUBPATTERN and low < high:
                return self._ends_lazily(list(argument[3]), fixed=fixed)
            if low < high:
                return False
            fixed = fixed or low > 0
        return False

    def _width(self, item: Item) -> tuple[int, int]:
        """The fewest and the most characters that an item takes."""
        found: tuple[int, int] = PARSER.SubPattern(self._state, [item]).getwidth()
        return found

    def _refusal(self, why: str) -> ConstraintError:
        return ConstraintError(f"regex {self._pattern!r:.200}: it has {why}")


def _branches(branches: list[Expression]) -> Expression:
    alive = [branch for branch in branches if not branch.void]
    return Expression(
        source=_either([branch.source for branch in alive]),
        void=not alive,
        blank=all(branch.blank for branch in alive),
        sample=max((branch.sample for branch in alive), key=len, default=""),
        counted=max((branch.counted for branch in alive), default=1),
    )


def _either(sources: list[str]) -> str:
    return f"(?:{'|'.join(sources)})"


def _characters(ranges: Ranges) -> Expression:
    """One character of these."""
    if not ranges:
        return Expression("", void=True)
    first = chr(ranges[0][0])
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return Expression(_literal(ranges[0][0]), sample=first)
    rest = complement(ranges)
    negated = 0 < len(rest) < len(ranges)
    spelled = "".join(
        _literal(low) if low == high else f"{_literal(low)}-{_literal(high)}"
        for low, high in (rest if negated else ranges)
    )
    return Expression(f"[{'^' if negated else ''}{spelled}]", sample=first)


def _literal(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
