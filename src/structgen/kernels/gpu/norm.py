"""RMSNorm (Zhang and Sennrich, 2019): of rows, of rows after a residual add, and of heads.

Owns   nothing.
Holds  a row's result is a function of that row alone; sums are float32, in one fixed order.
Used   by the decoder on a GPU. References: `torch.nn.functional.rms_norm` and the decoder's
       `x_th += update_th`, which round in the same places.

Shape legend as in `kernels/attention.py`; h is the length of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structgen.kernels.gpu.config import config_for


@triton.jit
def _norm(
    x_th,
    update_th,
    weight_h,
    out_th,
    stride_x,
    stride_u,
    eps,
    h: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program a row, and the whole row at once: it is read from memory once.
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < h
    x = tl.load(x_th + t * stride_x + i, mask=inside, other=0.0)
    if ADD:
        update = tl.load(update_th + t * stride_u + i, mask=inside, other=0.0)
        # The norm sees the sum as it is kept, rounded.
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
        tl.store(x_th + t * stride_x + i, x, mask=inside)
    x_32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_32 * x_32, 0) / h + eps)
    weight = tl.load(weight_h + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_th + t * h + i, (x_32 * scale * weight).to(x.dtype), mask=inside)


@triton.jit
def _norm_heads(
    qkv_tx,
    weight_nd,
    stride_t,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # One program per token and block of heads.
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n < N)[:, None] & (d < D)[None, :]
    at = n[:, None] * D + d[None, :]
    x = tl.load(qkv_tx + t * stride_t + at, mask=inside, other=0.0)
    x_32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_32 * x_32, 1) / D + eps)
    # Rounded before the weight and after it, as transformers does.
    normed = (x_32 * scale[:, None]).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_nd + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(qkv_tx + t * stride_t + at, (normed * weight).to(x.dtype), mask=inside)


def rms_norm(x_th: Tensor, weight_h: Tensor, eps: float, *, arch: str) -> Tensor:
    """`functional.rms_norm(x_th, (h,), weight_h, eps)`.

    x_th       [T, h] float32, float16 or bfloat16, rows contiguous
    weight_h   [h] in a dtype of its own
    """
    return _rows(x_th, None, weight_h, eps, arch)


def add_rms_norm(
    x_th: Tensor, update_th: Tensor, weight_h: Tensor, eps: float, *, arch: str
) -> Tensor:
    """`x_th += update_th` in place, and the norm of the sum as a new tensor.

    x_th, update_th   [T, h] of one dtype, rows contiguous; otherwise as of `rms_norm`
    """
    assert x_th.shape == update_th.shape, "the update is not as large as what it is added to"
    assert x_th.dtype == update_th.dtype, "the update has another dtype"
    assert update_th.stride(1) == 1, "rows of the update are not contiguous"
    return _rows(x_th, update_th, weight_h, eps, arch)


def _rows(
    x_th: Tensor, update_th: Tensor | None, weight_h: Tensor, eps: float, arch: str
) -> Tensor:
    count, size = x_th.shape
    assert x_th.stride(1) == 1, "rows are not contiguous"
    assert weight_h.shape == (size,), "the weight is not as long as a row"
    out_th = torch.empty(count, size, dtype=x_th.dtype, device=x_th.device)
    if count == 0:
        return out_th
    config = config_for(arch, "norm", size)
    added_th = x_th if update_th is None else update_th
    _norm[count,](
        x_th,
        added_th,
        weight_h,
        out_th,
        x_th.stride(0),
        added_th.stride(0),
        eps,
        h=size,
        ADD=update_th is not None,
        BLOCK=triton.next_power_of_2(size),
        **config.launch,
    )
    return out_th


def norm_heads(qkv_tx: Tensor, weight_nd: Tensor, eps: float, *, arch: str) -> None:
    """RMSNorm of each head of q and k in place, as the decoder does it for Qwen3.

    qkv_tx      [T, X] as of `rope_write`
    weight_nd   [H + K, D]: a weight for each head of q and then of k
    """
    count, dim = weight_nd.shape
    assert qkv_tx.stride(1) == 1, "rows are not contiguous"
    assert weight_nd.is_contiguous(), "the weights are not contiguous"
    if len(qkv_tx) == 0:
        return
    config = config_for(arch, "norm_heads", dim)
    _norm_heads[len(qkv_tx), triton.cdiv(count, config.block_m)](
        qkv_tx,
        weight_nd,
        qkv_tx.stride(0),
        eps,
        N=count,
        D=dim,
        BLOCK_N=config.block_m,
        BLOCK_D=triton.next_power_of_2(dim),
        **config.launch,
    )
