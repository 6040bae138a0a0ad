"""What is in a body: unpacked piece by piece, counted, and then decoded in one piece.

Owns   how gzip and deflate are undone, how many values a body may have, whatever its fields are,
       and how it is decoded.
Holds  the event loop is not held up while a body is counted, and no longer than 50 ms while it is
       decoded. msgspec keeps the interpreter lock all the time, so that a thread would not help;
       what it takes depends on the number of values, and hardly on the length of texts.
       A few hundred bytes may unpack to as many megabytes: that is done for who may call, and
       never by the parser of HTTP, which would go on with it after the answer, all at once.
Used   by `call`, and by `connection`.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import re
import zlib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from aiohttp.web_protocol import RequestHandler

from structgen.server.errors import ApiError

T = TypeVar("T")

MOST_PARTS = 100_000  # lists, objects and texts, names of fields included; 200 ns each
MOST_VALUES = 500_000  # of lists and objects; numbers take 50 ns each
SMALL = 1 << 16  # bytes of a body that cannot have so many that it would matter
_SLICE = 1 << 16  # bytes that are looked through at a time, in 2 ms at the most
# Half of a surrogate pair, behind which there is no room for the other: so it seems cut off.
_HALF_AT_END = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})[^\\]{0,5}$", re.DOTALL)
_TAIL = 64
_LARGE = 4 << 20  # bytes of a body of which it would take long to say which field is the largest
_PIECE = 1 << 17  # bytes that are unpacked at a time, in less than 1 ms
_DEFLATE = 8  # what the first byte of zlib's form says of the method; raw deflate has no such byte


class LeavesPacked(RequestHandler):
    """A connection that hands bodies on as they were sent."""

    __slots__ = ()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, auto_decompress=False, **keywords)


class Unpacker:
    """Unpacks one body, of which pieces come."""

    def __init__(self, encoding: str) -> None:
        """`encoding` is "gzip" or "deflate", which is in zlib's form or raw: clients send both."""
        self._gzip = encoding == "gzip"
        self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS) if self._gzip else None

    def unpacked(self, data: bytes) -> Iterator[bytes]:
        """What the next bytes unpack to, in pieces that are small.

        Raises `ValueError` for what is not packed in this way, or goes on after its end.
        """
        if self._stream is None:
            raw = data[0] & 0xF != _DEFLATE
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS)
        stream = self._stream
        while data or not stream.eof:
            if stream.eof:
                raise ValueError("something follows its end")
            try:
                piece = stream.decompress(data, _PIECE)
            except zlib.error as error:
                raise ValueError(str(error)) from None
            data = stream.unused_data or stream.unconsumed_tail
            if piece:
                yield piece
            elif not data:
                return

    def check_whole(self) -> None:
        """Raise `ValueError` where its end has not come."""
        if self._stream is None or not self._stream.eof:
            raise ValueError("its end is missing")


async def check_counts(data: bytes, type_: object) -> None:
    """Refuse a body that has more values than it may have.

    type_   of the body, whose largest field is to blame

    Raises `ApiError`.
    """
    if len(data) <= SMALL or await _is_sure_to_fit(data):
        return
    # Quotes, brackets and commas stand in texts, too: only now they have to be told apart.
    counts = _Counts()
    for start, stop in _slices(data):
        counts.add(data[start:stop])
        if counts.parts > MOST_PARTS:
            raise _refusal(data, type_, f"{MOST_PARTS:,} lists, objects and texts")
        if counts.values > MOST_VALUES:
            raise _refusal(data, type_, f"{MOST_VALUES:,} values")
        await asyncio.sleep(0)


def decoded(data: bytes, type_: type[T]) -> T:
    """The body as a value of a type. Raises the errors of `msgspec.json.decode`."""
    if len(data) <= SMALL or not gc.isenabled():
        return _decoded(data, type_)
    # All that is made here stays until it is whole. The collector would look through it, and
    # through everything else there is, again and again: nine tenths of the time.
    gc.disable()
    try:
        return _decoded(data, type_)
    finally:
        gc.enable()


def _decoded(data: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.DecodeError as error:
        if (explanation := explained(error, data)) is error:
            raise
        raise explanation from None


def explained(error: msgspec.DecodeError, data: bytes) -> msgspec.DecodeError:
    """What is wrong with JSON, where msgspec only says that it came to its end too soon."""
    if "truncated" in str(error) and (half := _HALF_AT_END.search(data[-_TAIL:])) is not None:
        return msgspec.DecodeError(
            f"{half[1].decode()} is half of a surrogate pair, and no text; send whole characters"
        )
    return error


class _Counts:
    """Counts what stands outside of texts, slice by slice.

    parts    lists, objects and texts
    values   commas: as many values as that follow another one
    """

    def __init__(self) -> None:
        self.parts = self.values = 0
        self._quoted = False

    def add(self, piece: bytes) -> None:
        """The next slice, which does not begin within an escape."""
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        stretches = piece.split(b'"')
        outside = b" ".join(stretches[self._quoted :: 2])
        borders = len(stretches) - 1
        self.parts += (borders + (not self._quoted)) // 2
        self.parts += outside.count(b"[") + outside.count(b"{")
        self.values += outside.count(b",")
        self._quoted ^= borders % 2 == 1


async def _is_sure_to_fit(data: bytes) -> bool:
    """Whether a body has few values even if every sign in its texts were one of JSON."""
    parts = values = quotes = 0
    for start in range(0, len(data), _SLICE):
        piece = data[start : start + _SLICE]
        parts += piece.count(b"[") + piece.count(b"{")
        quotes += piece.count(b'"')
        values += piece.count(b",")
        if parts + quotes / 2 > MOST_PARTS or values > MOST_VALUES:
            return False
        await asyncio.sleep(0)
    return True


def _slices(data: bytes) -> list[tuple[int, int]]:
    """Where to cut, but not within an escape."""
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(data):
        stop = min(start + _SLICE, len(data))
        piece = data[start:stop]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            stop += 1
        found.append((start, stop))
        start = stop
    return found


def _refusal(data: bytes, type_: object, most: str) -> ApiError:
    field = _largest(data, type_)
    named = f"{field}: " if field else ""
    where = ", most of them here" if field else ""
    return ApiError(
        400,
        f"{named}the body has more than the {most} that a request may have{where}; send less at "
        "a time",
        param=field,
    )


def _largest(data: bytes, type_: object) -> str | None:
    """The field that takes most of a body, None for none and where that would take long to say."""
    if len(data) > _LARGE:
        return None
    try:
        fields = msgspec.json.decode(data, type=_unread(type_))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    names: tuple[str, ...] = fields.__struct_fields__
    sizes = {name: len(getattr(fields, name)) for name in names}
    return next((name for name, size in sizes.items() if size > len(data) / 2), None)


@functools.cache
def _unread(type_: object) -> type[msgspec.Struct]:
    """A struct of the same fields, of which none is read."""
    nothing = msgspec.field(default_factory=lambda: msgspec.Raw(b""))
    names: tuple[str, ...] = getattr(type_, "__struct_fields__", ())
    return msgspec.defstruct("Unread", [(name, msgspec.Raw, nothing) for name in names])
