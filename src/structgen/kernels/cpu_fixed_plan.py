"""Which call answers which row where a row's bits are to be its own: host half of `cpu_fixed.py`.

Owns   the choice of call for every query row of a step, made once a step in numpy:

       Lone    one query each of several sequences, or few of one
       Chunk   consecutive queries of one sequence

Holds  every query row belongs to exactly one part; where a row's keys begin, and how many columns
       they are padded to, its position and the window say alone, but for whole blocks of BLOCK
       columns that are hidden from it, which change no bit;
       columns beyond a sequence's own tokens repeat one of them, since 0 * NaN is NaN.
Used   by `cpu_fixed.FixedCpuAttention.plan` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.attention import Layout

# Keys per step of torch's flash attention: a row's sums are of so many, in order.
BLOCK = 512
# Rows with fewer keys are padded to multiples of this, all at once.
COLUMNS = 128
# Query rows per step of torch's flash attention, in calls of fewer than 192.
QUERIES = 32
CHUNK_QUERIES = 128
# Fewer consecutive rows than these are cheaper one by one than as QUERIES.
FEWEST_QUERIES = 8
# As in `cpu_plan`: what a group may gather more than its rows need.
PADDING_SHARE = 0.25
CALL_SLOTS = 1024

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lone:
    """One query each, of `width` columns: `index_g` i64[N * C], additive `mask_n11c` f32."""

    rows_n: Tensor
    index_g: Tensor
    width: int
    mask_n11c: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Query rows [first, first + count) over the same columns, `index_c` i64[C].

    mask_qc   additive f32[Q, C]; Q is `count` rounded up to whole blocks of QUERIES
    """

    first: int
    count: int
    index_c: Tensor
    mask_qc: Tensor


Part = Lone | Chunk


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows [first, first + count) of one sequence, at `position` and after, with equal columns.

    They are the `width` columns from `start` on, of which a row sees those from its low one on.
    """

    first: int
    count: int
    position: int
    start: int
    width: int
    context: Ints


def fixed_parts(
    layout: Layout, window: int | None, *, gather_rows: int, chunks: bool, pairs: bool
) -> tuple[Part, ...]:
    """The calls that answer all query rows of `layout` under this sliding window.

    gather_rows   pool rows that one part may copy
    chunks        whether Chunk gives the bits of Lone here
    pairs         answer a lone query twice, so that there are two of them
    """
    parts: list[Part] = []
    lone: list[_Run] = []
    for run in _runs(layout, window):
        if chunks and run.count >= FEWEST_QUERIES:
            parts += [_chunk(piece, window) for piece in _pieces(run, CHUNK_QUERIES)]
        else:
            lone += _pieces(run, 1)
    for group in _groups(lone, gather_rows):
        parts.append(_lone(group * 2 if pairs and len(group) == 1 else group, window))
    return tuple(parts)


def padded_width(tokens: Ints) -> Ints:
    """Columns for rows that need so many: whole blocks, or less than one."""
    step = np.where(tokens <= BLOCK, COLUMNS, BLOCK)
    width: Ints = -(-tokens // step) * step
    return width


def _runs(layout: Layout, window: int | None) -> Iterator[_Run]:
    starts = layout.query_start_b1.tolist()
    for first, last, context in zip(starts, starts[1:], layout.context_b, strict=False):
        if first == last:
            continue
        before = len(context) - (last - first)
        position_q = np.arange(before, len(context))
        start_q = np.zeros_like(position_q)
        if window is not None:
            start_q = np.maximum(position_q - window + 1, 0) // COLUMNS * COLUMNS
        width_q = padded_width(position_q + 1 - start_q)
        changes = np.flatnonzero((np.diff(start_q) != 0) | (np.diff(width_q) != 0)) + 1
        for low, high in pairwise([0, *changes.tolist(), last - first]):
            start, width = int(start_q[low]), int(width_q[low])
            yield _Run(first + low, high - low, before + low, start, width, context)


def _pieces(run: _Run, most: int) -> list[_Run]:
    return [
        _Run(
            run.first + at,
            min(most, run.count - at),
            run.position + at,
            run.start,
            run.width,
            run.context,
        )
        for at in range(0, run.count, most)
    ]


def _groups(lone: Sequence[_Run], gather_rows: int) -> list[list[_Run]]:
    """Rows of equal width, below a block, or of similar width, of whole blocks."""
    groups: list[list[_Run]] = []
    needed = 0
    for run in sorted(lone, key=lambda r: -r.width):
        if groups:
            width = groups[-1][0].width
            padded = (len(groups[-1]) + 1) * width
            allowed = (needed + run.width) * (1 + PADDING_SHARE) + CALL_SLOTS
            alike = run.width == width or (run.width >= BLOCK and padded <= allowed)
            if alike and padded <= gather_rows:
                groups[-1].append(run)
                needed += run.width
                continue
        groups.append([run])
        needed = run.width
    return groups


def _lone(group: Sequence[_Run], window: int | None) -> Lone:
    width = group[0].width
    index_nc = np.stack([_columns(run, width) for run in group])
    mask_nc = torch.cat([_mask(run, window, 1, width) for run in group])
    rows_n = torch.tensor([run.first for run in group], dtype=torch.int64)
    return Lone(rows_n, torch.from_numpy(index_nc.reshape(-1)), width, mask_nc[:, None, None, :])


def _chunk(run: _Run, window: int | None) -> Chunk:
    queries = -(-run.count // QUERIES) * QUERIES
    index_c = torch.from_numpy(_columns(run, run.width))
    return Chunk(run.first, run.count, index_c, _mask(run, window, queries, run.width))


def _columns(run: _Run, width: int) -> Ints:
    """The slots of a run's columns."""
    seen = run.context[run.start : run.position + run.count]
    index_c = np.full(width, seen[0], dtype=np.int64)
    index_c[: len(seen)] = seen
    return index_c


def _mask(run: _Run, window: int | None, queries: int, width: int) -> Tensor:
    """0 where a row sees a column, -inf elsewhere; rows beyond the run's own are its last."""
    position_q1 = run.position + np.minimum(np.arange(queries), run.count - 1)[:, None]
    column_1c = run.start + np.arange(width)[None, :]
    hidden_qc = column_1c > position_q1
    if window is not None:
        hidden_qc |= column_1c <= position_q1 - window
    return torch.zeros(queries, width).masked_fill_(torch.from_numpy(hidden_qc), -torch.inf)
