"""A constraint in the words of the grammar backends: what a front end makes, and `compiler` takes.

Owns   the seam between the front ends (`dialect` for patterns and choices, `schema`, `ebnf`,
       `structure`) and the backends that make masks.
Holds  mask and judge together are exact: a text that both let through is what the constraint asks
       for, and of all such texts none is kept out but by a limit that the documentation names.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Judge(Protocol):
    """The final check of a whole text, for what no mask expresses. Pure; any thread may ask."""

    def fault(self, text: str) -> str | None:
        """What is wrong with the text, where, and by which keyword; None if nothing is."""
        ...


class Finder(Protocol):
    """Finds again, in a whole text, what was captured. Pure; any thread may ask."""

    def captures(self, text: str) -> tuple[tuple[str, str], ...]:
        """(name, text) of each capture, in the order of the text; an outer one before an inner one.

        Raises `ConstraintError` for a text that does not fit.
        """
        ...


class Source(msgspec.Struct, frozen=True):
    """What compiles to a grammar.

    name       the constraint as messages name it, cut to a length that can be shown
    lark       a grammar for llguidance, without its `%llguidance` line; it begins at `start`
    sample     a text that it matches or begins, to be tried before any request depends on it
    closed     a JSON Schema of which xgrammar's mask is exact, with its layout in `separators`;
               None where only llguidance's is
    separators see `JsonSchema`
    judge      checks the whole text in the end; None where the mask alone is exact
    marked     it has control tokens in it; see `Vocabulary.markers`
    unmasked   what only the judge enforces, as "path: keyword"
    captures   names of what is captured, in order
    finder     finds that in a whole text; None where nothing is captured
    """

    name: str
    lark: str
    sample: str = ""
    closed: str | None = None
    separators: tuple[str, str] | None = None
    judge: Judge | None = None
    marked: bool = False
    unmasked: tuple[str, ...] = ()
    captures: tuple[str, ...] = ()
    finder: Finder | None = None
