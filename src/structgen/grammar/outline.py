"""Terms looked at from outside: their parts, their names, their limits.

Owns   how large and how deep a term may be.
Used   by `structure` and `spans`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from structgen import terms
from structgen.errors import ConstraintError
from structgen.terms import Capture, Either, Fixed, Joinable, Json, Pattern, Repeat, Rules, Term

DEEPEST = 40  # terms in terms
MOST_TERMS = 10_000
MOST_CHARACTERS = 200_000  # of all texts, patterns and grammars
MOST_IN_SCHEMAS = 1_000_000  # characters of all schemas: 128 tools may have long descriptions


def check(term: Term) -> None:
    """Refuse a term that is none, or too large to be looked at. Never deep itself."""
    todo: list[tuple[object, int]] = [(term, 1)]
    count = characters = schemas = 0
    while todo:
        at, depth = todo.pop()
        if not isinstance(at, Joinable):
            raise ConstraintError(f"term: expected a term, got {at!r:.80}; see structgen.terms")
        count += 1
        length = sum(len(text) for text in _texts(at))
        if isinstance(at, Json):
            schemas += length
        else:
            characters += length
        if depth > DEEPEST:
            raise ConstraintError(f"term: more than {DEEPEST} parts in one another; nest less")
        if count > MOST_TERMS or characters > MOST_CHARACTERS or schemas > MOST_IN_SCHEMAS:
            raise ConstraintError(
                f"term: more than {MOST_TERMS} parts, or {MOST_CHARACTERS} characters in all, or "
                f"{MOST_IN_SCHEMAS} of schemas; generate it in several steps"
            )
        todo += [(part, depth + 1) for part in parts_of(at)]


def parts_of(term: Joinable) -> tuple[Term, ...]:
    """The terms that one is made of directly."""
    match term:
        case terms.Sequence(parts) | Either(parts):
            return parts
        case Repeat(part) | Capture(_, part):
            return (part,)
        case _:
            return ()


def _texts(term: Joinable) -> tuple[str, ...]:
    """What is written in a term itself. Raises `ConstraintError` for what is no text."""
    match term:
        case Fixed(text) | Pattern(text) | Json(text) | Rules(text) | Capture(text):
            found: tuple[str, ...] = (text,)
        case terms.Free(until):
            found = until
        case _:
            return ()
    for text in found:
        if not isinstance(text, str):
            raise ConstraintError(f"term: expected a str, got {text!r:.80}")
    return found


def bare(term: Term) -> Term:
    """A term without the captures around it."""
    while isinstance(term, Capture):
        term = term.part
    return term


def names_in(term: Term) -> Iterator[str]:
    """The names of all captures, in order."""
    if isinstance(term, Capture):
        yield term.name
    for part in parts_of(term):
        yield from names_in(part)


def flat(parts: Sequence[Term]) -> Iterator[Term]:
    """Parts without sequences among them; fixed texts side by side are one."""
    held = ""
    for part in parts:
        for each in flat(part.parts) if isinstance(part, terms.Sequence) else (part,):
            if isinstance(each, Fixed):
                held += each.text
                continue
            if held:
                yield Fixed(held)
            held = ""
            yield each
    if held:
        yield Fixed(held)


def endings_of(term: Term) -> Sequence[str] | None:
    """The strings before which a term ends, if it ends with a free text."""
    match term:
        case terms.Free(until):
            return until
        case Capture(_, part):
            return endings_of(part)
        case terms.Sequence(parts) if parts:
            return endings_of(parts[-1])
        case _:
            return None


def is_plain(term: Term) -> bool:
    """Whether a term is read at once: it has no captures and no JSON, and no free text ends it."""
    return endings_of(term) is None and not any(
        isinstance(part, Json | Capture) for part in _inside(term)
    )


def _inside(term: Term) -> Iterator[Term]:
    """A term and all parts of it."""
    yield term
    for part in parts_of(term):
        yield from _inside(part)
