"""Runs told by hand: events with times that a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from structgen.trace.spans import RunSpan

LIMIT = 1000


def usage(prompt: int = 0, cached: int = 0, new: int = 0) -> Usage:
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=new)


class Story:
    """One run, told to a listener."""

    def __init__(self, tell: Callable[[Event], None], run: str = "r1") -> None:
        self.tell, self.run = tell, run

    def say(self, event: Callable[..., Event], at: float, /, **fields: Any) -> None:
        self.tell(event(run=self.run, at=at, **fields))

    def start(self, at: float, program: str = "haiku", parent: str = "") -> None:
        self.say(RunStarted, at, program=program, parent=parent)
        self.enter(at, program)

    def finish(self, at: float, program: str = "haiku", error: str = "", **tokens: int) -> None:
        self.leave(at, program, error=error)
        self.say(RunEnded, at, usage=usage(**tokens), error=error)

    def enter(self, at: float, program: str, state: int = 0) -> None:
        self.say(ProgramEntered, at, program=program, state=state)

    def leave(self, at: float, program: str, state: int = 0, error: str = "") -> None:
        self.say(ProgramLeft, at, program=program, state=state, error=error)

    def fork(self, at: float, state: int, branch: tuple[int, ...], parent: int = 0) -> None:
        self.say(BranchOpened, at, state=state, parent=parent, branch=branch)

    def close(self, at: float, state: int) -> None:
        self.say(BranchClosed, at, state=state)

    def ask(self, at: float, call: int, name: str = "", state: int = 0, kind: str = "gen") -> None:
        self.say(CallStarted, at, call=call, name=name, state=state, kind=kind)

    def write(self, at: float, call: int, text: str, state: int = 0, **fields: Any) -> None:
        self.say(TextDelta, at, call=call, name="", state=state, text=text, **fields)

    def answer(self, at: float, call: int, state: int = 0, **fields: Any) -> None:
        self.say(CallEnded, at, call=call, state=state, **{"reason": "stop", **fields})

    def call(
        self, start: float, end: float, call: int, name: str = "", state: int = 0, **fields: Any
    ) -> None:
        """A gen that begins, writes its name halfway, and ends."""
        self.ask(start, call, name, state)
        self.write((start + end) / 2, call, name, state, tokens=1)
        self.answer(end, call, state, name=name, **fields)

    def choose(self, at: float, name: str, value: Any, state: int = 0) -> None:
        self.say(VariableSet, at, state=state, name=name, value=value)


def folded(*tellings: Callable[[Fold], None], limit: int = LIMIT) -> tuple[RunSpan, ...]:
    """The spans of runs that are told one after the other, from time 0."""
    fold = Fold(0.0, limit)
    for telling in tellings:
        telling(fold)
    return fold.freeze()


class Shown:
    """Runs that are there already: what a `Trace` is to those that show it."""

    def __init__(self, runs: tuple[RunSpan, ...]) -> None:
        self.runs = runs


def forked(fold: Fold) -> None:
    """A haiku: one gen, two branches with a gen each, a title. Times in seconds."""
    story = Story(fold.tell)
    story.start(0.0)
    story.call(0.010, 0.050, 1, "haiku", usage=usage(20, 0, 8), waited=0.005)
    for state in (1, 2):
        story.fork(0.060, state, (state - 1,))
    for state in (1, 2):
        end = 0.080 + state / 100
        story.call(0.061, end, state + 1, "why", state, usage=usage(30, 29, 4))
    for state in (1, 2):
        story.close(0.110, state)
    story.call(0.120, 0.150, 4, "title", usage=usage(40, 30, 2), reason="length")
    story.finish(0.160, prompt=120, cached=88, new=18)
