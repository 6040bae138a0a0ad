"""The form of an output as a term: fixed texts, patterns, JSON, choices, and how they are joined.

    from structgen.terms import capture, json, literal, regex

    term = literal("Name: ") + capture("name", regex("[A-Z][a-z]+")) + literal(", ")

Owns   nothing: a term is frozen, plain and serialisable. `a + b` puts one after the other, `a | b`
       takes one or the other; a str stands for its own text.
Used   by `request`, whose `Structure` is the constraint that the output has the form of a term.

The algebra is that of Guidance (Microsoft) and of Outlines' types (dottxt).
"""

from __future__ import annotations

import msgspec


class Fixed(msgspec.Struct, frozen=True, tag="fixed", gc=False):
    """This text."""

    text: str


class Pattern(msgspec.Struct, frozen=True, tag="pattern", gc=False):
    """A text that this regular expression matches, whole."""

    regex: str


class Json(msgspec.Struct, frozen=True, tag="json"):
    """A JSON value that is valid under this schema, itself JSON text."""

    schema: str
    separators: tuple[str, str] | None = None


class Rules(msgspec.Struct, frozen=True, tag="rules", gc=False):
    """A text that an EBNF grammar derives from its rule `root`."""

    ebnf: str


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Any text, up to and without the first of these strings; at least one character not of it."""

    until: tuple[str, ...]


class Sequence(msgspec.Struct, frozen=True, tag="sequence"):
    """One after the other."""

    parts: tuple[Term, ...]


class Either(msgspec.Struct, frozen=True, tag="either"):
    """One of these."""

    options: tuple[Term, ...]


class Repeat(msgspec.Struct, frozen=True, tag="repeat"):
    """So many times in a row; `most` None for without an end."""

    part: Term
    least: int = 0
    most: int | None = None


class Capture(msgspec.Struct, frozen=True, tag="capture"):
    """What the part becomes is the value of a name."""

    name: str
    part: Term


Term = Fixed | Pattern | Json | Rules | Free | Sequence | Either | Repeat | Capture
