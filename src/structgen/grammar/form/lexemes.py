"""How far one lexeme of a grammar reaches into what another one takes.

The backend cuts a text into lexemes from left to right, and ends a lexeme only where no lexeme that
is legal there can take the next byte. That is the language of the grammar only if no lexeme could
go on where one ends and the next begins. So for two lexemes that are legal at the same place, it is
worked out here which bytes the second can go on with where the first is whole.

Owns   the automata of lexemes, over classes of characters.
Holds  what is answered is never too little: counts are followed up to a bound, and taken to be
       endless beyond it; characters that begin with the same byte are taken to be the same.
Used   by `production`.

The automata have a state for each character that is written down, without steps between them:
Glushkov, "The abstract theory of automata", 1961. The strings that end a text are found as in
Aho and Corasick, "Efficient string matching", CACM 1975.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from structgen.grammar.characters import Ranges, complement, contains, intersection, union
from structgen.grammar.form.tree import (
    Chars,
    Either,
    Form,
    Join,
    Marker,
    Repeat,
    Rule,
    Text,
    Until,
    Value,
    Without,
)

MOST_COPIES = 16  # of a counted part that are followed one by one
MOST_COPIED = 256  # states that they may take
_NO_TEXT = 1 << 0xFF  # as bits: what the backend has control tokens begin with

Places = tuple[int, ...]


class Meeting(msgspec.Struct, frozen=True, gc=False):
    """Two lexemes that are legal at the same place.

    together   some text is both of them, whole
    beyond     the first bytes, as bits, of what the second goes on with where the first is whole
    """

    together: bool
    beyond: int


def leads(ranges: Ranges) -> int:
    """The first bytes of characters, as bits."""
    found = 0
    for low, high in ranges:
        found |= (2 << _lead(high)) - (1 << _lead(low))
    return found


def _lead(code: int) -> int:
    return chr(code).encode()[0]


class Lexemes:
    """The lexemes of one grammar, by number."""

    def __init__(self) -> None:
        self._numbers: dict[Form, int] = {}
        self._forms: list[Form] = []
        self._automata: list[_Automaton] = []
        self._meetings: dict[tuple[int, int], Meeting] = {}

    def number(self, form: Form) -> int:
        """The number of a lexeme, a new one where it has none."""
        found = self._numbers.get(form)
        if found is None:
            found = self._numbers[form] = len(self._automata)
            self._forms.append(form)
            self._automata.append(_Automaton(form))
        return found

    def begins(self, number: int) -> int:
        """The first bytes of a lexeme, as bits."""
        return self._automata[number].begins

    def reaches(self, number: int, text: str, after: int) -> Iterator[int]:
        """After how many characters of a text a lexeme may be whole, before one of `after`."""
        automaton = self._automata[number]
        now = set(automaton.first)
        for length, character in enumerate(text[:-1], start=1):
            here = {place for place in now if contains(automaton.labels[place], ord(character))}
            following = 1 << _lead(ord(text[length]))
            if here & automaton.last and following & after:
                yield length
            now = {place for at in here for group in automaton.follow[at] for place in group}

    def near(self) -> list[int]:
        """For each lexeme those, as bits, that its meeting may say anything of; itself, too.

        Of a term with many tags or tools most pairs are fixed texts of which none begins the other,
        and free texts with different ends: these are left out without a look at each pair.
        """
        texts: dict[str, int] = {}
        free: dict[tuple[str, ...], int] = defaultdict(int)
        others = 0
        for number, form in enumerate(self._forms):
            if isinstance(form, Text):
                texts[form.text] = number
            else:
                others |= 1 << number
                if isinstance(form, Until | Without):
                    free[form.strings] |= 1 << number
        found = [1 << number for number in range(len(self._forms))]
        lengths = sorted(set(map(len, texts)))
        for text, number in texts.items():
            for length in lengths[: bisect_left(lengths, len(text))]:
                if (shorter := texts.get(text[:length])) is not None:
                    found[number] |= 1 << shorter
                    found[shorter] |= 1 << number
        for number, form in enumerate(self._forms):
            if not isinstance(form, Text):
                apart = free[form.strings] if isinstance(form, Until | Without) else 0
                found[number] |= ((1 << len(found)) - 1) & ~apart
            else:
                found[number] |= others
        return found

    def meeting(self, one: int, other: int) -> Meeting:
        """What there is to know of two lexemes that are legal at the same place."""
        key = (one, other)
        found = self._meetings.get(key)
        if found is None:
            forms = self._forms[one], self._forms[other]
            if _are_apart(*forms):
                found = Meeting(together=False, beyond=0)
            elif isinstance(forms[0], Text) and isinstance(forms[1], Text):
                found = _met_texts(forms[0].text, forms[1].text)
            else:
                found = _met(self._automata[one], self._automata[other])
            self._meetings[key] = found
        return found


def _are_apart(one: Form, other: Form) -> bool:
    """Whether two free texts end in different ways: no text is both.

    None that has ended begins the other, or it is the last of the output and nothing follows. For
    the many tags of one term this saves looking at each of them beside each other.
    """
    free = Until | Without
    return (
        isinstance(one, free)
        and isinstance(other, free)
        and one.strings == other.strings
        and one != other
    )


def _met_texts(one: str, other: str) -> Meeting:
    """The same of two fixed texts, of which a term with many tags or tools has many pairs."""
    goes_on = len(other) > len(one) and other.startswith(one)
    return Meeting(one == other, 1 << _lead(ord(other[len(one)])) if goes_on else 0)


def _met(one: _Automaton, other: _Automaton) -> Meeting:
    if not one.begins & other.begins:
        return Meeting(together=False, beyond=0)
    shared = _Shared([*one.labels, *other.labels])
    ones, others = ([shared.bits(label) for label in each.labels] for each in (one, other))
    together, beyond = False, 0
    todo: list[tuple[Places, Places]] = [(one.first, other.first)]
    crossed = set(todo)
    seen: set[tuple[int, int]] = set()
    while todo:
        for mine, theirs in _common(*todo.pop(), ones, others):
            if (mine, theirs) in seen:
                continue
            seen.add((mine, theirs))
            if mine in one.last:
                together = together or theirs in other.last
                for after in other.follow[theirs]:
                    for place in after:
                        beyond |= other.leads[place]
            steps = {(a, b) for a in one.follow[mine] for b in other.follow[theirs]} - crossed
            crossed |= steps
            todo += steps
    return Meeting(together, beyond)


def _common(
    some: Places, others: Places, some_bits: Sequence[int], other_bits: Sequence[int]
) -> Iterable[tuple[int, int]]:
    """Pairs of places that one character may lead to."""
    return [(a, b) for a in some for b in others if some_bits[a] & other_bits[b]]


class _Shared:
    """Classes of characters as bits: one for each stretch that no class divides."""

    def __init__(self, labels: Iterable[Ranges]) -> None:
        distinct = set(labels)
        self._edges = sorted({edge for each in distinct for a, b in each for edge in (a, b + 1)})
        self._bits = {each: self._spread(each) for each in distinct}

    def bits(self, label: Ranges) -> int:
        return self._bits[label]

    def _spread(self, label: Ranges) -> int:
        found = 0
        for low, high in label:
            first, last = bisect_left(self._edges, low), bisect_left(self._edges, high + 1)
            found |= (1 << last) - (1 << first)
        return found


class _Automaton:
    """The texts of one lexeme, not the empty one.

    labels   what each place is reached by
    leads    the first bytes of that, as bits
    follow   for each place, the groups of places that may be next
    first    the places that a text begins with
    last     the places where it may end
    begins   the first bytes of all texts, as bits
    """

    def __init__(self, form: Form) -> None:
        self.labels: list[Ranges] = []
        self.follow: list[list[Places]] = []
        self.begins = 0
        found = self._build(form)
        self.first = found.first
        self.last = frozenset(found.last)
        known = {label: leads(label) for label in set(self.labels)}
        self.leads = [known[label] for label in self.labels]
        for place in self.first:
            self.begins |= self.leads[place]

    def _add(self, label: Ranges) -> int:
        self.labels.append(label)
        self.follow.append([])
        return len(self.labels) - 1

    def _build(self, form: Form) -> _Piece:
        found = _Piece((), ())
        match form:
            case Chars(ranges):
                place = self._add(ranges)
                found = _Piece((place,), (place,))
            case Text():
                found = self._texts([form])
            case Join(parts):
                found = self._joined([self._build(part) for part in parts])
            case Either(options):
                texts = [option for option in options if isinstance(option, Text)]
                pieces = [self._build(each) for each in options if not isinstance(each, Text)]
                found = _beside([*pieces, self._texts(texts)] if texts else pieces)
            case Repeat():
                found = self._repeated(form)
            case Until(strings, ending, among):
                found = self._searching(strings, ending, among)
            case Without(strings, among):
                found = self._searching(strings, None, among)
            case Value() | Marker():  # how it goes on is not looked at
                self.begins |= form.leads if isinstance(form, Value) else _NO_TEXT
            case Rule():
                raise AssertionError(form)
        return found

    def _texts(self, texts: Sequence[Text]) -> _Piece:
        """One of some texts: those that begin alike share places."""
        children: dict[tuple[int, str], int] = {}
        after: dict[int, list[int]] = {-1: []}
        ends = []
        for each in texts:
            at = -1
            for character in each.text:
                key = (at, character)
                if key not in children:
                    children[key] = self._add(((ord(character), ord(character)),))
                    after[at].append(children[key])
                    after[children[key]] = []
                at = children[key]
            ends.append(at)
        for place, places in after.items():
            if place >= 0 and places:
                self.follow[place].append(tuple(places))
        return _Piece(tuple(after[-1]), tuple(ends))

    def _joined(self, pieces: Sequence[_Piece]) -> _Piece:
        whole = _Piece((), (), blank=True)
        for piece in pieces:
            self._link(whole.last, piece.first)
            whole = _Piece(
                whole.first + piece.first if whole.blank else whole.first,
                whole.last + piece.last if piece.blank else piece.last,
                blank=whole.blank and piece.blank,
            )
        return whole

    def _link(self, last: Places, first: Places) -> None:
        if first:
            for place in last:
                self.follow[place].append(first)

    def _repeated(self, form: Repeat) -> _Piece:
        part, least, most = form.part, form.least, form.most
        copies = least if most is None else most
        start = len(self.labels)
        piece = self._build(part)
        few = copies <= MOST_COPIES and (len(self.labels) - start) * copies <= MOST_COPIED
        if copies > 1 and few:
            pieces = [piece, *(self._build(part) for _ in range(copies - 1))]
            optional = [
                _Piece(each.first, each.last, blank=each.blank or number >= least)
                for number, each in enumerate(pieces)
            ]
            if most is None:
                self._link(pieces[-1].last, pieces[-1].first)
            return self._joined(optional)
        if most != 1:
            self._link(piece.last, piece.first)
        return _Piece(piece.first, piece.last, blank=piece.blank or least == 0)

    def _searching(self, strings: Sequence[str], ending: str | None, among: Ranges) -> _Piece:
        """Any text up to and with `ending`, the first of the strings; without: free of them."""
        steps, found = _searched(strings)
        letters = sorted({letter for each in strings for letter in each})
        rest = intersection(among, complement(union((ord(c), ord(c)) for c in letters)))
        places: dict[int, dict[int, int]] = {state: {} for state in steps}
        for state, step in steps.items():
            for letter in letters:
                target = step[letter]
                if found.get(target, ending) == ending:
                    places[state][self._add(((ord(letter), ord(letter)),))] = target
            if rest:
                places[state][self._add(rest)] = 0
        for following in places.values():
            for place, target in following.items():
                if target not in found and places[target]:
                    self.follow[place].append(tuple(places[target]))
        last = tuple(
            place
            for following in places.values()
            for place, target in following.items()
            if (target in found) == (ending is not None)
        )
        return _Piece(tuple(places[0]), last, blank=ending is None)


class _Piece(msgspec.Struct, frozen=True):
    """A part of an automaton: where it begins and ends, and whether it may be left out."""

    first: Places
    last: Places
    blank: bool = False


def _beside(pieces: Sequence[_Piece]) -> _Piece:
    return _Piece(
        tuple(place for piece in pieces for place in piece.first),
        tuple(place for piece in pieces for place in piece.last),
        blank=any(piece.blank for piece in pieces),
    )


def _searched(strings: Sequence[str]) -> tuple[dict[int, dict[str, int]], dict[int, str]]:
    """The automaton that looks for strings, of which none is a part of another.

    Returns for each state the state after each letter, 0 where nothing is said, and for the states
    where one of the strings is found, that string; these are not left any more.
    """
    prefixes = sorted({each[:length] for each in strings for length in range(len(each) + 1)})
    numbers = {prefix: number for number, prefix in enumerate(prefixes)}  # "" is the first: 0
    letters = {letter for each in strings for letter in each}
    steps: dict[int, dict[str, int]] = {}
    for prefix, number in numbers.items():
        if prefix in strings:
            continue
        text = {letter: prefix + letter for letter in letters}
        steps[number] = {
            letter: next(numbers[t[at:]] for at in range(len(t) + 1) if t[at:] in numbers)
            for letter, t in text.items()
        }
    return steps, {numbers[each]: each for each in strings}
