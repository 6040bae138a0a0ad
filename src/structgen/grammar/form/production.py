"""Forms written out as a grammar of the backend, cut into lexemes that do not change the language.

The backend has a lexer. A lexeme as long as possible makes masks fast, but the lexer never goes
back: where a lexeme could go on, it does, even if the text then cannot be completed. So what has no
recursion becomes one lexeme at first; `lexemes` tells where one could reach into what follows; such
a one is taken apart, and so on, down to single characters, of which none can reach any further.

Owns   which parts of a form become lexemes.
Holds  the grammar has the texts of the form, no more and no fewer, or the form is refused.
Used   by `ebnf` and `structure`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from structgen.errors import ConstraintError
from structgen.grammar.form.derivation import longest_way
from structgen.grammar.form.lexemes import Lexemes, leads
from structgen.grammar.form.places import Fork, Lexeme, Loop, Option, Part, Places, Row, bits
from structgen.grammar.form.tree import (
    BLANK,
    DEEPEST,
    MOST_REPEATS,
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
    either,
    join,
    nullable,
    parts_of,
    replaced,
    rules_in,
    unrolled,
)
from structgen.grammar.form.writing import written

MOST_PARTS = 20_000  # of one lexeme: texts and classes in it, times their repeats
MOST_IN_PLACE = 256  # of a rule that is put in the place of its name
MOST_PLACES = 640  # of a grammar, where lexemes stand that are no fixed texts and no JSON values
MOST_SIMPLE_PLACES = 2_000  # those of fixed texts and JSON values, of which each tool has two
MOST_ROUNDS = 6  # of cutting texts where it is needed; then they are cut everywhere
MOST_WRITTEN = 1_000_000  # characters
MOST_CERTAIN = 250_000  # characters that come next in any case: the backend looks for all of them
NUMBERS = leads(tuple((ord(sign), ord(sign)) for sign in "+-.0123456789Ee"))


def lark_of(rules: Mapping[str, Form], start: str, name: str) -> str:
    """The rules as a grammar in Lark's syntax, which begins at `start`.

    `name` is what messages begin with. Raises `ConstraintError` for what cannot be written as
    lexemes, or is too large.
    """
    if longest_way(rules) > MOST_CERTAIN:
        raise ConstraintError(
            f"{name}: some rule has no text of less than {MOST_CERTAIN:,} characters; repeat less, "
            "or write an alternative that ends sooner"
        )
    return _Production(rules, start, name).lark()


class _Production:
    """One grammar on its way."""

    def __init__(self, rules: Mapping[str, Form], start: str, name: str) -> None:
        self._start, self._name = start, name
        self._rules = _in_place(rules)
        self._apart: set[Form] = set()
        self._cuts: dict[Text, set[int]] = {}  # where texts are taken apart
        self._rounds = 0
        self._lexemes = Lexemes()
        self._merged = False
        self._places: dict[int, Form] = {}
        self._place_of: dict[Form, int] = {}

    def lark(self) -> str:
        """See `lark_of`."""
        parts = self._cut_all()
        while not isinstance(parts[self._start], Lexeme | Option):
            clashes = self._clashes(Places(parts, self._places, self._start))
            if not clashes:
                break
            self._apart |= clashes
            self._rounds += 1
            parts = self._cut_all()
        lark = written(parts, self._start)
        if len(lark) > MOST_WRITTEN:
            raise ConstraintError(
                f"{self._name}: its classes of characters, written out, take {len(lark)} "
                f"characters, more than {MOST_WRITTEN}; use smaller classes, or fewer"
            )
        return lark

    # ------------------------------------------------------------ cutting

    def _cut_all(self) -> dict[str, Part]:
        """The rules that are used, cut into lexemes."""
        self._places, self._place_of = {}, {}
        found: dict[str, Part] = {}
        todo = [self._start]
        while todo:
            at = todo.pop()
            if at not in found:
                form = self._rules[at]
                found[at] = self._cut(form)
                todo += rules_in(form)
        simple = sum(isinstance(each, Text | Value) for each in self._places.values())
        if len(self._places) - simple <= MOST_PLACES and simple <= MOST_SIMPLE_PLACES:
            return found
        if self._merged:
            raise ConstraintError(
                f"{self._name}: it comes to more than {MOST_PLACES} lexemes, or to more than "
                f"{MOST_SIMPLE_PLACES} fixed texts and JSON values; write classes such as [a-z] "
                "for alternatives, and fewer rules that begin or end alike"
            )
        self._merged = True
        return self._cut_all()

    def _cut(self, form: Form) -> Part:
        if isinstance(form, Rule):
            return form
        whole = form not in self._apart and form != BLANK and _is_lexeme(form)
        if whole or not isinstance(form, Join | Either | Repeat | Text):
            return self._lexeme(form)
        match form:
            case Text(text):
                ends = sorted(self._cuts[form] | {len(text)})
                pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
                return Row(tuple(self._cut(Text(piece)) for piece in pieces))
            case Join(parts):
                return Row(tuple(map(self._cut, self._grouped(form, parts))))
            case Either(options):
                return Fork(tuple(map(self._cut, self._grouped(form, options))))
            case Repeat(part, least, most):
                return Loop(self._cut(part), least, most)

    def _grouped(self, form: Join | Either, parts: tuple[Form, ...]) -> Iterator[Form]:
        """The parts, with those beside each other that have no rules taken together."""
        if form in self._apart:
            yield from parts
            return
        together = join if isinstance(form, Join) else either
        group: list[Form] = []
        size = 0
        for part in parts:
            measure = _measured(part)
            fits = measure is not None and measure.depth < DEEPEST
            if measure is not None and fits and size + measure.parts <= MOST_PARTS:
                group.append(part)
                size += measure.parts
                continue
            if group:
                yield together(group)
            group, size = ([part], measure.parts) if measure is not None and fits else ([], 0)
            if not group:
                yield part
        if group:
            yield together(group)

    def _lexeme(self, form: Form) -> Part:
        place = self._place_of.get(form) if self._merged else None
        if place is None:
            place = len(self._places)
            self._places[place] = form
            self._place_of[form] = place
        lexeme = Lexeme(form, place)
        return Option(lexeme) if nullable(form) else lexeme

    # ------------------------------------------------------------ checking

    def _clashes(self, places: Places) -> set[Form]:
        """The lexemes to be taken apart."""
        numbers = [self._lexemes.number(form) for form in places.forms]
        near = self._near(numbers)
        beside = self._beside(places, numbers, near)
        begins: dict[int, int] = {}
        found: set[Form] = set()
        for place, form in enumerate(places.forms):
            following = places.next[place]
            after = begins.get(following)
            if after is None:
                after = begins[following] = self._begins(following, numbers)
            if isinstance(form, Value):
                self._check_value(form, after)
            for other in bits(beside[place] & near[place]):
                rival = places.forms[other]
                if isinstance(form, Value) or isinstance(rival, Value):
                    if form != rival:
                        self._check_beside(numbers[place], numbers[other])
                elif self._lexemes.meeting(numbers[place], numbers[other]).beyond & after:
                    self._check_free(rival)
                    found.add(rival)
                    if isinstance(rival, Text):
                        self._cut_text(rival, numbers[place], after)
        return found

    def _cut_text(self, text: Text, other: int, after: int) -> None:
        """Note where a text is to be cut, because there another lexeme may end."""
        cuts = self._cuts.setdefault(text, set())
        if self._rounds < MOST_ROUNDS:
            cuts.update(self._lexemes.reaches(other, text.text, after))
        else:  # cut after cut would take as long as the text
            cuts.update(range(1, len(text.text)))

    def _check_value(self, value: Value, after: int) -> None:
        if value.numeric and after & NUMBERS:
            raise ConstraintError(
                f"{self._name}: a JSON value that may be a number is followed by a digit, a sign, "
                "a dot or an e, which would be part of the number; put another text between them"
            )

    def _check_beside(self, one: int, other: int) -> None:
        if self._lexemes.begins(one) & self._lexemes.begins(other):
            raise ConstraintError(
                f"{self._name}: a JSON value stands beside something else that may begin with the "
                "same character; let a fixed text before each tell them apart, or write one JSON "
                "schema for both, with anyOf"
            )

    def _check_free(self, form: Form) -> None:
        if isinstance(form, Until | Without):
            raise ConstraintError(
                f"{self._name}: free text stands beside something else that it may begin with; "
                "write that as one of the tags, or let a fixed text before each tell them apart"
            )

    def _begins(self, places: int, numbers: list[int]) -> int:
        """The first bytes, as bits, of what stands at some places."""
        found = 0
        for place in bits(places):
            found |= self._lexemes.begins(numbers[place])
        return found

    def _near(self, numbers: list[int]) -> list[int]:
        """For each place the places, as bits, whose lexemes may have to do with its own."""
        places = [0] * (max(numbers, default=0) + 1)
        for place, number in enumerate(numbers):
            places[number] |= 1 << place
        used = sum(1 << number for number in set(numbers))
        near: dict[int, int] = {}
        for number, others in enumerate(self._lexemes.near()):
            if used >> number & 1:
                near[number] = 0
                for other in bits(others & used):
                    near[number] |= places[other]
        return [near[number] for number in numbers]

    def _beside(self, places: Places, numbers: list[int], near: list[int]) -> list[int]:
        """For each place the places, as bits, where the lexer may be at the same time."""
        found = [0] * len(numbers)
        fresh: dict[int, int] = {}

        def add(some: int, others: int) -> None:
            for place in bits(some):
                if new := others & ~found[place]:
                    found[place] |= new
                    fresh[place] = fresh.get(place, 0) | new

        add(places.first, places.first)
        while fresh:
            place, others = fresh.popitem()
            after = 0
            for other in bits(others & near[place]):
                if self._together(numbers[place], numbers[other]):
                    after |= places.next[other]
            add(places.next[place], after)
        return found

    def _together(self, one: int, other: int) -> bool:
        """Whether some text may be both of two lexemes."""
        return one == other or self._lexemes.meeting(one, other).together


# ---------------------------------------------------------------- rules without recursion


class _Measure(msgspec.Struct, frozen=True, gc=False):
    """How large a form is, and how deep."""

    parts: int
    depth: int


def _in_place(rules: Mapping[str, Form]) -> dict[str, Form]:
    """The rules, with those that are not recursive put in the place of their names."""
    found = {name: unrolled(name, form) for name, form in rules.items()}
    waiting = {name: set(rules_in(form)) for name, form in found.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, needed in waiting.items():
        for other in needed:
            users[other].append(name)
    plain: dict[str, Form] = {}
    todo = [name for name, needed in waiting.items() if not needed]
    while todo:
        name = todo.pop()
        measure = _measured(found[name])
        if measure is None or measure.depth > DEEPEST or measure.parts > MOST_IN_PLACE:
            continue
        plain[name] = found[name]
        for user in users[name]:
            waiting[user].discard(name)
            if not waiting[user]:
                found[user] = replaced(found[user], plain)
                todo.append(user)
    for name, needed in waiting.items():
        if needed:
            found[name] = replaced(found[name], plain)
    return found


def _is_lexeme(form: Form) -> bool:
    """Whether the lexer could read it all at once."""
    found = _measured(form)
    return found is not None and found.depth <= DEEPEST and found.parts <= MOST_PARTS


def _measured(form: Form) -> _Measure | None:
    """How large a form is; None if a rule, a JSON value or a control token is in it."""
    if isinstance(form, Rule | Value | Marker):
        return None
    if isinstance(form, Until | Without):
        return _Measure(1 + sum(map(len, form.strings)), 1)
    if isinstance(form, Text):
        return _Measure(1 + len(form.text) // 64, 1)
    found = [_measured(part) for part in parts_of(form)]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    depth = 1 + max((each.depth for each in known), default=0)
    size = sum(each.parts for each in known)
    if isinstance(form, Repeat):
        size *= max(form.least if form.most is None else form.most, 1)
        return _Measure(size, depth) if size <= MOST_REPEATS else None
    return _Measure(size if found else 1, depth)
