"""Tensors from safetensors files, memory-mapped: one file, or shards with an index.

Owns   the open files of a checkpoint directory. Reads nothing but headers until asked.
Holds  `read` copies out of the mapping, so that a tensor outlives its file and is never shared.
Used   by `checkpoint`, as the TensorSource of a directory.
"""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from structgen.errors import CheckpointError

_DENSE = frozenset({"F64", "F32", "F16", "BF16"})


class SafetensorsSource:
    """The TensorSource over `model.safetensors`, or the shards of `model.safetensors.index.json`.

    CheckpointError if the directory has neither, a shard is missing or damaged, or the index and
    the shards disagree; the message has the path.
    """

    def __init__(self, directory: Path) -> None:
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if single.is_file():
            self._open(single)
        elif index.is_file():
            self._open_shards(index)
        else:
            raise CheckpointError(_nothing_found(directory))

    def names(self) -> AbstractSet[str]:
        """Every tensor in the files."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor as a fresh contiguous copy in `dtype`.

        CheckpointError if it is stored in integers or eight-bit floats.
        """
        stored = self._file_of[name].get_slice(name).get_dtype()
        if stored not in _DENSE:
            raise CheckpointError(
                f"{self._path_of[name]}: {name} is stored as {stored}; "
                f"supported are {', '.join(sorted(_DENSE))}"
            )
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor.to(dtype, copy=True).contiguous()

    def _open_shards(self, index: Path) -> None:
        shard_of = _weight_map(index)
        for shard in sorted(set(shard_of.values())):
            path = index.parent / shard
            if Path(shard).name != shard or not path.is_file():
                raise CheckpointError(f"{index} names the shard {shard!r}, which is not beside it")
            self._open(path)
        for name, shard in shard_of.items():
            if self._path_of.get(name) != index.parent / shard:
                raise CheckpointError(f"{index} places {name} in {shard}, which does not hold it")

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or not safetensors: {error}") from error
        for name in names:
            if name in self._path_of:
                raise CheckpointError(f"{name} is both in {self._path_of[name]} and in {path}")
            self._file_of[name] = file
            self._path_of[name] = path


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes())
        return dict(content["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error


def _nothing_found(directory: Path) -> str:
    message = f"{directory} has no model.safetensors and no model.safetensors.index.json"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        message += "; pickled weights (.bin, .pth) are not read, convert them to safetensors"
    return message
