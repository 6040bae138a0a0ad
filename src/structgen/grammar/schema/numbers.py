"""Which numbers the masks' backend holds exactly: it reads those of a schema as 64-bit floats.

Used   by `weakening` and `settling`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from decimal import Decimal
from fractions import Fraction
from math import lcm

from structgen.grammar.schema.keywords import Json

_MOST_INTEGER = 2**63 - 1
_MOST_FLOAT, _LEAST_FLOAT = 1e15, 1e-9
MOST_MULTIPLE = 10_000  # a mask remembers the remainder; 20 us to compile each
MOST_REMAINDERS = 40_000  # of all the steps of a schema
_TENTHS = frozenset(Fraction(1, 10**power) for power in range(1, 7))


def is_held(value: Json) -> bool:
    """Whether a value, and all that is inside of it, can be told from others."""
    if isinstance(value, list):
        return all(map(is_held, value))
    if isinstance(value, dict):
        return all(map(is_held, value.values()))
    return not _is_number(value) or is_bound(value)


def plain(value: Json) -> Json:
    """A value with whole floats as integers: -0.0 is 0, which the backend would take for "-0"."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_bound(value: float) -> bool:
    """Whether a number can be a bound."""
    if value == _MOST_INTEGER:  # saturates
        return True
    if abs(value) >= _MOST_FLOAT and value != int(value):
        return False
    if isinstance(value, int):
        return abs(value) < _MOST_INTEGER and int(float(value)) == value
    return value == 0 or _LEAST_FLOAT <= abs(value) < _MOST_FLOAT


def is_step(value: float) -> bool:
    """Whether numbers can be held to be multiples of this one.

    Of a fraction only if it is one of tenths, hundredths and so on: the backend takes 0.50 for a
    multiple of 0.25, and 0.5 for none.
    """
    exact = Fraction(str(value))
    whole = exact.denominator == 1
    return exact.numerator <= MOST_MULTIPLE if whole else exact in _TENTHS


def too_many(places: Collection[tuple[str | None, int]]) -> set[int]:
    """The steps that are too many beside smaller ones.

    Where two steps meet, in one number or in two ways to read one, a mask remembers the remainder
    by their common multiple. Properties of different names do not meet.

    places   each step with the name of the property that it is for; None if that may be any
    """
    names: dict[int, set[str | None]] = {}
    for name, step in places:
        names.setdefault(step, set()).add(name)
    # The common multiple of the steps of each property; under None, of those that all may meet.
    common: dict[str | None, int] = {None: 1}
    common |= {name: 1 for name, _ in places}
    dropped: set[int] = set()
    total = 0
    for step in sorted(names):
        met = common if None in names[step] else names[step]
        worst = max(lcm(common[None], common[name], step) for name in met)
        if worst > MOST_MULTIPLE or total + step > MOST_REMAINDERS:
            dropped.add(step)
            continue
        total += step
        common |= {name: lcm(common[name], step) for name in names[step]}
    return dropped


def missed(bounds: dict[str, float]) -> list[float]:
    """Numbers within these bounds that the backend takes to be beyond.

    They are what a bound away from zero begins with: 0.6 of a maximum of 0.64.
    """
    found = []
    for bound in bounds.values():
        whole, _, fraction = format(Decimal(str(bound)), "f").partition(".")
        found += [float(f"{whole}.{fraction[:length]}") for length in range(1, len(fraction))]
    return [each for each in dict.fromkeys(found) if _is_within(each, bounds)]


def _is_within(value: float, bounds: dict[str, float]) -> bool:
    tests = {
        "minimum": operator.ge,
        "maximum": operator.le,
        "exclusiveMinimum": operator.gt,
        "exclusiveMaximum": operator.lt,
    }
    return all(tests[keyword](value, bound) for keyword, bound in bounds.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
