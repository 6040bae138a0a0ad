"""Top-k, top-p and min-p of a row without sorting it: the last token that they keep.

Owns   the search. The order of the filters and their ties are those of `kernels/draw.py`.
Holds  masses are summed in float32 in one fixed order, and compared with their bound in float64.
Used   by `sample.py`.

The rank of a token is the bits of its z without the sign: an integer that rises as z falls, from 0
for the likeliest. Tokens that a filter keeps have ranks up to some last one; of those with the
last rank itself it keeps the `room` lowest ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structgen.kernels.gpu.config import config_for
from structgen.kernels.gpu.tokens import legal_logits, tempered

_LOG2E = tl.constexpr(1.4426950408889634)
# The rank of the least finite value. A token at -inf comes after it and is never kept.
_LAST = tl.constexpr(0x7F7FFFFF)
_FAN = tl.constexpr(16)


@triton.jit
def _ranks(row_v, mask_w, mask_row, i, V, peak, temperature, MASKED: tl.constexpr):
    _, legal = legal_logits(row_v, mask_w, mask_row, i, V, MASKED)
    return tempered(legal, peak, temperature).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weight(rank):
    """The exponential of the z of this rank; 0 long before the product could overflow."""
    return tl.exp2(-tl.minimum(rank.to(tl.float32, bitcast=True), 1e4) * _LOG2E)


@triton.jit
def _search(
    row_v,
    mask_w,
    mask_row,
    V,
    peak,
    temperature,
    target,
    WEIGHTED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first rank up to which there are `target` tokens, or as much mass; how much comes before.

    target   float64, as is what comes before
    """
    step = tl.arange(0, _FAN)
    low = 0
    before = target * 0.0
    # 31 bits, four at a time; the last turn has three left and looks at more ranks than it needs.
    for turn in range(8):
        shift = tl.maximum(27 - 4 * turn, 0)
        edge = low + (step << shift) + ((1 << shift) - 1)
        sums = tl.zeros([BLOCK, _FAN], tl.float32)
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            rank = _ranks(row_v, mask_w, mask_row, i, V, peak, temperature, MASKED)
            # A count is exact in float32 up to 2**24, which is more tokens than there are.
            worth = tl.where(i < V, 1.0, 0.0)
            if WEIGHTED:
                worth = _weight(rank)
            sums += tl.where(rank[:, None] <= edge[None, :], worth[:, None], 0.0)
        reached = tl.sum(sums, 0).to(tl.float64)
        steps = tl.minimum(tl.sum((reached < target).to(tl.int32), 0), _FAN - 1)
        # Rising with the edges, since more terms are added in the same order.
        before = tl.maximum(before, tl.max(tl.where(step < steps, reached, 0.0), 0))
        low += steps << shift
    return low, before


@triton.jit
def _mass_before(
    row_v,
    mask_w,
    mask_row,
    V,
    peak,
    temperature,
    last,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        rank = _ranks(row_v, mask_w, mask_row, i, V, peak, temperature, MASKED)
        sums += tl.where(rank < last, _weight(rank), 0.0)
    return tl.sum(sums, 0).to(tl.float64)


@triton.jit
def _last_id(
    row_v,
    mask_w,
    mask_row,
    V,
    peak,
    temperature,
    last,
    room,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The id of the `room`-th token of this rank; V if there are not so many."""
    found = V
    seen = 0
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        rank = _ranks(row_v, mask_w, mask_row, i, V, peak, temperature, MASKED)
        equal = (rank == last).to(tl.int32)
        place = seen + tl.cumsum(equal, 0)
        found = tl.minimum(found, tl.min(tl.where((equal > 0) & (place == room), i, V), 0))
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def _top_k(
    row_v,
    mask_w,
    mask_row,
    V,
    peak,
    temperature,
    top_k,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last rank of the k largest, and how many tokens of that rank are among them."""
    rank, before = _search(
        row_v,
        mask_w,
        mask_row,
        V,
        peak,
        temperature,
        top_k.to(tl.float64),
        False,
        MASKED,
        BLOCK,
    )
    # With fewer possible tokens than k all of them stay.
    room = tl.where(rank > _LAST, V, top_k - before.to(tl.int32))
    return tl.minimum(rank, _LAST), room


@triton.jit
def _top_p(
    row_v,
    mask_w,
    mask_row,
    V,
    peak,
    temperature,
    top_p,
    last,
    room,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same of the shortest prefix that holds p of the mass of a prefix, and no longer one."""
    mass = _mass_before(row_v, mask_w, mask_row, V, peak, temperature, last, MASKED, BLOCK)
    # Without a top-k this adds nothing: the last rank of all has no weight.
    mass += room.to(tl.float64) * _weight(last).to(tl.float64)
    bound = top_p.to(tl.float64) * mass
    rank, before = _search(
        row_v, mask_w, mask_row, V, peak, temperature, bound, True, MASKED, BLOCK
    )
    # A token stays while the mass before it is less than the bound; the likeliest always.
    weight = tl.maximum(_weight(rank).to(tl.float64), 1e-300)
    fitting = tl.maximum(tl.minimum(tl.ceil((bound - before) / weight), V), 1.0).to(tl.int32)
    fitting = tl.where(rank == last, tl.minimum(room, fitting), fitting)
    return tl.minimum(rank, last), tl.where(rank > last, room, fitting)


@triton.jit
def _threshold(
    logits_rv,
    mask_mw,
    words_7r,
    peak_rb,
    last_2r,
    stride_r,
    stride_m,
    R,
    V,
    B,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK_B)
    peak = tl.max(tl.load(peak_rb + r * B + blocks, mask=blocks < B, other=-float("inf")), 0)
    temperature = tl.load(words_7r + r).to(tl.float32, bitcast=True)
    top_k = tl.load(words_7r + R + r)
    top_p = tl.load(words_7r + 2 * R + r).to(tl.float32, bitcast=True)
    floor = tl.load(words_7r + 3 * R + r) & 0x7FFFFFFF
    mask_row = tl.load(words_7r + 6 * R + r)
    row_v = logits_rv + r * stride_r
    mask_w = mask_mw + mask_row.to(tl.int64) * stride_m
    last = _LAST + 0 * top_k
    room = V + 0 * top_k
    if (temperature > 0) & (tl.abs(peak) < float("inf")):
        if (top_k > 0) & (top_k < V):
            last, room = _top_k(row_v, mask_w, mask_row, V, peak, temperature, top_k, MASKED, BLOCK)
        if top_p < 1:
            last, room = _top_p(
                row_v, mask_w, mask_row, V, peak, temperature, top_p, last, room, MASKED, BLOCK
            )
        if floor < last:
            last = floor
            room = V
    last_id = V
    if room < V:
        last_id = _last_id(row_v, mask_w, mask_row, V, peak, temperature, last, room, MASKED, BLOCK)
    tl.store(last_2r + r, last)
    tl.store(last_2r + R + r, last_id)


def threshold(
    logits_rv: Tensor,
    mask_mw: Tensor,
    words_7r: Tensor,
    peak_rb: Tensor,
    masked: bool,
    *,
    arch: str,
) -> Tensor:
    """i32 [2, R]: the last rank that the filters of each row keep, and the last id of that rank.

    peak_rb   float32 [R, B]: the largest legal logit of each block of a row; otherwise as of
              `sample`
    """
    count, vocabulary = logits_rv.shape
    config = config_for(arch, "threshold", vocabulary)
    last_2r = torch.empty(2, count, dtype=torch.int32, device=logits_rv.device)
    _threshold[count,](
        *(logits_rv, mask_mw, words_7r, peak_rb, last_2r),
        *(logits_rv.stride(0), mask_mw.stride(0), count, vocabulary, peak_rb.shape[1]),
        MASKED=masked,
        BLOCK=config.block_n,
        BLOCK_B=triton.next_power_of_2(peak_rb.shape[1]),
        # Ranks must be those that `sample.py` compares them with.
        enable_fp_fusion=False,
        **config.launch,
    )
    return last_2r
