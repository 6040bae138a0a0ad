"""Which numbers the masks' backend holds exactly: it reads those of a schema as 64-bit floats.

Used   by `weakening`.
"""

from __future__ import annotations

import operator
from decimal import Decimal
from fractions import Fraction

from structgen.grammar.schema.keywords import Json

_MOST_INTEGER = 2**63 - 1
_MOST_FLOAT, _LEAST_FLOAT = 1e15, 1e-9
MOST_MULTIPLE = 1_000_000  # a mask remembers the remainder
_TENTHS = frozenset(Fraction(1, 10**power) for power in range(1, 7))


def is_held(value: Json) -> bool:
    """Whether a value, and all that is inside of it, can be told from others."""
    if isinstance(value, list):
        return all(map(is_held, value))
    if isinstance(value, dict):
        return all(map(is_held, value.values()))
    return not _is_number(value) or is_bound(value)


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
