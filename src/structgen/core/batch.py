"""One step's work as flat, frozen arrays: what crosses to the worker and what comes back.

Holds  the logit rows of a slice stand together: first those that score tokens, by position, then
       the one that draws a token (if the slice reaches the last known token of who samples).
Used   by `core`, which assembles a batch a step; by `runner` and `sample` on the worker.

Shape legend as in `kernels/attention.py`; R counts logit rows. A sequence may have several rows
(input logprobs, scoring, later speculation) or none (a prefill chunk that does not end its prompt).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from structgen.core.radix import NO_IDS
from structgen.core.schedule import Slice
from structgen.core.sequence import Sequence
from structgen.kernels.attention import PADDING_SLOT, Layout


class LogitEdit(msgspec.Struct, frozen=True):
    """Changes to the logits of one row before a token is drawn; all ids are int64 arrays.

    Applied in this order: repetition penalty, frequency and presence penalties, bias, ban.

    seen_ids, repetition            tokens of prompt and output, each as often as it occurs or once;
                                    CTRL-style factor, 1.0 for none
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
    further         by row with a target, i64: more tokens whose log-probability is to be reported
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
    further: dict[int, NDArray[np.int64]] = {}


class Batch(msgspec.Struct, frozen=True):
    """One step, complete: the worker needs nothing else and sees no engine state.

    step            number of the step, counted from 1
    tokens_t        i64[T]; ids to embed
    layout          slots, positions and contexts for attention
    logit_rows_r    i64[R]; which of the T rows need logits
    rows            what to do with each of them
    masks           how many rows of a grammar mask they are bound to
    """

    step: int
    tokens_t: NDArray[np.int64]
    layout: Layout
    logit_rows_r: NDArray[np.int64]
    rows: SamplingRows
    masks: int = 0


class Picked(msgspec.Struct, frozen=True):
    """The outcome of a step, by logit row.

    tokens_r     i64[R]; the token drawn, or the row's target
    logprobs_r   f32[R]; log-probability of that token under the model's own distribution
                 (before edits, mask and temperature); NaN where not wanted
    top          by row: the likeliest (token, log-probability) pairs, best first, k of them
    broken_r     bool[R]; the row's logits were not finite, nothing in it may be used
    further      by row, where it has further targets and is not broken: their log-probabilities
    """

    tokens_r: NDArray[np.int64]
    logprobs_r: NDArray[np.float32]
    top: tuple[tuple[tuple[int, float], ...], ...]
    broken_r: NDArray[np.bool_]
    further: dict[int, tuple[float, ...]] = {}


def scored_positions(piece: Slice) -> range:
    """Positions whose log-probabilities the logits of this slice give.

    The logits of row t score the tokens at t + 1.
    """
    sequence = piece.sequence
    first = max(sequence.logprob_next, piece.start + 1)
    return range(first, min(piece.start + piece.count + 1, sequence.logprob_stop))


def assemble(step: int, slices: list[Slice], padded_rows: Callable[[int], int]) -> Batch:
    """Build the batch of one step; its T is `padded_rows` of the tokens to compute."""
    counts = np.fromiter((piece.count for piece in slices), np.int64, len(slices))
    starts = np.zeros(len(slices) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    width = padded_rows(int(starts[-1]))
    tokens = np.zeros(width, np.int64)
    positions = np.zeros(width, np.int64)
    slots = np.full(width, PADDING_SLOT, np.int64)
    context: list[NDArray[np.int64]] = []
    origins: list[object] = []
    for piece, at in zip(slices, starts[:-1].tolist(), strict=True):
        sequence, start, stop = piece.sequence, piece.start, piece.start + piece.count
        end = at + piece.count
        tokens[at:end] = sequence.ids[start:stop]
        positions[at:end] = np.arange(start, stop)
        slots[at + piece.fresh - start : end] = sequence.slots[piece.fresh : stop]
        # No copy: an array of slots is only ever written to behind what steps have seen of it.
        context.append(sequence.slots[:stop])
        origins.append(sequence.slots)
    rows, sampling = _rows(slices, starts)
    layout = Layout(starts, tuple(context), slots, positions, tuple(origins))
    masks = int(sampling.mask_row_r.max(initial=-1)) + 1
    return Batch(step, tokens, layout, rows, sampling, masks)


def _rows(slices: list[Slice], starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], SamplingRows]:
    rows: list[int] = []
    targets: list[int] = []
    numbers: list[tuple[float, int, float, float, int, int, int]] = []
    edits: list[LogitEdit] = []
    further: dict[int, NDArray[np.int64]] = {}
    masks: dict[int, int] = {}
    for piece, at in zip(slices, starts[:-1].tolist(), strict=True):
        sequence, stop = piece.sequence, piece.start + piece.count
        want = sequence.request.want
        for position in scored_positions(piece):
            wanted = sequence.wanted_at(position)
            if len(wanted) > 1:
                further[len(rows)] = wanted[1:]
            rows.append(at + position - 1 - piece.start)
            targets.append(int(wanted[0]))
            numbers.append((0.0, 0, 1.0, 0.0, 0, position, want.top_logprobs))
        if sequence.draws and stop == sequence.known:
            if edit := _edit(sequence, len(rows)):
                edits.append(edit)
            if sequence.matcher is not None:
                masks[len(rows)] = len(masks)
            rows.append(at + piece.count - 1)
            targets.append(-1)
            numbers.append(_numbers(sequence))
    columns = list(zip(*numbers, strict=True)) or [()] * 7
    return np.array(rows, np.int64), SamplingRows(
        target_r=np.array(targets, np.int64),
        temperature_r=np.array(columns[0], np.float32),
        top_k_r=np.array(columns[1], np.int32),
        top_p_r=np.array(columns[2], np.float32),
        min_p_r=np.array(columns[3], np.float32),
        seed_r=np.array(columns[4], np.int64),
        position_r=np.array(columns[5], np.int64),
        logprobs_r=np.array(columns[6], np.int32),
        mask_row_r=np.array([masks.get(row, -1) for row in range(len(rows))], np.int32),
        edits=tuple(edits),
        further=further,
    )


def _numbers(sequence: Sequence) -> tuple[float, int, float, float, int, int, int]:
    sampling, want = sequence.sampling, sequence.request.want
    return (
        sampling.temperature or 0.0,
        sampling.top_k or 0,
        1.0 if sampling.top_p is None else sampling.top_p,
        sampling.min_p or 0.0,
        sequence.job.seed,
        sequence.known,
        want.top_logprobs if sequence.wants_logprobs else -1,
    )


def _edit(sequence: Sequence, row: int) -> LogitEdit | None:
    """What changes the logits of the row that draws this sequence's next token."""
    sampling = sequence.sampling
    repetition = sampling.repetition_penalty or 1.0
    counting = sampling.frequency_penalty or sampling.presence_penalty
    # Where there is a mask, it says where the output may end.
    free = sequence.matcher is None and not sequence.enough
    banned = sequence.stop_ids if free else ()
    if repetition == 1.0 and not counting and not sampling.logit_bias and not banned:
        return None
    counts = sequence.counts if counting else {}
    return LogitEdit(
        row=row,
        # Copied, since the sequence goes on; a token that occurs twice is there twice.
        seen_ids=sequence.ids[: sequence.known].copy() if repetition != 1.0 else NO_IDS,
        repetition=repetition,
        output_ids=np.fromiter(counts, np.int64, len(counts)),
        output_counts=np.fromiter(counts.values(), np.int64, len(counts)),
        frequency=sampling.frequency_penalty,
        presence=sampling.presence_penalty,
        bias_ids=np.array([token for token, _ in sampling.logit_bias], np.int64),
        bias_values=np.array([bias for _, bias in sampling.logit_bias], np.float32),
        banned_ids=np.fromiter(banned, np.int64, len(banned)),
    )
