"""Who reads which keys in which program of a GPU: the host half of `gpu/attention.py`, numpy only.

Owns   the work lists of one step under one sliding window, all of them i32:

       items    `rows` query rows over one range of slots: a decode, 2 .. 16 forced or drafted
                tokens, or all rows below one fork, which read their common prefix once
       merges   which partial results make up a row that several items answer
       tiles    query tokens of one longer chunk of a prompt, over all that it sees

Holds  each (row, visible position) is in exactly one item, or in the tile of its row;
       the rows of an item are a contiguous range of `order_n`; partials merge by position.
       Padded items (0 rows) and padded merges (0 partials) are legal: nothing is stored for them.
Used   by `gpu.attention.TritonAttention.plan`.

Sequences are sorted by their slots, so that those below any fork are neighbours, to any depth. How
many first slots neighbours have in common then says all there is to know about the tree, as the
LCP array of a suffix array does (Kasai et al. 2001). That a prefix is attended to once for all its
branches is Hydragen's idea (Juravsky et al. 2024), that the kernel's work is planned on the host is
FlashInfer's (Ye et al. 2025).

    N rows of the split path    I items    M merged rows    P partials    C slots of the table
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from structgen.kernels.attention import HeadShape, Layout

Slots = NDArray[np.int64]
Ints = NDArray[np.int32]

DIRECT = -1  # in place of a partial: the item's rows have no other, and are written to the output
ITEM_FIELDS = 6
TILE_FIELDS = 5
SMALLEST_BLOCK = 16
# Where a chunk begins within a prompt may not move the blocks of keys: they start at multiples of
# the largest block there is.
ALIGNED = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may assume of the device, and how it is to be split.

    processors      streaming multiprocessors, which chunks are to keep busy
    element_bytes   of a key or value
    block_rows      query rows of an item x query heads of a group, at most
    tile_rows       the same for a tile of a chunk
    split_queries   sequences with more new tokens than these are tiles
    shared_tokens   shorter common prefixes are read by each row
    chunk_tokens    least and most slots of an item
    fixed_chunk     slots of an item where `deterministic`
    deterministic   a row's partials, and the block they are computed in, do not depend on the
                    other rows of the step: chunks begin at multiples of `fixed_chunk`, prefixes are
                    shared by whole chunks, and there is one bucket. What a row gets still depends
                    on whether it came as a tile or as an item.
    """

    processors: int = 132
    element_bytes: int = 2
    block_rows: int = 128
    tile_rows: int = 128
    split_queries: int = 16
    shared_tokens: int = 256
    chunk_tokens: tuple[int, int] = (256, 2048)
    fixed_chunk: int = 512
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """Items [first, last), to be launched with `block_rows` rows x group."""

    block_rows: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The work lists of one step; position n of an item or tile has slot `table_c[shift + n]`.

    table_c         slots; what items share stands in it once
    order_n         row of the step of each row of the split path
    low_n, high_n   the row sees positions [low, high)
    items_i         [I, 6]: first row (of N), rows, shift, positions [from, to), first partial
    buckets         in ascending `block_rows`; within one, longest items first
    merged_m        rows of the step that are made of partials
    part_start_m1   the partials of merged row m are parts_p[start[m] : start[m + 1]]
    part_count      partials there are
    tiles_i         [I, 5]: first row (of the step), rows, shift, position of the first row, first
                    position of the first block; longest first
    """

    table_c: Ints
    order_n: Ints
    low_n: Ints
    high_n: Ints
    items_i: Ints
    buckets: tuple[Bucket, ...]
    merged_m: Ints
    part_start_m1: Ints
    parts_p: Ints
    part_count: int
    tiles_i: Ints


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence with new tokens: rows [first, first + queries) over `context`."""

    first: int
    queries: int
    context: Slots


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of the split path in tree order: sequence s has rows [start[s], start[s + 1])."""

    start: list[int]
    order_n: Ints
    low_n: Ints
    high_n: Ints


def saves(shape: HeadShape, limits: Limits, *, reads: int, rows: int, tokens: int) -> bool:
    """Whether `reads` sequences with `rows` rows should read a prefix of `tokens` once.

    It saves the bytes of all reads but one, and costs a partial more per row and chunk: written
    once and read once, float32.
    """
    if reads < 2 or tokens < limits.shared_tokens:
        return False
    chunks = -(-tokens // _chunk(tokens, shape, limits))
    slot_bytes = 2 * limits.element_bytes * shape.kv_heads * shape.head_dim
    saved = (reads - 1) * tokens * slot_bytes
    return saved > 2 * rows * shape.heads * (shape.head_dim + 1) * 4 * chunks


def plan_segments(
    layout: Layout, window: int | None, shape: HeadShape, limits: Limits
) -> SegmentPlan:
    """The work lists of a step for the layers with this window."""
    table: list[Slots] = []
    split, long = _sequences(layout, limits)
    rows = _rows_of(split, window)
    segments = _Segments(split, rows, shape, limits)
    raw_i5 = segments.items(table)
    tiles_i = _tiles(long, window, shape, limits, table)
    table_c = np.concatenate(table).astype(np.int32) if table else np.empty(0, np.int32)
    items_i, merges = _with_partials(raw_i5, rows)
    items_i, buckets = _bucketed(items_i, shape.heads // shape.kv_heads, limits)
    return SegmentPlan(
        table_c, rows.order_n, rows.low_n, rows.high_n, items_i, buckets, *merges, tiles_i
    )


def padded(plan: SegmentPlan, multiple: int) -> SegmentPlan:
    """The same work with every list rounded up, so that a captured graph fits several steps."""
    items: list[Ints] = []
    buckets: list[Bucket] = []
    first = 0
    for bucket in plan.buckets:
        count = _up(bucket.last - bucket.first, multiple)
        padding_i = np.zeros((count - bucket.last + bucket.first, ITEM_FIELDS), np.int32)
        padding_i[:, 5] = DIRECT
        items += [plan.items_i[bucket.first : bucket.last], padding_i]
        buckets.append(Bucket(bucket.block_rows, first, first + count))
        first += count
    merges = _up(len(plan.merged_m), multiple) - len(plan.merged_m)
    tiles = _up(len(plan.tiles_i), multiple) - len(plan.tiles_i)
    return replace(
        plan,
        items_i=np.concatenate(items) if items else plan.items_i,
        buckets=tuple(buckets),
        merged_m=np.pad(plan.merged_m, (0, merges)),
        part_start_m1=np.pad(plan.part_start_m1, (0, merges), mode="edge"),
        tiles_i=np.pad(plan.tiles_i, ((0, tiles), (0, 0))),
    )


def _sequences(layout: Layout, limits: Limits) -> tuple[list[_Sequence], list[_Sequence]]:
    """Those of the split path in tree order, and those that are long enough for tiles."""
    starts = layout.query_start_b1.tolist()
    split: list[_Sequence] = []
    long: list[_Sequence] = []
    for first, last, context in zip(starts, starts[1:], layout.context_b, strict=False):
        if last > first:
            sequence = _Sequence(first, last - first, context)
            (split if last - first <= limits.split_queries else long).append(sequence)
    if len(split) > 1:
        # Big-endian, bytes compare as the numbers they stand for: one memcmp a comparison.
        split.sort(key=lambda s: (s.context.astype(">i4").tobytes(), s.first))
    return split, long


def _rows_of(split: list[_Sequence], window: int | None) -> _Rows:
    start, order, high = [0], [], []
    for sequence in split:
        count, length = sequence.queries, len(sequence.context)
        start.append(start[-1] + count)
        order.append(np.arange(sequence.first, sequence.first + count, dtype=np.int32))
        high.append(np.arange(length - count + 1, length + 1, dtype=np.int32))
    empty = np.empty(0, np.int32)
    order_n = np.concatenate(order) if order else empty
    high_n = np.concatenate(high) if high else empty
    low_n = np.zeros_like(high_n) if window is None else np.maximum(high_n - window, 0)
    return _Rows(start, order_n, low_n.astype(np.int32), high_n)


class _Segments:
    """Walks the tree that the contexts form and cuts it into items."""

    def __init__(
        self, split: list[_Sequence], rows: _Rows, shape: HeadShape, limits: Limits
    ) -> None:
        self.split = split
        self.rows = rows
        self.shape = shape
        self.limits = limits
        pairs = pairwise(sequence.context for sequence in split)
        self.common = np.array([0, *(_common(a, b) for a, b in pairs)], dtype=np.int64)

    def items(self, table: list[Slots]) -> Ints:
        """[I, 5] without partials: first row, rows, shift, from, to; slots are put in `table`."""
        found: list[tuple[int, int, int, int, int]] = []
        offset = sum(map(len, table))
        for first, last, low, high in self._ranges():
            table.append(self.split[first].context[low:high])
            shift = offset - low
            offset += high - low
            for begin, end in self._chunks(low, high):
                found += [
                    (row, count, shift, begin, end) for row, count in self._blocks(first, last)
                ]
        return np.array(found, dtype=np.int32).reshape(-1, 5)

    def _ranges(self) -> Iterator[tuple[int, int, int, int]]:
        """(first sequence, last, from, to): positions that these sequences read together."""
        todo = [(0, len(self.split), 0)] if self.split else []
        while todo:
            first, last, start = todo.pop()
            if last - first == 1:
                low, high = self._seen(first, last, start, len(self.split[first].context))
                if low < high:
                    yield first, last, low, high
                continue
            inner = self.common[first + 1 : last]
            end = int(inner.min())
            low, high = self._seen(first, last, start, self._border(end))
            if self._shares(first, last, high - low):
                yield first, last, low, high
                start = self._border(end)
            cuts = first + 1 + np.flatnonzero(inner == end)
            todo += [(a, b, start) for a, b in pairwise([first, *cuts.tolist(), last])]

    def _shares(self, first: int, last: int, tokens: int) -> bool:
        rows = self.rows.start[last] - self.rows.start[first]
        return saves(self.shape, self.limits, reads=last - first, rows=rows, tokens=tokens)

    def _seen(self, first: int, last: int, start: int, end: int) -> tuple[int, int]:
        """The part of positions [start, end) that any row of these sequences sees."""
        rows = slice(self.rows.start[first], self.rows.start[last])
        low = max(start, int(self.rows.low_n[rows].min()))
        if self.limits.deterministic:
            low -= low % self.limits.fixed_chunk
        return low, min(end, int(self.rows.high_n[rows].max()))

    def _border(self, end: int) -> int:
        return end - end % self.limits.fixed_chunk if self.limits.deterministic else end

    def _chunks(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        step = _chunk(high - low, self.shape, self.limits)
        for begin in range(low, high, step):
            yield begin, min(begin + step, high)

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(first row, rows) of as few blocks as hold the rows of these sequences."""
        begin, end = self.rows.start[first], self.rows.start[last]
        most = max(1, self.limits.block_rows * self.shape.kv_heads // self.shape.heads)
        for row in range(begin, end, most):
            yield row, min(most, end - row)


def _chunk(tokens: int, shape: HeadShape, limits: Limits) -> int:
    """Slots of an item: enough items to keep the device busy, each long enough to pay."""
    if limits.deterministic:
        return limits.fixed_chunk
    least, most = limits.chunk_tokens
    even = _up(tokens * shape.kv_heads // (2 * limits.processors), ALIGNED)
    return min(max(even, least), most)


def _with_partials(raw_i5: Ints, rows: _Rows) -> tuple[Ints, tuple[Ints, Ints, Ints, int]]:
    """Items with their first partial, and (merged_m, part_start_m1, parts_p, part_count).

    A row that sees nothing of an item has a partial there, which no merge asks for.
    """
    counts = raw_i5[:, 1].astype(np.int64)
    item = np.repeat(np.arange(len(raw_i5)), counts)
    within = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)
    row = raw_i5[item, 0] + within
    sees = (rows.low_n[row] < raw_i5[item, 4]) & (rows.high_n[row] > raw_i5[item, 3])
    answers_n = np.bincount(row[sees], minlength=len(rows.order_n))
    alone = sees & (answers_n[row] == 1)
    direct = np.bincount(item[~alone], minlength=len(raw_i5)) == 0
    held = np.where(direct, 0, counts)
    first_part = np.where(direct, DIRECT, np.cumsum(held) - held)
    kept = sees & ~direct[item]
    row, begin, part = row[kept], raw_i5[item, 3][kept], (first_part[item] + within)[kept]
    by_position = np.lexsort((begin, row))
    merged, part_counts = np.unique(row, return_counts=True)
    part_start_m1 = np.concatenate([[0], np.cumsum(part_counts)]).astype(np.int32)
    items_i = np.column_stack([raw_i5, first_part.astype(np.int32)])
    parts_p = part[by_position].astype(np.int32)
    return items_i, (rows.order_n[merged], part_start_m1, parts_p, int(held.sum()))


def _bucketed(items_i: Ints, group: int, limits: Limits) -> tuple[Ints, tuple[Bucket, ...]]:
    """Items by the block that holds their rows, longest first, and where each block's begin."""
    if limits.deterministic:
        # Another block may sum in another order.
        block = np.full(len(items_i), limits.block_rows)
    else:
        needed = np.maximum(items_i[:, 1] * group, SMALLEST_BLOCK)
        block = 2 ** np.ceil(np.log2(needed)).astype(np.int64)
    order = np.lexsort((items_i[:, 3] - items_i[:, 4], block))
    block = block[order]
    sizes, first = np.unique(block, return_index=True)
    borders = [*first.tolist(), len(block)]
    buckets = [
        Bucket(size, a, b) for size, (a, b) in zip(sizes.tolist(), pairwise(borders), strict=True)
    ]
    return np.ascontiguousarray(items_i[order]), tuple(buckets)


def _tiles(
    long: list[_Sequence], window: int | None, shape: HeadShape, limits: Limits, table: list[Slots]
) -> Ints:
    """[I, 5]: first row, rows, shift, position of the first row, first position of a block."""
    tiles: list[tuple[int, int, int, int, int]] = []
    most = max(1, limits.tile_rows * shape.kv_heads // shape.heads)
    offset = sum(map(len, table))
    for sequence in long:
        before = len(sequence.context) - sequence.queries
        floor = _floor(before, window)
        table.append(sequence.context[floor:])
        for row in range(0, sequence.queries, most):
            count, position = min(most, sequence.queries - row), before + row
            low = _floor(position, window)
            tiles.append((sequence.first + row, count, offset - floor, position, low))
        offset += len(sequence.context) - floor
    tiles.sort(key=lambda tile: tile[4] - tile[3] - tile[1])
    return np.array(tiles, dtype=np.int32).reshape(-1, TILE_FIELDS)


def _floor(position: int, window: int | None) -> int:
    """Where the blocks begin of which the query at `position` sees something."""
    seen = 0 if window is None else max(0, position - window + 1)
    return seen - seen % ALIGNED


def _common(a: Slots, b: Slots) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    done, step = 0, 256
    while done < length:
        piece = slice(done, min(done + step, length))
        different = a[piece] != b[piece]
        if different.any():
            return done + int(different.argmax())
        done, step = done + step, step * 4
    return length


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
