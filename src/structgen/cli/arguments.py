"""`--arg name=value` to the arguments of a program, by its annotations.

A value is read as plain text where the annotation takes that (`str`, `int`, `Literal`, dates, ...)
and as JSON otherwise (`list[str]`, structs, ...). Without an annotation it stays text.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from structgen.cli.failure import CommandError
from structgen.options import did_you_mean
from structgen.output.signature import hints_of

_NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
_NO_DEFAULT = inspect.Parameter.empty
_MOST_CHOICES = 20  # in a message; an enumeration may have thousands


def keywords(
    function: Callable[..., Any], pairs: Sequence[str], bound: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Convert `name=value` pairs for a program's function, whose first parameter is its State.

    `bound` are arguments that the program was given before; a pair takes the place of one.

    Raises `CommandError` for a pair without `=`, a name that is unknown, given twice or missing,
    and a value that the annotation refuses.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = {p.name: p.default for p in parameters if p.kind in _NAMED} | dict(bound or {})
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    given = _split(pairs)
    if unknown := [name for name in given if name not in named and not takes_any]:
        hint = did_you_mean(unknown[0], named)
        raise CommandError(f"--arg {unknown[0]}: unknown argument{hint}; {_expected(named)}")
    required = [name for name, default in named.items() if default is _NO_DEFAULT]
    if missing := [name for name in required if name not in given]:
        what = "missing argument" if len(missing) == 1 else "missing arguments"
        pairs_to_add = " ".join(f"--arg {name}=..." for name in missing)
        raise CommandError(f"{what}: add {pairs_to_add}; {_expected(named)}")
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


def _expected(named: Mapping[str, Any]) -> str:
    if not named:
        return "the program takes no arguments"
    parts = [
        name if default is _NO_DEFAULT else f"{name}={default!r}" for name, default in named.items()
    ]
    return f"the program takes {', '.join(parts)}"


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return hints_of(function)
    except TypeError as error:
        raise CommandError(f"{function.__name__}: {error}") from None


def _value(name: str, text: str, annotation: object) -> object:
    try:
        return msgspec.convert(text, annotation, strict=False)
    except msgspec.ValidationError as error:
        refused = error
    except TypeError as error:
        raise CommandError(f"--arg {name}: cannot be given on the command line: {error}") from None
    try:
        return msgspec.json.decode(text, type=annotation, strict=False)
    except msgspec.DecodeError as error:
        reason = _reason(annotation, refused, error)
    raise CommandError(f"--arg {name}={text}: {reason}")


def _reason(
    annotation: object, as_text: msgspec.ValidationError, as_json: msgspec.DecodeError
) -> str:
    """Why a value was refused, which was read as text and then as JSON; and what it could be."""
    choices = [_shown(each) for each in dict.fromkeys(_choices(annotation))]
    if len(choices) > _MOST_CHOICES:
        choices = [*choices[:_MOST_CHOICES], f"... ({len(choices)} in all)"]
    listed = ", ".join(choices)
    if choices and all(_is_choice(each) for each in _alternatives(annotation)):
        return f"expected {'one of ' if len(choices) > 1 else ''}{listed}"
    if isinstance(as_json, msgspec.ValidationError):
        reason = str(as_json)
    else:
        hint = "; write it as JSON" if re.search("`(array|object)", str(as_text)) else ""
        reason = f"{as_text}{hint}"
    return f"{reason}; the choices are {listed}" if choices else reason


# ---------------------------------------------------------------- choices


def _choices(annotation: object) -> Iterator[object]:
    """The values that its `Literal` and `Enum` types list, at any depth."""
    annotation = getattr(annotation, "__value__", annotation)  # of a `type` statement's alias
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        yield from (member.value for member in annotation)
    else:
        for inner in get_args(annotation):
            yield from _choices(inner)


def _alternatives(annotation: object) -> Iterator[object]:
    """The types of a union but None, or the type itself."""
    annotation = getattr(annotation, "__value__", annotation)
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in {Union, types.UnionType}:
        for each in get_args(annotation):
            yield from _alternatives(each)
    elif annotation is not types.NoneType:
        yield annotation


def _is_choice(annotation: object) -> bool:
    is_enum = isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    return is_enum or get_origin(annotation) is Literal


def _shown(choice: object) -> str:
    """A choice as it is written on the command line; quoted where it could be misread."""
    if isinstance(choice, str):
        return choice if re.fullmatch(r"[\w.+-]+", choice) else repr(choice)
    return msgspec.json.encode(choice).decode()
