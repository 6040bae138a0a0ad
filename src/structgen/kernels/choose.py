"""Which kernels run on which device: the table of implementations.

Owns   the table. A faster implementation is a row here; nothing else in the engine changes.
Holds  Triton is imported only for who asks for a GPU: its import takes time and memory, and there
       are systems without it.
Used   by the engine, once, when it loads a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.attention import AttentionType
from structgen.kernels.cpu import CpuAttention
from structgen.kernels.cpu_fixed import FixedCpuAttention
from structgen.kernels.draw import Terms
from structgen.kernels.gpu.config import ARCHITECTURES, arch_of
from structgen.kernels.operations import AlikeOperations, Operations, TorchOperations


class Sampler(Protocol):
    """Draws on a device, in place of the draw of `engine/sample.py`."""

    def __call__(
        self,
        logits_nv: Tensor,
        temperature_n: NDArray[np.float32],
        terms: Terms,
        mask_row_n: NDArray[np.int32],
        mask_mw: Tensor | None,
    ) -> NDArray[np.int64]:
        """A token of each row, -1 where it has none that is finite and allowed.

        logits_nv    float32 [N, V] after all edits; not modified
        temperature_n  0 is greedy
        mask_row_n   row of `mask_mw` that binds the row, -1 for none
        mask_mw      i32 [M, ceil(V / 32)] on the device of the logits; None if no row is bound
        """
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model computes with on one device.

    attention    made with the pools
    operations   the decoder's norms and activation
    sampler      None: rows are drawn by torch
    """

    attention: AttentionType
    operations: Operations
    sampler: Sampler | None = None


def kernels_for(device: torch.device) -> Kernels:
    """The implementations for a device.

    ValueError names the devices there are, or the architectures that there are kernels for.
    """
    if device.type not in KERNELS:
        known = ", ".join(sorted(KERNELS))
        raise ValueError(f"no kernels for device {device.type!r}; there are some for: {known}")
    return KERNELS[device.type](device)


def deterministic_kernels_for(device: torch.device) -> Kernels:
    """Those in which a row's bits do not depend on the step's other rows.

    ValueError names the devices that have them.
    """
    if device.type != "cpu":
        raise ValueError(
            f"no deterministic kernels for device {device.type!r}; there are some for: cpu"
        )
    return Kernels(FixedCpuAttention, AlikeOperations())


def triton_kernels(arch: str) -> Kernels:
    """The Triton kernels for an architecture; ValueError says which there are."""
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"no kernels for {arch!r}; there are some for {known}, and for the cpu")
    try:
        from structgen.kernels.gpu.attention import TritonAttention  # noqa: PLC0415 - as below
        from structgen.kernels.gpu.operations import (  # noqa: PLC0415 - Triton, only for a GPU
            TritonOperations,
            TritonSampler,
        )
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("a GPU needs Triton: pip install triton, or use the cpu") from error

    attention = functools.partial(TritonAttention, arch=arch)
    return Kernels(attention, TritonOperations(arch), TritonSampler(arch))


def _cpu(device: torch.device) -> Kernels:
    del device
    return Kernels(CpuAttention, TorchOperations())


def _cuda(device: torch.device) -> Kernels:
    return triton_kernels(arch_of(device))


KERNELS: dict[str, Callable[[torch.device], Kernels]] = {"cpu": _cpu, "cuda": _cuda}
