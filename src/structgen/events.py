"""What a program run reports while it runs: one event for each thing that happens.

Owns   the context variable `LISTENERS`: who hears of the runs that start in this context.
Used   by `program/`, which tells; by `trace/` and `Program.stream`, which listen.

Events of one run arrive in order. A listener is called on the event loop, in the middle of the
program's work: it must return at once and never raise.

    run       the id of the run; `Lineage.run` of its requests
    state     number of a State in its run: 0 for the first one, each branch has a new one
    call      number of a gen or select in its run
    at        seconds on the clock of `time.perf_counter`
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

import msgspec

from structgen.request import FinishReason, Usage

CallKind = Literal["gen", "select", "prime"]
Channel = Literal["answer", "reasoning"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One thing that happened in a run."""

    run: str
    at: float


class RunStarted(Event, frozen=True, tag="run_started"):
    """A run of `program` begins; `parent` is the run in whose program it was started, if any."""

    program: str
    parent: str = ""


class RunEnded(Event, frozen=True, tag="run_ended"):
    """It has ended; nothing more comes. `error` is what it raised, "" if it returned."""

    usage: Usage
    error: str = ""


class ProgramEntered(Event, frozen=True, tag="program_entered"):
    """A program was called inline on a state, or begins as the run's own."""

    state: int
    program: str


class ProgramLeft(Event, frozen=True, tag="program_left"):
    """The innermost program on the state returned or raised."""

    state: int
    program: str
    error: str = ""


class BranchOpened(Event, frozen=True, tag="branch_opened"):
    """A fork made `state` of `parent`; `branch` is its index path from the first state."""

    state: int
    parent: int
    branch: tuple[int, ...]


class BranchClosed(Event, frozen=True, tag="branch_closed"):
    """The branch's fork scope was left, or the run ends."""

    state: int


class CallStarted(Event, frozen=True, tag="call_started"):
    """A gen or select is sent to the backend; one with `n` samples is `n` calls."""

    call: int
    state: int
    kind: CallKind
    name: str = ""


class TextDelta(Event, frozen=True, tag="text_delta"):
    """A generation wrote some text of a variable. `tokens` counts those that came with it."""

    call: int
    state: int
    name: str
    text: str
    tokens: int = 0
    channel: Channel = "answer"


class CallEnded(Event, frozen=True, tag="call_ended"):
    """The call has its result, failed, or was aborted.

    reason   why the generation ended; "abort" for one that was left early, None for an error
    waited   seconds in the backend's queue before anything of it was computed
    """

    call: int
    state: int
    name: str = ""
    reason: FinishReason | None = None
    usage: Usage = Usage()
    waited: float = 0.0
    error: str = ""


class VariableSet(Event, frozen=True, tag="variable_set"):
    """A variable of a state has a value."""

    state: int
    name: str
    value: Any


Listener = Callable[[Event], None]
LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("structgen_listeners", default=())
