"""One step's work as flat, frozen arrays: what crosses to the worker and what comes back.

Shape legend as in `kernels/attention.py`; R counts logit rows. A sequence may have several rows
(input logprobs, scoring, later speculation) or none (a prefill chunk that does not end its prompt).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from structgen.kernels.attention import Layout


class LogitEdit(msgspec.Struct, frozen=True):
    """Changes to the logits of one row before a token is drawn; all ids are int64 arrays.

    Applied in this order: repetition penalty, frequency and presence penalties, bias, ban.

    seen_ids, repetition            tokens of prompt and output; CTRL-style factor, 1.0 for none
    output_ids, output_counts       distinct tokens of the output and how often each occurred
    frequency, presence             subtracted per occurrence and once
    bias_ids, bias_values           added
    banned_ids                      set to -inf (end tokens before `min_tokens`)
    """

    row: int
    seen_ids: NDArray[np.int64]
    repetition: float
    output_ids: NDArray[np.int64]
    output_counts: NDArray[np.int64]
    frequency: float
    presence: float
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    banned_ids: NDArray[np.int64]


class SamplingRows(msgspec.Struct, frozen=True):
    """What to do with each logit row.

    target_r        i64; -1: draw a token; else: report the log-probability of this token
    temperature_r   f32; 0 is greedy
    top_k_r         i32; 0 for no limit
    top_p_r, min_p_r  f32; 1 and 0 for no limit
    seed_r          i64
    position_r      i64; index in its sequence of the token to draw: the noise counter
    logprobs_r      i32; -1: no log-probability wanted, k >= 0: wanted, with the k likeliest
    mask_row_r      i32; row of the grammar mask that binds this row, -1 for none
    edits           sparse changes to the logits, by ascending row
    """

    target_r: NDArray[np.int64]
    temperature_r: NDArray[np.float32]
    top_k_r: NDArray[np.int32]
    top_p_r: NDArray[np.float32]
    min_p_r: NDArray[np.float32]
    seed_r: NDArray[np.int64]
    position_r: NDArray[np.int64]
    logprobs_r: NDArray[np.int32]
    mask_row_r: NDArray[np.int32]
    edits: tuple[LogitEdit, ...] = ()


class Batch(msgspec.Struct, frozen=True):
    """One step, complete: the worker needs nothing else and sees no engine state.

    step            number of the step, counted from 1
    tokens_t        i64[T]; ids to embed
    layout          slots, positions and contexts for attention
    logit_rows_r    i64[R]; which of the T rows need logits
    rows            what to do with each of them
    """

    step: int
    tokens_t: NDArray[np.int64]
    layout: Layout
    logit_rows_r: NDArray[np.int64]
    rows: SamplingRows


class Picked(msgspec.Struct, frozen=True):
    """The outcome of a step, by logit row.

    tokens_r     i64[R]; the token drawn, or the row's target
    logprobs_r   f32[R]; log-probability of that token under the model's own distribution
                 (before edits, mask and temperature); NaN where not wanted
    top          by row: the likeliest (token, log-probability) pairs, best first, k of them
    broken_r     bool[R]; the row's logits were not finite, nothing in it may be used
    """

    tokens_r: NDArray[np.int64]
    logprobs_r: NDArray[np.float32]
    top: tuple[tuple[tuple[int, float], ...], ...]
    broken_r: NDArray[np.bool_]
