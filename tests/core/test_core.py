"""The core, step by step: how requests end, how they are ended, and what others notice of it."""

from __future__ import annotations

import numpy as np
import pytest

from structgen.core.core import Core, Failure
from structgen.errors import NumericalError, PromptError, StepFailedError
from structgen.request import Delta, Finish
from structgen.sampling import Want
from tests.core.fakes import (
    PLAIN,
    TABLE,
    VOCABULARY,
    Bench,
    candidates_from,
    job,
    logprob,
    next_token,
    path_tags,
)

PROMPT = [0, 1, 2, 0, 1]


def outputs(prompt: list[int], count: int) -> list[int]:
    """What comes after a prompt."""
    path = list(prompt)
    for _ in range(count):
        token = next_token(path_tags(PLAIN, path)[-1])
        assert token is not None
        path.append(token)
    return path[len(prompt) :]


def text_of(tokens: list[int]) -> str:
    return b"".join(TABLE[token] for token in tokens).decode()


def finish(bench: Bench, request: int) -> Finish:
    end = bench.end(request)
    assert isinstance(end, Finish)
    return end


def deltas(bench: Bench, request: int) -> list[Delta]:
    return [outcome for outcome in bench.outcomes[request] if isinstance(outcome, Delta)]


def cached_length(bench: Bench, path: list[int]) -> int:
    return bench.core.schedule.radix.peek(PLAIN, np.array(path, np.int64))[0]


class TestSubmitting:
    def test_refuses_an_empty_prompt(self) -> None:
        with pytest.raises(PromptError, match="the prompt is empty"):
            Bench().submit([])

    def test_refuses_an_empty_prompt_whose_log_probabilities_are_wanted(self) -> None:
        with pytest.raises(PromptError, match="the prompt is empty"):
            Bench().submit([], want=Want(prompt_logprobs=0))

    def test_leaves_nothing_of_what_it_refused(self) -> None:
        bench = Bench(slots=4)
        with pytest.raises(PromptError):
            bench.submit(PROMPT, max_tokens=4)

        assert not bench.core.has_work

    def test_works_while_a_step_is_in_flight(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.plan()
        two = bench.submit(PROMPT)
        bench.land()
        bench.run()

        assert bench.tokens(two) == outputs(PROMPT, 1)


class TestTheEnd:
    def test_comes_with_the_last_token_that_is_allowed(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=6)
        bench.run()

        assert bench.tokens(one) == outputs(PROMPT, 6)
        assert finish(bench, one).reason == "length"

    def test_comes_with_an_end_token_that_is_not_given_out(self) -> None:
        bench = Bench()
        expected = outputs(PROMPT, 6)
        end = expected[3]
        one = bench.submit(PROMPT, max_tokens=6, end_ids={end})
        bench.run()

        assert bench.tokens(one) == expected[: expected.index(end)]
        assert (finish(bench, one).reason, finish(bench, one).matched) == ("stop", end)

    def test_comes_with_a_stop_token_of_the_request(self) -> None:
        bench = Bench()
        stop = outputs(PROMPT, 1)[0]
        one = bench.submit(PROMPT, max_tokens=6, stop_token_ids=(stop,))
        bench.run()

        assert bench.tokens(one) == []
        assert finish(bench, one).matched == stop

    def test_does_not_come_with_an_end_token_that_is_to_be_ignored(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=6, end_ids=range(VOCABULARY), ignore_eos=True)
        bench.run()

        assert len(bench.tokens(one)) == 6

    def test_does_not_come_before_the_least_number_of_tokens(self) -> None:
        bench = Bench()
        stops = outputs(PROMPT, 1)
        one = bench.submit(PROMPT, max_tokens=9, min_tokens=4, stop_token_ids=stops)
        bench.run()

        assert len(bench.tokens(one)) >= 4
        assert stops[0] not in bench.tokens(one)

    def test_comes_for_a_job_that_samples_nothing_when_its_prompt_is_computed(self) -> None:
        bench = Bench(chunk_size=2)
        one = bench.submit(PROMPT, samples=False)
        bench.run()

        assert deltas(bench, one)[0].finish == finish(bench, one)
        assert finish(bench, one).usage.completion_tokens == 0
        assert cached_length(bench, PROMPT) == len(PROMPT)

    def test_leaves_no_slot_behind(self) -> None:
        bench = Bench()
        bench.submit(PROMPT, max_tokens=6)
        bench.run()

        assert bench.core.pool.free + bench.core.schedule.radix.evictable == bench.core.pool.total


class TestStopStrings:
    def test_hold_back_the_tokens_that_may_belong_to_one(self) -> None:
        bench = Bench()
        expected = outputs(PROMPT, 6)
        begins = text_of(expected[:2])
        one = bench.submit(PROMPT, max_tokens=6, stop=(begins + "no",))
        bench.step()
        bench.step()
        held = bench.tokens(one)
        bench.run()

        assert held == []
        assert bench.tokens(one) == expected

    def test_cut_off_tokens_that_nobody_has_seen(self) -> None:
        bench = Bench()
        expected = outputs(PROMPT, 6)
        stop = text_of(expected[2:5])
        one = bench.submit(PROMPT, max_tokens=6, stop=(stop,))
        bench.run()

        assert bench.tokens(one) == expected[:2]
        assert "".join(delta.text for delta in deltas(bench, one)) == text_of(expected[:2])
        assert (finish(bench, one).reason, finish(bench, one).matched) == ("stop", stop)

    def test_cut_off_their_log_probabilities_too(self) -> None:
        bench = Bench()
        expected = outputs(PROMPT, 6)
        stop = text_of(expected[2:5])
        one = bench.submit(PROMPT, max_tokens=6, stop=(stop,), want=Want(logprobs=True))
        bench.run()
        entries = [entry for delta in deltas(bench, one) for entry in delta.logprobs]

        assert [entry.token for entry in entries] == expected[:2]

    def test_count_in_the_usage(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=6, stop=(text_of(outputs(PROMPT, 6)[2:5]),))
        bench.run()

        assert finish(bench, one).usage.completion_tokens == 5

    def test_do_not_end_the_output_before_the_least_number_of_tokens(self) -> None:
        bench = Bench()
        first = text_of(outputs(PROMPT, 1))
        one = bench.submit(PROMPT, max_tokens=2, min_tokens=2, stop=(first,))
        bench.run()

        assert bench.tokens(one)[:1] == outputs(PROMPT, 1)


class TestLogProbabilities:
    @pytest.mark.parametrize("chunk_size", [1, 2, 3, 16])
    @pytest.mark.parametrize("start", [0, 1, 3, 4])
    @pytest.mark.parametrize("warm", [False, True])
    def test_of_the_prompt_are_complete_and_in_order(
        self, chunk_size: int, start: int, warm: bool
    ) -> None:
        bench = Bench(chunk_size=chunk_size)
        if warm:
            bench.submit(PROMPT)
            bench.run()
        one = bench.submit(PROMPT, want=Want(prompt_logprobs=start, top_logprobs=2))
        bench.run()
        entries = [e for delta in deltas(bench, one) for e in delta.prompt_logprobs]
        tags = [0, *path_tags(PLAIN, PROMPT)]

        assert [entry.token for entry in entries] == PROMPT[start:]
        assert [entry.logprob for entry in entries] == [
            logprob(tags[index], PROMPT[index]) if index else None
            for index in range(start, len(PROMPT))
        ]

    @pytest.mark.parametrize("start", [5, 6, 99])
    def test_of_a_prompt_are_none_behind_its_end(self, start: int) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, want=Want(prompt_logprobs=start))
        bench.run()

        assert [d.prompt_logprobs for d in deltas(bench, one)] == [()]

    def test_of_the_prompt_come_with_the_first_token_only(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=3, want=Want(prompt_logprobs=0))
        bench.run()

        assert [len(d.prompt_logprobs) for d in deltas(bench, one)] == [5, 0, 0]

    def test_of_a_scored_prompt_come_at_the_end(self) -> None:
        bench = Bench(chunk_size=2)
        one = bench.submit(PROMPT, samples=False, want=Want(prompt_logprobs=3))
        bench.run()

        assert [e.token for e in deltas(bench, one)[-1].prompt_logprobs] == PROMPT[3:]

    def test_of_the_output_stand_beside_its_tokens(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=3, want=Want(logprobs=True))
        bench.run()
        entries = [entry for delta in deltas(bench, one) for entry in delta.logprobs]
        tags = path_tags(PLAIN, [*PROMPT, *outputs(PROMPT, 3)])[4:]

        assert [e.logprob for e in entries] == [
            logprob(tag, token) for tag, token in zip(tags, outputs(PROMPT, 3), strict=False)
        ]


class TestCandidates:
    EACH = ([1], [4, 0, 2], [0, 3])

    def submit(self, bench: Bench, prompt: list[int] = PROMPT) -> int:
        """Score candidates for the last tokens of a prompt, and for the one behind it."""
        wanted = candidates_from(len(prompt) - 2, *self.EACH)
        return bench.submit(prompt, samples=False, candidates=wanted)

    def entries(self, bench: Bench, request: int) -> list[tuple[int, float | None]]:
        found = [e for delta in deltas(bench, request) for e in delta.prompt_logprobs]
        return [(entry.token, entry.logprob) for entry in found]

    def expected(self, prompt: list[int] = PROMPT) -> list[tuple[int, float | None]]:
        tags = path_tags(PLAIN, prompt)[-3:]
        return [
            (token, logprob(tag, token))
            for tag, ids in zip(tags, self.EACH, strict=True)
            for token in ids
        ]

    @pytest.mark.parametrize("chunk_size", [1, 2, 3, 16])
    @pytest.mark.parametrize("radix", [True, False])
    @pytest.mark.parametrize("warm", [False, True])
    def test_get_their_log_probabilities_in_order(
        self, chunk_size: int, radix: bool, warm: bool
    ) -> None:
        bench = Bench(chunk_size=chunk_size, radix=radix)
        if warm:
            bench.submit(PROMPT)
            bench.run()
        one = self.submit(bench)
        bench.run()

        assert self.entries(bench, one) == self.expected()
        assert finish(bench, one).reason == "length"

    def test_cost_one_row_a_position_however_many_they_are(self) -> None:
        bench = Bench()
        self.submit(bench)

        assert len(bench.plan().logit_rows_r) == len(self.EACH)

    def test_of_a_warm_prompt_run_only_the_rows_that_tell_of_them(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.run()
        one = self.submit(bench)
        batch = bench.plan()

        assert bench.planned() == [(one, 2, 3)]
        assert batch.layout.slots_t.tolist() == [0, 0, 0]

    def test_are_found_by_the_side_of_requests_that_sample(self) -> None:
        bench = Bench()
        one, two = bench.submit(PROMPT, max_tokens=3), self.submit(bench)
        three = bench.submit([4, *PROMPT], max_tokens=3)
        bench.run()

        assert self.entries(bench, two) == self.expected()
        assert bench.tokens(one) == outputs(PROMPT, 3)
        assert bench.tokens(three) == outputs([4, *PROMPT], 3)

    def test_survive_a_retraction(self) -> None:
        prompt = [*PROMPT, *PROMPT]
        bench = Bench(slots=16, chunk_size=1)
        bench.core.schedule._expected = 0.0
        first = bench.submit([4], max_tokens=15)
        one = self.submit(bench, prompt)
        bench.run()

        assert bench.core.schedule.counters.retractions > 0
        assert self.entries(bench, one) == self.expected(prompt)
        assert bench.tokens(first) == outputs([4], 15)

    def test_that_are_not_finite_fail_their_job(self) -> None:
        bench = Bench()
        one, two = self.submit(bench), bench.submit([4, *PROMPT])
        bench.plan()
        bench.land(broken={one})

        assert isinstance(bench.end(one), NumericalError)
        assert bench.tokens(two) == outputs([4, *PROMPT], 1)

    def test_that_are_finite_prove_the_values_they_come_from(self) -> None:
        bench = Bench()
        self.submit(bench)
        bench.run()
        one = bench.submit([*PROMPT, 3, 3])
        bench.plan()
        bench.land(poisoned={one})

        assert cached_length(bench, [*PROMPT, 3, 3]) == len(PROMPT)

    def test_of_an_aborted_job_bring_no_word(self) -> None:
        bench = Bench()
        one = self.submit(bench)
        bench.plan()
        bench.core.abort(one)

        assert bench.land() == []
        assert not bench.core.has_work

    @pytest.mark.parametrize(
        ("first", "each", "message"),
        [
            (0, [[1]] * 6, "a token before each"),
            (6, [], "a token before each"),
            (4, [[1]], "left out"),
            (5, [[]], "without candidates"),
        ],
    )
    def test_must_fit_their_prompt(self, first: int, each: list[list[int]], message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            Bench().submit(PROMPT, samples=False, candidates=candidates_from(first, *each))


class TestAdmission:
    def test_is_told_once_of_each_request(self) -> None:
        bench = Bench(chunk_size=4, max_running=2)
        one, two, three = (bench.submit([*PROMPT, last], max_tokens=2) for last in (0, 1, 2))
        told = []
        while bench.core.has_work:
            bench.plan()
            told.append(bench.core.admitted)
            bench.land()

        assert [each for each in told if each] == [(one,), (two,), (three,)]
        assert told[0] == (one,)

    def test_is_not_told_again_after_a_retraction(self) -> None:
        bench = Bench(slots=20, chunk_size=24)
        bench.core.schedule._expected = 0.0
        for first in range(2):
            bench.submit([first, 0, 1, 2], max_tokens=16)
        told: list[int] = []
        while bench.core.has_work:
            bench.plan()
            told += bench.core.admitted
            bench.land()

        assert bench.core.schedule.counters.retractions > 0
        assert told == [1, 2]


class TestUsage:
    def test_counts_prompt_cache_and_output(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.run()
        one = bench.submit([*PROMPT, 2, 2], max_tokens=3)
        bench.run()
        usage = finish(bench, one).usage

        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (7, 5, 3)

    def test_counts_the_end_token_as_sampled(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=6, end_ids=range(VOCABULARY))
        bench.run()

        assert finish(bench, one).usage.completion_tokens == 1


class TestAborting:
    def test_a_request_that_waits_forgets_it_at_once(self) -> None:
        bench = Bench()
        bench.core.abort(bench.submit(PROMPT))

        assert not bench.core.has_work
        assert bench.core.plan() is None

    def test_a_request_between_steps_frees_its_slots_at_once(self) -> None:
        bench = Bench(radix=False)
        one = bench.submit(PROMPT, max_tokens=9)
        bench.step()

        bench.core.abort(one)

        assert bench.core.pool.free == bench.core.pool.total

    def test_a_request_in_flight_keeps_its_slots_until_the_commit(self) -> None:
        bench = Bench(radix=False)
        one = bench.submit(PROMPT, max_tokens=9)
        bench.plan()
        bench.core.abort(one)
        before = bench.core.pool.free
        bench.land()

        assert before == bench.core.pool.total - len(PROMPT)
        assert bench.core.pool.free == bench.core.pool.total
        assert not bench.core.has_work

    def test_a_request_between_chunks_leaves_what_was_computed_to_others(self) -> None:
        bench = Bench(chunk_size=3)
        one = bench.submit(PROMPT)
        bench.step()
        bench.core.abort(one)
        two = bench.submit(PROMPT)
        bench.run()

        assert finish(bench, two).usage.cached_tokens == 3
        assert bench.tokens(two) == outputs(PROMPT, 1)

    def test_a_retracted_request_forgets_it_at_once(self) -> None:
        bench = Bench(slots=20, chunk_size=24)
        bench.core.schedule._expected = 0.0
        bench.submit([0, *PROMPT], max_tokens=14)
        two = bench.submit([1, *PROMPT], max_tokens=14)
        while not bench.core.schedule.counters.retractions:
            bench.step()

        bench.core.abort(two)

        assert two not in bench.core._sequences

    def test_brings_no_word_of_it(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=9)
        bench.plan()
        bench.core.abort(one)

        assert bench.land() == []

    def test_twice_or_after_the_end_or_unknown_does_nothing(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT)
        bench.core.abort(bench.submit(PROMPT))
        bench.run()
        for request in (one, 2, 99):
            bench.core.abort(request)

        assert bench.core.totals.aborted == 1
        assert finish(bench, one).reason == "length"

    def test_one_of_several_that_share_a_prefix_leaves_the_others_whole(self) -> None:
        bench = Bench(chunk_size=3)
        one, two = bench.submit([*PROMPT, 2], max_tokens=5), bench.submit([*PROMPT, 0])
        bench.step()
        bench.core.abort(one)
        bench.run()

        assert bench.tokens(two) == outputs([*PROMPT, 0], 1)


class TestFlushing:
    def test_drops_what_nobody_holds(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.run()

        assert bench.core.flush() == len(PROMPT)
        assert bench.core.pool.free == bench.core.pool.total

    def test_keeps_what_a_running_request_holds(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=3)
        bench.step()
        bench.core.flush()
        bench.run()

        assert bench.tokens(one) == outputs(PROMPT, 3)

    def test_frees_slots_only_after_the_step_in_flight(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.run()
        bench.submit([4, 4])
        bench.plan()
        bench.core.flush()
        before = bench.core.pool.free
        bench.land()

        assert bench.core.pool.free == before + len(PROMPT)


class TestAStepThatRaises:
    def test_fails_its_requests_with_the_cause(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=3)
        error = MemoryError("no more")
        bench.plan()
        bench.crash(error)
        failed = bench.end(one)

        assert isinstance(failed, StepFailedError)
        assert failed.__cause__ is error
        assert "no more" in str(failed)

    def test_fails_nobody_else(self) -> None:
        bench = Bench(max_running=1)
        bench.submit(PROMPT, max_tokens=3)
        two = bench.submit(PROMPT, max_tokens=3)
        bench.plan()
        bench.crash(RuntimeError("out of luck"))
        bench.run()

        assert bench.tokens(two) == outputs(PROMPT, 3)

    def test_leaves_nothing_of_what_it_should_have_computed(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.plan()
        bench.crash(RuntimeError("out of luck"))

        assert cached_length(bench, PROMPT) == 0
        assert bench.core.pool.free == bench.core.pool.total

    def test_leaves_what_earlier_steps_computed(self) -> None:
        bench = Bench(chunk_size=3)
        bench.submit(PROMPT)
        bench.step()
        bench.plan()
        bench.crash(RuntimeError("out of luck"))

        assert cached_length(bench, PROMPT) == 3

    def test_has_no_word_for_a_request_that_was_aborted(self) -> None:
        bench = Bench()
        one, two = bench.submit(PROMPT), bench.submit(PROMPT)
        bench.plan()
        bench.core.abort(one)

        assert [outcome.request for outcome in bench.crash(RuntimeError())] == [two]

    def test_can_be_survived_by_a_scope_that_was_opened_meanwhile(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.plan()
        bench.core.open_scope(1, PLAIN, np.array(PROMPT))
        bench.crash(RuntimeError("out of luck"))

        assert bench.core.schedule.radix.pinned == 0
        assert bench.core.pool.free == bench.core.pool.total


class TestBrokenLogits:
    def test_fail_their_request(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT)
        bench.plan()
        bench.land(broken={one})

        assert isinstance(bench.end(one), NumericalError)

    def test_fail_a_request_whose_tokens_are_all_banned(self) -> None:
        bench = Bench()
        one = bench.submit(
            PROMPT, max_tokens=2, min_tokens=1, stop_token_ids=tuple(range(VOCABULARY))
        )
        bench.run()

        assert isinstance(bench.end(one), NumericalError)

    def test_fail_nobody_else(self) -> None:
        bench = Bench()
        one, two = bench.submit([*PROMPT, 0]), bench.submit([4, *PROMPT])
        bench.plan()
        bench.land(poisoned={one}, broken={one})

        assert bench.tokens(two) == outputs([4, *PROMPT], 1)

    def test_do_not_fail_who_shares_a_good_prefix_of_the_same_step(self) -> None:
        bench = Bench()
        one, two = bench.submit([*PROMPT, 0]), bench.submit([*PROMPT, 1], max_tokens=3)
        bench.plan()
        bench.land(broken={one})
        bench.run()

        assert bench.tokens(two) == outputs([*PROMPT, 1], 3)

    def test_take_the_values_behind_them_out_of_the_cache(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT)
        bench.plan()
        bench.land(poisoned={one})
        two = bench.submit(PROMPT)
        bench.run()

        assert bench.tokens(two) == outputs(PROMPT, 1)

    def test_take_them_out_even_if_the_request_was_aborted_meanwhile(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT)
        bench.plan()
        bench.core.abort(one)
        bench.land(poisoned={one})

        assert cached_length(bench, PROMPT) == 0

    def test_take_them_out_even_if_a_scope_has_pinned_them(self) -> None:
        bench = Bench()
        bench.core.open_scope(1, PLAIN, np.array(PROMPT))
        one = bench.submit(PROMPT, scope=1)
        bench.plan()
        bench.land(poisoned={one})
        two = bench.submit(PROMPT, scope=1)
        bench.run()

        assert bench.tokens(two) == outputs(PROMPT, 1)
        assert bench.core.schedule.radix.pinned == len(PROMPT)

    def test_leave_in_the_cache_what_others_have_used_well(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.run()
        one = bench.submit([*PROMPT, 3, 3])
        bench.plan()
        bench.land(poisoned={one})

        assert cached_length(bench, [*PROMPT, 3, 3]) == len(PROMPT)

    def test_leave_a_pin_on_what_others_have_used_well(self) -> None:
        bench = Bench()
        bench.core.open_scope(1, PLAIN, np.array([*PROMPT, 3, 3]))
        bench.submit(PROMPT, scope=1)
        bench.run()
        one = bench.submit([*PROMPT, 3, 3], scope=1)
        bench.plan()
        bench.land(poisoned={one})

        assert bench.core.schedule.radix.pinned == len(PROMPT)

    def test_fail_who_reads_what_they_spoilt_and_nobody_after(self) -> None:
        bench = Bench(chunk_size=7)
        one, two = bench.submit(PROMPT), bench.submit([*PROMPT, *PROMPT])
        bench.plan()
        bench.land(poisoned={one})
        bench.run()
        three = bench.submit([*PROMPT, *PROMPT])
        bench.run()

        assert isinstance(bench.end(two), NumericalError)
        assert bench.tokens(three) == outputs([*PROMPT, *PROMPT], 1)

    def test_are_counted_as_failures(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT)
        bench.plan()
        outcomes = bench.land(broken={one})

        assert [type(outcome) for outcome in outcomes] == [Failure]
        assert bench.core.totals.failed == 1


class TestABatch:
    def test_pads_its_width_with_rows_that_touch_nothing(self) -> None:
        core = Core(64, padded_rows=lambda rows: -(-rows // 8) * 8)
        core.submit(job(1, PROMPT))
        batch = core.plan()
        assert batch is not None

        assert len(batch.tokens_t) == 8
        assert batch.layout.slots_t.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
        assert batch.layout.query_start_b1.tolist() == [0, 5]

    def test_must_be_committed_before_the_next_is_planned(self) -> None:
        bench = Bench()
        bench.submit(PROMPT)
        bench.plan()

        with pytest.raises(AssertionError, match="has not been committed"):
            bench.plan()

    def test_can_be_committed_once(self) -> None:
        bench = Bench()
        bench.submit(PROMPT, max_tokens=3)
        batch = bench.plan()
        bench.land()

        with pytest.raises(AssertionError, match="no step is in flight"):
            bench.core.fail(batch, RuntimeError())
