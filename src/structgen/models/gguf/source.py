"""The tensors of a GGUF file under Hugging Face names and in Hugging Face layout.

Owns   nothing but views: `GgufFile` owns the memory map.
Holds  every tensor in the file has a name here, or is the rope factors that the config carries.
Used   by `checkpoint`; implements its `TensorSource`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structgen.errors import CheckpointError
from structgen.models.gguf.blocks import FORMATS, dequantize
from structgen.models.gguf.config import (
    INTERLEAVED,
    ROPE_FACTORS,
    config_from,
    hugging_face_names,
)
from structgen.models.gguf.header import GgufFile, TensorEntry
from structgen.models.tensors import BlockWeight

_Q, _K = ".self_attn.q_proj.", ".self_attn.k_proj."
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufSource:
    """A GGUF file as a `TensorSource`.

    config   the file's metadata as a `config.json`
    dtype    the nearest dtype of most of its numbers: "bfloat16" for quantised files
    """

    def __init__(self, file: GgufFile) -> None:
        """Name every tensor; raises `CheckpointError` for what has no name or is not supported."""
        self._file = file
        self._names = hugging_face_names(file.path, file.tensors)
        shapes = {name: entry.shape for name, entry in file.tensors.items()}
        self.config: dict[str, Any] = config_from(
            file.path, file.metadata, shapes, self._rope_factors()
        )
        self._heads: dict[str, int] = {}
        if file.metadata["general.architecture"] in INTERLEAVED:
            self._heads = {
                _Q: self.config["num_attention_heads"],
                _K: self.config["num_key_value_heads"],
            }
        sizes = Counter[str]()
        for entry in file.tensors.values():
            sizes[entry.kind] += math.prod(entry.shape)
        self.dtype = _DTYPES.get(max(sizes, key=sizes.__getitem__), "bfloat16")

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def names(self) -> AbstractSet[str]:
        """Every tensor in the file, but the rope factors, which are in the config."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self._entry(name).shape

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, decoded in float32 and rounded to `dtype`, in Hugging Face layout."""
        entry = self._entry(name)
        out = torch.empty(entry.shape, dtype=dtype)
        dequantize(entry.kind, self.blocks(name).blocks, out)
        return out

    def blocks(self, name: str) -> BlockWeight:
        """One tensor undecoded, rows in Hugging Face order. May be a view of the mapped file."""
        entry = self._entry(name)
        rows_rb = self._rows(entry)
        for part, heads in self._heads.items():
            if part in name:
                rows_rb = self._halves(name, entry, rows_rb, heads)
        return BlockWeight(rows_rb, entry.kind, entry.shape)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._names:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self._file.tensors[self._names[name]]

    def _rows(self, entry: TensorEntry) -> Tensor:
        """The bytes of a tensor, u8[product of all but the last dimension, bytes per row]."""
        flat = torch.frombuffer(
            self._file.data, dtype=torch.uint8, count=entry.size, offset=entry.offset
        )
        form = FORMATS[entry.kind]
        return flat.view(-1, entry.shape[-1] // form.elements * form.bytes)

    def _halves(self, name: str, entry: TensorEntry, rows_rb: Tensor, heads: int) -> Tensor:
        """Rows (or numbers of a bias) from neighbouring pairs to first half and second half."""
        rows_rb = rows_rb.view(entry.shape[0], -1)
        if entry.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has {entry.shape[0]} rows, which {heads} heads "
                "cannot share"
            )
        pairs = rows_rb.view(heads, -1, 2, rows_rb.shape[1])
        swapped = pairs.transpose(1, 2).reshape(rows_rb.shape)
        return swapped if len(entry.shape) > 1 else swapped.view(1, -1)

    def _rope_factors(self) -> list[float] | None:
        entry = self._file.tensors.get(ROPE_FACTORS)
        if entry is None:
            return None
        factors = torch.empty(entry.shape, dtype=torch.float32)
        dequantize(entry.kind, self._rows(entry), factors)
        return factors.flatten().tolist()
