"""Attention of the new tokens of a prompt over all before them, in the pool already or from it.

Owns   nothing: the output is the caller's.
Holds  a block of keys begins at a multiple of its size, wherever the chunk of the prompt begins,
       so that a token's sums do not depend on how its prompt was cut.
Used   by `gpu/attention.py` for sequences with more new tokens than a decode. The tiles are those
       of `kernels/segment_plan.py`; reference: `ReferenceAttention.attend`.

The query heads of a group are rows of one tile, so that their keys and values are read once. Blocks
that every row of the tile sees whole need no mask: most of a long prompt (flash attention 2: Dao
2023).
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
def _extend(
    q, k, v, out, table, tiles, window, scale_log2, stride_qt, stride_qh, stride_k, stride_v,
    stride_out, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # One program per tile and key/value head.
    tile = tiles + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    first = tl.load(tile)
    count = tl.load(tile + 1)
    shift = tl.load(tile + 2)
    position = tl.load(tile + 3)
    begin = tl.load(tile + 4)

    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = token < count
    d = tl.arange(0, D)
    row = (first + token).to(tl.int64)
    high_m = position + token + 1
    low_m = high_m - window if WINDOWED else high_m * 0
    at_q = q + row[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
    q_md = tl.load(at_q, mask=live[:, None], other=0.0)

    acc_md, top_m, sum_m = nothing_seen(BLOCK_M, D)
    end = position + count
    # What every row of the tile sees whole, up to the first row's own token. In a window there is
    # little of it, and a loop of its own would take registers from all.
    whole_to = tl.maximum((position + 1) // BLOCK_N * BLOCK_N, begin)
    if WINDOWED:
        whole_to = begin
    else:
        acc_md, top_m, sum_m = attend_range(
            q_md, acc_md, top_m, sum_m, table + shift, k + kv_head * D, v + kv_head * D, begin,
            whole_to, low_m, high_m, stride_k, stride_v, scale_log2, D, BLOCK_N, False, PRECISION,
        )  # fmt: skip
    acc_md, top_m, sum_m = attend_range(
        q_md, acc_md, top_m, sum_m, table + shift, k + kv_head * D, v + kv_head * D, whole_to,
        end, low_m, high_m, stride_k, stride_v, scale_log2, D, BLOCK_N, True, PRECISION,
    )  # fmt: skip

    o_md = acc_md / tl.where(sum_m > 0.0, sum_m, 1.0)[:, None]
    at_out = out + row[:, None] * stride_out + head[:, None] * D + d[None, :]
    tl.store(at_out, o_md.to(out.dtype.element_ty), mask=live[:, None])


def extend_attention(
    q_thd: Tensor,
    k_pool_sx: Tensor,
    v_pool_sx: Tensor,
    out_tx: Tensor,
    table_c: Tensor,
    tiles_i5: Tensor,
    shape: HeadShape,
    window: int | None,
    config: Config,
) -> None:
    """Attend with every tile of a plan; reference: `ReferenceAttention.attend`.

    q_thd                 [T, H, D] float32, float16 or bfloat16; components contiguous
    k_pool_sx, v_pool_sx  [S, K * D] in the dtype of q
    out_tx                [T, H * D] in the dtype of q: the rows of the tiles
    table_c, tiles_i5     i32, as `SegmentPlan` has them for this window; tiles contiguous
    config                block_m holds the rows x H / K of every tile; block_n divides ALIGNED
    """
    check_pools(q_thd, k_pool_sx, v_pool_sx)
    assert tiles_i5.is_contiguous(), "tiles are read as rows of five"
    if len(tiles_i5) == 0:
        return
    _extend[len(tiles_i5), shape.kv_heads](
        q_thd,
        k_pool_sx,
        v_pool_sx,
        out_tx,
        table_c,
        tiles_i5,
        0 if window is None else window,
        shape.scale * LOG2_E,
        q_thd.stride(0),
        q_thd.stride(1),
        k_pool_sx.stride(0),
        v_pool_sx.stride(0),
        out_tx.stride(0),
        GROUP=shape.heads // shape.kv_heads,
        D=shape.head_dim,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        WINDOWED=window is not None,
        PRECISION=precision_of(q_thd.dtype),
        **config.launch,
    )
