"""Who attends to what on a CPU, in which torch call: the host half of `cpu.py`.

Owns   the choice of call for every query row of a step, made once a step in numpy:

       Single   one sequence: a lone decode row, a prompt, a chunk of a prompt
       Padded   decode rows of similar length, gathered side by side
       Shared   decode rows that begin with the same slots: the common run is read once for all
                of them and joined with each row's own tail (Hydragen, Juravsky et al. 2024)

Holds  every query row belongs to exactly one part; indexes beyond a row's own context repeat one
       of its own slots, since an unused slot may hold anything and 0 * NaN is NaN.
Used   by `cpu.CpuAttention.plan` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.attention import Layout

# Shared tokens from which a second product and the merge may cost less than reading them per row,
# and values of keys, of all rows but one, from which they do: 768 tokens of three heads of 64.
SHARED_TOKENS = 128
SAVED_VALUES = 144 << 10
# Chunks with fewer queries carry a mask; longer ones split at the chunk's start, which needs none.
MASKED_QUERIES = 32
# Queries per mask where a sliding window needs one: bounds the mask at window + 255 columns.
WINDOW_QUERIES = 256
# A padded group may gather this many slots more than its rows need: a quarter, and as many as
# another call costs.
PADDING_SHARE = 0.25
CALL_SLOTS = 1024

# A decode over at least so many slots in a row is cheaper as a call of its own, in place, than as a
# copy beside others.
IN_PLACE_SLOTS = 384

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Slots in order: `index` None means the `length` slots from `start` on, read in place."""

    start: int
    length: int
    index: Tensor | None

    @classmethod
    def of(cls, slots: Slots) -> Run:
        """The run of these slots; one in ascending steps of one needs no copy."""
        start, length = int(slots[0]), len(slots)
        if int(slots[-1]) - start == length - 1 and bool((np.diff(slots) == 1).all()):
            return cls(start, length, None)
        return cls(start, length, torch.tensor(slots))


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows of a step: `index` None means the `count` rows from `first` on."""

    first: int
    count: int
    index: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[int]) -> Rows:
        """Rows in ascending order."""
        first, count = rows[0], len(rows)
        if rows[-1] - first == count - 1:
            return cls(first, count, None)
        return cls(first, count, torch.tensor(rows, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Single:
    """Queries of one sequence over `prefix` (all of it visible), then `own`.

    prefix    None, or the run before the queries' own tokens
    own       the rest; causal among its last `rows.count` tokens unless `mask_qc` says which
    mask_qc   None, or additive [Q, C] over `own` alone, prefix included in it
    """

    rows: Rows
    prefix: Run | None
    own: Run
    mask_qc: Tensor | None


@dataclass(frozen=True, slots=True)
class Padded:
    """One query each of `rows.count` sequences, gathered to the longest context of C slots.

    index_g     i64[N * C]
    mask_n11c   additive [N, 1, 1, C], None where all contexts have C slots
    """

    rows: Rows
    index_g: Tensor
    width: int
    mask_n11c: Tensor | None


@dataclass(frozen=True, slots=True)
class Shared:
    """One query each of several sequences that all begin with `prefix`; `tails` is the rest."""

    prefix: Run
    tails: Padded


Part = Single | Padded | Shared


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries of one sequence: rows [first, last) over `context`, cut to what they can see."""

    first: int
    last: int
    context: Slots
    windowed: bool


def parts_of(
    layout: Layout, window: int | None, *, gather_rows: int, row_values: int, dtype: torch.dtype
) -> tuple[Part, ...]:
    """The calls that answer all query rows of `layout` under this sliding window.

    gather_rows   pool rows that one part may copy
    row_values    of keys in a pool row
    dtype         of the queries, and so of masks
    """
    decodes: list[_Piece] = []
    parts: list[Part] = []
    for piece in _pieces(layout, window):
        if piece.last - piece.first == 1:
            decodes.append(piece)
        else:
            parts.append(_single(piece, window, dtype))
    alone: list[_Piece] = []
    for shared, members in _shared_groups(decodes, row_values) if decodes else ():
        if not shared:
            alone += members
            continue
        prefix = Run.of(members[0].context[:shared])
        tails = [_Piece(p.first, p.last, p.context[shared:], windowed=False) for p in members]
        parts += [Shared(prefix, _padded(group, dtype)) for group in _similar(tails, gather_rows)]
    copied: list[_Piece] = []
    for piece in alone:
        if len(piece.context) >= IN_PLACE_SLOTS and Run.of(piece.context).index is None:
            parts.append(_single(piece, window, dtype))
        else:
            copied.append(piece)
    for group in _similar(copied, gather_rows):
        parts.append(_single(group[0], window, dtype) if len(group) == 1 else _padded(group, dtype))
    return tuple(parts)


def _pieces(layout: Layout, window: int | None) -> list[_Piece]:
    starts = layout.query_start_b1.tolist()
    pieces = []
    for first, last, context in zip(starts, starts[1:], layout.context_b, strict=False):
        if first == last:
            continue
        if window is None or len(context) <= window:
            pieces.append(_Piece(first, last, context, windowed=False))
            continue
        before = len(context) - (last - first)
        for low in range(first, last, WINDOW_QUERIES):
            high = min(low + WINDOW_QUERIES, last)
            end = before + high - first
            begin = max(0, end - (high - low) - window + 1)
            pieces.append(_Piece(low, high, context[begin:end], windowed=True))
    return pieces


def _single(piece: _Piece, window: int | None, dtype: torch.dtype) -> Single:
    queries, length = piece.last - piece.first, len(piece.context)
    rows = Rows(piece.first, queries, None)
    before = length - queries
    few = before > 0 and queries <= MASKED_QUERIES
    if queries > 1 and (piece.windowed or few):
        mask_qc = _band(queries, length, window if piece.windowed else None, dtype)
        return Single(rows, None, Run.of(piece.context), mask_qc)
    if queries == 1 or before == 0:
        return Single(rows, None, Run.of(piece.context), None)
    return Single(rows, Run.of(piece.context[:before]), Run.of(piece.context[before:]), None)


def _band(queries: int, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where query i, standing at token length - queries + i, sees a token; -inf elsewhere."""
    at_q1 = np.arange(length - queries, length)[:, None]
    token_1c = np.arange(length)[None, :]
    hidden = token_1c > at_q1
    if window is not None:
        hidden |= token_1c <= at_q1 - window
    mask_qc = torch.zeros(queries, length, dtype=dtype)
    return mask_qc.masked_fill_(torch.from_numpy(hidden), float("-inf"))


def _padded(pieces: Sequence[_Piece], dtype: torch.dtype) -> Padded:
    width = max(len(piece.context) for piece in pieces)
    index_nc = np.empty((len(pieces), width), dtype=np.int64)
    lengths_n = np.empty(len(pieces), dtype=np.int64)
    for row, piece in enumerate(pieces):
        length = len(piece.context)
        index_nc[row, :length] = piece.context
        index_nc[row, length:] = piece.context[0]
        lengths_n[row] = length
    mask_n11c = None
    if int(lengths_n.min()) < width:
        hidden = torch.from_numpy(np.arange(width)[None, :] >= lengths_n[:, None])
        mask_nc = torch.zeros(len(pieces), width, dtype=dtype).masked_fill_(hidden, float("-inf"))
        mask_n11c = mask_nc[:, None, None, :]
    rows = Rows.of([piece.first for piece in pieces])
    return Padded(rows, torch.from_numpy(index_nc.reshape(-1)), width, mask_n11c)


def _similar(pieces: Sequence[_Piece], gather_rows: int) -> list[list[_Piece]]:
    """Groups of similar context length, within the padding allowance and the gather limit."""
    groups: list[list[_Piece]] = []
    needed = width = 0
    for piece in sorted(pieces, key=lambda p: -len(p.context)):
        needed += len(piece.context)
        padded = (len(groups[-1]) + 1) * width if groups else 0
        allowed = needed + max(CALL_SLOTS, int(needed * PADDING_SHARE))
        if groups and padded <= min(allowed, gather_rows):
            groups[-1].append(piece)
        else:
            groups.append([piece])
            needed = width = len(piece.context)
    return [sorted(group, key=lambda p: p.first) for group in groups]


def _shared_groups(pieces: Sequence[_Piece], row_values: int) -> list[tuple[int, list[_Piece]]]:
    """Disjoint sets with a common beginning that save most reads: (shared tokens, members).

    Walks the tree that the contexts form and decides at each fork whether its branches are one
    set, or sets of their own further down. Pieces alone come as sets of one, sharing nothing.
    """
    if len(pieces) == 1:
        return [(0, list(pieces))]
    lead = pieces[0].context
    shared = min(_common(lead, piece.context) for piece in pieces)
    branches: dict[tuple[int, int], list[_Piece]] = {}
    for piece in pieces:
        # A context that ends here is a branch of its own, whatever its last slot is.
        ends = piece.first if len(piece.context) == shared + 1 else -1
        branches.setdefault((int(piece.context[shared]), ends), []).append(piece)
    apart = [group for branch in branches.values() for group in _shared_groups(branch, row_values)]
    saved = _saved([(shared, list(pieces))])
    pays = shared >= SHARED_TOKENS and saved * row_values >= SAVED_VALUES
    if pays and saved >= _saved(apart):
        return [(shared, list(pieces))]
    return apart


def _saved(groups: Sequence[tuple[int, list[_Piece]]]) -> int:
    return sum(shared * (len(members) - 1) for shared, members in groups)


def _common(a: Slots, b: Slots) -> int:
    """Length of the common beginning; at least one token of each is left over."""
    if a[0] != b[0]:
        return 0
    length = min(len(a), len(b)) - 1
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
