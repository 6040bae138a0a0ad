"""What a term captures, as the values of variables.

Owns   which names a term has, and which of them may stand several times.
Used   by `program`: a backend says what was captured, as (name, text) pairs in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from structgen.request import Constraint, Structure
from structgen.terms import Capture, Either, Repeat, Sequence, Term

Captured = str | list[str] | None
"""The text of a capture; a list of texts where it may stand several times; None where the output
went another way."""


def captured(
    constraint: Constraint | None, pairs: Iterable[tuple[str, str]]
) -> Mapping[str, Captured]:
    """The value of every name that a constraint captures, of what an output captured."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        found.setdefault(name, []).append(text)
    values: dict[str, Captured] = {}
    for name, times in names_of(constraint).items():
        texts = found.get(name, [])
        values[name] = texts if times > 1 else next(iter(texts), None)
    return values


def names_of(constraint: Constraint | None) -> Counter[str]:
    """The names that a constraint captures, and how often: once, or twice for more."""
    return _times(constraint.term) if isinstance(constraint, Structure) else Counter()


def _times(term: Term) -> Counter[str]:
    """How often each name may be captured, where more than once counts as twice or more."""
    match term:
        case Capture(name, part):
            return Counter([name]) + _times(part)
        case Sequence(parts):
            return sum(map(_times, parts), Counter())
        case Either(options):
            found: Counter[str] = Counter()
            for each in options:
                found |= _times(each)
            return found
        case Repeat(part, _, most):
            inner = _times(part)
            return Counter() if most == 0 else inner if most == 1 else inner + inner
        case _:
            return Counter()
