"""Forced tokens in the core: known without a draw, and otherwise tokens like all others."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from structgen.core.batch import Batch, Picked
from structgen.core.core import Core, Failure
from structgen.core.promise import PromisedText
from structgen.core.sequence import Job
from structgen.errors import GenerationError, InvalidOutputError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Mask, Vocabulary
from structgen.request import Delta, Finish, Regex, Request, Tokens
from structgen.sampling import Sampling, Want
from tests.core.fakes import PLAIN, Bench, Script, Strict, logprob, path_tags, root_tag

PROMPT = [0, 1, 2, 0, 1]
FREE = "abcde"


def places(text: str) -> tuple[str, ...]:
    """A script's places: letters, and a dot for any letter."""
    return tuple(FREE if letter == "." else letter for letter in text)


def finish(bench: Bench, request: int) -> Finish:
    end = bench.end(request)
    assert isinstance(end, Finish)
    return end


def text_of(bench: Bench, request: int) -> str:
    return "".join(o.text for o in bench.outcomes.get(request, ()) if isinstance(o, Delta))


class TestForcedTokens:
    def test_cost_no_step_of_their_own(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=12, script=Script(places("..abcd..ab..")))
        bench.run()

        assert bench.core.totals.steps == 6
        assert finish(bench, one).forced == 6
        assert finish(bench, one).usage.completion_tokens == 12

    def test_are_computed_beside_the_token_before_them(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=7, script=Script(places(".abcd..")))
        bench.step()
        bench.plan()

        assert bench.planned() == [(one, 5, 5)]

    def test_at_the_start_are_computed_with_the_prompt(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=4, script=Script(places("abc.")))
        bench.plan()

        assert bench.planned() == [(one, 0, 8)]

    def test_are_told_with_the_token_before_them(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=9, script=Script(places(".abcd..")))
        bench.step()

        assert text_of(bench, one)[1:] == "abcd"

    def test_to_the_end_finish_without_another_step(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=9, script=Script(places(".abcd")))
        bench.run()

        assert bench.core.totals.steps == 1
        assert finish(bench, one).reason == "stop"
        assert finish(bench, one).complete

    def test_that_are_all_there_is_take_one_step(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=9, script=Script(places("abcd")))
        bench.run()

        assert bench.core.totals.steps == 1
        assert text_of(bench, one) == "abcd"

    def test_do_not_go_beyond_max_tokens(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=3, script=Script(places(".abcd")))
        bench.run()

        end = finish(bench, one)
        assert (end.reason, end.complete, end.forced) == ("length", False, 2)
        assert text_of(bench, one)[1:] == "ab"

    def test_that_fill_max_tokens_exactly_are_complete(self) -> None:
        bench = Bench()
        script = Script(places(".abcd."), frozenset({5}))
        one = bench.submit(PROMPT, max_tokens=5, script=script)
        bench.run()

        end = finish(bench, one)
        assert (end.reason, end.complete) == ("length", True)

    def test_end_where_a_stop_string_does(self) -> None:
        bench = Bench()
        script = Script(places(".abcd."), frozenset({2}))
        one = bench.submit(PROMPT, max_tokens=9, script=script, stop=("bc",))
        bench.run()

        end = finish(bench, one)
        assert text_of(bench, one)[1:] == "a"
        assert (end.reason, end.matched, end.complete) == ("stop", "bc", True)
        assert end.usage.completion_tokens == 4
        assert end.forced == 2  # after the place where it might have ended, and up to the stop

    def test_wait_for_their_log_probabilities_where_these_are_wanted(self) -> None:
        bench = Bench()
        script = Script(places(".abcd."))
        one = bench.submit(PROMPT, max_tokens=9, script=script, want=Want(logprobs=True))
        bench.step()
        first = text_of(bench, one)
        bench.run()

        found = [e for o in bench.outcomes[one] if isinstance(o, Delta) for e in o.logprobs]
        tokens = bench.tokens(one)
        tags = [root_tag(PLAIN), *path_tags(PLAIN, [*PROMPT, *tokens])][len(PROMPT) :]
        assert len(first) == 1
        assert [entry.token for entry in found] == tokens
        assert [e.logprob for e in found] == [
            logprob(tag, token) for tag, token in zip(tags, tokens, strict=False)
        ]

    @pytest.mark.parametrize("jump", [True, False])
    def test_count_towards_min_tokens(self, *, jump: bool) -> None:
        bench = Bench()
        script = Script(places(".abcd...."), frozenset({1, 6, 7}))
        one = bench.submit(
            PROMPT,
            max_tokens=9,
            min_tokens=6,
            script=script,
            stop_token_ids=(0, 1, 2, 3, 4),
            jump=jump,
        )
        bench.run()

        assert finish(bench, one).usage.completion_tokens == 7

    def test_are_not_taken_where_jumping_is_off(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=6, script=Script(places(".abcd.")), jump=False)
        bench.run()

        assert bench.core.totals.steps == 6
        assert finish(bench, one).forced == 0


class TestTheChunk:
    def test_is_shared_by_prompts_and_forced_tokens(self) -> None:
        bench = Bench(chunk_size=8)
        for _ in range(3):
            bench.submit(PROMPT, max_tokens=8, script=Script(places(".aaaaaa.")))
        counts = []
        while bench.core.has_work:
            bench.plan()
            counts.append(sum(count for _, _, count in bench.planned()))
            bench.land()

        assert max(counts) <= 8 + 3

    def test_leaves_every_request_its_drawn_token(self) -> None:
        bench = Bench(chunk_size=5)
        for _ in range(2):
            bench.submit(PROMPT, max_tokens=12, script=Script(places(".aaaaaaaaaa.")))
        bench.step()
        bench.step()
        bench.plan()

        assert {request for request, _, _ in bench.planned()} == {1, 2}


class TestTheCounters:
    def test_tell_forced_tokens_from_prompts(self) -> None:
        bench = Bench()
        bench.submit(PROMPT, max_tokens=8, script=Script(places("abc.abc.")))
        bench.run()

        assert bench.core.schedule.counters.prefilled_tokens == len(PROMPT)
        assert bench.core.totals.generated_tokens == 8
        assert bench.core.totals.forced_tokens == 6

    def test_know_a_request_whose_prompt_is_cached_wholly(self) -> None:
        bench = Bench()
        bench.run_alone(PROMPT, max_tokens=4, script=Script(places("abc.")))
        one = bench.submit(PROMPT, max_tokens=4, script=Script(places("abc.")))
        bench.plan()
        admitted = bench.core.admitted
        bench.land()

        assert admitted == (one,)
        assert finish(bench, one).usage.cached_tokens == len(PROMPT)
        assert bench.core.schedule.counters.prompt_tokens == 2 * len(PROMPT)

    def test_do_not_count_what_a_stop_cut_off_before_it_was_told(self) -> None:
        bench = Bench()
        script = Script(places("aaaaa."), frozenset({0}))
        one = bench.submit(PROMPT, max_tokens=6, script=script, stop=("a",))
        bench.run()

        assert finish(bench, one).usage.completion_tokens == 1
        assert bench.core.totals.generated_tokens == 1


class TestAMatcher:
    @pytest.mark.parametrize("breaks", [4, 5])
    def test_that_gives_up_fails_its_request_after_what_was_told(self, breaks: int) -> None:
        bench = Bench()
        script = Script(places("..........")[:breaks] + places("ab"), breaks=breaks)
        one = bench.submit(PROMPT, max_tokens=12, script=script)
        two = bench.submit(PROMPT, max_tokens=3)
        bench.run()

        error = bench.end(one)
        assert isinstance(error, GenerationError)
        assert "gave up" in str(error)
        assert len(bench.tokens(one)) == breaks
        assert len(bench.tokens(two)) == 3

    @pytest.mark.parametrize("want", [Want(), Want(logprobs=True)])
    def test_that_gives_up_behind_a_stop_that_is_known_already_does_no_harm(
        self, want: Want
    ) -> None:
        bench = Bench()
        script = Script((FREE, "d", "a", "b", FREE), frozenset({1}), breaks=4)
        one = bench.submit(PROMPT, max_tokens=5, script=script, stop=("da",), want=want)
        bench.run()

        assert finish(bench, one).matched == "da"
        assert len(bench.tokens(one)) == len(text_of(bench, one)) == 1

    def test_that_gives_up_at_once_is_refused(self) -> None:
        bench = Bench()

        with pytest.raises(GenerationError, match="gave up"):
            bench.submit(PROMPT, max_tokens=3, script=Script(places("ab"), breaks=0))

        assert not bench.core.has_work


class TestAJudge:
    def test_fails_a_whole_output_in_which_it_finds_a_fault(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=9, script=Script(places("abc")), judge=Strict())
        bench.run()

        error = bench.end(one)
        assert isinstance(error, InvalidOutputError)
        assert str(error) == "the output does not keep its constraint: /: oddness"
        assert error.text == "abc"
        assert bench.core.totals.failed == 1
        assert bench.core.totals.finished == 0

    def test_is_not_asked_about_what_was_cut_off(self) -> None:
        bench = Bench()
        one = bench.submit(PROMPT, max_tokens=3, script=Script(places("abcd")), judge=Strict())
        bench.run()

        assert not finish(bench, one).complete

    def test_that_finds_fault_with_what_was_cut_off_makes_it_incomplete(self) -> None:
        bench = Bench()
        script = Script(places("abcd"), frozenset({3}))  # "abc" may be all, and is odd
        one = bench.submit(PROMPT, max_tokens=3, script=script, judge=Strict())
        two = bench.submit(PROMPT, max_tokens=3, script=script)
        bench.run()

        assert (finish(bench, one).reason, finish(bench, one).complete) == ("length", False)
        assert (finish(bench, two).reason, finish(bench, two).complete) == ("length", True)
        assert bench.core.totals.failed == 0

    def test_that_raises_fails_its_own_request_only(self) -> None:
        bench = Bench()
        judge = Strict(raises=True)
        one = bench.submit(PROMPT, max_tokens=9, script=Script(places("abc")), judge=judge)
        two = bench.submit(PROMPT, max_tokens=9, script=Script(places("abcd")), judge=judge)
        bench.run()

        assert isinstance(bench.outcomes[one][-1], Failure)
        assert "too hard" in str(bench.end(one))
        assert finish(bench, two).complete


# ---------------------------------------------------------------- a model of text

WORDS = (b"ab", b"abc", b"cd", b"de", b"dea", b"ea")
SPELLED = (*(bytes([byte]) for byte in FREE.encode()), *WORDS)
PATTERN = "[ab]{3}abcdea[cd]{2}deab(?:eabcd|cdedea)[a-e]{2}abc"


class TextModel:
    """A model to which spelling is nothing: the text so far alone says which letter comes next.

    It writes single letters; longer tokens come from the constraint, where it forces them.
    """

    def __init__(self, slots: int) -> None:
        self.texts = [""] * (slots + 1)

    def compute(self, batch: Batch, mask: Mask | None) -> Picked:
        layout, text_t = batch.layout, list[str]()
        starts = layout.query_start_b1.tolist()
        for owner, context in enumerate(layout.context_b):
            slots = context.tolist()
            first = len(slots) - (starts[owner + 1] - starts[owner])
            text = self.texts[slots[first - 1]] if first else ""
            for row, slot in enumerate(slots[first:], start=starts[owner]):
                text += SPELLED[batch.tokens_t[row]].decode()
                self.texts[slot] = text
                text_t.append(text)
        picked = [
            self._next(text_t[row], None if mask is None else int(mask[bound, 0]))
            for row, bound in zip(batch.logit_rows_r, batch.rows.mask_row_r, strict=True)
        ]
        none = np.zeros(len(picked), np.float32)
        tops: tuple[tuple[tuple[int, float], ...], ...] = ((),) * len(picked)
        return Picked(np.array(picked, np.int64), none, tops, none > 0)

    def _next(self, text: str, word: int | None) -> int:
        seen = zlib.crc32(text.encode())
        letters = [(seen >> 5) + n for n in range(5)]
        return next(n % 5 for n in letters if word is None or word >> n % 5 & 1)


def encode(text: str) -> list[int]:
    """A tokenizer: the longest word from the left."""
    ids: list[int] = []
    while text:
        best = max((w for w in SPELLED if text.startswith(w.decode())), key=len)
        ids.append(SPELLED.index(best))
        text = text[len(best) :]
    return ids


@cache
def grammar() -> Grammar:
    return compile_constraint(Regex(PATTERN), Vocabulary(SPELLED, (), len(SPELLED), encode))


def written(prompt: Sequence[int], *, jump: bool) -> tuple[str, tuple[int, ...], int]:
    """Text, tokens and steps of an output."""
    core, model, deltas = Core(64), TextModel(64), list[Delta]()
    sampling = Sampling(max_tokens=40, temperature=0.0)
    core.submit(
        Job(
            id=1,
            request=Request(prompt=(Tokens(tuple(prompt), ""),), sampling=sampling),
            sampling=sampling,
            seed=0,
            prompt=np.array(prompt, np.int64),
            end_ids=frozenset(),
            text=PromisedText(grammar(), SPELLED, (), ()),
            matcher=grammar().matcher(),
            jump=jump,
        )
    )
    while (batch := core.plan()) is not None:
        picked = model.compute(batch, core.mask(batch))
        deltas += [o for o in core.commit(batch, picked) if isinstance(o, Delta)]
    text = "".join(delta.text for delta in deltas)
    return text, tuple(t for delta in deltas for t in delta.tokens), core.totals.steps


class TestAModelOfTextAlone:
    @pytest.mark.parametrize("first", range(5))
    def test_writes_the_same_with_jumps_as_without(self, first: int) -> None:
        jumped, tokens, steps = written([first, 5, 8], jump=True)
        drawn, letters, more = written([first, 5, 8], jump=False)

        assert jumped == drawn
        assert len(tokens) < len(letters)
        assert steps < 0.6 * more
