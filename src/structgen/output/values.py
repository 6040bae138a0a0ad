"""Values as JSON, whatever of msgspec's, pydantic's or Python's they are made of.

Holds  what is written is text that a prompt or an answer can have: halves of surrogate pairs, which
       are no text, become `?`.
Used   by `tools`, which tells a model what a tool returned, and by the server, which tells a client
       what a program did.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from structgen.schemas import of_pydantic


def json_of(value: object) -> bytes:
    """A value as JSON. Raises `TypeError`, with the reason, for what JSON has no form for."""
    try:
        plain = _dumped(value) if of_pydantic(type(value)) else value
        try:
            return msgspec.json.encode(plain, enc_hook=_dumped)
        except UnicodeEncodeError:
            builtins = msgspec.to_builtins(plain, enc_hook=_dumped, str_keys=True)
            return msgspec.json.encode(_all_readable(builtins))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(str(error)) from error


def readable(text: str) -> str:
    """A text that a prompt can have: halves of surrogate pairs, which are no text, become `?`."""
    return text.encode(errors="replace").decode()


def _all_readable(value: object) -> object:
    """Numbers, strings, lists and dicts, with strings that a prompt can have."""
    match value:
        case str():
            return readable(value)
        case list() | tuple():
            return [_all_readable(each) for each in value]
        case dict():
            return {_all_readable(key): _all_readable(each) for key, each in value.items()}
        case _:
            return value


def _dumped(value: object) -> object:
    """What pydantic knows, as numbers, strings, lists and dicts; msgspec knows nothing of it."""
    type_ = type(value)
    if not of_pydantic(type_) or "pydantic" not in sys.modules:
        raise TypeError(f"it has no form for values of the type {type_.__name__}")
    pydantic: Any = sys.modules["pydantic"]
    found: object = pydantic.TypeAdapter(type_).dump_python(value, mode="json")
    return found
