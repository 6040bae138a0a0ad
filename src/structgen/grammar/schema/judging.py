"""The final check of a JSON text against its schema, by another validator than the masks' maker.

The validator is `jsonschema-rs` (Dygalo): it knows all drafts, is fast, bounds what a pattern may
cost, and shares no code with the backends of the masks.

Holds  a check never raises, never asks the network, and never takes long: what would is refused.
Used   by `relaxing`.
"""

from __future__ import annotations

import json
import sys
from decimal import Decimal

import jsonschema_rs

from structgen.grammar.schema import strict
from structgen.grammar.schema.effort import Effort
from structgen.grammar.schema.keywords import Json

# Visits of a schema to a place. Each takes some 50 ns, and 10 to 50 us where it is to be told what
# is wrong. Nothing else runs meanwhile, and no thread can stop it.
MOST_VISITS = 500_000
MOST_TOLD = 5_000
_SHOWN = 200  # characters of a fault's reason
_LARGEST = Decimal(repr(sys.float_info.max))
_FINEST = 5_000  # digits behind the point; what is smaller is taken for as much
_MOST_POWER = 9  # digits of an exponent; `Decimal` knows none of more than 18


class JsonJudge:
    """Whether a text is JSON and valid under a schema."""

    def __init__(
        self, validator: jsonschema_rs.Validator | None, effort: Effort | None = None
    ) -> None:
        """Without a validator any JSON text will do; `effort` is under its schema."""
        self._validator, self._effort = validator, effort

    def fault(self, text: str) -> str | None:
        """See `Judge`."""
        try:
            value = strict.loads(text, parse_float=_number)
        except strict.DuplicateKeyError as error:
            return f"duplicate key {error.args[0]!r:.80}"
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error!s:.{_SHOWN}}"
        if "\\u" in text and _has_surrogates(value):
            return "half of a surrogate pair in a string"
        if self._validator is None:
            return None
        if self._effort is not None and not self._effort.within(MOST_VISITS, value, len(text)):
            return (
                "$: it cannot be checked, since its schema applies to it in more than "
                f"{MOST_VISITS:,} ways; one that refers to itself in fewer places may do"
            )
        return self._first_fault(value)

    def _first_fault(self, value: Json) -> str | None:
        assert self._validator is not None
        try:
            if self._validator.is_valid(value):
                return None
            if self._effort is not None and not self._effort.within(MOST_TOLD, value):
                return "$: it is not valid; it is too large to say where"
            error = next(iter(self._validator.iter_errors(value)), None)
        except ValueError as trouble:  # a number, or a depth, that the validator cannot hold
            return f"the validator cannot check it: {trouble!s:.{_SHOWN}}"
        if error is None:
            return None
        return f"{_path(error.instance_path)}: {error.kind.name}: {error.message:.{_SHOWN}}"


def _number(text: str) -> Decimal | float:
    """A number, digit by digit; the largest float for one beyond all floats.

    Of a number with a huge exponent the validator would write out all digits.
    """
    digits, _, power = text.lower().partition("e")
    negative = digits.startswith("-")
    if not digits.strip("-0."):
        return 0.0  # without an exponent
    if len(power.lstrip("+-0")) > _MOST_POWER:
        # No text has so many digits before its exponent that the sign of that would not tell.
        return _finest(negative) if power.startswith("-") else _largest(negative)
    number = Decimal(f"{digits}e{power}" if power else digits)
    if number.copy_abs() > _LARGEST:
        return _largest(negative)
    return _finest(negative) if number.adjusted() < -_FINEST else number


def _largest(negative: bool) -> float:
    return -sys.float_info.max if negative else sys.float_info.max


def _finest(negative: bool) -> Decimal:
    return Decimal((int(negative), (1,), -_FINEST))


def _has_surrogates(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    return False


def _path(steps: list[str | int]) -> str:
    """A JSON path, such as $.a[0]."""
    return "$" + "".join(
        f"[{step}]" if isinstance(step, int) or not step.isidentifier() else f".{step}"
        for step in steps
    )
