"""A program as clients may call it: its name, the arguments it takes, what it returns.

Holds  what was bound is not for clients to see or to give. Arguments are read by the annotations;
       a parameter without one takes any JSON value.
Used   by `service`, which makes one of each program when the routes are added, by `programs`,
       which runs them, and by `openapi`.
"""

from __future__ import annotations

import copy
import inspect
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jsonschema_rs
import msgspec

from structgen.errors import OptionError
from structgen.output.signature import (
    EMPTY,
    arguments_class,
    arguments_in,
    hints_of,
    needs_pydantic,
    object_schema,
    parameters_of,
)
from structgen.program.program import Program
from structgen.schemas import described, inner

_NO_CHOICE = ("Invalid enum value", "Invalid value")  # as msgspec begins, which lists no choices
_MOST_CHOICES = 20  # in a message; an enumeration may have thousands
_Kind = jsonschema_rs.ValidationErrorKind


class Endpoint(msgspec.Struct, frozen=True):
    """A program that is served.

    parameters   JSON Schema of the object of its arguments
    returns      JSON Schema of what its annotation says that it returns; None where that says
                 nothing, or where JSON has no form for it
    reader       reads that object from JSON text, and passes over fields that a type inside has not
    closed       finds these
    """

    name: str
    description: str
    program: Program[..., Any]
    parameters: Mapping[str, Any]
    returns: Mapping[str, Any] | None
    reader: Callable[[str], Any]
    closed: jsonschema_rs.Validator

    def read(self, data: bytes) -> dict[str, Any]:
        """Arguments from the JSON text of an object. Raises `ValueError` for what is none."""
        try:
            found = arguments_in(self.reader(data.decode()))
        except ValueError as error:
            given = msgspec.json.decode(data)
            if (whole := _with_whole_numbers(given)) is not given:
                return self.read(json.dumps(whole).encode())
            if str(error).startswith(_NO_CHOICE):
                self._require_choices(data)
            raise
        for fault in self._faults(data):
            raise ValueError(f"{fault.message} - at `${_place(fault.instance_path)}`")
        return found

    def _faults(self, data: bytes) -> Iterator[jsonschema_rs.ValidationError]:
        return self.closed.iter_errors(msgspec.json.decode(data))

    def _require_choices(self, data: bytes) -> None:
        """Raise `ValueError`, which lists the choices, for a value that is none of them."""
        faults = [each for fault in self._faults(data) for each in _innermost(fault)]
        found = [
            (each.instance_path, each.instance, each.kind.options)
            for each in faults
            if isinstance(each.kind, _Kind.Enum)
        ]
        if not found:
            return
        place, value, _ = found[0]
        choices = [choice for where, _, options in found if where == place for choice in options]
        raise ValueError(
            f"{json.dumps(value, ensure_ascii=False):.80} is none of the choices: "
            f"{_listed(choices)} - at `${_place(place)}`"
        )


def endpoints(programs: Iterable[Program[..., Any]]) -> dict[str, Endpoint]:
    """Programs by name.

    Raises `TypeError` for what is no program, `ValueError` for two of one name, and `OptionError`
    for one whose arguments cannot be given in JSON.
    """
    found: dict[str, Endpoint] = {}
    for program in programs:
        if not isinstance(program, Program):
            raise TypeError(f"programs: expected functions under @program, got {program!r:.80}")
        endpoint = _endpoint(program)
        if endpoint.name in found:
            raise ValueError(f"two programs are named {endpoint.name!r}; rename one of them")
        found[endpoint.name] = endpoint
    return found


def _endpoint(program: Program[..., Any]) -> Endpoint:
    function, name = program.function, program.function.__name__
    try:
        parameters = {
            each: (Any if type_ is EMPTY else type_, default)
            for each, (type_, default) in parameters_of(function, "a client", skip=1).items()
            if each not in program.bound
        }
        pydantic = needs_pydantic(parameters)
        made = arguments_class(f"{name}_arguments", parameters, pydantic=pydantic)
        schema, reader = described(made)
        closed = jsonschema_rs.Draft202012Validator(_unpatterned(copy.deepcopy(schema)))
    except (TypeError, jsonschema_rs.ValidationError) as error:
        raise OptionError(
            "programs", f"{name} cannot be served: {error}; bind() what clients cannot give"
        ) from None
    return Endpoint(
        name=name,
        description=inspect.cleandoc(function.__doc__ or ""),
        program=program,
        parameters=object_schema(schema),
        returns=_returns(function),
        reader=reader,
        closed=closed,
    )


def _with_whole_numbers(value: object) -> object:
    """The value with 3 for 3.0, which is the same number in JSON; itself if it has none."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            items = [_with_whole_numbers(each) for each in value]
            return value if all(map(operator.is_, items, value)) else items
        case dict():
            items = [_with_whole_numbers(each) for each in value.values()]
            return (
                value
                if all(map(operator.is_, items, value.values()))
                else dict(zip(value, items, strict=True))
            )
        case _:
            return value


def _unpatterned(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without its patterns: the reader holds to them, and in Python's own syntax."""
    schema.pop("pattern", None)
    for each in inner(schema):
        _unpatterned(each)
    return schema


def _innermost(fault: jsonschema_rs.ValidationError) -> Iterator[jsonschema_rs.ValidationError]:
    """What was wrong under each of several alternatives, or the fault itself."""
    if not isinstance(fault.kind, _Kind.AnyOf):
        yield fault
        return
    for alternative in fault.kind.context:
        for each in alternative:
            yield from _innermost(each)


def _listed(choices: Sequence[object]) -> str:
    shown = [json.dumps(each, ensure_ascii=False) for each in choices[:_MOST_CHOICES]]
    more = f", ... ({len(choices)} in all)" if len(choices) > _MOST_CHOICES else ""
    return f"{', '.join(shown)}{more}"


def _place(steps: Iterable[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def _returns(function: Callable[..., Any]) -> Mapping[str, Any] | None:
    annotation = hints_of(function).get("return", Any)
    if annotation is Any:
        return None
    try:
        return described(annotation)[0]
    except TypeError:
        return None  # whether a value can be written is seen when there is one
