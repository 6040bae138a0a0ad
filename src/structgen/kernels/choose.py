"""Which attention runs on which device: the table of implementations.

Owns   the table. A faster implementation is a row here; nothing else in the engine changes.
Used   by the engine's runner, once, when it makes its pools.
"""

from __future__ import annotations

import torch

from structgen.kernels.attention import AttentionType
from structgen.kernels.cpu import CpuAttention
from structgen.kernels.cpu_fixed import FixedCpuAttention

ATTENTION: dict[str, AttentionType] = {"cpu": CpuAttention}
# Those in which a row's bits do not depend on the step's other rows.
DETERMINISTIC: dict[str, AttentionType] = {"cpu": FixedCpuAttention}


def attention_for(device: torch.device, *, deterministic: bool = False) -> AttentionType:
    """The implementation for a device; ValueError names the devices there are."""
    table = DETERMINISTIC if deterministic else ATTENTION
    if device.type not in table:
        kind = "deterministic attention" if deterministic else "attention"
        known = ", ".join(sorted(table))
        raise ValueError(f"no {kind} for device {device.type!r}; there is one for: {known}")
    return table[device.type]
