"""What the GPU's work lists say: every row over every position it sees, once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.kernels.attention import HeadShape, Layout
from structgen.kernels.segment_plan import (
    DIRECT,
    Limits,
    SegmentPlan,
    padded,
    plan_segments,
    saves,
)
from tests.kernels.scenes import Branch, head_shape, layout_of

SHAPE = head_shape(9, 3, 64)
SMALL = Limits(block_rows=16, tile_rows=16, split_queries=4, shared_tokens=8, chunk_tokens=(16, 64))
FIXED = Limits(
    block_rows=16, tile_rows=16, split_queries=4, shared_tokens=8, fixed_chunk=32,
    deterministic=True,
)  # fmt: skip
BRANCHES = st.lists(
    st.builds(
        Branch,
        cached=st.integers(0, 60),
        new=st.integers(0, 6),
        after=st.one_of(st.none(), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=7,
)


def laid_out(branches: list[Branch]) -> Layout:
    """With `after` pointing backwards and at least one token a sequence."""
    possible = [
        Branch(
            b.cached,
            b.new or int(b.cached == 0),
            None if b.after is None or b.after >= i else b.after,
        )
        for i, b in enumerate(branches)
    ]
    return layout_of(possible, scattered=True, padding=2, seed=0)[0]


def seen(layout: Layout, window: int | None) -> Counter[tuple[int, int, int]]:
    """(row, position, slot) of all that rows see, by the contract."""
    found: Counter[tuple[int, int, int]] = Counter()
    starts = layout.query_start_b1.tolist()
    for (first, last), context in zip(pairwise(starts), layout.context_b, strict=True):
        for row in range(first, last):
            end = len(context) - (last - row) + 1
            begin = 0 if window is None else max(0, end - window)
            found.update((row, n, int(context[n])) for n in range(begin, end))
    return found


def answered(plan: SegmentPlan, window: int | None) -> Counter[tuple[int, int, int]]:
    """(row, position, slot) of all that reaches the output: directly, by a merge, or by a tile."""
    found: Counter[tuple[int, int, int]] = Counter()
    merged = {
        (int(row), int(part))
        for m, row in enumerate(plan.merged_m)
        for part in plan.parts_p[plan.part_start_m1[m] : plan.part_start_m1[m + 1]]
    }
    for first, count, shift, low, high, part in plan.items_i.tolist():
        for i in range(first, first + count):
            row = int(plan.order_n[i])
            if part == DIRECT or (row, part + i - first) in merged:
                visible = range(max(low, int(plan.low_n[i])), min(high, int(plan.high_n[i])))
                found.update((row, n, int(plan.table_c[shift + n])) for n in visible)
    for first, count, shift, position, low in plan.tiles_i.tolist():
        for row in range(first, first + count):
            end = position + row - first + 1
            begin = 0 if window is None else max(0, end - window)
            assert low <= begin
            found.update((row, n, int(plan.table_c[shift + n])) for n in range(begin, end))
    return found


def read(plan: SegmentPlan) -> int:
    """How many places of the table the items read, each counted once."""
    spans = plan.items_i[:, 2:5].tolist()
    return len({shift + n for shift, low, high in spans for n in range(low, high)})


def partials_of(plan: SegmentPlan, row: int) -> list[tuple[int, int]]:
    """The ranges of positions whose partials make up a row, in the order of the merge."""
    of_part = {
        part + i: (low, high)
        for _, count, _, low, high, part in plan.items_i.tolist()
        for i in range(count)
        if part != DIRECT
    }
    if row not in plan.merged_m:
        i = int(np.flatnonzero(plan.order_n == row)[0])
        return [
            (low, high)
            for first, count, _, low, high, _ in plan.items_i.tolist()
            if first <= i < first + count
        ]
    m = int(np.flatnonzero(plan.merged_m == row)[0])
    borders = plan.part_start_m1[m : m + 2]
    return [of_part[int(part)] for part in plan.parts_p[borders[0] : borders[1]]]


@pytest.mark.parametrize("limits", [SMALL, FIXED], ids=["fast", "deterministic"])
class TestAnyStep:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(branches=BRANCHES, window=st.one_of(st.none(), st.integers(1, 120)))
    def test_answers_every_row_over_all_it_sees_once(
        self, limits: Limits, branches: list[Branch], window: int | None
    ) -> None:
        layout = laid_out(branches)

        plan = plan_segments(layout, window, SHAPE, limits)

        assert answered(plan, window) == seen(layout, window)
        assert answered(padded(plan, 8), window) == seen(layout, window)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(branches=BRANCHES, window=st.one_of(st.none(), st.integers(1, 120)))
    def test_keeps_its_promises(
        self, limits: Limits, branches: list[Branch], window: int | None
    ) -> None:
        plan = plan_segments(laid_out(branches), window, SHAPE, limits)

        rows = plan.items_i[:, 1] * 3
        spans = [plan.items_i[b.first : b.last] for b in plan.buckets]
        lengths = [(items[:, 4] - items[:, 3]).tolist() for items in spans]
        assert rows.max(initial=0) <= limits.block_rows
        assert all(
            (b.block_rows >= 3 * i[:, 1]).all() for b, i in zip(plan.buckets, spans, strict=True)
        )
        assert lengths == [sorted(of_bucket, reverse=True) for of_bucket in lengths]
        assert sum(len(items) for items in spans) == len(plan.items_i)
        assert len(set(plan.parts_p.tolist())) == len(plan.parts_p)
        assert plan.parts_p.max(initial=-1) < plan.part_count
        assert all(part.dtype == np.int32 for part in (plan.table_c, plan.items_i, plan.tiles_i))

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(branches=BRANCHES, window=st.one_of(st.none(), st.integers(1, 120)))
    def test_shares_only_what_pays(
        self, limits: Limits, branches: list[Branch], window: int | None
    ) -> None:
        layout = laid_out(branches)
        starts = layout.query_start_b1

        plan = plan_segments(layout, window, SHAPE, limits)

        # What stands at one place of the table is one range, cut into chunks and blocks of rows.
        for shift, begin in set(map(tuple, plan.items_i[:, 2:4].tolist())):
            at_shift = plan.items_i[plan.items_i[:, 2] == shift]
            items = at_shift[at_shift[:, 3] == begin]
            first, last = items[:, 0].min(), (items[:, 0] + items[:, 1]).max()
            items = at_shift[at_shift[:, 0] == first]
            rows = plan.order_n[first:last]
            reads = len(set(np.searchsorted(starts, rows, side="right").tolist()))
            tokens = int(items[:, 4].max() - items[:, 3].min())
            assert reads == 1 or saves(SHAPE, limits, reads=reads, rows=len(rows), tokens=tokens)


class TestSharing:
    def test_branches_over_one_prefix_read_it_once(self) -> None:
        branches = [Branch(1023, 1), *(Branch(20, 1, after=0) for _ in range(15))]

        plan = plan_segments(laid_out(branches), None, SHAPE, Limits())

        shared = plan.items_i[plan.items_i[:, 1] == 16]
        assert shared[:, 3:5].tolist() == [[0, 256], [256, 512], [512, 768], [768, 1024]]
        assert read(plan) == 1024 + 15 * 21

    def test_forks_within_forks_are_shared_at_every_depth(self) -> None:
        trunk = [Branch(499, 1)]
        limbs = [Branch(299, 1, after=0), Branch(399, 1, after=0)]
        twigs = [Branch(10, 1, after=limb) for limb in (1, 1, 1, 2, 2)]

        plan = plan_segments(laid_out([*trunk, *limbs, *twigs]), None, SHAPE, Limits())

        ranges = {(rows, low, high) for _, rows, _, low, high, _ in plan.items_i.tolist()}
        assert {(8, 0, 256), (8, 256, 500), (4, 500, 756), (3, 500, 756)} <= ranges
        assert read(plan) == 500 + 300 + 400 + 5 * 11

    def test_a_prefix_too_short_to_pay_is_read_by_each(self) -> None:
        branches = [Branch(254, 1), Branch(3, 1, after=0), Branch(3, 1, after=0)]

        plan = plan_segments(laid_out(branches), None, SHAPE, Limits())

        assert set(plan.items_i[:, 1].tolist()) == {1}
        assert read(plan) == 255 + 2 * (255 + 4)

    def test_more_rows_than_a_block_holds_are_several_items_over_the_same_slots(self) -> None:
        branches = [Branch(511, 1), *(Branch(1, 1, after=0) for _ in range(59))]

        plan = plan_segments(laid_out(branches), None, SHAPE, Limits())

        shared = plan.items_i[plan.items_i[:, 4] <= 512]
        assert sorted(shared[:, 1].tolist()) == [18, 18, 42, 42]
        assert read(plan) == 512 + 59 * 2

    def test_drafted_tokens_of_one_sequence_share_their_items(self) -> None:
        plan = plan_segments(laid_out([Branch(600, 5)]), None, SHAPE, Limits())

        assert plan.items_i[:, 1].tolist() == [5, 5, 5]
        assert plan.high_n.tolist() == [601, 602, 603, 604, 605]

    def test_a_lone_short_decode_needs_no_merge(self) -> None:
        plan = plan_segments(laid_out([Branch(30, 1)]), None, SHAPE, Limits())

        assert plan.items_i.tolist() == [[0, 1, 0, 0, 31, DIRECT]]
        assert plan.part_count == len(plan.merged_m) == 0

    def test_long_chunks_are_tiles_longest_first(self) -> None:
        plan = plan_segments(laid_out([Branch(0, 50), Branch(100, 30)]), None, SHAPE, Limits())

        assert plan.tiles_i[:, [0, 1, 3]].tolist() == [[50, 30, 100], [42, 8, 42], [0, 42, 0]]
        assert len(plan.items_i) == 0

    def test_a_window_reads_no_slot_before_it(self) -> None:
        branches = [Branch(1000, 1), Branch(5, 1, after=0)]

        plan = plan_segments(laid_out(branches), 16, SHAPE, Limits())

        assert read(plan) == 2 * 16

    def test_the_items_of_a_shape_of_few_saved_bytes_cost_more_than_they_save(self) -> None:
        many_queries = HeadShape(64, 1, 64, 1.0)

        assert saves(SHAPE, Limits(), reads=2, rows=2, tokens=256)
        assert not saves(many_queries, Limits(), reads=2, rows=2, tokens=256)
        assert not saves(SHAPE, Limits(), reads=1, rows=5, tokens=4096)


class TestDeterministicPlans:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(branches=BRANCHES, window=st.one_of(st.none(), st.integers(1, 120)))
    def test_give_a_row_the_partials_it_has_alone(
        self, branches: list[Branch], window: int | None
    ) -> None:
        layout = laid_out(branches)
        together = plan_segments(layout, window, SHAPE, FIXED)

        for b, context in enumerate(layout.context_b):
            first, last = layout.query_start_b1[b : b + 2].tolist()
            if not 0 < last - first <= FIXED.split_queries:
                continue
            alone = plan_segments(
                Layout(
                    np.array([0, last - first]),
                    (context,),
                    layout.slots_t[first:last],
                    layout.positions_t[first:last],
                ),
                window,
                SHAPE,
                FIXED,
            )
            begins = [[low for low, _ in partials_of(together, row)] for row in range(first, last)]
            expected = [[low for low, _ in partials_of(alone, i)] for i in range(last - first)]
            assert begins == expected

    def test_have_one_bucket(self) -> None:
        branches = [Branch(99, 1), Branch(3, 1, after=0), Branch(3, 4, after=0), Branch(10, 1)]

        plan = plan_segments(laid_out(branches), None, SHAPE, FIXED)

        assert [bucket.block_rows for bucket in plan.buckets] == [16]

    def test_share_whole_chunks(self) -> None:
        branches = [Branch(1099, 1), *(Branch(20, 1, after=0) for _ in range(3))]

        plan = plan_segments(laid_out(branches), None, SHAPE, Limits(deterministic=True))

        shared = plan.items_i[plan.items_i[:, 1] == 4]
        assert shared[:, 3:5].tolist() == [[0, 512], [512, 1024]]
