"""Who runs when, and with what: chunks, sharing, order, retraction, pins."""

from __future__ import annotations

import numpy as np
import pytest

from structgen.core.schedule import FORESEEN
from structgen.core.sequence import Sequence
from structgen.errors import PromptError
from structgen.request import Finish, Namespace
from structgen.sampling import Want
from tests.core.fakes import PLAIN, Bench, candidates_from, job


def tokens(count: int, first: int = 0) -> list[int]:
    """A prompt; two that differ in `first` share nothing."""
    return [first, *[index % 3 for index in range(1, count)]]


def ended(bench: Bench, request: int) -> bool:
    return isinstance(bench.end(request), Finish)


def cached(bench: Bench, request: int) -> int:
    finish = bench.end(request)
    assert isinstance(finish, Finish)
    return finish.usage.cached_tokens


class TestChunks:
    def test_spread_a_long_prompt_over_steps(self) -> None:
        bench = Bench(chunk_size=4)
        one = bench.submit(tokens(10))
        planned = []
        while bench.core.has_work:
            bench.plan()
            planned += bench.planned()
            bench.land()

        assert planned == [(one, 0, 4), (one, 4, 4), (one, 8, 2)]

    def test_are_shared_by_prompts_up_to_the_budget(self) -> None:
        bench = Bench(chunk_size=6)
        one, two = bench.submit(tokens(4)), bench.submit(tokens(5, first=1))

        bench.plan()

        assert bench.planned() == [(one, 0, 4), (two, 0, 2)]

    def test_of_prompts_run_in_one_step_with_decodes(self) -> None:
        bench = Bench(chunk_size=4)
        one = bench.submit(tokens(4), max_tokens=9)
        bench.step()
        two = bench.submit(tokens(4, first=1))

        bench.plan()

        assert bench.planned() == [(one, 4, 1), (two, 0, 4)]

    def test_are_not_made_smaller_by_decodes(self) -> None:
        bench = Bench(chunk_size=2)
        for first in range(3):
            bench.submit(tokens(1, first), max_tokens=9)
            bench.step()
        last = bench.submit(tokens(9, first=3))

        bench.plan()

        assert bench.planned()[-1] == (last, 0, 2)

    def test_are_not_more_than_may_run(self) -> None:
        bench = Bench(chunk_size=16, max_running=2)
        for first in range(3):
            bench.submit(tokens(2, first), max_tokens=3)

        bench.plan()

        assert len(bench.planned()) == 2


class TestRequestsThatShareAnUncachedPrefix:
    def test_compute_it_once_in_the_same_step(self) -> None:
        bench = Bench()
        prefix = tokens(6)
        one, two, three = (bench.submit([*prefix, last]) for last in (0, 1, 2))

        bench.plan()

        assert bench.planned() == [(one, 0, 7), (two, 6, 1), (three, 6, 1)]

    def test_score_each_token_of_it_once(self) -> None:
        bench = Bench(chunk_size=32)
        prefix = tokens(6)
        one = bench.submit(
            [*prefix, 0, 1], samples=False, candidates=candidates_from(6, [0, 1], [1], [2])
        )
        two = bench.submit([*prefix, 1], samples=False, candidates=candidates_from(7, [3]))
        three = bench.submit([*prefix, 0, 2], samples=False, candidates=candidates_from(8, [3]))

        batch = bench.plan()

        assert bench.planned() == [(one, 0, 8), (two, 6, 1), (three, 7, 1)]
        assert len(batch.logit_rows_r) == 3 + 1 + 1

    def test_find_the_right_values_there(self) -> None:
        bench, alone = Bench(), Bench(radix=False)
        for core in (bench, alone):
            for last in (0, 1, 2):
                core.submit([*tokens(6), last], max_tokens=5)
            core.run()

        assert [bench.tokens(n) for n in (1, 2, 3)] == [alone.tokens(n) for n in (1, 2, 3)]

    def test_count_it_as_cached_for_all_but_the_first(self) -> None:
        bench = Bench()
        one, two = bench.submit([*tokens(6), 0]), bench.submit([*tokens(6), 1])
        bench.run()

        assert (cached(bench, one), cached(bench, two)) == (0, 6)

    def test_compute_a_prompt_of_many_chunks_once(self) -> None:
        bench = Bench(chunk_size=4)
        one, two = bench.submit(tokens(14)), bench.submit(tokens(14))
        bench.run()

        assert bench.core.schedule.counters.prefilled_tokens == 14 + 1
        assert (cached(bench, one), cached(bench, two)) == (0, 13)

    def test_compute_it_each_for_itself_without_the_radix_cache(self) -> None:
        bench = Bench(radix=False)
        one, two = bench.submit([*tokens(6), 0]), bench.submit([*tokens(6), 1])

        bench.plan()

        assert bench.planned() == [(one, 0, 7), (two, 0, 7)]

    def test_share_nothing_over_namespaces(self) -> None:
        bench = Bench()
        one = bench.submit(tokens(6))
        two = bench.submit(tokens(6), namespace=Namespace(tenant="other"))

        bench.plan()

        assert bench.planned() == [(one, 0, 6), (two, 0, 6)]


class TestTheCache:
    def test_holds_the_prompt_and_all_of_the_output_but_its_last_token(self) -> None:
        bench = Bench()
        one = bench.submit(tokens(4), max_tokens=5)
        bench.run()
        whole = [*tokens(4), *bench.tokens(one)]

        assert bench.core.schedule.radix.peek(PLAIN, np.array([*whole, 0]))[0] == 4 + 5 - 1

    def test_always_leaves_a_token_to_compute(self) -> None:
        bench = Bench()
        bench.submit(tokens(6))
        bench.run()
        two = bench.submit(tokens(6))
        bench.plan()

        assert bench.planned() == [(two, 5, 1)]

    def test_is_not_written_to_by_a_token_that_was_there(self) -> None:
        bench = Bench()
        bench.submit(tokens(6))
        bench.run()
        bench.submit(tokens(6))

        assert bench.plan().layout.slots_t.tolist() == [0]

    def test_is_used_only_up_to_where_log_probabilities_are_wanted(self) -> None:
        bench = Bench()
        bench.submit(tokens(8))
        bench.run()
        two = bench.submit(tokens(8), want=Want(prompt_logprobs=5))
        bench.plan()

        assert bench.planned() == [(two, 4, 4)]


class TestOrder:
    def admitted(self, bench: Bench) -> list[int]:
        """Requests in the order in which they are first planned."""
        order: list[int] = []
        while bench.core.has_work:
            bench.plan()
            order += [request for request, _, _ in bench.planned() if request not in order]
            bench.land()
        return order

    def test_is_that_of_arrival_among_equals(self) -> None:
        bench = Bench(max_running=1)
        numbers = [bench.submit(tokens(3, first)) for first in range(4)]

        assert self.admitted(bench) == numbers

    def test_puts_a_higher_priority_first(self) -> None:
        bench = Bench(max_running=1)
        low, high = bench.submit(tokens(3)), bench.submit(tokens(3, first=1), priority=1)

        assert self.admitted(bench) == [high, low]

    def test_sees_a_higher_priority_behind_any_number_of_others(self) -> None:
        bench = Bench(max_running=1)
        for first in range(200):
            bench.submit(tokens(2, first % 5))
        high = bench.submit(tokens(3), priority=1)

        bench.plan()

        assert bench.planned()[0][0] == high

    def test_puts_the_longer_cache_hit_first(self) -> None:
        bench = Bench(max_running=1)
        bench.submit(tokens(8))
        bench.run()
        cold, warm = bench.submit(tokens(8, first=1)), bench.submit(tokens(8))

        assert self.admitted(bench) == [warm, cold]

    def test_lets_nobody_starve_under_a_stream_of_hits(self) -> None:
        bench = Bench(slots=256, max_running=1, chunk_size=64)
        bench.submit(tokens(60))
        bench.run()
        cold = bench.submit(tokens(60, first=4))
        passes = 0
        while not ended(bench, cold) and passes < 50:
            for _ in range(2):  # always more hits than can run
                bench.submit([*tokens(60), passes % 3])
            bench.step()
            passes += 1

        assert passes <= 3

    def test_bounds_the_wait_by_the_length_of_the_hit(self) -> None:
        bench = Bench(slots=2000, max_running=1, chunk_size=1000)
        bench.submit(tokens(640))
        bench.run()
        cold = bench.submit(tokens(60, first=4))
        passes = 0
        while not ended(bench, cold) and passes < 50:
            bench.submit([*tokens(640), passes % 3])
            bench.step()
            passes += 1

        assert 5 < passes <= 640 // 64 + 2


class TestPressure:
    def test_refuses_at_once_what_can_never_fit_and_says_by_how_much(self) -> None:
        bench = Bench(slots=10)

        with pytest.raises(
            PromptError,
            match=r"4 prompt tokens and up to 7 new ones need 11 slots, but the pool has 10",
        ):
            bench.submit(tokens(4), max_tokens=7)

    def test_runs_what_just_fits(self) -> None:
        bench = Bench(slots=10)
        one = bench.submit(tokens(4), max_tokens=6)
        bench.run()

        assert len(bench.tokens(one)) == 6

    def test_evicts_before_it_retracts(self) -> None:
        bench = Bench(slots=12)
        bench.submit(tokens(8))
        bench.run()
        bench.submit(tokens(8, first=1), max_tokens=4)
        bench.run()

        counters = bench.core.schedule.counters
        assert counters.evicted_tokens > 0
        assert counters.retractions == 0

    def test_lets_a_request_wait_that_would_soon_have_to_be_retracted(self) -> None:
        bench = Bench(slots=24, chunk_size=24)
        one = bench.submit(tokens(4), max_tokens=16)
        bench.submit(tokens(4, first=1), max_tokens=16)

        bench.plan()

        assert bench.planned() == [(one, 0, 4)]

    def test_does_not_keep_room_for_outputs_as_long_as_a_context(self) -> None:
        """Who names no limit may write to the end of the context, and hardly ever does."""
        bench = Bench(4 * FORESEEN, chunk_size=16)
        for first in range(4):
            bench.submit(tokens(2, first), max_tokens=4 * FORESEEN - 2)

        bench.plan()

        assert len(bench.planned()) == 4

    def test_calls_in_slots_taken_ahead_before_it_retracts(self) -> None:
        bench = Bench(slots=18)
        one = bench.submit(tokens(4), max_tokens=14)
        bench.step()
        bench.step()
        ahead = bench.core._sequences[one].allocated
        two = bench.submit(tokens(2, first=1))
        bench.step()

        assert ahead == 18
        assert ended(bench, two)
        assert bench.core.schedule.counters.retractions == 0

    def test_retracts_the_last_that_came(self) -> None:
        bench = Bench(slots=24, chunk_size=24)
        bench.core.schedule._expected = 0.0  # believes that nobody will write anything
        one, two, three = (bench.submit(tokens(4, f), max_tokens=16) for f in range(3))
        bench.step()
        while not bench.core.schedule.counters.retractions:
            bench.step()

        waiting = [sequence.id for sequence in bench.core.schedule.waiting]
        assert waiting[0] == three
        assert one not in waiting
        assert two in {sequence.id for sequence in bench.core.schedule.running}

    def test_never_retracts_the_first(self) -> None:
        bench = Bench(slots=20, chunk_size=24)
        bench.core.schedule._expected = 0.0
        one, two = (bench.submit(tokens(4, first), max_tokens=16) for first in range(2))
        steps = 0
        while not ended(bench, one) and steps < 50:
            bench.step()
            steps += 1

        assert steps == 16
        assert not ended(bench, two)

    def test_does_not_show_in_what_comes_out(self) -> None:
        tight, roomy = Bench(slots=20, chunk_size=5), Bench(slots=200)
        for bench in (tight, roomy):
            for first in range(4):
                bench.submit(tokens(4, first), max_tokens=16)
            bench.core.schedule._expected = 0.0
            bench.run()

        assert tight.core.schedule.counters.retractions > 0
        assert [tight.tokens(n) for n in range(1, 5)] == [roomy.tokens(n) for n in range(1, 5)]

    def overtaken(self, max_tokens: int) -> tuple[Bench, int, int]:
        """A request in whose way another one decodes the very path that it has as its prompt.

        Returns the bench, before the last chunk of the prompt, and the numbers of the two.
        """
        prompt = [0, 1]
        prompt += Bench().run_alone(prompt, max_tokens=8)
        bench = Bench(slots=17, chunk_size=3)
        bench.core.schedule._expected = 0.0
        late = bench.submit(prompt[:2], max_tokens=15)
        for _ in range(7):
            bench.step()
        first = bench.submit(prompt, max_tokens=max_tokens, priority=1)
        for _ in range(2):
            bench.step()
        return bench, first, late

    def test_lets_a_request_take_over_what_it_retracted_another_for(self) -> None:
        bench, first, _ = self.overtaken(max_tokens=2)
        batch = bench.plan()  # there is no room for the last chunk; then it is found computed

        assert bench.planned()[0] == (first, 8, 2)
        assert batch.layout.slots_t[:2].tolist() == [0, 0]
        bench.land()
        bench.run()
        prompt = Bench().run_alone([0, 1], max_tokens=10)
        assert bench.tokens(first) == prompt[8:]

    def test_writes_nothing_for_a_retracted_request_that_finds_all_its_tokens(self) -> None:
        bench, first, late = self.overtaken(max_tokens=5)
        bench.core.schedule._max_running = 1  # so that it is not back too soon
        while not ended(bench, first):
            bench.step()
        batch = bench.plan()

        assert [request for request, _, _ in bench.planned()] == [late]
        assert batch.layout.slots_t.tolist() == [0]
        bench.land()
        bench.run()
        assert bench.tokens(late) == Bench().run_alone([0, 1], max_tokens=15)

    def test_counts_what_a_retracted_request_finds_again_as_its_own(self) -> None:
        bench = Bench(slots=20, chunk_size=24)
        bench.core.schedule._expected = 0.0
        numbers = [bench.submit(tokens(4, first), max_tokens=16) for first in range(2)]
        bench.run()

        assert bench.core.schedule.counters.retractions > 0
        assert [cached(bench, number) for number in numbers] == [0, 0]


class TestScopes:
    def scope(self, bench: Bench, prefix: list[int], number: int = 1) -> int:
        bench.core.open_scope(number, PLAIN, np.array(prefix))
        return number

    def test_keep_a_cached_prefix_from_eviction(self) -> None:
        bench = Bench()
        bench.submit(tokens(8))
        bench.run()
        self.scope(bench, tokens(6))

        assert bench.core.flush() == 2

    def test_let_go_of_it_when_they_close(self) -> None:
        bench = Bench()
        bench.submit(tokens(8))
        bench.run()
        bench.core.close_scope(self.scope(bench, tokens(6)))

        assert bench.core.flush() == 8

    def test_keep_what_their_requests_compute(self) -> None:
        bench = Bench()
        scope = self.scope(bench, tokens(6))
        bench.submit([*tokens(6), 0], scope=scope)
        bench.run()

        assert bench.core.schedule.radix.pinned == 6

    def test_keep_nothing_that_strangers_compute(self) -> None:
        bench = Bench()
        self.scope(bench, tokens(6))
        bench.submit([*tokens(6), 0])
        bench.run()

        assert bench.core.schedule.radix.pinned == 0

    def test_keep_at_most_half_of_the_pool(self) -> None:
        bench = Bench(slots=20)
        bench.submit(tokens(11))
        bench.run()
        self.scope(bench, tokens(11))

        assert bench.core.schedule.radix.pinned == 0
        assert bench.core.schedule.scopes[1].soft

    def test_keep_their_own_pin_when_another_asks_for_too_much(self) -> None:
        bench = Bench(slots=20)
        bench.submit(tokens(6))
        bench.submit(tokens(6, first=1))
        bench.run()
        self.scope(bench, tokens(6), 1)
        self.scope(bench, tokens(6, first=1), 2)

        assert bench.core.schedule.radix.pinned == 6
        assert [scope.soft for scope in bench.core.schedule.scopes.values()] == [False, True]

    def test_give_way_to_a_request_that_would_never_run_otherwise(self) -> None:
        bench = Bench(slots=20)
        bench.submit(tokens(8))
        bench.run()
        self.scope(bench, tokens(8))
        big = bench.submit(tokens(15, first=1), max_tokens=5)
        bench.run()

        assert len(bench.tokens(big)) == 5

    def test_do_not_give_way_as_long_as_somebody_runs(self) -> None:
        bench = Bench(slots=20)
        bench.submit(tokens(8))
        bench.run()
        self.scope(bench, tokens(8))
        bench.submit(tokens(2, first=2), max_tokens=4)
        bench.step()
        bench.submit(tokens(12, first=1), max_tokens=5)
        bench.step()

        assert bench.core.schedule.radix.pinned == 8

    def test_keep_what_had_landed_when_a_later_step_fails(self) -> None:
        bench = Bench(chunk_size=4)
        scope = self.scope(bench, tokens(8))
        bench.submit(tokens(8), scope=scope)
        bench.step()
        bench.plan()
        bench.crash(RuntimeError("out of luck"))

        assert bench.core.schedule.radix.pinned == 4

    def test_do_nothing_without_the_radix_cache(self) -> None:
        bench = Bench(radix=False)
        scope = self.scope(bench, tokens(6))
        bench.submit(tokens(6), scope=scope)
        bench.run()
        bench.core.close_scope(scope)

        assert bench.core.pool.free == bench.core.pool.total


class TestSlotsThatABatchHasSeen:
    def computed(self) -> Sequence:
        sequence = Sequence(job(1, [0, 1, 2, 0], max_tokens=2), 0)
        sequence.slots[:4] = 5, 6, 7, 8
        sequence.computed = sequence.allocated = 4
        return sequence

    def test_stay_when_others_are_put_in_their_place(self) -> None:
        sequence = self.computed()
        seen = sequence.slots[:4]

        sequence.replace_slots(np.array([5, 6, 9]))

        assert seen.tolist() == [5, 6, 7, 8]
        assert sequence.slots[:4].tolist() == [5, 6, 9, 8]

    def test_stay_when_they_are_given_back(self) -> None:
        sequence = self.computed()
        seen = sequence.slots[:4]

        sequence.forget_slots()
        sequence.replace_slots(np.array([3, 2, 1]))

        assert seen.tolist() == [5, 6, 7, 8]
        assert sequence.own_slots().size == 0
