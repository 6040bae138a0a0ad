"""A function's parameters as a class: the schema of its arguments, and their reader.

Owns   the way from a signature to named parameters, and from these to a class of msgspec's or
       pydantic's.
Holds  arguments that are read have the types that the annotations name; what stands for a missing
       one is the function's own default.
Used   by `tools`, whose calls a model writes, by the server, whose clients send arguments, and by
       the command line, where people type them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, get_type_hints

import msgspec

from structgen.schemas import of_pydantic

EMPTY = inspect.Parameter.empty
"""Stands for the annotation, or the default, that a parameter has not."""

Parameters = Mapping[str, tuple[Any, Any]]
"""Name -> annotation and default; `EMPTY` where it has none."""

Made = Any  # a class that msgspec or pydantic made of a signature, or an object of it

_UNNAMED = {
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
}
_PLAIN = (str, int, float, bool, type(None), Enum)


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function. Raises `TypeError` with the reason where they have none."""
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise TypeError(
            f"its annotations cannot be resolved: {error}; define the types in the module, not in "
            "a function, and import them at run time, not under TYPE_CHECKING"
        ) from None


def parameters_of(function: Callable[..., Any], by: str, *, skip: int = 0) -> Parameters:
    """The parameters of a function whose arguments are given by name.

    by     who gives them, for the message: "a model"
    skip   parameters at the beginning that are given by somebody else

    Raises `TypeError` with the reason for parameters that have no name to give them by.
    """
    hints = hints_of(function)
    found: dict[str, tuple[Any, Any]] = {}
    for each in list(inspect.signature(function).parameters.values())[skip:]:
        if each.kind in _UNNAMED:
            raise TypeError(f"{by} gives arguments by name, so {each} cannot be one")
        found[each.name] = (hints.get(each.name, EMPTY), each.default)
    return found


def needs_pydantic(parameters: Parameters) -> bool:
    """Whether something of pydantic stands in a type."""
    return any(of_pydantic(type_) for type_, _ in parameters.values())


def arguments_class(name: str, parameters: Parameters, *, pydantic: bool) -> Made:
    """A class whose fields are the parameters, closed to others.

    Raises `TypeError` with the reason for names and types of which no class can be made.
    """
    items = parameters.items()
    if pydantic and (hidden := [each for each in parameters if each.startswith("_")]):
        raise TypeError(f"pydantic reads no field like {hidden[0]}; rename it, without underscore")
    try:
        if pydantic:
            named = {
                each: (type_, ... if value is EMPTY else value) for each, (type_, value) in items
            }
            closed = {"extra": "forbid"}
            return sys.modules["pydantic"].create_model(name, __config__=closed, **named)
        fields = [
            (each, type_) if value is EMPTY else (each, type_, _default(value))
            for each, (type_, value) in items
        ]
        return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    except (TypeError, ValueError, NameError) as error:
        raise TypeError(f"its parameters make no object: {error}") from None


def arguments_in(made: Made) -> dict[str, Any]:
    """The arguments in an object of such a class, whichever library made it."""
    if isinstance(made, msgspec.Struct):
        names = made.__struct_fields__
    else:
        names = tuple(type(made).__pydantic_fields__)
    return {each: getattr(made, each) for each in names}


def object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of such a class as an object on top, where it was a reference to one.

    Templates, models and people know the object itself there, and no reference to it.
    """
    if (reference := schema.pop("$ref", None)) is not None:
        schema = {**schema["$defs"].pop(reference.rpartition("/")[2]), **schema}
    if not schema.get("$defs", True):
        del schema["$defs"]
    schema.pop("title", None)
    return schema


def _default(value: object) -> object:
    """A default as a field has it; one that JSON cannot show is left out of the schema."""
    return value if isinstance(value, _PLAIN) else msgspec.field(default_factory=lambda: value)
