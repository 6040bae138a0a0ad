"""JSON read strictly: what one reader takes and another does not, nobody may write.

Used   by `reading`, for schemas, and by `judging`, for outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn

from structgen.grammar.schema.keywords import Json


class DuplicateKeyError(Exception):
    """An object has a key twice; it is the first argument."""


def loads(text: str, *, parse_float: Callable[[str], float | Decimal] = float) -> Json:
    """The value of a JSON text.

    Raises `DuplicateKeyError`, and `ValueError` or `RecursionError` for what is no JSON: Python's
    NaN and Infinity are none.
    """
    return json.loads(
        text, object_pairs_hook=_unique, parse_constant=_refused, parse_float=parse_float
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return found


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
