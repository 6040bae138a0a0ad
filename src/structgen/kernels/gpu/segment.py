"""Attention of few query rows over ranges of slots, and the merge of what ranges gave.

Owns   nothing: outputs and partials are the caller's.
Holds  a program stores for its own rows and heads only, a padded item for none; partials merge in
       the order of the plan, without atomics.
Used   by `gpu/attention.py` for decodes, forced and drafted tokens and forks. The work lists are
       those of `kernels/segment_plan.py`; reference: `ReferenceAttention.attend`.

The split over ranges is Flash-Decoding's (Dao, Haziza, Massa and Sizov 2023), the merge of states
by their log-sum-exp in base 2 FlashInfer's (Ye et al. 2025), slots of single tokens lightllm's.

    P partials    I items    M merged rows    C slots of the table    other letters as ever
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from structgen.kernels.attention import HeadShape
from structgen.kernels.gpu.block import (
    LOG2_E,
    attend_range,
    check_pools,
    nothing_seen,
    precision_of,
)
from structgen.kernels.gpu.config import Config


@triton.jit
def _segment(
    q, k, v, out, part_out, part_lse, table, order, lows, highs, items, scale_log2, stride_qt,
    stride_qh, stride_k, stride_v, stride_out, H: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # One program per item and key/value head: the rows of the item x the query heads of the group.
    item = items + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    first = tl.load(item)
    count = tl.load(item + 1)
    shift = tl.load(item + 2)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    part = tl.load(item + 5)

    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = token < count
    d = tl.arange(0, D)
    row = tl.load(order + first + token, mask=live, other=0).to(tl.int64)
    low_m = tl.load(lows + first + token, mask=live, other=0)
    high_m = tl.load(highs + first + token, mask=live, other=0)
    at_q = q + row[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
    q_md = tl.load(at_q, mask=live[:, None], other=0.0)

    acc_md, top_m, sum_m = nothing_seen(BLOCK_M, D)
    acc_md, top_m, sum_m = attend_range(
        q_md, acc_md, top_m, sum_m, table + shift, k + kv_head * D, v + kv_head * D,
        begin, end, low_m, high_m, stride_k, stride_v, scale_log2, D, BLOCK_N, True, PRECISION,
    )  # fmt: skip

    # A live row may see nothing of its item; its partial is zero, and no merge reads it.
    safe_m = tl.where(sum_m > 0.0, sum_m, 1.0)
    o_md = acc_md / safe_m[:, None]
    if part < 0:
        at_out = out + row[:, None] * stride_out + head[:, None] * D + d[None, :]
        tl.store(at_out, o_md.to(out.dtype.element_ty), mask=live[:, None])
    else:
        at = (part + token).to(tl.int64) * H + head
        tl.store(part_out + at[:, None] * D + d[None, :], o_md, mask=live[:, None])
        tl.store(part_lse + at, top_m + tl.log2(safe_m), mask=live)


@triton.jit
def _merge(
    part_out, part_lse, merged, start, parts, out, stride_out, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    # One program per merged row and block of heads.
    m = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    begin = tl.load(start + m)
    end = tl.load(start + m + 1)
    # A padded row has no partials; nothing may be stored for it.
    inside = (head < H) & (begin < end)
    d = tl.arange(0, D)
    acc_hd = tl.zeros([BLOCK_H, D], dtype=tl.float32)
    top_h = tl.full([BLOCK_H], -float("inf"), dtype=tl.float32)
    sum_h = tl.zeros([BLOCK_H], dtype=tl.float32)
    for i in range(begin, end):
        at = tl.load(parts + i).to(tl.int64) * H + head
        lse_h = tl.load(part_lse + at, mask=inside, other=0.0)
        o_hd = tl.load(part_out + at[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        new_h = tl.maximum(top_h, lse_h)
        safe_h = tl.where(new_h == -float("inf"), 0.0, new_h)
        fade_h = tl.exp2(top_h - safe_h)
        weight_h = tl.exp2(lse_h - safe_h)
        acc_hd = acc_hd * fade_h[:, None] + o_hd * weight_h[:, None]
        sum_h = sum_h * fade_h + weight_h
        top_h = new_h
    row = tl.load(merged + m).to(tl.int64)
    at_out = out + row * stride_out + head[:, None] * D + d[None, :]
    o_hd = acc_hd / tl.where(sum_h > 0.0, sum_h, 1.0)[:, None]
    tl.store(at_out, o_hd.to(out.dtype.element_ty), mask=inside[:, None])


def segment_attention(
    q_thd: Tensor,
    k_pool_sx: Tensor,
    v_pool_sx: Tensor,
    out_tx: Tensor,
    part_out_phd: Tensor,
    part_lse_ph: Tensor,
    table_c: Tensor,
    order_n: Tensor,
    low_n: Tensor,
    high_n: Tensor,
    items_i6: Tensor,
    shape: HeadShape,
    config: Config,
) -> None:
    """Attend with the items of one bucket; reference: `ReferenceAttention.attend`.

    q_thd                     [T, H, D] float32, float16 or bfloat16; components contiguous
    k_pool_sx, v_pool_sx      [S, K * D] in the dtype of q
    out_tx                    [T, H * D] in the dtype of q: rows of items without partials
    part_out_phd, part_lse_ph float32 [P, H, D] and [P, H], contiguous: attention over the item,
                              and its log-sum-exp in base 2, -inf where a row saw nothing
    table_c, order_n, low_n, high_n, items_i6
                              i32, as `SegmentPlan` has them; items contiguous
    config                    block_m holds the rows x H / K of every item
    """
    check_pools(q_thd, k_pool_sx, v_pool_sx)
    assert items_i6.is_contiguous(), "items are read as rows of six"
    if len(items_i6) == 0:
        return
    _segment[len(items_i6), shape.kv_heads](
        q_thd,
        k_pool_sx,
        v_pool_sx,
        out_tx,
        part_out_phd,
        part_lse_ph,
        table_c,
        order_n,
        low_n,
        high_n,
        items_i6,
        shape.scale * LOG2_E,
        q_thd.stride(0),
        q_thd.stride(1),
        k_pool_sx.stride(0),
        v_pool_sx.stride(0),
        out_tx.stride(0),
        H=shape.heads,
        GROUP=shape.heads // shape.kv_heads,
        D=shape.head_dim,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PRECISION=precision_of(q_thd.dtype),
        **config.launch,
    )


def merge_partials(
    part_out_phd: Tensor,
    part_lse_ph: Tensor,
    merged_m: Tensor,
    part_start_m1: Tensor,
    parts_p: Tensor,
    out_tx: Tensor,
    config: Config,
) -> None:
    """out[merged[m]] = attention over the union of what its partials saw.

    Reference: softmax over log-sum-exps, `sum_p exp2(lse_p - lse) * part_out_p`.

    part_out_phd, part_lse_ph       as `segment_attention` wrote them
    merged_m, part_start_m1, parts_p  i32, as `SegmentPlan` has them
    out_tx                          [T, H * D], any float dtype
    config                          block_m heads a program
    """
    _, heads, dim = part_out_phd.shape
    if len(merged_m) == 0:
        return
    _merge[len(merged_m), triton.cdiv(heads, config.block_m)](
        part_out_phd,
        part_lse_ph,
        merged_m,
        part_start_m1,
        parts_p,
        out_tx,
        out_tx.stride(0),
        H=heads,
        D=dim,
        BLOCK_H=config.block_m,
        **config.launch,
    )
