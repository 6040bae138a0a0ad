"""The header of a GGUF file: metadata and where each tensor lies.

Owns   the memory map of one file and the parsed header; tensors are only located here.
Holds  every tensor that is listed lies wholly inside the file; a damaged file raises
       `CheckpointError` with the path and what is wrong, before anything large is allocated.
Used   by `source` (tensors), `config` and `vocabulary` (metadata).

A file has no index, so the whole header is walked once, with `struct` on the map: 98,000 strings
of a usual vocabulary take some hundredths of a second.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from structgen.errors import CheckpointError
from structgen.models.gguf.blocks import FORMATS, KIND_NAMES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value types of the metadata, as `struct` formats; the files are little-endian.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# A metadata entry is at least a key length, a type and one byte; a tensor entry has 24 bytes
# besides its name and sizes. Counts that cannot fit in the file are refused before any loop.
_LEAST_ENTRY, _LEAST_TENSOR = 13, 24
_MOST_DIMENSIONS = 4


class TensorEntry(msgspec.Struct, frozen=True):
    """Where a tensor lies. `shape` is outermost first; `offset` counts from the file's start."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class GgufFile:
    """One open GGUF file.

    metadata   key to value: numbers, strings, booleans, lists
    tensors    name to `TensorEntry`
    data       the whole file, mapped privately: writes would stay in this process, and none happen

    The map lives as long as this object or any tensor made on it.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read its header; raises `CheckpointError` naming the path."""
        self.path = path
        self.data = _mapped(path)
        cursor = _Cursor(self.data, path)
        tensor_count, entry_count = _opening(cursor)
        self.metadata = _metadata(cursor, entry_count)
        parts = self.metadata.get("split.count", 0)
        if parts not in (0, 1):
            raise CheckpointError(
                f"{path}: this is one of {parts} parts of a split GGUF; "
                "merge them first (`llama-gguf-split --merge`)"
            )
        self.tensors = _tensors(cursor, tensor_count, self.metadata)

    def text(self, key: str) -> str | None:
        """A string of the metadata, None if absent; raises `CheckpointError` for another type."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.path}: metadata {key!r} should be text, is {value!r}")
        return value


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # ACCESS_COPY because torch warns about tensors on memory that it may not write.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Cursor:
    """Reads one value after another and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path = data, path
        self.at, self.size = 0, len(data)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} (at byte {self.at} of {self.size})")

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes; returns where they begin."""
        start = self.at
        if count > self.size - start:
            raise self.fail(f"the file ends inside {what}; it is truncated or damaged")
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        return self._decoded(self.data[start : start + length], what)

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; the loop is bare because vocabularies have hundreds of thousands."""
        data, size, at = self.data, self.size, self.at
        length_at = _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > size:
                    break
                found.append(data[start:at].decode())
        except struct.error:
            at = size + 1
        except UnicodeDecodeError:
            raise self.fail(f"{what} is no UTF-8 text") from None
        if at > size:
            raise self.fail(f"the file ends inside {what}; it is truncated or damaged")
        self.at = at
        return found

    def value(self, kind: int, what: str) -> Any:  # noqa: ANN401 - metadata has any type
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        return self._scalars(kind, 1, what)[0]

    def _array(self, what: str) -> list[Any]:
        kind, count = self.u32(what), self.u64(what)
        if kind == _STRING:
            if count * 8 > self.size - self.at:
                raise self.fail(f"{what} claims {count} strings, more than the file can hold")
            return self.strings(count, what)
        if kind == _ARRAY:
            raise self.fail(f"{what} is a list of lists, which no known file has")
        return list(self._scalars(kind, count, what))

    def _scalars(self, kind: int, count: int, what: str) -> tuple[Any, ...]:
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown value type {kind}")
        code = _SCALARS[kind]
        start = self.take(count * struct.calcsize(f"<{code}"), what)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def _decoded(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is no UTF-8 text") from None


def _opening(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; returns the counts of tensors and metadata entries."""
    if cursor.size < 4 or cursor.data[:4] != _MAGIC:
        raise CheckpointError(
            f"{cursor.path}: not a GGUF file (it begins with {bytes(cursor.data[:4])!r})"
        )
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        kind = "big-endian, " if swapped in _VERSIONS else ""
        raise CheckpointError(
            f"{cursor.path}: GGUF version {version} is not supported ({kind}versions 2 and 3 are); "
            "convert the model again with a current llama.cpp"
        )
    tensors, entries = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    room = cursor.size - cursor.at
    if tensors > room // _LEAST_TENSOR or entries > room // _LEAST_ENTRY:
        raise cursor.fail(
            f"the header claims {tensors} tensors and {entries} metadata entries, "
            "more than the file can hold"
        )
    return tensors, entries


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"the key of metadata entry {index}")
        if key in found:
            raise cursor.fail(f"metadata {key!r} appears twice")
        kind = cursor.u32(f"the type of metadata {key!r}")
        found[key] = cursor.value(kind, f"metadata {key!r}")
    return found


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, TensorEntry]:
    listed = [_listed(cursor, index) for index in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(f"{cursor.path}: general.alignment is {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    found: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in listed:
        if name in found:
            raise CheckpointError(f"{cursor.path}: tensor {name!r} appears twice")
        size = _size(cursor, name, shape, kind)
        if base + offset + size > cursor.size:
            raise CheckpointError(
                f"{cursor.path}: tensor {name!r} ends at byte {base + offset + size}, but the file "
                f"has {cursor.size}; it is truncated, fetch it again"
            )
        found[name] = TensorEntry(name, kind, shape, base + offset, size)
    return found


def _listed(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.string(f"the name of tensor {index}")
    dimensions = cursor.u32(f"the shape of tensor {name!r}")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} claims {dimensions} dimensions")
    shape = tuple(cursor.u64(f"the shape of tensor {name!r}") for _ in range(dimensions))
    code = cursor.u32(f"the type of tensor {name!r}")
    kind = KIND_NAMES.get(code, f"type {code}")
    if kind not in FORMATS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} is stored as {kind}, which is not supported; "
            f"use a file in one of {', '.join(FORMATS)}"
        )
    offset = cursor.u64(f"the offset of tensor {name!r}")
    return name, shape[::-1], kind, offset


def _size(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: str) -> int:
    form = FORMATS[kind]
    rows, rest = divmod(shape[-1], form.elements)
    if rest or min(shape) < 1:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} of shape {list(shape)} cannot be stored as {kind}, "
            f"whose blocks have {form.elements} elements"
        )
    return math.prod(shape[:-1]) * rows * form.bytes
