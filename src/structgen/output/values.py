"""Values as JSON, whatever of msgspec's, pydantic's or Python's they are made of.

Holds  what is written is text that a prompt or an answer can have: halves of surrogate pairs, which
       are no text, become `?`. No number is lost: JSON has none for NaN and infinity, and both
       libraries would write null.
Used   by `tools`, which tells a model what a tool returned, by the server and by `structgen run`,
       which tell what a program returned.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from structgen.schemas import of_pydantic

# How MessagePack, which loses none of them, writes a float that is not finite.
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")


def json_of(value: object) -> bytes:
    """A value as JSON. Raises `TypeError`, with the reason, for what JSON has no form for."""
    try:
        data = _encoded(value)
    except Exception as error:
        # How a value is written may be a user's own code, which may raise anything.
        reason = str(error).partition("\n")[0]  # the other lines advise on pydantic's own options
        raise TypeError(reason or type(error).__name__) from error
    if b"null" in data and (lost := _lost(value, data)) is not None:
        place, number = lost
        where = f"`{place.removeprefix('.')}`" if place else "it"
        raise TypeError(f"{where} is {number}, and JSON has no such number; make it None, or text")
    return data


def readable(text: str) -> str:
    """A text that a prompt can have: halves of surrogate pairs, which are no text, become `?`."""
    return text.encode(errors="replace").decode()


def _encoded(value: object) -> bytes:
    plain = _plain(value)
    try:
        return msgspec.json.encode(plain, enc_hook=_dumped)
    except UnicodeEncodeError:
        builtins = msgspec.to_builtins(plain, enc_hook=_dumped, str_keys=True)
        return msgspec.json.encode(_all_readable(builtins))


def _lost(value: object, data: bytes) -> tuple[str, float] | None:
    """The first number of a value that is null in its JSON, and its place."""
    found = _plain(value, mode="python")
    try:
        if not _NOT_FINITE.search(msgspec.msgpack.encode(found, enc_hook=_python)):
            return None
    except (OverflowError, UnicodeEncodeError):
        pass  # MessagePack has integers of 64 bits, and UTF-8 no halves of surrogate pairs
    builtins = msgspec.to_builtins(found, enc_hook=_python, str_keys=True)
    return next(_lost_in(builtins, msgspec.json.decode(data), ""), None)


def _lost_in(value: object, written: object, place: str) -> Iterator[tuple[str, float]]:
    match value, written:
        case float(), None:
            if not math.isfinite(value):
                yield place, value
        case dict(), dict():
            for key, each in value.items():
                yield from _lost_in(each, written.get(readable(key)), f"{place}.{readable(key)}")
        case list() | tuple(), list():
            for index, (each, other) in enumerate(zip(value, written, strict=False)):
                yield from _lost_in(each, other, f"{place}[{index}]")


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


def _plain(value: object, mode: str = "json") -> object:
    """A value as msgspec can write it, but for what of pydantic's is inside of msgspec's own."""
    if isinstance(value, msgspec.Struct) or not of_pydantic(type(value)):
        return value
    return _dumped(value, mode)


def _dumped(value: object, mode: str = "json") -> object:
    """What pydantic knows, as numbers, strings, lists and dicts; msgspec knows nothing of it."""
    type_ = type(value)
    if not of_pydantic(type_) or "pydantic" not in sys.modules:
        raise TypeError(f"it has no form for values of the type {type_.__name__}")
    pydantic: Any = sys.modules["pydantic"]
    found: object = pydantic.TypeAdapter(type_).dump_python(value, mode=mode)
    return found


def _python(value: object) -> object:
    """The same with numbers as they are; of what pydantic alone can write, nothing."""
    return _dumped(value, "python") if of_pydantic(type(value)) else None
