"""Logits to tokens on a GPU: grammar mask, temperature, filters, noise and the log-probability.

Owns   the scratch between its launches; no state.
Holds  a row's outcome is a function of that row alone. The noise has the words of
       `kernels/noise.py`, bit for bit, and a row is shaped by the steps of `kernels/draw.py`, so
       both draw the same token; only where two scores, or a mass and its bound, are closer than
       the rounding of a logarithm or a sum may they differ.
Used   by the runner on a GPU. References: `draw` of `kernels/draw.py` on (logit - peak) /
       temperature of what the mask allows, and `torch.log_softmax` of the raw logits.

Four launches, the second only where a row has a filter:
    peaks      per block of a row: largest raw logit and sum of exponentials, largest legal one
    threshold  per row: the last token in the order of `draw.py` that the filters keep
    scores     per block of a row: largest score among what they keep
    finish     per row: over its blocks; token and log-probability

No row is sorted. Tokens that filters keep are a prefix of the order, by falling value, then rising
id; so a value and an id name it. As no z is above 0, its bits without the sign are an integer that
rises as z falls, and the value is found by its digits: 16 sums over the row find four bits.

    R rows    V vocabulary    B blocks of a row    M mask rows    W words of a mask
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.draw import Terms
from structgen.kernels.gpu.config import config_for
from structgen.kernels.gpu.threshold import threshold
from structgen.kernels.gpu.tokens import legal_logits, noise_of, tempered
from structgen.kernels.noise import keys

_LOG2E = tl.constexpr(1.4426950408889634)
_INFINITY = tl.constexpr(float("inf"))


@dataclass(frozen=True, slots=True)
class RowTerms:
    """The terms of each row's draw, on the device.

    words_7r   i32 [7, R]: temperature, top-k, top-p and floor of z, both words of the noise key,
               and mask row; bits of a float32 where the value is no integer
    filtered   whether a row has a top-k, top-p or min-p
    masked     whether a row has a mask
    """

    words_7r: Tensor
    filtered: bool
    masked: bool


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_r i64 [R], -1 in a row that is broken; logprob_r f32 [R], NaN there.

    A row is broken where `pick` says so: it is not finite, or nothing in it is allowed.
    """

    token_r: Tensor
    logprob_r: Tensor


def row_terms(
    temperature_r: NDArray[np.float32],
    terms: Terms,
    mask_row_r: NDArray[np.int32],
    device: torch.device,
) -> RowTerms:
    """Pack the terms of a step and send them to the device, in one copy.

    temperature_r   f32 [R]; 0 is greedy
    mask_row_r      i32 [R]; row of the mask, -1 for none
    """
    # A top-k of one is greedy, and spares the noise.
    temperature_r = np.where(terms.top_k_n == 1, np.float32(0), temperature_r)
    words_7r = np.empty((7, len(temperature_r)), np.int32)
    words_7r[0] = temperature_r.astype(np.float32).view(np.int32)
    words_7r[1] = terms.top_k_n
    words_7r[2] = terms.top_p_n.astype(np.float32).view(np.int32)
    words_7r[3] = _floors(terms.min_p_n).view(np.int32)
    words_7r[4:6] = keys(terms.seed_n, terms.position_n).view(np.int32)
    words_7r[6] = mask_row_r
    filtered_r = (terms.top_k_n > 0) | (terms.top_p_n < 1) | (terms.min_p_n > 0)
    return RowTerms(
        torch.from_numpy(words_7r).to(device, non_blocking=True),
        filtered=bool((filtered_r & (temperature_r > 0)).any()),
        masked=bool((mask_row_r >= 0).any()),
    )


def _floors(min_p_r: NDArray[np.float32]) -> NDArray[np.float32]:
    """The least float32 z of a token that min-p keeps: rounded up from the exact logarithm."""
    with np.errstate(divide="ignore"):
        exact_r = np.log(min_p_r.astype(np.float64))
    near_r = exact_r.astype(np.float32)
    up_r = np.nextafter(near_r, np.float32(np.inf))
    return np.where(near_r < exact_r, up_r, near_r).astype(np.float32)


@triton.jit
def _peaks(
    logits_rv,
    mask_mw,
    words_7r,
    part_3rb,
    id_rb,
    stride_r,
    stride_m,
    R,
    V,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    B = tl.num_programs(1)
    mask_row = tl.load(words_7r + 6 * R + r)
    i = b * BLOCK + tl.arange(0, BLOCK)
    x, legal = legal_logits(
        logits_rv + r * stride_r, mask_mw + mask_row.to(tl.int64) * stride_m, mask_row, i, V, MASKED
    )
    top = tl.max(tl.where(tl.abs(x) <= _INFINITY, x, _INFINITY), 0)
    base = tl.where(tl.abs(top) == _INFINITY, 0.0, top)
    total = tl.sum(tl.exp2(tl.minimum(x - base, 0.0) * _LOG2E), 0)
    peak, at = tl.max(legal, 0, return_indices=True)
    tl.store(part_3rb + r * B + b, top)
    tl.store(part_3rb + (R + r) * B + b, total)
    tl.store(part_3rb + (2 * R + r) * B + b, peak)
    tl.store(id_rb + r * B + b, b * BLOCK + at)


@triton.jit
def _scores(
    logits_rv,
    mask_mw,
    words_7r,
    peak_rb,
    last_2r,
    score_rb,
    id_rb,
    stride_r,
    stride_m,
    R,
    V,
    B,
    MASKED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    temperature = tl.load(words_7r + r).to(tl.float32, bitcast=True)
    blocks = tl.arange(0, BLOCK_B)
    peak = tl.max(tl.load(peak_rb + r * B + blocks, mask=blocks < B, other=-_INFINITY), 0)
    # Greedy rows have their token already, broken ones have none.
    if (temperature > 0) & (tl.abs(peak) < _INFINITY):
        b = tl.program_id(1)
        mask_row = tl.load(words_7r + 6 * R + r)
        i = b * BLOCK + tl.arange(0, BLOCK)
        _, legal = legal_logits(
            logits_rv + r * stride_r,
            mask_mw + mask_row.to(tl.int64) * stride_m,
            mask_row,
            i,
            V,
            MASKED,
        )
        z = tempered(legal, peak, temperature)
        score = z + noise_of(i, tl.load(words_7r + 4 * R + r), tl.load(words_7r + 5 * R + r))
        if FILTERED:
            rank = z.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            last = tl.load(last_2r + r)
            last_id = tl.load(last_2r + R + r)
            kept = (rank < last) | ((rank == last) & (i <= last_id))
            score = tl.where(kept, score, -_INFINITY)
        best, at = tl.max(score, 0, return_indices=True)
        tl.store(score_rb + r * B + b, best)
        tl.store(id_rb + r * B + b, b * BLOCK + at)


@triton.jit
def _finish(
    logits_rv,
    words_7r,
    part_3rb,
    score_rb,
    id_2rb,
    token_r,
    logprob_r,
    stride_r,
    R,
    B,
    BLOCK_B: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK_B)
    inside = blocks < B
    tops = tl.load(part_3rb + r * B + blocks, mask=inside, other=-_INFINITY)
    totals = tl.load(part_3rb + (R + r) * B + blocks, mask=inside, other=0.0)
    peaks = tl.load(part_3rb + (2 * R + r) * B + blocks, mask=inside, other=-_INFINITY)
    top = tl.max(tops, 0)
    base = tl.where(tl.abs(top) == _INFINITY, 0.0, top)
    total = tl.sum(totals * tl.exp2(tl.minimum(tops - base, 0.0) * _LOG2E), 0)
    peak, b = tl.max(peaks, 0, return_indices=True)
    token = tl.load(id_2rb + r * B + b)
    broken = (tl.abs(top) == _INFINITY) | (tl.abs(peak) == _INFINITY)
    noisy = tl.load(words_7r + r).to(tl.float32, bitcast=True) > 0
    if noisy & (broken == 0):
        # Of equal scores the lowest id: blocks are in order, and the first maximum is taken.
        scores = tl.load(score_rb + r * B + blocks, mask=inside, other=-_INFINITY)
        _, b = tl.max(scores, 0, return_indices=True)
        token = tl.load(id_2rb + (R + r) * B + b)
    x = tl.load(logits_rv + r * stride_r + token).to(tl.float32)
    logprob = tl.where(broken, float("nan"), x - base - tl.log(tl.maximum(total, 1e-30)))
    tl.store(token_r + r, tl.where(broken, -1, token).to(tl.int64))
    tl.store(logprob_r + r, logprob)


def sample(logits_rv: Tensor, rows: RowTerms, mask_mw: Tensor | None, *, arch: str) -> Sampled:
    """Draw a token from each row, by the order of stages of `engine/sample.py` after its edits.

    logits_rv   float32, float16 or bfloat16 [R, V], rows contiguous; not modified
    mask_mw     i32 [M, ceil(V / 32)]: bit i of word w allows token 32 * w + i; needed where
                `rows.masked`
    """
    count, vocabulary = logits_rv.shape
    assert logits_rv.stride(1) == 1, "rows are not contiguous"
    assert not rows.masked or mask_mw is not None, "rows are bound to a mask, but there is none"
    if mask_mw is None or not rows.masked:
        mask_mw = rows.words_7r  # never read
    else:
        assert mask_mw.shape[1] == -(-vocabulary // 32), "the mask is not as wide as the logits"
        assert mask_mw.stride(1) == 1, "rows of the mask are not contiguous"
    token_r = torch.empty(count, dtype=torch.int64, device=logits_rv.device)
    logprob_r = torch.empty(count, dtype=torch.float32, device=logits_rv.device)
    if count == 0:
        return Sampled(token_r, logprob_r)
    config = config_for(arch, "sample", vocabulary)
    blocks = triton.cdiv(vocabulary, config.block_n)
    part_4rb = torch.empty(4, count, blocks, dtype=torch.float32, device=logits_rv.device)
    id_2rb = torch.empty(2, count, blocks, dtype=torch.int32, device=logits_rv.device)
    part_3rb, peak_rb, score_rb = part_4rb[:3], part_4rb[2], part_4rb[3]
    strides = (logits_rv.stride(0), mask_mw.stride(0))
    words_7r, width = rows.words_7r, triton.next_power_of_2(blocks)
    _peaks[count, blocks](
        *(logits_rv, mask_mw, words_7r, part_3rb, id_2rb[0], *strides, count, vocabulary),
        MASKED=rows.masked,
        BLOCK=config.block_n,
        **config.launch,
    )
    last_2r = words_7r  # never read
    if rows.filtered:
        last_2r = threshold(logits_rv, mask_mw, words_7r, peak_rb, rows.masked, arch=arch)
    # Without fusion every product and sum is rounded as on the CPU, and the noise is the same.
    _scores[count, blocks](
        *(logits_rv, mask_mw, words_7r, peak_rb, last_2r, score_rb, id_2rb[1]),
        *(*strides, count, vocabulary, blocks),
        MASKED=rows.masked,
        FILTERED=rows.filtered,
        BLOCK=config.block_n,
        BLOCK_B=width,
        enable_fp_fusion=False,
        **config.launch,
    )
    _finish[count,](
        *(logits_rv, words_7r, part_3rb, score_rb, id_2rb, token_r, logprob_r),
        *(logits_rv.stride(0), count, blocks),
        BLOCK_B=width,
        **config.launch,
    )
    return Sampled(token_r, logprob_r)
