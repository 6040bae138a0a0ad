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

The tree of forks is `slot_tree.py`'s, the table `slot_table.py`'s; both go on from step to step.
The lists are made anew, in numpy, with Python only for each sequence. That a prefix is attended to
once for all its branches is Hydragen's idea (Juravsky et al. 2024), that the kernel's work is
planned on the host is FlashInfer's (Ye et al. 2025).

    N rows of the split path    I items    M merged rows    P partials    C slots of the table
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from structgen.kernels.attention import HeadShape, Layout
from structgen.kernels.slot_table import SlotTable
from structgen.kernels.slot_tree import Reader, SlotTree, readers_of

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

    table_c         slots, each sequence's whole context somewhere; what items share is read off
                    one of those that share it. A planner writes to it in its next step
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
class _Rows:
    """The rows of the split path in tree order: reader s has rows [start[s], start[s + 1]).

    low_s, high_s   the first position that any row of reader s sees, and the one behind the last
    """

    start: list[int]
    order_n: Ints
    low_n: Ints
    high_n: Ints
    low_s: list[int]
    high_s: list[int]


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Positions [low, high) that readers [first, last) read together, off the slots of `first`."""

    first_r: Ints
    last_r: Ints
    low_r: Ints
    high_r: Ints


def saves(shape: HeadShape, limits: Limits, *, reads: int, rows: int, tokens: int) -> bool:
    """Whether `reads` sequences with `rows` rows should read a prefix of `tokens` once.

    It saves the bytes of all reads but one, and costs a partial more per row and chunk: written
    once and read once, float32.
    """
    if reads < 2 or tokens < limits.shared_tokens:
        return False
    chunks = -(-tokens // int(_chunks(np.array([tokens], np.int32), shape, limits)[0]))
    slot_bytes = 2 * limits.element_bytes * shape.kv_heads * shape.head_dim
    saved = (reads - 1) * tokens * slot_bytes
    return saved > 2 * rows * shape.heads * (shape.head_dim + 1) * 4 * chunks


class SegmentPlanner:
    """Plans step after step; what they have in common is not looked at again.

    That is what layouts with an `origin_b` say of the last one: whose contexts have only grown. A
    step's plans are good until the next step.

    table   the slots that all plans of a step refer to, and what has changed in it since the last
    """

    def __init__(self, shape: HeadShape, limits: Limits) -> None:
        self.shape = shape
        self.limits = limits
        self.table = SlotTable()
        self._tree = SlotTree()
        self._split_starts = np.zeros(0, np.int32)
        self._long: list[tuple[Reader, int]] = []

    def step(self, layout: Layout) -> None:
        """Take in the layout of the next step."""
        readers = list(readers_of(layout))
        starts = dict(zip(map(_key, readers), self.table.update(readers), strict=True))
        most = self.limits.split_queries
        self._tree.update([reader for reader in readers if reader.queries <= most])
        in_order = [starts[_key(reader)] for reader in self._tree.readers]
        self._split_starts = np.array(in_order, np.int32)
        self._long = [(r, starts[_key(r)]) for r in readers if r.queries > most]

    def plan(self, window: int | None) -> SegmentPlan:
        """The work lists of this step for the layers with this window."""
        rows = _rows_of(self._tree.readers, window)
        ranges = _Walk(rows, self._tree.common, self.shape, self.limits).ranges()
        raw_i5 = _items(ranges, rows, self._split_starts, self.shape, self.limits)
        items_i, merges = _with_partials(raw_i5, rows)
        items_i, buckets = _bucketed(items_i, self.shape.heads // self.shape.kv_heads, self.limits)
        tiles_i = _tiles(self._long, window, self.shape, self.limits)
        return SegmentPlan(
            self.table.slots_c,
            rows.order_n,
            rows.low_n,
            rows.high_n,
            items_i,
            buckets,
            *merges,
            tiles_i,
        )


def plan_segments(
    layout: Layout, window: int | None, shape: HeadShape, limits: Limits
) -> SegmentPlan:
    """The work lists of a step by itself for the layers with this window."""
    planner = SegmentPlanner(shape, limits)
    planner.step(layout)
    return planner.plan(window)


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


def _key(reader: Reader) -> int:
    return id(reader.origin)


def _rows_of(readers: Sequence[Reader], window: int | None) -> _Rows:
    first_s = np.array([reader.first for reader in readers], np.int32)
    count_s = np.array([reader.queries for reader in readers], np.int32)
    high_s = np.array([len(reader.context) for reader in readers], np.int32)
    start_s = _offsets(count_s)
    within_n = np.arange(start_s[-1], dtype=np.int32) - np.repeat(start_s[:-1], count_s)
    order_n = np.repeat(first_s, count_s) + within_n
    high_n = np.repeat(high_s - count_s + 1, count_s) + within_n
    low_n, low_s = np.zeros_like(high_n), np.zeros_like(high_s)
    if window is not None:
        low_n = np.maximum(high_n - np.int32(window), 0)
        low_s = low_n[start_s[:-1]]
    return _Rows(start_s.tolist(), order_n, low_n, high_n, low_s.tolist(), high_s.tolist())


class _Walk:
    """Walks the tree that the contexts form, and says who reads what together."""

    def __init__(
        self, rows: _Rows, common: Sequence[int], shape: HeadShape, limits: Limits
    ) -> None:
        self.rows = rows
        self.common = common
        self.shape = shape
        self.limits = limits
        self.found: list[tuple[int, int, int, int]] = []
        # From where on each reader reads for itself.
        self.alone = [0] * len(rows.low_s)

    def ranges(self) -> _Ranges:
        """What is shared, then what each reader reads for itself; none of them empty."""
        todo = [(0, len(self.alone), 0)]
        while todo:
            first, last, start = todo.pop()
            if last - first > 1:
                todo += self._fork(first, last, start)
        shared_r4 = np.array(self.found, np.int32).reshape(-1, 4)
        low_s = np.maximum(np.array(self.alone, np.int32), np.array(self.rows.low_s, np.int32))
        if self.limits.deterministic:
            low_s -= low_s % np.int32(self.limits.fixed_chunk)
        high_s = np.array(self.rows.high_s, np.int32)
        alone_s = np.flatnonzero(low_s < high_s).astype(np.int32)
        alone_r4 = np.column_stack([alone_s, alone_s + 1, low_s[alone_s], high_s[alone_s]])
        return _Ranges(*np.concatenate([shared_r4, alone_r4]).T)

    def _fork(self, first: int, last: int, start: int) -> Iterator[tuple[int, int, int]]:
        """Readers [first, last) read from `start` on: the branches where they part, likewise."""
        end = min(self.common[first + 1 : last])
        border = self._border(end)
        low = self._border(max(start, min(self.rows.low_s[first:last])))
        high = min(border, max(self.rows.high_s[first:last]))
        if self._shares(first, last, high - low):
            self.found.append((first, last, low, high))
            start = border
        begin = first
        for cut in range(first + 1, last + 1):
            if cut == last or self.common[cut] == end:
                if cut - begin == 1:
                    self.alone[begin] = start
                else:
                    yield begin, cut, start
                begin = cut

    def _shares(self, first: int, last: int, tokens: int) -> bool:
        rows = self.rows.start[last] - self.rows.start[first]
        return saves(self.shape, self.limits, reads=last - first, rows=rows, tokens=tokens)

    def _border(self, end: int) -> int:
        return end - end % self.limits.fixed_chunk if self.limits.deterministic else end


def _items(ranges: _Ranges, rows: _Rows, start_s: Ints, shape: HeadShape, limits: Limits) -> Ints:
    """[I, 5] without partials: ranges cut into chunks, and their rows into as few blocks."""
    row_start_s = np.array(rows.start, np.int32)
    first_row_r, last_row_r = row_start_s[ranges.first_r], row_start_s[ranges.last_r]
    most = max(1, limits.block_rows * shape.kv_heads // shape.heads)
    blocks_r = -(-(last_row_r - first_row_r) // most)
    step_r = _chunks(ranges.high_r - ranges.low_r, shape, limits)
    count_r = blocks_r * -(-(ranges.high_r - ranges.low_r) // step_r)
    r = np.repeat(np.arange(len(count_r)), count_r)
    within = np.arange(len(r)) - _offsets(count_r)[r]
    chunk, block = np.divmod(within, blocks_r[r])
    begin = ranges.low_r[r] + chunk * step_r[r]
    row = first_row_r[r] + block * most
    items_i5 = np.empty((len(r), 5), np.int32)
    items_i5[:, 0], items_i5[:, 1] = row, np.minimum(last_row_r[r] - row, most)
    items_i5[:, 2] = start_s[ranges.first_r[r]]
    items_i5[:, 3], items_i5[:, 4] = begin, np.minimum(begin + step_r[r], ranges.high_r[r])
    return items_i5


def _chunks(tokens_r: Ints, shape: HeadShape, limits: Limits) -> Ints:
    """Slots of an item by those of its range: enough items to keep the device busy, each long
    enough to pay.
    """
    if limits.deterministic:
        return np.full_like(tokens_r, limits.fixed_chunk)
    least, most = limits.chunk_tokens
    # 64 bits: tokens times heads may be more than 32 hold.
    even_r = tokens_r.astype(np.int64) * shape.kv_heads // (2 * limits.processors)
    even_r += -even_r % ALIGNED
    return np.clip(even_r, least, most).astype(np.int32)


def _with_partials(raw_i5: Ints, rows: _Rows) -> tuple[Ints, tuple[Ints, Ints, Ints, int]]:
    """Items with their first partial, and (merged_m, part_start_m1, parts_p, part_count).

    A row that sees nothing of an item has a partial there, which no merge asks for.
    """
    counts = raw_i5[:, 1]
    item = np.repeat(np.arange(len(raw_i5)), counts)
    within = np.arange(len(item)) - _offsets(counts)[item]
    row = raw_i5[item, 0] + within
    sees = (rows.low_n[row] < raw_i5[item, 4]) & (rows.high_n[row] > raw_i5[item, 3])
    answers_n = np.bincount(row[sees], minlength=len(rows.order_n))
    alone = sees & (answers_n[row] == 1)
    direct = np.bincount(item[~alone], minlength=len(raw_i5)) == 0
    held = np.where(direct, 0, counts)
    start_i = _offsets(held)
    items_i = np.column_stack([raw_i5, np.where(direct, DIRECT, start_i[:-1])])
    kept = np.flatnonzero(sees & ~direct[item])
    # A row's items stand in order of position: the walk comes from the root and cuts in order.
    kept = kept[np.argsort(row[kept], kind="stable")]
    parts_p = start_i[item[kept]] + within[kept].astype(np.int32)
    count_n = np.bincount(row[kept], minlength=len(rows.order_n))
    merged = np.flatnonzero(count_n)
    part_start_m1 = _offsets(count_n[merged])
    return items_i, (rows.order_n[merged], part_start_m1, parts_p, int(start_i[-1]))


def _bucketed(items_i: Ints, group: int, limits: Limits) -> tuple[Ints, tuple[Bucket, ...]]:
    """Items by the block that holds their rows, longest first, and where each block's begin."""
    if limits.deterministic:
        # Another block may sum in another order.
        block_i = np.full(len(items_i), limits.block_rows)
    else:
        needed_i = np.maximum(items_i[:, 1] * group, SMALLEST_BLOCK)
        block_i = 2 ** np.ceil(np.log2(needed_i)).astype(np.int64)
    # One number an item, for one sort: ascending blocks, then descending lengths.
    rank_i = (block_i << 32) - (items_i[:, 4] - items_i[:, 3])
    order = np.argsort(rank_i, kind="stable")
    block_i = block_i[order]
    borders = [0, *(np.flatnonzero(np.diff(block_i)) + 1).tolist(), len(block_i)]
    buckets = [Bucket(int(block_i[a]), a, b) for a, b in pairwise(borders) if a < b]
    return items_i[order], tuple(buckets)


def _tiles(
    long: Sequence[tuple[Reader, int]], window: int | None, shape: HeadShape, limits: Limits
) -> Ints:
    """[I, 5]: first row, rows, shift, position of the first row, first position of a block."""
    tiles = [np.empty((0, TILE_FIELDS), np.int32)]
    most = max(1, limits.tile_rows * shape.kv_heads // shape.heads)
    for reader, start in long:
        row = np.arange(0, reader.queries, most)
        position = len(reader.context) - reader.queries + row
        seen = np.zeros_like(row) if window is None else np.maximum(position - window + 1, 0)
        count = np.minimum(most, reader.queries - row)
        columns = (reader.first + row, count, np.full_like(row, start), position)
        tiles.append(np.column_stack([*columns, seen - seen % ALIGNED]).astype(np.int32))
    tiles_i = np.concatenate(tiles)
    return tiles_i[np.argsort(tiles_i[:, 4] - tiles_i[:, 3] - tiles_i[:, 1], kind="stable")]


def _offsets(count_i: NDArray[np.integer]) -> Ints:
    """Where each begins that has so many, and where the last one ends."""
    start_i = np.zeros(len(count_i) + 1, np.int32)
    np.cumsum(count_i, out=start_i[1:])
    return start_i


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
