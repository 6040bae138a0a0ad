"""Weights as files give them: the contract between file formats and architectures.

Used   by `safetensors_file` and `gguf` (which produce them) and by `linear` and `weights`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Protocol

import msgspec
import torch
from torch import Tensor


class DenseWeight(msgspec.Struct, frozen=True):
    """A weight as plain numbers, `[out, in]` for matrices."""

    tensor: Tensor


class BlockWeight(msgspec.Struct, frozen=True):
    """A weight as GGUF blocks, undecoded: `blocks` is u8[out, bytes per row]."""

    blocks: Tensor
    kind: str
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of a checkpoint under their Hugging Face names, whatever the file calls them."""

    def names(self) -> AbstractSet[str]:
        """Every tensor in the files."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor as a fresh contiguous dense tensor of that dtype, in Hugging Face layout."""
        ...
