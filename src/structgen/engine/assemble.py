"""Slices of sequences to one flat batch.

Holds  rows of a slice stand together: first those that score prompt tokens, by position, then
       the one that draws a token (if the slice reaches the last known token).
Used   by `core`, once a step; this is the only Python that runs for every row, so it stays lean.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from structgen.engine.batch import Batch, LogitEdit, SamplingRows
from structgen.engine.radix import NO_IDS
from structgen.engine.schedule import Slice
from structgen.engine.sequence import Sequence
from structgen.kernels.attention import PADDING_SLOT, Layout

NO_VALUES = np.empty(0, np.float32)


def scored_positions(piece: Slice) -> range:
    """Prompt positions whose log-probability the logits of this slice give.

    The logits of row t score the token at t + 1.
    """
    sequence = piece.sequence
    first = max(sequence.logprob_next, piece.start + 1)
    return range(first, min(piece.start + piece.count + 1, sequence.prompt_length))


def assemble(step: int, slices: list[Slice], bucket: int = 1) -> Batch:
    """Build the batch of one step; T is padded to a multiple of `bucket`."""
    counts = np.fromiter((piece.count for piece in slices), np.int64, len(slices))
    starts = np.zeros(len(slices) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    width = -(-int(starts[-1]) // bucket) * bucket
    tokens = np.zeros(width, np.int64)
    positions = np.zeros(width, np.int64)
    slots = np.full(width, PADDING_SLOT, np.int64)
    context: list[NDArray[np.int64]] = []
    for piece, at in zip(slices, starts[:-1].tolist(), strict=True):
        sequence, start, stop = piece.sequence, piece.start, piece.start + piece.count
        end = at + piece.count
        tokens[at:end] = sequence.ids[start:stop]
        positions[at:end] = np.arange(start, stop)
        slots[at + piece.fresh - start : end] = sequence.slots[piece.fresh : stop]
        # Copied: the sequence may change its slots (retraction, adoption) before the step ends.
        context.append(sequence.slots[:stop].copy())
    rows, sampling = _rows(slices, starts)
    layout = Layout(starts, tuple(context), slots, positions)
    return Batch(step, tokens, layout, rows, sampling)


def _rows(slices: list[Slice], starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], SamplingRows]:
    rows: list[int] = []
    targets: list[int] = []
    numbers: list[tuple[float, int, float, float, int, int, int]] = []
    edits: list[LogitEdit] = []
    for piece, at in zip(slices, starts[:-1].tolist(), strict=True):
        sequence, stop = piece.sequence, piece.start + piece.count
        want = sequence.request.want
        for position in scored_positions(piece):
            rows.append(at + position - 1 - piece.start)
            targets.append(int(sequence.ids[position]))
            numbers.append((0.0, 0, 1.0, 0.0, 0, position, want.top_logprobs))
        if sequence.samples and stop == sequence.known:
            if edit := _edit(sequence, len(rows)):
                edits.append(edit)
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
        mask_row_r=np.full(len(rows), -1, np.int32),
        edits=tuple(edits),
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
        want.top_logprobs if want.logprobs or want.top_logprobs else -1,
    )


def _edit(sequence: Sequence, row: int) -> LogitEdit | None:
    """What changes the logits of the row that draws this sequence's next token."""
    sampling = sequence.sampling
    repetition = sampling.repetition_penalty or 1.0
    counting = sampling.frequency_penalty or sampling.presence_penalty
    banned = sequence.stop_ids if sequence.output_length < sampling.min_tokens else ()
    if repetition == 1.0 and not counting and not sampling.logit_bias and not banned:
        return None
    counts = sequence.counts if counting else {}
    return LogitEdit(
        row=row,
        seen_ids=np.unique(sequence.ids[: sequence.known]) if repetition != 1.0 else NO_IDS,
        repetition=repetition,
        output_ids=np.fromiter(counts, np.int64, len(counts)),
        output_counts=np.fromiter(counts.values(), np.int64, len(counts)),
        frequency=sampling.frequency_penalty,
        presence=sampling.presence_penalty,
        bias_ids=np.array([token for token, _ in sampling.logit_bias], np.int64),
        bias_values=np.array([bias for _, bias in sampling.logit_bias], np.float32),
        banned_ids=np.fromiter(banned, np.int64, len(banned)),
    )
