"""The form of an output as a term: fixed texts, patterns, JSON, choices, and how they are joined.

    from structgen.terms import capture, json, literal, regex

    term = literal("Name: ") + capture("name", regex("[A-Z][a-z]+")) + ", " + json(list[int])

Owns   nothing: a term is frozen, plain and serialisable. `a + b` puts one after the other, `a | b`
       takes one or the other; a str beside a term stands for its own text.
Used   by `request`, whose `Structure` is the constraint that the output has the form of a term.

What a term cannot be, as a pattern that no automaton can follow, is said where it is compiled; here
only what is no term at all is refused. The algebra is that of Guidance (Microsoft) and of Outlines'
types (dottxt).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from structgen.errors import ConstraintError
from structgen.schemas import SchemaLike, schema_text


class Joinable(msgspec.Struct, frozen=True):
    """What terms have in common: `+` and `|`, also with a str on either side."""

    def __add__(self, other: TermLike) -> Term:
        return sequence(_own(self), other) if _is_term(other) else NotImplemented

    def __radd__(self, other: TermLike) -> Term:
        return sequence(other, _own(self)) if _is_term(other) else NotImplemented

    def __or__(self, other: TermLike) -> Term:
        return either(_own(self), other) if _is_term(other) else NotImplemented

    def __ror__(self, other: TermLike) -> Term:
        return either(other, _own(self)) if _is_term(other) else NotImplemented


class Fixed(Joinable, frozen=True, tag="fixed", gc=False):
    """This text."""

    text: str


class Pattern(Joinable, frozen=True, tag="pattern", gc=False):
    """A text that this regular expression matches, whole."""

    regex: str


class Json(Joinable, frozen=True, tag="json"):
    """A JSON value that is valid under this schema, itself JSON text."""

    schema: str
    separators: tuple[str, str] | None = None


class Rules(Joinable, frozen=True, tag="rules", gc=False):
    """A text that an EBNF grammar derives from its rule `root`."""

    ebnf: str


class Free(Joinable, frozen=True, tag="free"):
    """Any text, also an empty one, up to and without the first of these strings.

    One of the strings has to follow at once, as the beginning of a fixed text; at the end of the
    output nothing follows, and the text has none of them.
    """

    until: tuple[str, ...] = ()


class Sequence(Joinable, frozen=True, tag="sequence"):
    """One after the other."""

    parts: tuple[Term, ...]


class Either(Joinable, frozen=True, tag="either"):
    """One of these."""

    options: tuple[Term, ...]


class Repeat(Joinable, frozen=True, tag="repeat"):
    """So many times in a row; `most` None for without an end."""

    part: Term
    least: int = 0
    most: int | None = None


class Capture(Joinable, frozen=True, tag="capture"):
    """What the part becomes is the value of a name."""

    name: str
    part: Term


Term = Fixed | Pattern | Json | Rules | Free | Sequence | Either | Repeat | Capture
TermLike = Term | str
"""A term, or a str for its own text."""


# ---------------------------------------------------------------- what users write


def literal(text: str) -> Term:
    """This text. Raises `ConstraintError` for what is no str."""
    if not isinstance(text, str):
        raise ConstraintError(f"literal: expected a str, got {text!r:.80}; write str(...)")
    return Fixed(text)


def regex(pattern: str) -> Term:
    """A text that this regular expression matches, whole, in the syntax of Python's `re`.

    A lazy repeat matches what the greedy one does, except where the pattern is the whole term.
    """
    return Pattern(pattern)


def json(schema: SchemaLike = True, separators: tuple[str, str] | None = None) -> Term:
    """A JSON value.

    schema       what is valid, as JSON text, a dict or a type; True, the default: any value
    separators   fix the layout, such as `(", ", ": ")`; None, the default, leaves it to the model

    Raises `ConstraintError` for a schema that cannot be written as JSON.
    """
    return Json(schema_text(schema), separators)


def ebnf(grammar: str) -> Term:
    """A text that this EBNF grammar derives from its rule `root`."""
    return Rules(grammar)


def choice(options: Iterable[str]) -> Term:
    """One of these texts."""
    if isinstance(options, str):
        raise ConstraintError(f"choice: expected several texts, got {options!r:.80}; write a list")
    return either(*(literal(text) for text in options))


def sequence(*parts: TermLike) -> Term:
    """The parts one after the other."""
    found: list[Term] = []
    for part in map(term_of, parts):
        found += part.parts if isinstance(part, Sequence) else (part,)
    return found[0] if len(found) == 1 else Sequence(tuple(found))


def either(*options: TermLike) -> Term:
    """One of the options. Raises `ConstraintError` if there is none."""
    if not options:
        raise ConstraintError("either: there is nothing to choose from; give at least one option")
    found: list[Term] = []
    for option in map(term_of, options):
        found += option.options if isinstance(option, Either) else (option,)
    return found[0] if len(found) == 1 else Either(tuple(found))


def optional(part: TermLike) -> Term:
    """The part, or nothing."""
    return Repeat(term_of(part), 0, 1)


def repeat(part: TermLike, least: int = 0, most: int | None = None) -> Term:
    """The part at least `least` times (default 0), and at most `most` times (default: no bound)."""
    return Repeat(term_of(part), least, most)


def text(until: str | Iterable[str] = ()) -> Term:
    """Any text up to and without the first of the strings `until`, possibly an empty one.

    One of the strings has to be written after it: `text(until="\\n") + "\\n"`. At the end of the
    output it may end anywhere; without `until` it stands only there.
    """
    return Free((until,) if isinstance(until, str) else tuple(until))


def capture(name: str, part: TermLike) -> Term:
    """The part; what it becomes is the value of `name`, a list where it may stand several times.

    Raises `ConstraintError` for a name that is no str or empty.
    """
    if not isinstance(name, str) or not name:
        raise ConstraintError(
            f"capture: expected a name, got {name!r:.80}; write capture(name, part)"
        )
    return Capture(name, term_of(part))


def tagged(tags: Mapping[str, TermLike], *, at_least: int = 0) -> Term:
    """Free text in which each tag is followed by its term: structural tags, as for tool calls.

    tags       from the text that begins a tag to the term that has to follow it, its end included:
               `{"<tool_call>": json(schema) + "</tool_call>"}`
    at_least   so many tags stand in it; the default 0 lets the text have none

    Raises `ConstraintError` if there are no tags.
    """
    if not tags:
        raise ConstraintError("tagged: there are no tags; write text() for free text")
    free = Free(tuple(tags))
    begun = either(*(sequence(begin, after) for begin, after in tags.items()))
    return sequence(Repeat(sequence(free, begun), at_least), free)


def term_of(part: TermLike) -> Term:
    """A term as it is, a str as its own text. Raises `ConstraintError` for anything else."""
    if isinstance(part, str):
        return Fixed(part)
    if not isinstance(part, Joinable):
        raise ConstraintError(
            f"expected a term or a str, got {part!r:.80}; write literal, regex, json, choice or "
            "another of structgen.terms"
        )
    return part


def _is_term(value: object) -> bool:
    return isinstance(value, str | Joinable)


def _own(term: Joinable) -> Term:
    assert isinstance(term, Term)  # there are no other kinds
    return term
