"""Plans of steps that follow each other: what is kept from the last one changes no plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from structgen.kernels.attention import Layout
from structgen.kernels.segment_plan import Limits, SegmentPlan, SegmentPlanner, plan_segments
from structgen.kernels.slot_table import SlotTable
from structgen.kernels.slot_tree import SlotTree, readers_of
from tests.kernels.test_segment_plan import FIXED, SHAPE, SMALL

WINDOWS = (None, 40)
MOST = 180  # slots of a sequence, with a few more


@dataclass
class Story:
    """Sequences that come and go; their slots are drawn from a shuffled pool."""

    free: list[int]
    alive: list[NDArray[np.int64]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def admit(self, length: int, parent: int | None, shared: int) -> None:
        """A sequence of its own, or one that begins as another does."""
        slots = np.zeros(MOST + 8, np.int64)
        if parent is not None and self.alive:
            whose = parent % len(self.alive)
            shared = min(shared, self.lengths[whose])
            slots[:shared] = self.alive[whose][:shared]
            length += shared
        else:
            shared = 0
        length = min(length, MOST)
        slots[shared:length] = self.take(length - shared)
        self.alive.append(slots)
        self.lengths.append(length)

    def take(self, count: int) -> list[int]:
        taken, self.free[:count] = self.free[:count], []
        return taken

    def end(self, which: int) -> None:
        at = which % len(self.alive)
        del self.alive[at], self.lengths[at]

    def rewrite(self, which: int, start: int) -> None:
        """Other slots from `start` on, as after a retraction or an adoption."""
        at = which % len(self.alive)
        slots = self.alive[at] = self.alive[at].copy()
        length = self.lengths[at]
        slots[start:length] = self.take(max(0, length - start))

    def step(self, counts: list[int], turn: int) -> Layout:
        """Sequences grow by these counts, again and again; 0: not in the step, -1: their last token
        is computed again. Another order of rows at each turn.
        """
        order = np.roll(np.arange(len(self.alive)), turn).tolist()
        starts, contexts, origins = [0], list[NDArray[np.int64]](), list[object]()
        for at in order:
            slots, before = self.alive[at], self.lengths[at]
            count = counts[at % len(counts)]
            grown = max(count, int(before == 0)) if before < MOST else 0
            if count:
                slots[before : before + grown] = self.take(grown)
                self.lengths[at] = before + grown
                starts.append(starts[-1] + max(grown, 1))
                contexts.append(slots[: before + grown])
                origins.append(slots)
        rows = np.zeros(starts[-1], np.int64)
        return Layout(np.array(starts), tuple(contexts), rows, rows, tuple(origins))


Event = tuple[Any, ...]  # a method of `Story` and its arguments
ADMIT = st.tuples(
    st.just("admit"),
    st.integers(0, 60),
    st.one_of(st.none(), st.integers(0, 9)),
    st.integers(0, 90),
)
GROW = st.lists(st.sampled_from([-1, -1, 0, 1, 1, 1, 3, 7]), min_size=1, max_size=5)
HISTORIES = st.lists(
    st.one_of(
        ADMIT,
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("rewrite"), st.integers(0, 9), st.integers(0, 60)),
        st.tuples(st.just("step"), GROW, st.integers(0, 3)),
        st.tuples(st.just("step"), st.just([1]), st.integers(0, 3)),
    ),
    min_size=8,
    max_size=24,
)


def steps_of(admitted: list[Event], history: list[Event], seed: int) -> Iterator[Layout]:
    """The layouts of a history, one after the other, and of a step at the end."""
    story = Story(np.random.default_rng(seed).permutation(np.arange(1, 10_000)).tolist())
    for name, *arguments in [*admitted, ("step", [1], 0), *history, ("step", [1], 0)]:
        if name == "admit" or story.alive:
            layout = getattr(story, name)(*arguments)
            if layout is not None and layout.context_b:
                yield layout


def lists_of(plan: SegmentPlan) -> list[Any]:
    """All of a plan, with the slots that are read in place of where they stand in the table."""
    arrays = [plan.order_n, plan.low_n, plan.high_n, plan.merged_m, plan.part_start_m1]
    arrays += [plan.parts_p, plan.items_i[:, [0, 1, 3, 4, 5]], plan.tiles_i[:, [0, 1, 3, 4]]]
    spans = plan.items_i[:, 2:5].tolist()
    spans += [(shift, low, at + count) for _, count, shift, at, low in plan.tiles_i.tolist()]
    slots = [plan.table_c[shift + low : shift + high] for shift, low, high in spans]
    return [plan.buckets, plan.part_count, *(array.tolist() for array in (*arrays, *slots))]


@pytest.mark.parametrize("limits", [SMALL, FIXED], ids=["fast", "deterministic"])
class TestAnyHistory:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        admitted=st.lists(ADMIT, min_size=1, max_size=8),
        history=HISTORIES,
        seed=st.integers(0, 99),
    )
    def test_gives_the_plans_that_each_step_has_by_itself(
        self, limits: Limits, admitted: list[Event], history: list[Event], seed: int
    ) -> None:
        planner = SegmentPlanner(SHAPE, limits)
        for layout in steps_of(admitted, history, seed):
            planner.step(layout)

            for window in WINDOWS:
                alone = plan_segments(layout, window, SHAPE, limits)
                assert lists_of(planner.plan(window)) == lists_of(alone)


class TestTheTable:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        admitted=st.lists(ADMIT, min_size=1, max_size=8),
        history=HISTORIES,
        seed=st.integers(0, 99),
    )
    def test_is_what_its_edits_make_of_a_copy(
        self, admitted: list[Event], history: list[Event], seed: int
    ) -> None:
        table, copy = SlotTable(), np.zeros(0, np.int32)
        for layout in steps_of(admitted, history, seed):
            readers = list(readers_of(layout))
            starts = table.update(readers)
            if table.edits.whole:
                copy = table.slots_c.copy()
            for low, high in table.edits.ranges:
                copy[low:high] = table.slots_c[low:high]
            copy[table.edits.at] = table.edits.slots

            spans = [
                (start, start + len(r.context)) for start, r in zip(starts, readers, strict=True)
            ]
            assert [copy[low:high].tolist() for low, high in spans] == [
                reader.context.tolist() for reader in readers
            ]
            assert max(high for _, high in spans) <= table.used <= len(copy)
            ordered = sorted(spans)
            assert all(low >= high for (_, high), (low, _) in pairwise(ordered))

    def test_takes_one_slot_from_each_sequence_of_a_decode(self) -> None:
        table = SlotTable()
        story = Story(list(range(1, 10_000)))
        for _ in range(4):
            story.admit(100, None, 0)
        table.update(list(readers_of(story.step([1], 0))))
        layout = story.step([1], 0)

        table.update(list(readers_of(layout)))

        assert not table.edits.whole
        assert table.edits.ranges == []
        assert table.edits.slots == [int(context[-1]) for context in layout.context_b]

    def test_moves_a_sequence_that_outgrows_its_room(self) -> None:
        table = SlotTable()
        slots, origins = np.arange(1, 2001).reshape(2, 1000), (object(), object())
        for length in range(10, 400):
            rows = np.zeros(2, np.int64)
            contexts = slots[0, :length], slots[1, :10]
            layout = Layout(np.arange(3), contexts, rows, rows, origins)

            one, other = table.update(list(readers_of(layout)))

            assert table.slots_c[one : one + length].tolist() == contexts[0].tolist()
            assert table.slots_c[other : other + 10].tolist() == contexts[1].tolist()

    def test_stays_within_a_few_times_what_the_sequences_need(self) -> None:
        table, story = SlotTable(), Story(list(range(1, 100_000)))
        for _ in range(300):
            story.admit(150, None, 0)
            if len(story.alive) > 8:
                story.end(0)
            table.update(list(readers_of(story.step([1], 0))))

        assert len(table.slots_c) == 2 * 4096


class TestTheTree:
    def test_does_not_look_at_old_slots_again(self) -> None:
        story, tree = Story(list(range(1, 10_000))), SlotTree()
        story.admit(100, None, 0)
        for _ in range(4):
            story.admit(20, 0, 60)
        tree.update(list(readers_of(story.step([1], 0))))
        common = list(tree.common)
        # As no core would do: what is seen of this was not looked up.
        for slots in story.alive:
            slots[:50] = 0

        tree.update(list(readers_of(story.step([1], 0))))

        assert tree.common == common == [0, 60, 60, 60, 60]

    @pytest.mark.parametrize("next_slots", [(5, 6, 7), (7, 6, 5), (6, 7, 5), (5, 7, 6)])
    def test_parts_those_that_were_alike_by_what_they_get(
        self, next_slots: tuple[int, ...]
    ) -> None:
        tree, origins = SlotTree(), (object(), object(), object(), object())
        rows = np.zeros(4, np.int64)
        before = [np.array(slots) for slots in ([1, 2], [1, 2], [1, 2], [3])]
        tree.update(list(readers_of(Layout(np.arange(5), tuple(before), rows, rows, origins))))
        after = [np.append(slots, n) for slots, n in zip(before, (*next_slots, 9), strict=True)]

        tree.update(list(readers_of(Layout(np.arange(5), tuple(after), rows, rows, origins))))

        assert [int(reader.context[-1]) for reader in tree.readers] == [5, 6, 7, 9]
        assert tree.common == [0, 2, 2, 0]

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(admitted=st.lists(ADMIT, min_size=1, max_size=8), history=HISTORIES)
    def test_is_in_order_and_knows_what_neighbours_share(
        self, admitted: list[Event], history: list[Event]
    ) -> None:
        tree = SlotTree()
        for layout in steps_of(admitted, history, 0):
            tree.update(list(readers_of(layout)))

            keys = [(reader.context.tolist(), reader.first) for reader in tree.readers]
            assert keys == sorted(keys)
            assert len(keys) == len(layout.context_b)
            for (a, _), (b, _), common in zip(keys, keys[1:], tree.common[1:], strict=False):
                assert a[:common] == b[:common]
                assert min(len(a), len(b)) == common or a[common] != b[common]
