"""Finds where the first match of several patterns ends, one character at a time.

Owns   the automaton of the patterns of one request, and where it is in the output.
Holds  each character is looked at once; the work and memory for it are bounded by the size of
       the patterns, whatever the text is; nothing is ever taken back.
Used   by `core/text`, which cuts the output there, and by the scripted backend.

Of all matches the one that ends first counts, and of those that end there the one that begins
first. So a match never grows: `\\n+` ends with its first newline, and whether a repeat is lazy
makes no difference.

The automaton is built as in Thompson, "Regular expression search algorithm", CACM 1968, and all of
its ways through the text are followed at once, each with where it began, as in Pike's editor sam
(Cox, "Regular expression matching: the virtual machine approach", 2009): where two ways meet, the
one that began earlier goes on. Steps between characters are done when it is built. What each place
becomes by each kind of character is kept once it is known, as in RE2's lazily built automata.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from structgen.grammar.pattern import (
    CharSet,
    Edge,
    Either,
    Join,
    Repeat,
    Start,
    Tree,
    is_word,
    parse,
    refusal,
)

MOST_CHARACTERS = 10_000  # of all patterns
MOST_STATES = 2_000
MOST_STEPS = 10_000  # between characters, from all places
SLOW_CHARACTERS = 100
# What is kept of how characters and places combine; beyond that it is forgotten and found again.
KEPT_CHARACTERS = 1_024
KEPT_KINDS = 32

# The place where a match may begin, and the same at the very beginning of the output.
ANYWHERE, FIRST = 0, 1


class Move(msgspec.Struct, frozen=True, gc=False):
    """From a place by a character of the set with that index to another place.

    edge   whether the place has to be the edge of a word; None if that does not matter
    """

    charset: int
    edge: bool | None
    place: int


class Place(msgspec.Struct, frozen=True):
    """Somewhere between two characters of a match: how it may go on, and whether it is one."""

    moves: tuple[Move, ...]
    ends: bool


class Automaton(msgspec.Struct, frozen=True):
    """Where matches can be. Places ANYWHERE and FIRST are where they begin."""

    sets: tuple[CharSet, ...]
    places: tuple[Place, ...]
    edges: bool


def automaton_of(patterns: Sequence[str]) -> Automaton:
    """The automaton of one pattern or more.

    Raises `ConstraintError`, quoting the pattern, for one that is not understood (see `pattern`),
    matches the empty text or never, needs more than 2,000 states or explodes.
    """
    if sum(map(len, patterns)) > MOST_CHARACTERS:
        raise refusal(patterns, f"longer than {MOST_CHARACTERS:,} characters in all", "write less")
    return _Builder(tuple(patterns)).automaton([parse(pattern) for pattern in patterns])


def is_slow(patterns: Sequence[str]) -> bool:
    """Whether to build their automaton in a thread: it might take longer than a millisecond.

    Without counts there are no more states than characters.
    """
    return sum(map(len, patterns)) > SLOW_CHARACTERS or any("{" in each for each in patterns)


# ---------------------------------------------------------------- building


class _Take(msgspec.Struct, frozen=True, gc=False):
    """A node that takes one character."""

    charset: int
    after: int


class _Fork(msgspec.Struct, frozen=True):
    """A node that goes on in several ways."""

    ways: tuple[int, ...]


class _Guard(msgspec.Struct, frozen=True, gc=False):
    """A node that is passed only at a start (`edge` None) or where an edge is or is not."""

    edge: bool | None
    after: int


class _End(msgspec.Struct, frozen=True, gc=False):
    """The end of the pattern with that index."""

    pattern: int


_Node = _Take | _Fork | _Guard | _End


class _Builder:
    """Trees to nodes, from the last to the first; then nodes to places."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns
        self._now = 0  # the pattern that is being built
        self._nodes: list[_Node] = []
        self._sets: dict[CharSet, int] = {}
        # Nodes at which there are places, by the number of the place; and those numbers.
        self._found: list[int] = []
        self._numbers: dict[int, int] = {}
        self._steps = 0
        self._reached: set[int] = set()

    def automaton(self, trees: Sequence[Tree]) -> Automaton:
        starts = []
        for self._now, tree in enumerate(trees):
            starts.append(self._build(tree, self._add(_End(self._now))))
        start = self._add(_Fork(tuple(starts)))
        self._found = [start, start]
        places = [self._place(start, first=False), self._place(start, first=True)]
        while len(places) < len(self._found):
            places.append(self._place(self._found[len(places)], first=False))
        for index, pattern in enumerate(self._patterns):
            if index not in self._reached:
                raise refusal(
                    pattern, "it never matches", r"^ is the beginning of the output; a line has \n"
                )
        edges = any(move.edge is not None for place in places for move in place.moves)
        return Automaton(tuple(self._sets), tuple(places), edges)

    def _add(self, node: _Node) -> int:
        if len(self._nodes) >= MOST_STATES:
            raise refusal(
                self._patterns[self._now],
                f"more than {MOST_STATES:,} states in all (one a character, set or choice, times "
                "their repeats)",
                "repeat less often, or without a bound",
            )
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _build(self, tree: Tree, after: int) -> int:
        """Add the nodes of `tree`, which goes on at node `after`; returns the first of them."""
        match tree:
            case CharSet():
                return self._add(_Take(self._sets.setdefault(tree, len(self._sets)), after))
            case Join(parts):
                for part in reversed(parts):
                    after = self._build(part, after)
                return after
            case Either(options):
                return self._add(_Fork(tuple(self._build(option, after) for option in options)))
            case Repeat():
                return self._repeat(tree, after)
            case Start():
                return self._add(_Guard(None, after))
            case Edge(edge):
                return self._add(_Guard(edge, after))

    def _repeat(self, tree: Repeat, after: int) -> int:
        part, needed = tree.part, tree.least
        if tree.most is None:
            loop = self._add(_Fork(()))
            body = self._build(part, loop)
            self._nodes[loop] = _Fork((body, after))
            first = body if needed else loop
            needed = max(0, needed - 1)
        else:
            first = after
            for _ in range(tree.most - needed):
                first = self._add(_Fork((self._build(part, first), after)))
        for _ in range(needed):
            first = self._build(part, first)
        return first

    def _place(self, node: int, *, first: bool) -> Place:
        """The place at a node: whatever is reached from it without taking a character."""
        moves: list[Move] = []
        ends: set[tuple[int, bool | None]] = set()
        todo: list[tuple[int, bool | None]] = [(node, None)]
        seen = set(todo)
        while todo:
            self._spend_a_step()
            at, edge = todo.pop()
            match self._nodes[at]:
                case _Take(charset, after):
                    moves.append(Move(charset, edge, self._number(after)))
                    continue
                case _End(pattern):
                    ends.add((pattern, edge))
                    continue
                case _Fork(ways):
                    following = [(way, edge) for way in ways]
                case _Guard(None, after):
                    following = [(after, edge)] if first else []
                case _Guard(needed, after):
                    following = [] if edge is (not needed) else [(after, needed)]
            following = [step for step in following if step not in seen]
            seen.update(following)
            todo += following
        for pattern, edge in ends:
            if edge is not None and (pattern, None) not in ends:
                raise refusal(
                    self._patterns[pattern],
                    r"a \b or \B at its end is known only when the next character is there",
                    r"write the character that ends it, such as \W, or leave it out",
                )
        self._reached.update(pattern for pattern, _ in ends)
        return Place(tuple(moves), bool(ends))

    def _number(self, node: int) -> int:
        """The number of the place at a node that is reached by a character."""
        if node not in self._numbers:
            self._numbers[node] = len(self._found)
            self._found.append(node)
        return self._numbers[node]

    def _spend_a_step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise refusal(
                self._patterns if len(self._patterns) > 1 else self._patterns[0],
                "there are too many ways through it",
                "repeat less of what may be left out: a{0,99} for (?:a?){99}",
            )


# ---------------------------------------------------------------- searching

Step = tuple[bool, tuple[int, ...]]
_NOWHERE: Step = (False, ())


class _Row(dict[int, Step]):
    """What each place becomes by the characters of one kind, found when it is first asked for.

    A step is whether a match ends, and the places that may go on.
    """

    def __init__(self, automaton: Automaton, inside: Sequence[bool], *, edge: bool) -> None:
        super().__init__()
        self._automaton, self._inside, self._edge = automaton, inside, edge

    def __missing__(self, place: int) -> Step:
        places, inside = self._automaton.places, self._inside
        after = [
            move.place
            for move in places[place].moves
            if inside[move.charset] and (move.edge is None or move.edge == self._edge)
        ]
        ends = any(places[number].ends for number in after)
        going_on = tuple(dict.fromkeys(number for number in after if places[number].moves))
        step = (ends, going_on) if ends or going_on else _NOWHERE
        self[place] = step
        return step


class Search:
    """Looks through one output for the first match to end."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._rows: tuple[dict[str, _Row], ...] = ({}, {})
        self._kinds: dict[tuple[bool, ...], _Row] = {}
        self._read = 0
        self._word = False  # whether the last character is of a word, if that matters
        # Where matches may go on, and where the earliest that goes on there began: the earliest
        # comes first, so who comes first to a place keeps it.
        self._threads = {FIRST: 0}

    @property
    def held(self) -> int:
        """How many characters at the end of the text may begin a match that is not complete."""
        return self._read - next(iter(self._threads.values()), self._read)

    def scan(self, text: str, *, allow: bool) -> tuple[int, int]:
        """Read on: how many characters were read, and how long the match is that ends there.

        The length is 0 if no match ended and all of the text was read. Where a match does not
        count, for want of `allow`, it is passed over: another may have begun inside it.
        """
        for count, character in enumerate(text, start=1):
            row = self._rows[self._word].get(character)
            if row is None:
                row = self._row(character)
            here = self._read
            self._read = here + 1
            if self._automaton.edges:
                self._word = is_word(character)
            if not self._threads and row[ANYWHERE] is _NOWHERE:
                continue
            began = self._step(row, here)
            if allow and began is not None:
                return count, self._read - began
        return len(text), 0

    def _step(self, row: _Row, here: int) -> int | None:
        """Take one character; returns where the earliest match that it ends began."""
        found: int | None = None
        moved: dict[int, int] = {}
        for place, start in chain(self._threads.items(), ((ANYWHERE, here),)):
            ends, going_on = row[place]
            if ends and found is None:
                found = start
            for number in going_on:
                if number not in moved:
                    moved[number] = start
        self._threads = moved
        return found

    def _row(self, character: str) -> _Row:
        """The row of a character after the last one, made or found by what kind it is."""
        inside = tuple(character in charset for charset in self._automaton.sets)
        edge = self._automaton.edges and is_word(character) != self._word
        row = self._kinds.get((*inside, edge))
        if row is None:
            if len(self._kinds) >= KEPT_KINDS:
                self._kinds.clear()
                for rows in self._rows:
                    rows.clear()
            row = self._kinds[*inside, edge] = _Row(self._automaton, inside, edge=edge)
        rows = self._rows[self._word]
        if len(rows) >= KEPT_CHARACTERS:
            rows.clear()
        rows[character] = row
        return row
