"""How JSON is laid out between its values: what the mask allows there.

Holds  no white space before the first character of a value and behind its last.
Used   by `relaxing`.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from structgen.errors import ConstraintError

# JSON's white space, at most two characters wherever some is allowed: a model that likes white
# space best goes on all the same.
_FREE = r"[ \t\n\r]{1,2}"
# A string may write any character as \uXXXX, save where a pattern or a list says what it may be.
_SPELLING = MappingProxyType({"json_allow_general_unicode_escapes": True})
_FORMS = (
    re.compile(r"[ \t\n\r]{0,8},[ \t\n\r]{0,8}"),
    re.compile(r"[ \t\n\r]{0,8}:[ \t\n\r]{0,8}"),
)


def layout(separators: tuple[str, str] | None) -> dict[str, Any]:
    """The backend's options for a layout; see `JsonSchema.separators`.

    Raises `ConstraintError` for separators that would not be JSON.
    """
    if separators is None:
        return {**_SPELLING, "whitespace_pattern": _FREE}
    fits = isinstance(separators, tuple | list) and len(separators) == 2
    if not fits or not all(
        isinstance(text, str) and form.fullmatch(text)
        for form, text in zip(_FORMS, separators, strict=True)
    ):
        raise ConstraintError(
            f"separators={separators!r:.80}: expected a comma and a colon, each with at most 8 "
            "white-space characters around it, such as (', ', ': ') or (',', ':')"
        )
    item, key = (_literal(text) for text in separators)
    return {**_SPELLING, "whitespace_flexible": False, "item_separator": item, "key_separator": key}


def _literal(text: str) -> str:
    return "".join(f"\\x{ord(character):02x}" for character in text)
