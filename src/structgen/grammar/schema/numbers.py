"""Which numbers the masks' backend holds exactly: it reads those of a schema as 64-bit floats.

Holds  a bound is given out as the schema has it, or as the nearest one inside of it: a mask never
       lets a number through that the final check would find beyond.
Used   by `weakening`, `settling` and `reading`.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection
from decimal import Decimal
from fractions import Fraction
from math import lcm

from structgen.grammar.schema.keywords import Json

# Whole numbers that the backend counts with; below the lowest it fails.
LOWEST, HIGHEST = -(2**63) + 1024, 2**63 - 1
MOST = 10**18  # of bounds that are not only for whole numbers; lone ones from here on it refuses
_EXACT = 2**53  # up to here each whole number is a float of its own
_DIGITS, _PLACES = 15, 20  # of a number: all of them, and those behind the point
_MOST_FLOAT = Fraction(repr(sys.float_info.max))
_LOWER = frozenset(("minimum", "exclusiveMinimum"))
MOST_MULTIPLE = 10_000  # a mask remembers the remainder; 20 us to compile each
MOST_REMAINDERS = 40_000  # of all the steps of a schema
_FINEST = 6  # digits behind the point of a step


def exact(value: Json) -> Json:
    """A value with floats as the decimal numbers that they were written as, for the validator."""
    if isinstance(value, list):
        return [exact(each) for each in value]
    if isinstance(value, dict):
        return {name: exact(each) for name, each in value.items()}
    if not isinstance(value, float):
        return value
    found = Decimal(repr(value))
    return int(found) if value.is_integer() else found


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
    """Whether the backend can tell a number from all others, its spelling included."""
    found = _fraction(value)
    if found.denominator == 1 and abs(found) <= _EXACT:
        return True
    exact_float = found.denominator > 1 or int(float(found)) == found
    return abs(found) <= MOST and exact_float and _rounded(found, math.floor) == found


def held_bound(keyword: str, value: float, *, whole: bool) -> tuple[str, float] | None:
    """A bound as the backend holds it: as it is, or the nearest one inside of it.

    whole   it is for whole numbers only

    None if no number that the backend can count to is within the bound. Raises `VacuousError` for a
    bound that all numbers are within.
    """
    found, lower = _fraction(value), keyword in _LOWER
    if whole:
        return _whole_bound(found, exclusive=keyword.startswith("exclusive"), lower=lower)
    if lower:  # the same, seen from the other side
        mirrored = held_bound(_MIRRORED[keyword], -value, whole=False)
        return mirrored and (_MIRRORED[mirrored[0]], -mirrored[1])
    if found >= _MOST_FLOAT:
        raise VacuousError
    if found < -MOST:
        return None
    if found > MOST:
        return "maximum", MOST
    if found.denominator == 1 and abs(found) <= _EXACT:
        return keyword, int(found)
    inside = _rounded(found, math.floor)
    if inside != found:
        keyword = "maximum"
    elif keyword == "exclusiveMaximum" and abs(found) > _EXACT:
        # Among whole numbers the backend takes the next float for the next number.
        keyword, inside = "maximum", _rounded(found - Fraction(1, 2), math.floor)
    return keyword, int(inside) if inside.denominator == 1 else float(inside)


class VacuousError(Exception):
    """A bound that all numbers are within that a float can hold."""


_MIRRORED = {
    "minimum": "maximum",
    "maximum": "minimum",
    "exclusiveMinimum": "exclusiveMaximum",
    "exclusiveMaximum": "exclusiveMinimum",
}


def _whole_bound(found: Fraction, *, exclusive: bool, lower: bool) -> tuple[str, float] | None:
    """An inclusive bound of whole numbers."""
    number = math.ceil(found) if lower else math.floor(found)
    if exclusive and number == found:
        number += 1 if lower else -1
    number = max(number, LOWEST) if lower else min(number, HIGHEST)
    if not LOWEST <= number <= HIGHEST:
        return None
    near = int(float(number))
    if number in {HIGHEST, near}:
        return "minimum" if lower else "maximum", number
    if (near < number) == lower:
        near = int(math.nextafter(float(number), math.inf if lower else -math.inf))
    return ("minimum" if lower else "maximum", near) if LOWEST <= near <= HIGHEST else None


def _fraction(value: float) -> Fraction:
    """A number as it was written: the shortest decimal one that is this float."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _rounded(value: Fraction, way: Callable[[Fraction], int]) -> Fraction:
    """A number with as many digits as the backend holds."""
    if not value:
        return value
    first = Decimal(value.numerator).adjusted() - Decimal(value.denominator).adjusted()
    first -= abs(value) < Fraction(10) ** first
    step = Fraction(10) ** max(first + 1 - _DIGITS, -_PLACES)
    return way(value / step) * step


def steps_of(value: float) -> tuple[float, ...]:
    """A step as those of which a multiple of one is a multiple of it; none where it is not held.

    The backend takes only as many digits behind the point as the step has: 0.50 for a multiple of
    0.25, and 0.5 for none. So there is a step for each number of digits.
    """
    found = _fraction(value)
    places = next((n for n in range(20) if not 10**n % found.denominator), None)
    if (Fraction(1, 10**_FINEST) / found).denominator == 1:
        return (10.0**-_FINEST,)  # all that has so few digits
    if places is None or places > _FINEST or found * 10**places > MOST_MULTIPLE:
        return ()
    scales = (Fraction(1, 10**n) for n in range(places, 0, -1))
    coarser = dict.fromkeys(_common(found, scale) for scale in scales)
    return tuple(map(_number, coarser)) or (_number(found),)


def remainders(step: float) -> int:
    """How many remainders a mask tells from each other for a step: it counts in its last digit."""
    found = _fraction(step)
    return int(found * next(10**n for n in range(20) if not 10**n % found.denominator))


def _common(one: Fraction, other: Fraction) -> Fraction:
    """The least common multiple."""
    return Fraction(
        lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator)
    )


def _number(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def too_many(places: Collection[tuple[str | None, int]]) -> set[int]:
    """The steps that are too many beside smaller ones.

    Where two steps meet, in one number or in two ways to read one, a mask remembers the remainder
    by their common multiple. Properties of different names do not meet.

    places   each step, as its `remainders`, and the property that it is for; None if it may be any
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
