"""The pool of slots: whose a slot is, and in which runs slots are handed out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgen.core.pool import Pool


def slots(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


class TestTakingSlots:
    def test_never_gives_the_padding_slot(self) -> None:
        pool = Pool(4)

        assert pool.take(4).tolist() == [1, 2, 3, 4]

    def test_gives_one_run_where_one_is_long_enough(self) -> None:
        pool = Pool(10)
        pool.take(10)
        pool.give_back(slots(1, 2, 4, 5, 6, 9))

        assert pool.take(3).tolist() == [4, 5, 6]

    def test_goes_on_behind_a_slot_if_it_can(self) -> None:
        pool = Pool(10)
        pool.take(6)
        pool.give_back(slots(1, 2))

        assert pool.take(2, after=6).tolist() == [7, 8]

    def test_takes_what_fits_behind_that_slot_and_the_rest_elsewhere(self) -> None:
        pool = Pool(10)
        pool.take(10)
        pool.give_back(slots(1, 2, 3, 7, 8))

        assert pool.take(4, after=6).tolist() == [7, 8, 1, 2]

    def test_pieces_runs_together_where_none_is_long_enough(self) -> None:
        pool = Pool(6)
        pool.take(6)
        pool.give_back(slots(1, 3, 5))

        assert pool.take(3).tolist() == [1, 3, 5]

    def test_gives_nothing_for_nothing(self) -> None:
        pool = Pool(3)

        assert pool.take(0).tolist() == []
        assert pool.free == 3

    def test_cannot_give_more_than_there_are(self) -> None:
        pool = Pool(3)

        with pytest.raises(AssertionError, match="4 slots asked for, 3 free"):
            pool.take(4)


class TestGivingBack:
    def test_joins_neighbours_to_one_run(self) -> None:
        pool = Pool(6)
        pool.take(6)

        for slot in (2, 4, 3, 6, 5, 1):
            pool.give_back(slots(slot))

        assert (pool._starts, pool._stops) == ([1], [7])

    @pytest.mark.parametrize("twice", [slots(1), slots(3), slots(2, 3), slots(1, 2, 3, 4)])
    def test_notices_what_is_free_already(
        self, twice: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> None:
        pool = Pool(4)
        pool.take(4)
        pool.give_back(slots(1, 3))

        with pytest.raises(AssertionError, match="given back twice"):
            pool.give_back(twice)

    def test_notices_a_slot_twice_in_one_gift(self) -> None:
        pool = Pool(4)
        pool.take(4)

        with pytest.raises(AssertionError, match="given back twice"):
            pool.give_back(slots(2, 2))


class TestLimbo:
    def test_keeps_what_is_given_back_while_a_step_is_in_flight(self) -> None:
        pool = Pool(4)
        taken = pool.take(3)
        pool.launch()

        pool.give_back(taken)

        assert (pool.free, pool.in_limbo) == (1, 3)
        assert pool.limbo_slots().tolist() == [1, 2, 3]

    def test_ends_when_the_step_has_landed(self) -> None:
        pool = Pool(4)
        taken = pool.take(3)
        pool.launch()
        pool.give_back(taken)

        pool.land()

        assert (pool.free, pool.in_limbo) == (4, 0)
        assert pool.take(4).tolist() == [1, 2, 3, 4]

    def test_allows_one_step_at_a_time(self) -> None:
        pool = Pool(4)
        pool.launch()

        with pytest.raises(AssertionError, match="in flight already"):
            pool.launch()


class TestAnySequenceOfTakingAndGiving:
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 24)), max_size=40))
    def test_leaves_every_slot_with_one_owner(self, acts: list[tuple[bool, int, int]]) -> None:
        pool = Pool(24)
        owned: list[int] = []
        for takes, count, seed in acts:
            if takes:
                owned += pool.take(min(count, pool.free), after=seed).tolist()
            else:
                gift = [owned.pop(seed % len(owned)) for _ in range(min(count, len(owned)))]
                pool.give_back(slots(*gift))

        assert sorted(owned + pool.free_slots().tolist()) == list(range(1, 25))
