"""Rotate queries and keys, and write keys and values into their slots, in one launch a layer.

Owns   nothing.
Holds  a program touches one token; a slot of a pool is written by the row that owns it and by no
       other. Slot 0 takes what padded rows bring, in any order, and nobody reads it.
Used   by the attention of this folder, as its `write`. Reference: `ReferenceAttention.write`.

Shape legend as in `kernels/attention.py`. Angles and products are float32 and rounded once, at
the store; values are copied bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structgen.kernels.attention import HeadShape
from structgen.kernels.gpu.config import config_for


@triton.jit
def _rope_write(
    qkv_tx,
    cos_sin_pd,
    positions_t,
    slots_t,
    q_thd,
    k_pool_sx,
    v_pool_sx,
    stride_tx,
    stride_p,
    stride_k,
    stride_v,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,
):
    # One program per token and block of heads. 64-bit: slot * stride passes 2**31 in large pools.
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_t + t).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    f = tl.arange(0, HALF)
    # The mask over f is always true, and gone, where D / 2 is a power of two.
    inside = (head < H + 2 * K)[:, None] & (f < D // 2)[None, :]
    source = qkv_tx + t * stride_tx + head[:, None] * D + f[None, :]
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + D // 2, mask=inside, other=0.0)
    if ROTARY:
        angle = cos_sin_pd + tl.load(positions_t + t).to(tl.int64) * stride_p + f
        cos = tl.load(angle, mask=f < D // 2, other=0.0)[None, :]
        sin = tl.load(angle + D // 2, mask=f < D // 2, other=0.0)[None, :]
        turns = (head < H + K)[:, None]
        low_32, high_32 = low.to(tl.float32), high.to(tl.float32)
        # Chosen, not multiplied by 1 and 0: an infinite value would turn its partner into NaN.
        low = tl.where(turns, low_32 * cos - high_32 * sin, low_32).to(low.dtype)
        high = tl.where(turns, high_32 * cos + low_32 * sin, high_32).to(high.dtype)
    is_q = inside & (head < H)[:, None]
    is_k = inside & ((head >= H) & (head < H + K))[:, None]
    is_v = inside & (head >= H + K)[:, None]
    to_q = q_thd + t * (H * D) + head[:, None] * D + f[None, :]
    tl.store(to_q, low, mask=is_q)
    tl.store(to_q + D // 2, high, mask=is_q)
    to_k = k_pool_sx + slot * stride_k + (head - H)[:, None] * D + f[None, :]
    tl.store(to_k, low, mask=is_k)
    tl.store(to_k + D // 2, high, mask=is_k)
    to_v = v_pool_sx + slot * stride_v + (head - H - K)[:, None] * D + f[None, :]
    tl.store(to_v, low, mask=is_v)
    tl.store(to_v + D // 2, high, mask=is_v)


def rope_write(
    qkv_tx: Tensor,
    cos_sin_pd: Tensor,
    positions_t: Tensor,
    slots_t: Tensor,
    k_pool_sx: Tensor,
    v_pool_sx: Tensor,
    shape: HeadShape,
    *,
    rotary: bool,
    arch: str,
) -> Tensor:
    """The contract of `Attention.write`, for one layer; returns q_thd [T, H, D].

    qkv_tx                 [T, X] float32, float16 or bfloat16: q, then k, then v, rows contiguous
    cos_sin_pd             float32 [positions, D]: D / 2 cosines, then sines
    positions_t, slots_t   i32 or i64 [T], on the device
    k_pool_sx, v_pool_sx   [S, K * D] in the dtype of qkv_tx; written in place
    rotary                 False leaves q and k unrotated
    arch                   as `arch_of` names it
    """
    count, heads, kv_heads, dim = len(qkv_tx), shape.heads, shape.kv_heads, shape.head_dim
    assert qkv_tx.shape[1] == (heads + 2 * kv_heads) * dim, "X is not (H + 2K) * D"
    assert qkv_tx.stride(1) == k_pool_sx.stride(1) == v_pool_sx.stride(1) == 1
    assert qkv_tx.dtype == k_pool_sx.dtype == v_pool_sx.dtype, "the pools have another dtype"
    assert cos_sin_pd.dtype == torch.float32, "angles are float32"
    q_thd = torch.empty(count, heads, dim, dtype=qkv_tx.dtype, device=qkv_tx.device)
    if count == 0:
        return q_thd
    config = config_for(arch, "rope_write", dim)
    grid = (count, triton.cdiv(heads + 2 * kv_heads, config.block_m))
    _rope_write[grid](
        qkv_tx,
        cos_sin_pd,
        positions_t,
        slots_t,
        q_thd,
        k_pool_sx,
        v_pool_sx,
        qkv_tx.stride(0),
        cos_sin_pd.stride(0),
        k_pool_sx.stride(0),
        v_pool_sx.stride(0),
        H=heads,
        K=kv_heads,
        D=dim,
        ROTARY=rotary,
        BLOCK_H=config.block_m,
        HALF=triton.next_power_of_2(dim // 2),
        **config.launch,
    )
    return q_thd
