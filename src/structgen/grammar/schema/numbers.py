"""Which numbers the masks' backend holds exactly: it reads those of a schema as 64-bit floats.

Used   by `weakening`.
"""

from __future__ import annotations

from fractions import Fraction

from structgen.grammar.schema.keywords import Json

_MOST_INTEGER = 2**63 - 1
_MOST_FLOAT, _LEAST_FLOAT = 1e15, 1e-9
MOST_MULTIPLE = 1_000_000  # a mask remembers the remainder


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
    """Whether numbers can be held to be multiples of this one."""
    exact = Fraction(str(value))
    return exact.numerator <= MOST_MULTIPLE and exact.denominator <= MOST_MULTIPLE


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
