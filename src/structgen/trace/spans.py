"""What happened, as data: a tree of spans for every run.

Owns   the shapes of the tree, and walks through it. All of it is frozen and goes through JSON.
Holds  times are seconds since the trace began; what has no `end` was still running.
Used   by `fold`, which builds spans, and by `chrome` and `tree`, which show them.

    RunSpan                  one call of `Program.run`
      FrameSpan              a program on a state: the run's own, or one that was called inline
        CallSpan             a gen, a select or a prime
        BranchSpan           one state of a fork
          FrameSpan, CallSpan, BranchSpan ...
        RunSpan              a run that was started here
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from structgen.events import CallKind
from structgen.request import FinishReason, Usage


class CallSpan(msgspec.Struct, frozen=True, kw_only=True, tag_field="span", tag="call"):
    """One request to the backend; a gen with `n` samples is `n` of them.

    name          of its variable, "" if it sets none
    branch        index path of forks from the run's first state
    waited        seconds in the backend's queue before anything of it was computed
    first_token   when its first text came, None where none came
    usage         tokens of the prompt, those of them that were cached, and new ones; of a call
                  that still runs only the new ones are known
    reason        why it ended; "abort" for one that was left early, None for an error
    text          what it wrote or chose, cut after as many characters as the trace keeps
    reasoning     what it thought before its answer, cut likewise
    cut           whether there was more of either
    children      runs that were started while their task was reading this call's stream
    """

    kind: CallKind
    name: str = ""
    branch: tuple[int, ...] = ()
    start: float
    waited: float = 0.0
    first_token: float | None = None
    end: float | None = None
    usage: Usage = Usage()
    reason: FinishReason | None = None
    error: str = ""
    text: str = ""
    reasoning: str = ""
    cut: bool = False
    children: tuple[Span, ...] = ()


class BranchSpan(msgspec.Struct, frozen=True, kw_only=True, tag_field="span", tag="branch"):
    """One state of a fork, from the fork until its scope was left or the run ended."""

    branch: tuple[int, ...]
    start: float
    end: float | None = None
    children: tuple[Span, ...] = ()


class FrameSpan(msgspec.Struct, frozen=True, kw_only=True, tag_field="span", tag="program"):
    """A program on a state: the run's own, or one that was called inline."""

    program: str
    branch: tuple[int, ...] = ()
    start: float
    end: float | None = None
    error: str = ""
    children: tuple[Span, ...] = ()


class RunSpan(msgspec.Struct, frozen=True, kw_only=True, tag_field="span", tag="run"):
    """One run of a program; `usage` is its own, without that of runs started inside."""

    run: str
    program: str
    start: float
    end: float | None = None
    usage: Usage = Usage()
    error: str = ""
    children: tuple[Span, ...] = ()


Span: TypeAlias = RunSpan | FrameSpan | BranchSpan | CallSpan


class Recorded(Protocol):
    """Whatever holds the spans of some runs: a `Trace`, or what was read back from JSON."""

    @property
    def runs(self) -> tuple[RunSpan, ...]:
        """The runs that no other run of these started, in order of their start."""
        ...


class Placed(NamedTuple):
    """A span and where it stands in a list in which parents come before their children.

    parent   index of the span around it in that list, -1 for none
    run      index of the run it belongs to; a run belongs to itself
    """

    span: Span
    depth: int
    parent: int
    run: int


def walk(runs: Sequence[RunSpan]) -> list[Placed]:
    """All spans, parents before children, children in order.

    Not recursive: a program may fork a fork of a fork some thousand times.
    """
    found: list[Placed] = []
    ahead: list[tuple[Span, int, int, int]] = [(run, 0, -1, -1) for run in reversed(runs)]
    while ahead:
        span, depth, parent, run = ahead.pop()
        here = len(found)
        run = here if isinstance(span, RunSpan) else run
        found.append(Placed(span, depth, parent, run))
        ahead += [(child, depth + 1, here, run) for child in reversed(span.children)]
    return found


def own_frame(run: RunSpan) -> FrameSpan | None:
    """The frame that says the same as its run: the run's own program on its first state."""
    match run.children:
        case (FrameSpan(program=name, branch=()) as frame,) if name == run.program:
            return frame
        case _:
            return None


def title(span: Span) -> str:
    """A span's name for people."""
    match span:
        case RunSpan(program=name):
            return f"run {name}"
        case FrameSpan(program=name):
            return f"program {name}"
        case BranchSpan(branch=path):
            return branch_title(path)
        case CallSpan(kind=kind, name=name):
            return f"{kind} {name}" if name else kind


def branch_title(path: Sequence[int]) -> str:
    """A branch's name for people: `branch 0.2` is the third fork of the first."""
    return f"branch {'.'.join(map(str, path)) or '?'}"


def total(usages: Iterable[Usage]) -> Usage:
    """The sum of usages."""
    return sum(usages, Usage())


def latest(placed: Iterable[Placed]) -> float:
    """The last moment that any of the spans knows of: unfinished ones are drawn up to it."""
    return max((moment for each in placed for moment in _moments(each.span)), default=0.0)


def _moments(span: Span) -> Iterator[float]:
    yield span.start
    if span.end is not None:
        yield span.end
    if isinstance(span, CallSpan) and span.first_token is not None:
        yield span.first_token
