"""The Chrome trace keeps the rules of its format, as viewers enforce them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from structgen.trace.chrome import chrome_trace
from structgen.trace.fold import Fold
from tests.trace.stories import Shown, Story, folded, forked, usage

Json = dict[str, Any]


def events(runs: Any, phase: str = "X") -> list[Json]:
    return [event for event in chrome_trace(Shown(runs))["traceEvents"] if event["ph"] == phase]


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def overlaps(found: list[Json]) -> list[tuple[str, str]]:
    """Pairs of events on one thread of which neither lies in the other: no viewer draws both."""
    threads: dict[tuple[int, int], list[Json]] = defaultdict(list)
    for event in found:
        threads[event["pid"], event["tid"]].append(event)
    crossing: list[tuple[str, str]] = []
    for thread in threads.values():
        stack: list[tuple[int, str]] = []
        for event in thread:  # in the order of the file, which is that of their starts
            start = nanoseconds(event["ts"])
            end = start + nanoseconds(event["dur"])
            while stack and stack[-1][0] <= start:
                stack.pop()
            if stack and end > stack[-1][0]:
                crossing.append((stack[-1][1], event["name"]))
            stack.append((end, event["name"]))
    return crossing


def lanes(runs: Any) -> dict[tuple[int, int], str]:
    found = [e for e in events(runs, "M") if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in found}


def samples(fold: Fold) -> None:
    """Three samples of one gen at the same time; the second one lies within the first."""
    story = Story(fold.tell)
    story.start(0)
    for call, end in ((1, 10), (2, 9), (3, 11)):
        story.ask(1, call, "x")
        story.answer(end, call, name="x")
    story.finish(12)


def nested_runs(fold: Fold) -> None:
    outer, inner = Story(fold.tell), Story(fold.tell, "r2")
    outer.start(0)
    outer.fork(1, 1, (0,))
    outer.call(2, 3, 1, "x", state=1)
    inner.start(4, "judge", parent="r1")
    inner.call(4, 5, 1, "score")
    inner.finish(5, "judge")
    outer.finish(6)


def twice_forked(fold: Fold) -> None:
    """Two forks of one state: their branches have the same paths."""
    story = Story(fold.tell)
    story.start(0)
    for state in (1, 2):
        story.fork(state, state, (0,))
        story.call(state, state + 3, state, "x", state)
    story.finish(9)


def late(fold: Fold) -> None:
    """A call that ends after its program, and a branch that opens after its run."""
    story = Story(fold.tell)
    story.start(0)
    story.enter(1, "inner")
    story.ask(2, 1, "x")
    story.leave(3, "inner")
    story.answer(5, 1)
    story.finish(4)
    story.fork(6, 1, (0,))


TELLINGS = [forked, samples, nested_runs, twice_forked, late]


@pytest.mark.parametrize("telling", TELLINGS, ids=lambda telling: telling.__name__)
class TestEveryTrace:
    def test_is_json_with_the_fields_of_the_format(self, telling: Any) -> None:
        trace = chrome_trace(Shown(folded(telling)))

        assert json.loads(json.dumps(trace, allow_nan=False)) == trace
        assert trace["displayTimeUnit"] in {"ms", "ns"}
        for event in trace["traceEvents"]:
            assert event["ph"] in {"X", "M", "s", "f"}
            assert isinstance(event["pid"], int)
            assert isinstance(event["tid"], int)
            assert isinstance(event["name"], str)
            assert event["ph"] == "M" or event["ts"] >= 0

    def test_has_complete_events_that_lie_in_each_other(self, telling: Any) -> None:
        found = events(folded(telling))

        assert all(event["dur"] >= 0 for event in found)
        assert [e["ts"] for e in found] != []
        assert overlaps(found) == []

    def test_names_every_process_and_thread(self, telling: Any) -> None:
        runs = folded(telling)
        named = {e["pid"] for e in events(runs, "M") if e["name"] == "process_name"}

        assert {e["pid"] for e in events(runs)} == named
        assert {(e["pid"], e["tid"]) for e in events(runs)} == lanes(runs).keys()

    def test_has_arrows_from_inside_a_bar_to_the_start_of_one(self, telling: Any) -> None:
        runs = folded(telling)
        starts = {e["id"]: e for e in events(runs, "s")}
        ends = {e["id"]: e for e in events(runs, "f")}

        assert starts.keys() == ends.keys()
        for number, end in ends.items():
            start = starts[number]
            assert (start["name"], start["cat"]) == (end["name"], end["cat"])
            assert end["bp"] == "e"
            assert start["ts"] <= end["ts"]
            assert any(holds(bar, start) for bar in events(runs))
            assert any(holds(bar, end) and bar["ts"] == end["ts"] for bar in events(runs))


def holds(bar: Json, event: Json) -> bool:
    same = (bar["pid"], bar["tid"]) == (event["pid"], event["tid"])
    return same and bar["ts"] <= event["ts"] <= bar["ts"] + bar["dur"]


class TestTheLanes:
    def test_are_one_for_each_branch(self) -> None:
        assert [*lanes(folded(forked)).values()] == ["main", "branch 0", "branch 1"]

    def test_are_as_many_as_samples_at_the_same_time(self) -> None:
        assert [*lanes(folded(samples)).values()] == ["main", "main (2)", "main (3)"]

    def test_are_more_for_branches_of_one_path_at_the_same_time(self) -> None:
        assert [*lanes(folded(twice_forked)).values()] == ["main", "branch 0", "branch 0 (2)"]

    def test_of_a_run_in_a_run_are_in_a_process_of_its_own(self) -> None:
        found = [e for e in events(folded(nested_runs), "M") if e["name"] == "process_name"]

        assert [(e["pid"], e["args"]["name"]) for e in found] == [(1, "haiku"), (2, "judge")]


class TestACall:
    def test_has_its_figures(self) -> None:
        (call,) = [e for e in events(folded(forked)) if e["name"] == "gen haiku"]

        assert (call["cat"], call["ts"], call["dur"]) == ("gen", 10_000.0, 40_000.0)
        assert call["args"] == {
            "prompt_tokens": 20,
            "cached_tokens": 0,
            "new_tokens": 8,
            "waited_ms": 5.0,
            "first_token_ms": 20.0,
            "finish": "stop",
            "text": "haiku",
        }

    def test_has_the_phases_that_it_went_through(self) -> None:
        phases = [e for e in events(folded(forked)) if e["cat"] == "phase"][:3]

        assert [(e["name"], e["ts"], e["dur"]) for e in phases] == [
            ("wait", 10_000.0, 5_000.0),
            ("prefill", 15_000.0, 15_000.0),
            ("generate", 30_000.0, 20_000.0),
        ]

    def test_that_runs_is_drawn_to_the_last_moment_and_says_so(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.ask(1, 1, "x")
            story.write(3, 1, "abc")

        (call,) = [e for e in events(folded(tell)) if e["name"] == "gen x"]

        assert (call["ts"], call["dur"]) == (1e6, 2e6)
        assert call["args"]["unfinished"] is True

    def test_waits_no_longer_than_it_takes(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.call(1, 2, 1, "x", waited=99, usage=usage(1))

        assert overlaps(events(folded(tell))) == []
