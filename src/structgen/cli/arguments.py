"""`--arg name=value` to the arguments of a program, by its annotations.

A value is read as plain text where the annotation takes that (`str`, `int`, `Literal`, dates, ...)
and as JSON otherwise (`list[str]`, structs, ...). Without an annotation it stays text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import msgspec

from structgen.cli.failure import CommandError

_NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def keywords(function: Callable[..., Any], pairs: Sequence[str]) -> dict[str, Any]:
    """Convert `name=value` pairs for a program's function, whose first parameter is its State.

    Raises `CommandError` for a pair without `=`, a name that is unknown, given twice or missing,
    and a value that the annotation refuses.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = {p.name: p for p in parameters if p.kind in _NAMED}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    given = _split(pairs)
    if unknown := [name for name in given if name not in named and not takes_any]:
        raise CommandError(f"--arg {unknown[0]}: unknown argument; {_expected(named)}")
    required = [name for name, p in named.items() if p.default is inspect.Parameter.empty]
    if missing := [name for name in required if name not in given]:
        raise CommandError(f"missing argument: add --arg {missing[0]}=...; {_expected(named)}")
    hints = _hints(function)
    return {name: _value(name, text, hints.get(name, str)) for name, text in given.items()}


def _split(pairs: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise CommandError(f"--arg {pair!r}: write --arg name=value")
        if name in given:
            raise CommandError(f"--arg {name}: given twice")
        given[name] = text
    return given


def _expected(named: dict[str, inspect.Parameter]) -> str:
    if not named:
        return "the program takes no arguments"
    parts = [
        name if p.default is inspect.Parameter.empty else f"{name}={p.default!r}"
        for name, p in named.items()
    ]
    return f"the program takes {', '.join(parts)}"


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise CommandError(
            f"the annotations of {function.__name__} cannot be read: {error}; "
            "import what they name at run time, not under TYPE_CHECKING"
        ) from None


def _value(name: str, text: str, annotation: object) -> object:
    try:
        return msgspec.convert(text, annotation, strict=False)
    except msgspec.ValidationError as error:
        refused = error
    except TypeError as error:
        raise CommandError(f"--arg {name}: cannot be given on the command line: {error}") from None
    try:
        return msgspec.json.decode(text, type=annotation, strict=False)
    except msgspec.ValidationError as error:
        raise CommandError(f"--arg {name}={text}: {error}") from None
    except msgspec.DecodeError:
        hint = "; write it as JSON" if re.search("`(array|object)", str(refused)) else ""
        raise CommandError(f"--arg {name}={text}: {refused}{hint}") from None
