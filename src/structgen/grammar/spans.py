"""Which part of a finished text is which part of its term: captures, and JSON to be checked.

A text may fit a term in several ways. The first counts in which options come before later ones,
repeats go on for as long as they can and patterns take as much as they can, the first part first;
a JSON value counts only if it is valid under its whole schema.

Owns   the reading of whole texts, after they were decoded.
Holds  each place of the term is entered at most once at each character, so that the time is bounded
       by the size of the term and the length of the text, whatever the patterns are.
Used   by `structure`.

The reading follows the steps of a backtracking machine, of which none is taken a second time: a
"memoized" matcher as in Packrat parsers (Ford, 2002).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from llguidance import LLMatcher

from structgen import terms
from structgen.errors import ConstraintError
from structgen.grammar.matcher import LIMITS, GuidanceMatcher, byte_vocabulary
from structgen.grammar.outline import bare, flat, is_plain
from structgen.grammar.source import Judge
from structgen.terms import Capture, Either, Fixed, Json, Repeat, Term

MOST_STEPS = 50_000  # of a term, with the copies of what it repeats
Captures = tuple[tuple[str, str], ...]


# ---------------------------------------------------------------- what the parts of a term take


class Part(Protocol):
    """A part that is read at once."""

    def ends(self, text: str, at: int) -> Sequence[int]:
        """Where it may end if it begins at that character; the first is tried first."""
        ...


class Words:
    """A fixed text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def ends(self, text: str, at: int) -> Sequence[int]:
        """See `Part`."""
        return (at + len(self._text),) if text.startswith(self._text, at) else ()


class Free:
    """Any text up to the first of some strings, or to the end where there is none."""

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._strings = strings

    def ends(self, text: str, at: int) -> Sequence[int]:
        """See `Part`."""
        found = [place for each in self._strings if (place := text.find(each, at)) >= 0]
        return (min(found, default=len(text)),)


class Fitting:
    """What fits a grammar of the backend."""

    def __init__(self, lark: str, name: str) -> None:
        """Raises `ConstraintError` if the backend does not take the grammar."""
        grammar = LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\n{lark}')
        self._state = LLMatcher(byte_vocabulary().backend, grammar, log_level=0, limits=LIMITS)
        if self._state.is_error():
            reason = self._state.get_error().strip().partition("\n")[0]
            raise ConstraintError(f"{name}: {reason}; a simpler one may do")

    def ends(self, text: str, at: int) -> Sequence[int]:
        """See `Part`."""
        matcher = GuidanceMatcher(self._state.deep_copy(), byte_vocabulary())
        found = [at] if matcher.complete else []
        for place in range(at, len(text)):
            data = text[place].encode()
            if matcher.try_all(data) < len(data):
                break
            if matcher.complete:
                found.append(place + 1)
        return found[::-1]


class Checked:
    """A JSON value that a judge finds no fault with."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def ends(self, text: str, at: int) -> Sequence[int]:
        """See `Part`: here of any JSON value; the judge is asked by `Reading`."""
        try:
            _, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            return ()
        return (end,)


# ---------------------------------------------------------------- steps


class Take(msgspec.Struct, frozen=True):
    """Read a part, then go on at a step."""

    part: Part
    after: int


class Try(msgspec.Struct, frozen=True):
    """Go on at one of several steps."""

    steps: tuple[int, ...]


class Note(msgspec.Struct, frozen=True):
    """Remember where a capture begins or ends, then go on at a step."""

    name: str
    begins: bool
    after: int


class Steps:
    """The steps of a term, added from its last to its first; number 0 is the end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.all: list[Take | Try | Note] = [Try(())]

    def add(self, step: Take | Try | Note) -> int:
        """Add a step; its number. Raises `ConstraintError` if there are too many."""
        if len(self.all) >= MOST_STEPS:
            raise ConstraintError(
                f"{self._name}: captures or JSON are repeated too often inside of it; repeat "
                "without a bound, or less often"
            )
        self.all.append(step)
        return len(self.all) - 1

    def loop(self) -> int:
        """A step that is told later, by `close`, where it goes on."""
        return self.add(Try(()))

    def close(self, loop: int, ways: tuple[int, ...]) -> None:
        """Say where a loop goes on."""
        self.all[loop] = Try(ways)


# ---------------------------------------------------------------- reading

Trail = tuple[Note, int, "Trail"] | None


class Reading:
    """Reads whole texts of one term; the `Judge` of its JSON."""

    def __init__(self, steps: Steps, start: int) -> None:
        self._steps, self._start = steps.all, start

    def fault(self, text: str) -> str | None:
        """See `Judge`."""
        trail, fault = self._read(text)
        return fault if trail is None else None

    def captures(self, text: str) -> Captures:
        """See `Finder`."""
        trail, fault = self._read(text)
        if trail is None:
            raise ConstraintError(f"captures of a text that does not fit: {fault}")
        return _captured(trail[0], text)

    def _read(self, text: str) -> tuple[tuple[Trail] | None, str]:
        """What was noted on the way through the text, or None and what is wrong with it."""
        fault = (-1, "it does not have the form of the term")
        todo: list[tuple[int, int, Trail]] = [(self._start, 0, None)]
        seen: set[tuple[int, int]] = set()
        while todo:
            number, at, trail = todo.pop()
            if number == 0 and at == len(text):
                return (trail,), ""
            if (number, at) in seen:
                continue
            seen.add((number, at))
            step = self._steps[number]
            match step:
                case Try(ways):
                    todo += [(way, at, trail) for way in reversed(ways)]
                case Note(_, _, after):
                    todo.append((after, at, (step, at, trail)))
                case Take(part, after):
                    ends = part.ends(text, at)
                    if isinstance(part, Checked) and ends:
                        wrong = part.judge.fault(text[at : ends[0]])
                        if wrong is not None:
                            fault = max(fault, (at, f"JSON at character {at}: {wrong}"))
                            continue
                    todo += [(after, end, trail) for end in reversed(ends)]
        return None, fault[1]


def _captured(trail: Trail, text: str) -> Captures:
    """What was captured, in the order in which it begins."""
    notes: list[tuple[Note, int]] = []
    while trail is not None:
        note, at, trail = trail
        notes.append((note, at))
    found: list[tuple[str, str]] = []
    opened: list[tuple[int, int]] = []
    for note, at in reversed(notes):
        if note.begins:
            opened.append((len(found), at))
            found.append((note.name, ""))
        else:
            index, begin = opened.pop()
            found[index] = (note.name, text[begin:at])
    return tuple(found)


# ---------------------------------------------------------------- from a term to its steps


def reading_of(
    term: Term, lark: Callable[[Term, bool], str], judges: Mapping[Json, Judge], name: str
) -> Reading:
    """What reads whole texts of a term.

    lark     the grammar of a part without captures and JSON, which is the last of the output or not
    judges   for each JSON of the term what checks it
    name     what messages begin with

    Raises `ConstraintError` for a term that has too many steps.
    """
    return _Builder(lark, judges, name).reading(term)


class _Builder:
    """Adds the steps of a term, from the last to the first."""

    def __init__(
        self, lark: Callable[[Term, bool], str], judges: Mapping[Json, Judge], name: str
    ) -> None:
        self._lark, self._judges, self._name = lark, judges, name
        self._steps = Steps(name)
        self._fitting: dict[str, Part] = {}
        self._whole: Term | None = None

    def reading(self, term: Term) -> Reading:
        """See `reading_of`."""
        inner = bare(term)
        # What is all of the output needs no second look at where it ends.
        self._whole = inner if is_plain(inner) else None
        start = self._add(term, 0)
        return Reading(self._steps, start)

    def _add(self, term: Term, after: int) -> int:
        """Add the steps of a term after which those at `after` follow; the first of them."""
        if term == self._whole or is_plain(term) or isinstance(term, terms.Free | Json):
            return self._steps.add(Take(self._part(term, last=after == 0), after))
        match term:
            case Capture(name, part):
                closed = self._steps.add(Note(name, begins=False, after=after))
                first = Note(name, begins=True, after=self._add(part, closed))
                after = self._steps.add(first)
            case terms.Sequence(parts):
                for part in reversed(list(flat(parts))):
                    after = self._add(part, after)
            case Either(options):
                after = self._steps.add(Try(tuple(self._add(each, after) for each in options)))
            case Repeat(part, least, most):
                after = self._repeated(part, least, most, after)
        return after

    def _repeated(self, part: Term, least: int, most: int | None, after: int) -> int:
        if most is None:
            first = self._steps.loop()
            self._steps.close(first, (self._add(part, first), after))
        else:
            first = after
            for _ in range(most - least):
                first = self._steps.add(Try((self._add(part, first), after)))
        for _ in range(least):
            first = self._add(part, first)
        return first

    def _part(self, term: Term, *, last: bool) -> Part:
        if isinstance(term, Json):
            return Checked(self._judges[term])
        if isinstance(term, terms.Free) or term == self._whole:
            return Free(term.until if isinstance(term, terms.Free) else ())
        texts = [each.text for each in flat((term,)) if isinstance(each, Fixed)]
        if len(texts) == len(list(flat((term,)))):
            return Words("".join(texts))
        lark = self._lark(term, last)
        if lark not in self._fitting:
            self._fitting[lark] = Fitting(lark, self._name)
        return self._fitting[lark]
