"""Where the lexemes of a grammar stand: which of them may begin an output, and follow which.

Owns   the parts of a grammar that is cut into lexemes.
Holds  what may follow is never too little. That a rule may be left only to where it was entered
       from is not looked at: whatever may follow it anywhere may follow it everywhere.
Used   by `production`, and by `writing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from structgen.grammar.form.tree import Form, Rule


class Lexeme(msgspec.Struct, frozen=True):
    """A part of a grammar that the lexer reads, at one place in it."""

    form: Form
    place: int


class Option(msgspec.Struct, frozen=True):
    """What may be left out."""

    part: Part


class Row(msgspec.Struct, frozen=True):
    """One after the other."""

    parts: tuple[Part, ...]


class Fork(msgspec.Struct, frozen=True):
    """One of several."""

    options: tuple[Part, ...]


class Loop(msgspec.Struct, frozen=True):
    """So many times; `most` None for without an end."""

    part: Part
    least: int
    most: int | None


Part = Lexeme | Option | Row | Fork | Loop | Rule


class Places:
    """What may stand after what.

    forms   the lexeme of each place
    first   the places, as bits, at which an output may begin
    next    for each place the places that may follow
    """

    def __init__(self, parts: Mapping[str, Part], forms: Mapping[int, Form], start: str) -> None:
        self._parts = parts
        self.forms = [forms[place] for place in range(len(forms))]
        self._blank: set[str] = set()
        self._firsts = dict.fromkeys(parts, 0)
        self._lasts = dict.fromkeys(parts, 0)
        self.next = [0] * len(forms)
        self._settle()
        for part in parts.values():
            self._follow(part)
        self.first = self._firsts[start]

    def _settle(self) -> None:
        """Work out how rules begin and end, until nothing changes any more."""
        users: dict[str, set[str]] = {name: set() for name in self._parts}
        for name, part in self._parts.items():
            for mentioned in _mentioned(part):
                users[mentioned].add(name)
        todo = dict.fromkeys(self._parts)
        while todo:
            name, _ = todo.popitem()
            first, last, blank = self._edges(self._parts[name])
            before = self._firsts[name], self._lasts[name], name in self._blank
            if (first, last, blank) != before:
                self._firsts[name], self._lasts[name] = first, last
                self._blank |= {name} if blank else set()
                todo |= dict.fromkeys(users[name])

    def _edges(self, part: Part) -> tuple[int, int, bool]:
        """The places, as bits, where a part may begin and end, and whether it may be empty."""
        match part:
            case Lexeme(_, place):
                return 1 << place, 1 << place, False
            case Rule(name):
                return self._firsts[name], self._lasts[name], name in self._blank
            case Option(inner):
                first, last, _ = self._edges(inner)
                return first, last, True
            case Loop(inner, least):
                first, last, blank = self._edges(inner)
                return first, last, blank or not least
            case Fork(options):
                first = last = 0
                blank = False
                for option in options:
                    a, b, c = self._edges(option)
                    first, last, blank = first | a, last | b, blank or c
                return first, last, blank
            case Row(parts):
                return self._row_edges(parts)

    def _row_edges(self, parts: tuple[Part, ...]) -> tuple[int, int, bool]:
        first = last = 0
        blank = True
        for part in parts:
            a, b, c = self._edges(part)
            first |= a if blank else 0
            last = last | b if c else b
            blank = blank and c
        return first, last, blank

    def _follow(self, part: Part) -> None:
        match part:
            case Option(inner):
                self._follow(inner)
            case Fork(options):
                for option in options:
                    self._follow(option)
            case Loop(inner, _, most):
                self._follow(inner)
                if most != 1:
                    first, last, _ = self._edges(inner)
                    self._link(last, first)
            case Row(parts):
                ends = 0
                for each in parts:
                    self._follow(each)
                    first, last, blank = self._edges(each)
                    self._link(ends, first)
                    ends = ends | last if blank else last

    def _link(self, ends: int, first: int) -> None:
        for place in bits(ends):
            self.next[place] |= first


def _mentioned(part: Part) -> Iterator[str]:
    match part:
        case Rule(name):
            yield name
        case Option(inner) | Loop(inner):
            yield from _mentioned(inner)
        case Row(parts) | Fork(parts):
            for each in parts:
                yield from _mentioned(each)


def bits(number: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
