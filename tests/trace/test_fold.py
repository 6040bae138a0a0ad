"""Events become a tree of spans, in whatever order they come."""

from __future__ import annotations

import itertools
from contextvars import copy_context

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.events import (
    BranchClosed,
    BranchOpened,
    CallEnded,
    CallStarted,
    Event,
    ProgramEntered,
    ProgramLeft,
    RunEnded,
    RunStarted,
    TextDelta,
    VariableSet,
)
from structgen.request import Usage
from structgen.trace.fold import Fold
from structgen.trace.spans import (
    BranchSpan,
    CallSpan,
    FrameSpan,
    RunSpan,
    Span,
    own_frame,
    walk,
)
from tests.trace.stories import Story, folded, forked, usage


def outline(runs: tuple[RunSpan, ...]) -> list[str]:
    """Every span as its depth in dots and its name."""
    return ["." * each.depth + name(each.span) for each in walk(runs)]


def name(span: Span) -> str:
    match span:
        case RunSpan():
            return f"run {span.program}"
        case FrameSpan():
            return f"program {span.program}"
        case BranchSpan():
            return f"branch {span.branch}"
        case CallSpan():
            return f"{span.kind} {span.name}"


def calls(runs: tuple[RunSpan, ...]) -> list[CallSpan]:
    return [each.span for each in walk(runs) if isinstance(each.span, CallSpan)]


class TestTheTree:
    def test_has_runs_programs_branches_and_calls(self) -> None:
        assert outline(folded(forked)) == [
            "run haiku",
            ".program haiku",
            "..gen haiku",
            "..branch (0,)",
            "...gen why",
            "..branch (1,)",
            "...gen why",
            "..gen title",
        ]

    def test_goes_through_json(self) -> None:
        runs = folded(forked)

        assert msgspec.json.decode(msgspec.json.encode(runs), type=tuple[RunSpan, ...]) == runs

    def test_is_frozen(self) -> None:
        with pytest.raises(AttributeError, match="immutable"):
            folded(forked)[0].program = "other"  # type: ignore[misc]  # what is tested

    def test_puts_an_inline_program_under_its_caller(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.enter(1, "title")
            story.call(2, 3, 1, "title")
            story.leave(4, "title", error="ValueError: no")
            story.call(5, 6, 2, "end")
            story.finish(7)

        runs = folded(tell)

        assert outline(runs)[2:] == ["..program title", "...gen title", "..gen end"]
        frame = walk(runs)[2].span
        assert isinstance(frame, FrameSpan)
        assert (frame.start, frame.end, frame.error) == (1, 4, "ValueError: no")

    def test_puts_a_program_on_a_branch_into_the_branch(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.fork(1, 1, (0,))
            story.enter(2, "inner", state=1)
            story.fork(3, 2, (0, 0), parent=1)
            story.ask(4, 1, "x", state=2)

        assert outline(folded(tell))[2:] == [
            "..branch (0,)",
            "...program inner",
            "....branch (0, 0)",
            ".....gen x",
        ]

    def test_ends_the_innermost_of_two_programs_of_one_name(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0, "loop")
            story.enter(1, "loop")
            story.leave(2, "loop")

        outer, inner = (each.span for each in walk(folded(tell)) if each.depth)

        assert (outer.end, inner.end) == (None, 2)

    def test_survives_three_thousand_forks_of_forks(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            for state in range(1, 3000):
                story.fork(state, state, (0,) * state, parent=state - 1)

        assert len(walk(folded(tell))) == 3001


class TestACall:
    def test_has_its_times_tokens_and_text(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(1.0)
            story.ask(2.0, 1, "x")
            story.write(2.5, 1, "ab", tokens=1)
            story.write(2.6, 1, "cd", tokens=2)
            story.answer(3.0, 1, name="x", usage=usage(9, 4, 3), waited=0.25, reason="length")

        (call,) = calls(folded(tell))

        assert call == CallSpan(
            kind="gen",
            name="x",
            start=2.0,
            waited=0.25,
            first_token=2.5,
            end=3.0,
            usage=usage(9, 4, 3),
            reason="length",
            text="abcd",
        )

    def test_keeps_no_more_text_than_asked_for(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.ask(0, 1)
            for _ in range(3):
                story.write(1, 1, "abcd")
                story.write(1, 1, "ABCD", channel="reasoning")

        (call,) = calls(folded(tell, limit=6))

        assert (call.text, call.reasoning, call.cut) == ("abcdab", "ABCDAB", True)

    def test_that_fits_is_not_cut(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.ask(0, 1)
            story.write(1, 1, "abcdef")

        assert not calls(folded(tell, limit=6))[0].cut

    def test_that_runs_counts_the_tokens_that_came(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.ask(0, 1)
            story.write(1, 1, "a", tokens=2)
            story.write(2, 1, "b", tokens=3)

        (call,) = calls(folded(tell))

        assert (call.end, call.usage.completion_tokens) == (None, 5)

    def test_that_failed_has_its_error_and_the_tokens_that_came(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.ask(0, 1)
            story.write(1, 1, "a", tokens=2)
            story.answer(2, 1, reason=None, error="DeadlineError: too late")

        (call,) = calls(folded(tell))

        assert (call.reason, call.error) == (None, "DeadlineError: too late")
        assert call.usage.completion_tokens == 2

    def test_of_a_select_has_its_choice_as_text(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.ask(0, 1, "colour", kind="select")
            story.answer(1, 1, name="colour")
            story.choose(1, "shape", "round")
            story.choose(1, "colour", "red")

        (call,) = calls(folded(tell))

        assert (call.kind, call.text, call.first_token) == ("select", "red", None)

    def test_of_a_gen_keeps_what_it_wrote_when_the_value_is_another(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.call(0, 1, 1, "three")
            story.choose(1, "three", "3")

        assert calls(folded(tell))[0].text == "three"

    def test_that_its_run_left_unfinished_was_aborted(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.ask(1, 1)
            story.finish(2)

        (call,) = calls(folded(tell))

        assert (call.end, call.reason) == (2, "abort")

    def test_that_ends_after_its_run_has_the_end_that_it_reports(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.ask(1, 1)
            story.finish(2)
            story.answer(3, 1, usage=usage(new=1))

        (call,) = calls(folded(tell))

        assert (call.end, call.reason, call.usage) == (3, "stop", usage(new=1))


class TestARun:
    def test_has_the_usage_that_it_reports(self) -> None:
        assert folded(forked)[0].usage == usage(120, 88, 18)

    def test_that_runs_has_the_usage_of_its_calls(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.call(1, 2, 1, usage=usage(5, 1, 2))
            story.call(3, 4, 2, usage=usage(7, 0, 1))

        (run,) = folded(tell)

        assert (run.end, run.usage) == (None, usage(12, 1, 3))

    def test_ends_what_it_has_open(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.fork(1, 1, (0,))
            story.enter(2, "inner", state=1)
            story.say(RunEnded, 3, usage=Usage(), error="E: x")

        runs = folded(tell)

        assert [each.span.end for each in walk(runs)] == [3, 3, 3, 3]
        assert runs[0].error == "E: x"

    def test_says_the_same_as_its_own_frame(self) -> None:
        (run,) = folded(forked)

        assert own_frame(run) is run.children[0]
        assert own_frame(msgspec.structs.replace(run, program="other")) is None


class TestARunInARun:
    def test_hangs_under_the_program_that_started_it(self) -> None:
        def tell(fold: Fold) -> None:
            outer, inner = Story(fold.tell), Story(fold.tell, "r2")
            outer.start(0)
            inner.start(1, "judge", parent="r1")
            inner.finish(2, "judge")
            outer.finish(3)

        assert outline(folded(tell)) == [
            "run haiku",
            ".program haiku",
            "..run judge",
            "...program judge",
        ]

    def test_hangs_under_the_branch_that_its_task_has_worked_on(self) -> None:
        def tell(fold: Fold) -> None:
            outer = Story(fold.tell)
            outer.start(0)
            outer.fork(1, 1, (0,))
            outer.fork(1, 2, (1,))

            def task(state: int) -> None:
                outer.call(2, 3, state, "x", state)
                for turn in (1, 2):
                    inner = Story(fold.tell, f"r{state}{turn}")
                    inner.start(4, f"judge{state}{turn}", parent="r1")
                    inner.finish(5, f"judge{state}{turn}")

            tasks = [copy_context(), copy_context()]
            for state, context in enumerate(tasks, start=1):
                context.run(task, state)

        shown = [line for line in outline(folded(tell)) if "program" not in line]

        assert shown == [
            "run haiku",
            "..branch (0,)",
            "...gen x",
            "...run judge11",
            "...run judge12",
            "..branch (1,)",
            "...gen x",
            "...run judge21",
            "...run judge22",
        ]

    def test_hangs_under_the_stream_that_its_task_reads(self) -> None:
        def tell(fold: Fold) -> None:
            outer, inner = Story(fold.tell), Story(fold.tell, "r2")
            outer.start(0)
            beside = copy_context()
            outer.ask(1, 1, "x")
            inner.start(2, "check", parent="r1")
            inner.finish(3, "check")
            beside.run(Story(fold.tell, "r3").start, 3, "beside", "r1")

        shown = outline(folded(tell))

        assert shown[2:] == [
            "..gen x",
            "...run check",
            "....program check",
            "..run beside",
            "...program beside",
        ]

    def test_hangs_under_the_run_when_its_branch_has_closed(self) -> None:
        def tell(fold: Fold) -> None:
            outer, inner = Story(fold.tell), Story(fold.tell, "r2")
            outer.start(0)
            outer.fork(1, 1, (0,))
            outer.call(2, 3, 1, "x", state=1)
            outer.close(4, 1)
            inner.start(5, "judge", parent="r1")

        assert outline(folded(tell))[-2:] == ["..run judge", "...program judge"]

    def test_is_on_its_own_when_its_parent_was_not_heard(self) -> None:
        def tell(fold: Fold) -> None:
            Story(fold.tell).start(0, "lonely", parent="nobody")

        assert outline(folded(tell))[0] == "run lonely"

    def test_is_never_in_itself(self) -> None:
        def tell(fold: Fold) -> None:
            Story(fold.tell, "a").start(0, "one", parent="a")
            Story(fold.tell, "b").start(1, "two", parent="a")
            Story(fold.tell, "a").start(2, "one", parent="b")

        assert [run.program for run in folded(tell)] == ["one"]


class TestMissingBeginnings:
    def test_begin_where_they_are_first_heard_of(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.answer(5, 7, name="x", usage=usage(new=3), state=4)
            story.fork(6, 4, (1,))
            story.leave(6, "nothing")
            story.close(6, 99)

        runs = folded(tell)

        assert outline(runs) == ["run ?", ".branch (1,)", "..gen x"]
        assert {each.span.start for each in walk(runs)} == {5}

    def test_take_the_name_that_comes_late(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.enter(0, "late")
            story.start(1, "later")

        assert folded(tell)[0].program == "later"

    def test_end_with_a_run_that_has_ended(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.finish(1)
            story.fork(2, 1, (0,))
            story.enter(3, "ghost", state=1)

        assert all(each.span.end is not None for each in walk(folded(tell)))

    def test_never_end_before_they_begin(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(5)
            story.ask(6, 1)
            story.answer(2, 1)
            story.finish(1)

        assert all(
            each.span.end is not None and each.span.end >= each.span.start
            for each in walk(folded(tell))
        )


TIMES = st.floats(0, 10, allow_nan=False)
RUNS = st.sampled_from(["r1", "r2", "r3"])
NUMBERS = st.integers(0, 3)
NAMES = st.sampled_from(["", "a", "b"])
SHARED = {"run": RUNS, "at": TIMES}
ON_STATE = {**SHARED, "state": NUMBERS}
USAGES = st.builds(usage, NUMBERS, NUMBERS, NUMBERS)
EVENTS = st.one_of(
    st.builds(RunStarted, **SHARED, program=NAMES, parent=RUNS),
    st.builds(RunEnded, **SHARED, usage=USAGES, error=NAMES),
    st.builds(ProgramEntered, **ON_STATE, program=NAMES),
    st.builds(ProgramLeft, **ON_STATE, program=NAMES, error=NAMES),
    st.builds(BranchOpened, **ON_STATE, parent=NUMBERS, branch=st.tuples(NUMBERS)),
    st.builds(BranchClosed, **ON_STATE),
    st.builds(CallStarted, **ON_STATE, call=NUMBERS, kind=st.sampled_from(["gen", "select"])),
    st.builds(TextDelta, **ON_STATE, call=NUMBERS, name=NAMES, text=NAMES),
    st.builds(CallEnded, **ON_STATE, call=NUMBERS, usage=USAGES, waited=TIMES),
    st.builds(VariableSet, **ON_STATE, name=NAMES, value=NUMBERS | NAMES),
)


class TestEventsInAnyOrder:
    @given(st.lists(EVENTS, max_size=40))
    @settings(deadline=None, max_examples=200)
    def test_make_a_whole_tree(self, events: list[Event]) -> None:
        def tell() -> tuple[RunSpan, ...]:
            fold = Fold(0.0, 10)
            for event in events:
                fold.tell(event)
            return fold.freeze()

        runs = copy_context().run(tell)
        placed = walk(runs)

        told = {event.run for event in events}
        shown = [each.span.run for each in placed if isinstance(each.span, RunSpan)]
        asked = {
            (e.run, e.call) for e in events if isinstance(e, CallStarted | CallEnded | TextDelta)
        }
        assert sorted(shown) == sorted(told)
        assert len(calls(runs)) == len(asked)
        assert msgspec.json.decode(msgspec.json.encode(runs), type=tuple[RunSpan, ...]) == runs
        ended = {e.run for e in events if isinstance(e, RunEnded)}
        for run, group in itertools.groupby(placed, key=lambda each: each.run):
            of = placed[run].span
            assert isinstance(of, RunSpan)
            ends = [
                each.span.end
                for each in group
                if not isinstance(each.span, CallSpan) and of.run in ended
            ]
            assert None not in ends


class TestEventsOfALaterVersion:
    def test_are_passed_over(self) -> None:
        class Surprise(Event, frozen=True, tag="surprise"):
            """Something that this version does not know."""

        fold = Fold(0.0, 10)

        fold.tell(Surprise(run="r1", at=1.0))

        assert outline(fold.freeze()) == ["run ?"]
