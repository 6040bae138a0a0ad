"""Which attention runs on which device: the table of implementations.

Owns   the table. A faster implementation is a row here; nothing else in the engine changes.
Used   by the engine's runner, once, when it makes its pools.
"""

from __future__ import annotations

import torch

from structgen.kernels.attention import AttentionType
from structgen.kernels.cpu import CpuAttention

ATTENTION: dict[str, AttentionType] = {"cpu": CpuAttention}


def attention_for(device: torch.device) -> AttentionType:
    """The implementation for a device; ValueError names the devices there are."""
    if device.type not in ATTENTION:
        known = ", ".join(sorted(ATTENTION))
        raise ValueError(f"no attention for device {device.type!r}; there is one for: {known}")
    return ATTENTION[device.type]
