"""Values as JSON, whatever of msgspec's, pydantic's or Python's they are made of.

Holds  what is written is text that a prompt or an answer can have: halves of surrogate pairs, which
       are no text, become `?`, or are refused. No number is lost: JSON has none for NaN and
       infinity, and both libraries would write null.
Used   by `tools`, which tells a model what a tool returned, by the server and by `structgen run`,
       which tell what a program returned.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from structgen.schemas import of_pydantic
from structgen.waiting import in_turns

LARGE = 1 << 18  # characters, or what takes as long: they are written in some 5 ms
_EACH = 16  # characters that take as long to write as a value does besides what is in it
_SPLIT = frozenset({list, tuple, dict})  # types of values that are written member by member
_OWN = _SPLIT | {str, int, float, bool, type(None)}  # what is never of pydantic's
# How MessagePack, which loses none of them, writes a float that is not finite.
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
_T = TypeVar("_T")


def json_of(value: object, *, exact: bool = False) -> bytes:
    """A value as JSON. Raises `TypeError`, with the reason, for what JSON has no form for.

    exact   that is also a half of a surrogate pair, which becomes `?` otherwise
    """
    try:
        data = _encoded(value, exact=exact)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise TypeError(
            f"{half!r} in it is half of a surrogate pair, and no text; leave it out, or decode its "
            "source as UTF-8"
        ) from error
    except Exception as error:
        raise TypeError(_reason(error)) from error
    if b"null" in data and (lost := _lost(value, data)) is not None:
        place, number = lost
        where = f"`{place.removeprefix('.')}`" if place else "it"
        raise TypeError(f"{where} is {number}, and JSON has no such number; make it None, or text")
    return data


async def json_in_turns(value: object) -> bytes:
    """Exactly the value as JSON, as `json_of` writes it: while that takes long, others run.

    They do between the parts of texts, lists and dicts, not within a value of another type.
    """
    if _size(value) <= LARGE:
        return json_of(value, exact=True)
    try:
        return b"".join(await in_turns(_pieces(value)))
    except (TypeError, RuntimeError):  # refused, or changed meanwhile
        return json_of(value, exact=True)  # says where in the whole value that is


def readable(text: str) -> str:
    """A text that a prompt can have: halves of surrogate pairs, which are no text, become `?`."""
    return text.encode(errors="replace").decode()


def _reason(error: Exception) -> str:
    """What an error says: how a value is written may be a user's own code, which may raise any."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - it is a user's own, too
        said = ""
    # The other lines advise on pydantic's own options.
    return said.partition("\n")[0] or type(error).__name__


def _size(value: object) -> int:
    """About how long it takes to write a value, in characters; more than `LARGE` is not counted."""
    size, waiting = 0, [value]
    while waiting and size <= LARGE:
        each = waiting.pop()
        size += _EACH
        if isinstance(each, str | bytes):
            size += len(each)
        elif type(each) in _SPLIT:
            members: Any = each
            size += _EACH * len(members)
            if size <= LARGE:
                waiting += members.values() if type(each) is dict else members
    return size


def _pieces(value: object) -> Iterator[bytes]:
    """The JSON of a value in pieces, of which each is written soon."""
    found: Any = value
    if _size(value) <= LARGE:
        yield json_of(value, exact=True)
    elif type(value) is str:
        yield b'"'
        for at in range(0, len(found), LARGE):
            yield json_of(found[at : at + LARGE], exact=True)[1:-1]
        yield b'"'
    elif type(value) is dict:
        yield b"{"
        for number, group in enumerate(_groups(found.items())):
            key, member = group[0]
            yield b"," if number else b""
            if len(group) > 1:
                yield json_of(dict(group), exact=True)[1:-1]
            else:
                yield json_of({key: 0}, exact=True)[1:-2]
                yield from _pieces(member)
        yield b"}"
    elif type(value) in _SPLIT:
        yield b"["
        for number, group in enumerate(_groups(found)):
            yield b"," if number else b""
            if len(group) > 1:
                yield json_of(group, exact=True)[1:-1]
            else:
                yield from _pieces(group[0])
        yield b"]"
    else:
        yield json_of(value, exact=True)


def _groups(values: Iterable[_T]) -> Iterator[list[_T]]:
    """The values, in order; those of each group are written soon, or there is only one."""
    group: list[_T] = []
    size = 0
    for value in values:
        size += (more := _size(value))
        if group and size > LARGE:
            yield group
            group, size = [], more
        group.append(value)
    if group:
        yield group


def _encoded(value: object, *, exact: bool) -> bytes:
    plain = _plain(value)
    try:
        return msgspec.json.encode(plain, enc_hook=_dumped)
    except UnicodeEncodeError:
        if exact:
            raise
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
    if type(value) in _OWN or isinstance(value, msgspec.Struct) or not of_pydantic(type(value)):
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
