"""The form of a text, character by character: what EBNF, terms and patterns in them come down to.

Owns   the tree that the front ends build and `production` writes out for the backend.
Holds  no tree has a part that no text fits, and no text of no characters: the builders here leave
       such parts out. A form says which texts there are and nothing about how they are cut.
Used   by `ebnf` and `structure`, which make forms, `lexemes` and `production`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from structgen.grammar.characters import Ranges

MOST_REPEATS = 4096  # of one count
DEEPEST = 64  # parts inside parts, in what is written and in what is put in place of a rule


class Chars(msgspec.Struct, frozen=True, gc=False):
    """One character of these."""

    ranges: Ranges


class Text(msgspec.Struct, frozen=True, gc=False):
    """These characters, at least one."""

    text: str


class Marker(msgspec.Struct, frozen=True, gc=False):
    """One control token of the model, which stands for these characters."""

    text: str
    token: int


class Join(msgspec.Struct, frozen=True):
    """One part after the other; of no parts: the empty text."""

    parts: tuple[Form, ...] = ()


class Either(msgspec.Struct, frozen=True):
    """One of several; of none: no text at all."""

    options: tuple[Form, ...] = ()


class Repeat(msgspec.Struct, frozen=True):
    """A part `least` to `most` times, None for any number of times."""

    part: Form
    least: int
    most: int | None


class Rule(msgspec.Struct, frozen=True, gc=False):
    """What the rule of that name says."""

    name: str


class Until(msgspec.Struct, frozen=True):
    """Any text up to and with the first of some strings, which is `ending`.

    among   what the text may have, as ranges
    """

    strings: tuple[str, ...]
    ending: str
    among: Ranges


class Without(msgspec.Struct, frozen=True):
    """Any text without any of these strings; it may be empty, and is the last of the output."""

    strings: tuple[str, ...]
    among: Ranges


class Value(msgspec.Struct, frozen=True):
    """A JSON value.

    json      what stands behind `%json`
    leads     bytes that it may begin with, as bits
    numeric   it may be a number, which a digit after it would change
    """

    json: str
    leads: int
    numeric: bool


Form = Chars | Text | Marker | Join | Either | Repeat | Rule | Until | Without | Value
BLANK = Join()
VOID = Either()


# ---------------------------------------------------------------- building


def join(parts: Iterable[Form]) -> Form:
    """One after the other; texts side by side become one.

    A row inside of a row stays one: it is what the lexer had better read in one piece.
    """
    found: list[Form] = []
    for part in map(_plain, parts):
        if part == VOID:
            return VOID
        if isinstance(part, Text) and found and isinstance(found[-1], Text):
            found[-1] = Text(found[-1].text + part.text)
        elif part != BLANK:
            found.append(part)
    return found[0] if len(found) == 1 else Join(tuple(found))


def either(options: Iterable[Form]) -> Form:
    """One of several; what comes twice, and what no text fits, is left out."""
    found = tuple(dict.fromkeys(each for each in map(_plain, options) if each != VOID))
    return found[0] if len(found) == 1 else Either(found)


def repeat(part: Form, least: int, most: int | None) -> Form:
    """A part so many times."""
    if most == 0 or part == BLANK or (part == VOID and not least):
        return BLANK
    if part == VOID or (least, most) == (1, 1):
        return part
    return Repeat(_plain(part), least, most)


def _plain(form: Form) -> Form:
    """A class of one character as a text."""
    if isinstance(form, Chars):
        (low, high), *others = form.ranges or ((0, 1),)
        if low == high and not others:
            return Text(chr(low))
        return form if form.ranges else VOID
    return form


def anything(among: Ranges) -> Form:
    """One character of these; of none, no text at all."""
    return _plain(Chars(among))


# ---------------------------------------------------------------- reading


def parts_of(form: Form) -> tuple[Form, ...]:
    """The forms that one is made of directly."""
    match form:
        case Join(parts) | Either(parts):
            return parts
        case Repeat(part):
            return (part,)
        case _:
            return ()


def rules_in(form: Form) -> Iterator[str]:
    """The names of the rules that a form mentions."""
    todo = [form]
    while todo:
        at = todo.pop()
        if isinstance(at, Rule):
            yield at.name
        todo += parts_of(at)


def nullable(form: Form, known: frozenset[str] | set[str] = frozenset()) -> bool:
    """Whether the empty text fits.

    known   the rules of which that is known; of others it is taken to be false
    """
    match form:
        case Join(parts):
            return all(nullable(part, known) for part in parts)
        case Either(options):
            return any(nullable(option, known) for option in options)
        case Repeat(part, least):
            return least == 0 or nullable(part, known)
        case Rule(name):
            return name in known
        case Without():
            return True
        case _:
            return False


def replaced(form: Form, rules: Mapping[str, Form]) -> Form:
    """A form with others in the place of the names of some rules."""
    match form:
        case Rule(name):
            return rules.get(name, form)
        case Join(parts):
            return join(replaced(part, rules) for part in parts)
        case Either(options):
            return either(replaced(option, rules) for option in options)
        case Repeat(part, least, most):
            return repeat(replaced(part, rules), least, most)
        case _:
            return form


def unrolled(name: str, form: Form) -> Form:
    """What a rule says, without the rule itself where that is first or last: as a repeat.

    `a ::= "x" a | "y"` is `"x"* "y"`, and `a ::= a "x" | "y"` is `"y" "x"*`: the same texts. Of the
    rule the backend would keep all that are begun and not ended: more with every character.
    """
    itself = Rule(name)
    options = form.options if isinstance(form, Either) else (form,)
    for last in (True, False):
        again, ends = [], []
        for option in options:
            parts = option.parts if isinstance(option, Join) else (option,)
            if parts and parts[-1 if last else 0] == itself:
                again.append(join(parts[:-1] if last else parts[1:]))
            else:
                ends.append(option)
        if again and not any(name in rules_in(each) for each in (*again, *ends)):
            repeated = repeat(either(again), 0, None)
            return join((repeated, either(ends)) if last else (either(ends), repeated))
    return form
