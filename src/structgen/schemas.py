"""What a JSON Schema may be given as - text, a dict, a Python type - as JSON text.

Owns   the way from a type to its schema; msgspec's types, and pydantic's where they are used.
Used   by `request`, whose `JsonSchema` takes all of these, and by `output`, which reads values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from structgen.errors import ConstraintError

SchemaLike = str | bool | Mapping[str, Any] | type
"""JSON text, True for any JSON value, a schema as a dict, or a type that msgspec or pydantic can
describe."""


def schema_text(schema: object) -> str:
    """A schema as JSON text.

    Raises `ConstraintError` for what is no schema and for a type that has none.
    """
    if isinstance(schema, str):
        return schema
    if isinstance(schema, bool):
        return "true" if schema else "false"
    if isinstance(schema, Mapping):
        try:
            return json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(f"JSON schema: it cannot be written as JSON: {error}") from None
    return json.dumps(schema_of_type(schema), ensure_ascii=False)


def schema_of_type(type_: object) -> dict[str, Any]:
    """The JSON Schema of a Python type; objects with named fields are closed to others.

    Raises `ConstraintError` for a type that has none.
    """
    try:
        found = msgspec.json.schema(type_)
    except (TypeError, ValueError, NameError, AttributeError) as error:
        # The last line says what is wrong; the others advise on msgspec's own options.
        reason = (str(error).splitlines() or [type(error).__name__])[-1]
        raise ConstraintError(f"{type_!r:.80} has no JSON schema: {reason}") from None
    # msgspec defines each type with a name of its own once, at the top, and refers to it.
    for definition in found.get("$defs", {}).values():
        if "properties" in definition:
            definition.setdefault("additionalProperties", False)
    return found
