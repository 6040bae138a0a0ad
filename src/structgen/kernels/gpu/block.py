"""A block of query rows against a range of keys: the loop that all attention kernels are made of.

Owns   nothing; `nothing_seen` and `attend_range` are called in kernels.
Holds  softmax in base 2 and float32, rescaled as maxima grow (online softmax: Milakov and
       Gimelshein 2018; flash attention: Dao et al. 2022); low precision only in loads, in products
       of the matrix units and in stores.
Used   by `segment.py` and `extend.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, D: tl.constexpr):
    """What rows have before their first key: acc f32 [M, D], top f32 [M] and sum f32 [M]."""
    acc_md = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    top_m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    return acc_md, top_m, tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def attend_range(
    q_md, acc_md, top_m, sum_m, table, k, v, begin, end, low_m, high_m, stride_k, stride_v,
    scale_log2, D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Positions [begin, end), of which row m sees those in [low, high); all if not MASKED, and
    then the range is whole blocks. Returns acc, top and sum with them.

    table points to the slot of position 0; k and v to component 0 of the head in slot 0.
    """
    d = tl.arange(0, D)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        held = n < end
        # 64-bit: slot * stride passes 2**31 in large pools.
        if MASKED:
            slot = tl.load(table + n, mask=held, other=0).to(tl.int64)
            k_dn = tl.load(k + slot[None, :] * stride_k + d[:, None], mask=held[None, :], other=0.0)
        else:
            slot = tl.load(table + n).to(tl.int64)
            k_dn = tl.load(k + slot[None, :] * stride_k + d[:, None])
        score_mn = tl.dot(q_md, k_dn, input_precision=PRECISION) * scale_log2
        if MASKED:
            seen = held[None, :] & (n[None, :] >= low_m[:, None]) & (n[None, :] < high_m[:, None])
            score_mn = tl.where(seen, score_mn, -float("inf"))
        new_m = tl.maximum(top_m, tl.max(score_mn, 1))
        # A row that has seen no key yet: -inf - -inf would be NaN, -inf - 0 gives the weight 0.
        safe_m = tl.where(new_m == -float("inf"), 0.0, new_m)
        p_mn = tl.exp2(score_mn - safe_m[:, None])
        fade_m = tl.exp2(top_m - safe_m)
        sum_m = sum_m * fade_m + tl.sum(p_mn, 1)
        # The mask is not only in the weights: 0 times what an unused slot holds may be NaN.
        if MASKED:
            v_nd = tl.load(v + slot[:, None] * stride_v + d[None, :], mask=held[:, None], other=0.0)
        else:
            v_nd = tl.load(v + slot[:, None] * stride_v + d[None, :])
        acc_md = acc_md * fade_m[:, None]
        acc_md += tl.dot(p_mn.to(v_nd.dtype), v_nd, input_precision=PRECISION)
        top_m = new_m
    return acc_md, top_m, sum_m


def precision_of(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: float32 exactly, since tf32 keeps ten bits; others as they are."""
    return "ieee" if dtype == torch.float32 else "tf32"


def check_pools(q_thd: Tensor, k_pool_sx: Tensor, v_pool_sx: Tensor) -> None:
    """What every attention kernel asks of its tensors."""
    assert q_thd.dtype == k_pool_sx.dtype == v_pool_sx.dtype, "q and the pools differ in dtype"
    assert q_thd.stride(2) == k_pool_sx.stride(1) == v_pool_sx.stride(1) == 1
