"""Whether a text has the form of a term, and what it captures: by trying all ways.

Owns   nothing. It takes time that grows fast with the text, which is well for tests, and nothing
       for an engine. Used by the scripted backend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import msgspec

from structgen.errors import UnsupportedError
from structgen.grammar.schema import relaxed
from structgen.terms import (
    Capture,
    Either,
    Fixed,
    Free,
    Json,
    Pattern,
    Repeat,
    Rules,
    Term,
)
from structgen.terms import Sequence as InTurn


class Match(msgspec.Struct, frozen=True):
    """One way in which a term covers a text up to `end`.

    captures   (name, text) pairs in order
    values     the JSON values in it, and the terms that they must be valid under
    """

    end: int
    captures: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[Json, str], ...] = ()


def match_of(term: Term, text: str) -> Match | None:
    """The first way in which a term covers the whole text."""
    return next((found for found in _ways(term, text, 0) if found.end == len(text)), None)


def fault_of(found: Match) -> str | None:
    """What a final check finds wrong with the JSON in a text."""
    for term, text in found.values:
        if (fault := relaxed(term.schema, term.separators).judge.fault(text)) is not None:
            return fault
    return None


def require_checkable(term: Term) -> None:
    """Raise `UnsupportedError` for a term with a part that is not understood here."""
    for part in parts_of(term):
        if isinstance(part, Rules):
            raise UnsupportedError("the scripted backend cannot check EBNF rules in a term")


def parts_of(term: Term) -> Iterator[Term]:
    """The term and all that it consists of."""
    yield term
    match term:
        case InTurn(inner) | Either(inner):
            for each in inner:
                yield from parts_of(each)
        case Repeat(part, _, _) | Capture(_, part):
            yield from parts_of(part)


def _ways(term: Term, text: str, at: int) -> Iterator[Match]:
    match term:
        case Fixed(fixed):
            if text.startswith(fixed, at):
                yield Match(at + len(fixed))
        case Pattern(regex):
            compiled = re.compile(regex)
            ends = range(len(text), at - 1, -1)
            yield from (Match(end) for end in ends if compiled.fullmatch(text, at, end))
        case Json():
            yield from _json(term, text, at)
        case Free(until):
            ends = range(len(text), at - 1, -1)
            yield from (Match(end) for end in ends if not _any_in(until, text[at:end]))
        case _:
            yield from _ways_of_joined(term, text, at)


def _ways_of_joined(term: Term, text: str, at: int) -> Iterator[Match]:
    match term:
        case InTurn(parts):
            yield from _in_turn(parts, text, at)
        case Either(options):
            for each in options:
                yield from _ways(each, text, at)
        case Repeat(part, least, most):
            yield from _repeated(part, text, at, least, most)
        case Capture(name, part):
            for found in _ways(part, text, at):
                own = (name, text[at : found.end])
                yield Match(found.end, (own, *found.captures), found.values)
        case _:
            raise AssertionError(term)


def _json(term: Json, text: str, at: int) -> Iterator[Match]:
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return
    yield Match(end, (), ((term, text[at:end]),))


def _any_in(strings: Sequence[str], text: str) -> bool:
    return any(each in text for each in strings)


def _in_turn(parts: Sequence[Term], text: str, at: int) -> Iterator[Match]:
    if not parts:
        yield Match(at)
        return
    for first in _ways(parts[0], text, at):
        for rest in _in_turn(parts[1:], text, first.end):
            yield _joined(first, rest)


def _repeated(part: Term, text: str, at: int, least: int, most: int | None) -> Iterator[Match]:
    if most is None or most > 0:
        for first in _ways(part, text, at):
            if first.end == at and least <= 0:
                continue  # more of nothing adds nothing
            left = None if most is None else most - 1
            for rest in _repeated(part, text, first.end, least - 1, left):
                yield _joined(first, rest)
    if least <= 0:
        yield Match(at)


def _joined(first: Match, rest: Match) -> Match:
    return Match(rest.end, first.captures + rest.captures, first.values + rest.values)
