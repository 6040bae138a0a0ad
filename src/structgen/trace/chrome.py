"""A trace in Chrome's Trace Event Format, which Perfetto and chrome://tracing show.

Owns   nothing: a function of the spans.
Holds  spans that share a lane (a thread, to the format) lie one inside the other, and the outer
       one stands first: viewers drop or misdraw what overlaps. What does not fit gets a lane of
       its own. Times are microseconds, exact to the nanosecond.
Used   by `Trace.save`.

One process for each run, one thread for each branch, "X" events for spans, "M" events for names,
and arrows ("s" to "f") to what was forked or started. The format is Google's: "Trace Event
Format" in the Catapult project (Duca and Sinclair).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from structgen.request import Usage
from structgen.trace.spans import (
    BranchSpan,
    CallSpan,
    FrameSpan,
    Placed,
    Recorded,
    RunSpan,
    Span,
    branch_title,
    latest,
    own_frame,
    title,
    walk,
)

Json = dict[str, Any]
Trail = tuple[int, ...]


class Slot(NamedTuple):
    """Where a span is drawn: nanoseconds, process, thread."""

    start: int
    end: int
    pid: int
    tid: int


class Lanes:
    """The threads of one process: as many for a branch as its spans need."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._placed = placed
        # Of each lane the spans that are open where the drawing has come to, outermost first.
        self._open: dict[tuple[Trail, int], list[tuple[int, int]]] = {}

    def place(self, index: int, path: Trail, start: int, end: int) -> tuple[Trail, int]:
        """The lane of a span; spans come in order of their start, longer ones first."""
        number = 0
        while True:
            lane = self._open.setdefault((path, number), [])
            while lane and lane[-1][1] <= start:
                lane.pop()
            # Only a span around it may enclose it: of two samples of one gen neither does.
            if not lane or (end <= lane[-1][1] and self._is_inside(index, lane[-1][0])):
                lane.append((index, end))
                return path, number
            number += 1

    def names(self) -> dict[tuple[Trail, int], str]:
        """The lanes in order, and their names."""
        return {lane: _lane_name(*lane) for lane in sorted(self._open)}

    def _is_inside(self, index: int, other: int) -> bool:
        while index > other:
            index = self._placed[index].parent
        return index == other


def chrome_trace(trace: Recorded) -> Json:
    """The trace as the JSON object that viewers load.

    Spans that have not ended are drawn up to the last moment that the trace knows of, and their
    arguments say so.
    """
    placed = walk(trace.runs)
    slots, names = _lay_out(placed)
    events = [*_names(placed, names)]
    order = sorted(range(len(placed)), key=lambda i: (slots[i].start, -slots[i].end, i))
    for index in order:
        if not _is_drawn(placed, index):
            continue
        span, slot = placed[index].span, slots[index]
        events.append(_complete(title(span), _category(span), slot, _arguments(span)))
        if isinstance(span, CallSpan):
            events += _phases(span, slot)
        events += _arrow(placed, slots, index)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# ---------------------------------------------------------------- laying out


def _lay_out(placed: Sequence[Placed]) -> tuple[list[Slot], dict[int, dict[int, str]]]:
    """The slot of each span, and for each process the names of its threads."""
    now = latest(placed)
    times = [_times(each.span, now) for each in placed]
    pids: dict[int, int] = {}
    for each in placed:
        pids.setdefault(each.run, len(pids) + 1)
    processes = {run: Lanes(placed) for run in pids}
    lanes: dict[int, tuple[Trail, int]] = {}
    for index in sorted(range(len(placed)), key=lambda i: (times[i][0], -times[i][1], i)):
        if _is_drawn(placed, index):
            path = _path(placed[index].span)
            lanes[index] = processes[placed[index].run].place(index, path, *times[index])
        else:
            lanes[index] = ((), 0)
    tids = {
        run: {lane: tid for tid, lane in enumerate(process.names(), start=1)}
        for run, process in processes.items()
    }
    slots = [
        Slot(*times[index], pids[each.run], tids[each.run].get(lanes[index], 1))
        for index, each in enumerate(placed)
    ]
    names = {
        pids[run]: dict(enumerate(process.names().values(), start=1))
        for run, process in processes.items()
    }
    return slots, names


def _times(span: Span, now: float) -> tuple[int, int]:
    start = _nanoseconds(span.start)
    return start, max(_nanoseconds(now if span.end is None else span.end), start)


def _is_drawn(placed: Sequence[Placed], index: int) -> bool:
    """A run's own frame is not: the run is in its place."""
    run = placed[placed[index].run].span
    return not isinstance(run, RunSpan) or placed[index].span is not own_frame(run)


def _path(span: Span) -> Trail:
    return () if isinstance(span, RunSpan) else span.branch


def _lane_name(path: Trail, number: int) -> str:
    name = branch_title(path) if path else "main"
    return f"{name} ({number + 1})" if number else name


# ---------------------------------------------------------------- events


def _names(placed: Sequence[Placed], names: dict[int, dict[int, str]]) -> Iterator[Json]:
    runs = [each.span for each in placed if isinstance(each.span, RunSpan)]
    for (pid, threads), run in zip(names.items(), runs, strict=True):
        yield _metadata("process_name", pid, 0, name=run.program)
        yield _metadata("process_labels", pid, 0, labels=run.run)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        for tid, name in threads.items():
            yield _metadata("thread_name", pid, tid, name=name)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(kind: str, pid: int, tid: int, **arguments: Any) -> Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _complete(name: str, category: str, slot: Slot, arguments: Json) -> Json:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": slot.pid,
        "tid": slot.tid,
        "ts": _microseconds(slot.start),
        "dur": _microseconds(slot.end - slot.start),
        "args": arguments,
    }


def _phases(span: CallSpan, slot: Slot) -> Iterator[Json]:
    """What a call did after what: it waited, its prompt was computed, it generated."""
    computed = min(slot.start + _nanoseconds(span.waited), slot.end)
    spoke = slot.end if span.first_token is None else _nanoseconds(span.first_token)
    spoke = min(max(spoke, computed), slot.end)
    parts = (
        ("wait", slot.start, computed),
        ("prefill", computed, spoke),
        ("generate", spoke, slot.end),
    )
    for name, start, end in parts:
        if end > start:
            yield _complete(name, "phase", Slot(start, end, slot.pid, slot.tid), {})


def _arrow(placed: Sequence[Placed], slots: Sequence[Slot], index: int) -> Iterator[Json]:
    """An arrow to a branch, or a run inside another, from what it was forked or started in."""
    span, origin = placed[index].span, placed[index].parent
    if origin < 0 or not isinstance(span, BranchSpan | RunSpan):
        return
    while not _is_drawn(placed, origin):
        origin = placed[origin].parent
    here, there = slots[index], slots[origin]
    # It begins inside the origin's bar, also where that had ended before.
    begin = max(there.start, min(here.start, there.end))
    shared = {"name": "start" if isinstance(span, RunSpan) else "fork", "cat": "flow", "id": index}
    yield {**shared, "ph": "s", "pid": there.pid, "tid": there.tid, "ts": _microseconds(begin)}
    yield {
        **shared,
        "ph": "f",
        "bp": "e",
        "pid": here.pid,
        "tid": here.tid,
        "ts": _microseconds(here.start),
    }


def _category(span: Span) -> str:
    match span:
        case RunSpan():
            return "run"
        case FrameSpan():
            return "program"
        case BranchSpan():
            return "branch"
        case CallSpan():
            return span.kind


def _arguments(span: Span) -> Json:
    """What viewers show of a span that is selected; nothing that says nothing."""
    found: Json = {}
    match span:
        case RunSpan():
            found = {"run": span.run, **_counts(span.usage), "error": span.error}
        case FrameSpan():
            found = {"error": span.error}
        case BranchSpan():
            pass
        case CallSpan():
            first = span.first_token
            found = {
                **_counts(span.usage),
                "waited_ms": round(span.waited * 1000, 3),
                "first_token_ms": None if first is None else round((first - span.start) * 1000, 3),
                "finish": span.reason,
                "error": span.error,
                "reasoning": span.reasoning,
                "text": span.text,
            }
    found = {name: value for name, value in found.items() if value is not None and value != ""}
    return found if span.end is not None else {**found, "unfinished": True}


def _counts(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "new_tokens": usage.completion_tokens,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000
