"""SiLU of the gate times the up projection, read from where one product left both.

Owns   nothing.
Used   by the decoder on a GPU. Reference: `functional.silu(gate_ti).mul_(up_ti)` of the two halves
       of `both_ti`, which rounds in the same places.

    T tokens    I components of the gate
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structgen.kernels.gpu.config import config_for

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _silu_and_multiply(both_ti, out_ti, stride_t, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # One program per token and block of components.
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gate = tl.load(both_ti + t * stride_t + i, mask=inside, other=0.0)
    up = tl.load(both_ti + t * stride_t + SIZE + i, mask=inside, other=0.0)
    gate_32 = gate.to(tl.float32)
    # Far below zero the power overflows to infinity, and the quotient is the zero it should be.
    silu = (gate_32 / (1.0 + tl.exp2(-gate_32 * _LOG2E))).to(gate.dtype)
    out = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ti + t * SIZE + i, out.to(gate.dtype), mask=inside)


def silu_and_multiply(both_ti: Tensor, *, arch: str) -> Tensor:
    """SiLU of the first half of each row times its second half; a new tensor [T, I].

    both_ti   [T, 2 * I] float32, float16 or bfloat16, rows contiguous
    """
    count, size = len(both_ti), both_ti.shape[1] // 2
    assert both_ti.shape[1] == 2 * size, "a row has no two halves"
    assert both_ti.stride(1) == 1, "rows are not contiguous"
    out_ti = torch.empty(count, size, dtype=both_ti.dtype, device=both_ti.device)
    if count == 0:
        return out_ti
    config = config_for(arch, "activation", size)
    grid = (count, triton.cdiv(size, config.block_n))
    _silu_and_multiply[grid](
        both_ti, out_ti, both_ti.stride(0), SIZE=size, BLOCK=config.block_n, **config.launch
    )
    return out_ti
