"""What a JSON Schema may be given as - text, a dict, a Python type - as JSON text.

Owns   the way from a type to its schema, and to the reader of its values: msgspec's, or pydantic's
       for a type in which something of pydantic stands.
Holds  a bound that a type names is in its schema, or the type is refused: msgspec would not see
       pydantic's bounds, nor pydantic those of `msgspec.Meta`, and neither says so.
Used   by `request`, whose `JsonSchema` takes all of these, and by `output`, which reads values.

pydantic is not imported here: a type can only be one of its own where it has been.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from structgen.errors import ConstraintError

SchemaLike = str | bool | Mapping[str, Any] | type | UnionType
"""JSON text, True for any JSON value, a schema as a dict, or a type that msgspec or pydantic can
describe."""

Reader = Callable[[str], Any]
# Where a schema holds schemas: by name, in a list, or one.
_NAMED = ("$defs", "properties", "patternProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
# What a model, a dataclass of pydantic, or a type that is made for it has.
_OF_PYDANTIC = ("__pydantic_validator__", "__get_pydantic_core_schema__")


def schema_text(schema: object) -> str:
    """A schema as JSON text.

    Raises `ConstraintError` for what is no schema and for a type that has none.
    """
    if isinstance(schema, str):
        return schema
    if isinstance(schema, bool):
        return "true" if schema else "false"
    if not isinstance(schema, Mapping):
        schema = schema_of_type(schema)
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"JSON schema: it cannot be written as JSON: {error}") from None


def schema_of_type(type_: object) -> dict[str, Any]:
    """The JSON Schema of a Python type; objects with named fields are closed to others.

    Raises `ConstraintError` for a type that has none.
    """
    try:
        return described(type_)[0]
    except TypeError as error:
        raise ConstraintError(f"{type_!r:.80} has no JSON schema: {error}") from None


def described(type_: object) -> tuple[dict[str, Any], Reader]:
    """The JSON Schema of a type, and what reads a value of it from JSON text.

    The reader raises `ValueError` for what is no value of the type. Raises `TypeError`, with the
    reason as its message, for a type that has no schema.
    """
    notes = set(_notes(type_, set()))
    if len(notes) > 1:
        raise TypeError(
            "it has bounds of msgspec.Meta and something of pydantic, and neither library sees "
            "the other's bounds; use pydantic.Field or msgspec.Meta for all of it"
        )
    if notes != {"pydantic"}:
        return _by_msgspec(type_)
    if "pydantic" not in sys.modules:
        raise TypeError("its bounds are of annotated_types; use msgspec.Meta or install pydantic")
    return _by_pydantic(type_)


def bounds(note: object) -> str | None:
    """Whose bounds a note of `Annotated` adds to a type: "msgspec", "pydantic", or nobody's."""
    if isinstance(note, msgspec.Meta):
        return "msgspec"
    module = type(note).__module__.partition(".")[0]
    return "pydantic" if module in {"pydantic", "annotated_types"} else None


def of_pydantic(type_: object) -> bool:
    """Whether a type needs pydantic, since something of pydantic stands in it."""
    return "pydantic" in _notes(type_, set())


# ---------------------------------------------------------------- the two libraries


def _by_msgspec(type_: object) -> tuple[dict[str, Any], Reader]:
    described: Any = type_  # whether it is a type is for msgspec to say
    try:
        schema = msgspec.json.schema(described)
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(described)
    except (TypeError, ValueError, NameError, AttributeError) as error:
        # The last line says what is wrong; the others advise on msgspec's own options.
        raise TypeError((str(error).splitlines() or [type(error).__name__])[-1]) from None
    return closed(schema), decoder.decode


def _by_pydantic(type_: object) -> tuple[dict[str, Any], Reader]:
    pydantic: Any = sys.modules["pydantic"]
    try:
        adapter = pydantic.TypeAdapter(type_)
        schema = adapter.json_schema()
    except (pydantic.errors.PydanticUserError, TypeError, NameError, AttributeError) as error:
        # The first line says what is wrong; the others advise on pydantic's own options.
        raise TypeError((str(error).splitlines() or [type(error).__name__])[0]) from None

    def read(text: str) -> object:
        try:
            return adapter.validate_json(text)
        except pydantic.ValidationError as error:
            raise ValueError(_first_fault(error)) from None

    return closed(schema), read


def _first_fault(error: object) -> str:
    """The first thing that a `ValidationError` found, and where, in msgspec's words for places."""
    found: Any = error
    fault = found.errors(include_url=False)[0]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"])
    where = "".join(steps)
    return f"{fault['msg']} - at `${where}`" if where else str(fault["msg"])


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with every object that names its fields closed to others."""
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    for each in list(inner(schema)):
        closed(each)
    return schema


def inner(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that stand directly in a schema."""
    found = [each for word in _NAMED for each in schema.get(word, {}).values()]
    found += [each for word in _LISTED for each in schema.get(word, ())]
    found += [schema[word] for word in _SINGLE if word in schema]
    return (each for each in found if isinstance(each, dict))


# ---------------------------------------------------------------- what stands in a type


def _notes(type_: object, seen: set[int]) -> Iterator[str]:
    """Whose models and bounds stand in a type, at any depth: "msgspec", "pydantic"."""
    if id(type_) in seen:
        return
    seen.add(id(type_))
    if get_origin(type_) is Annotated:
        yield from (whose for note in type_.__metadata__ if (whose := bounds(note)))  # type: ignore[attr-defined] # Annotated has it
    if any(hasattr(type_, name) for name in _OF_PYDANTIC):
        yield "pydantic"
    for inner in (*get_args(type_), *_fields(type_)):
        yield from _notes(inner, seen)
    for wrapped in ("__supertype__", "__value__"):  # of a NewType, of the `type` statement
        if (inner := getattr(type_, wrapped, None)) is not None:
            yield from _notes(inner, seen)


def _fields(type_: object) -> tuple[Any, ...]:
    """The types of the fields of a class that names them."""
    base = get_origin(type_) or type_
    named = (
        dataclasses.is_dataclass(base)
        or is_typeddict(base)
        or hasattr(base, "__struct_fields__")
        or hasattr(base, "__pydantic_fields__")
        or (isinstance(base, type) and issubclass(base, tuple) and hasattr(base, "_fields"))
    )
    if not named or not isinstance(base, type):
        return ()
    try:
        return tuple(get_type_hints(cast("Any", base), include_extras=True).values())
    except (NameError, TypeError):
        return ()  # said better by the library that will have to resolve them
