"""Events of runs, folded into the tree of their spans.

Owns   what is known so far of every run. No clock, no thread: a function of the events it was told.
Holds  nothing that a run could tell makes it raise. What ends without having begun begins where
       it is first heard of; what has begun and is not ended when its run ends, ends with it.
Used   by `record`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple

from structgen.events import (
    BranchClosed,
    BranchOpened,
    CallEnded,
    CallKind,
    CallStarted,
    Event,
    ProgramEntered,
    ProgramLeft,
    RunEnded,
    RunStarted,
    TextDelta,
    VariableSet,
)
from structgen.request import FinishReason, Usage
from structgen.trace.spans import BranchSpan, CallSpan, FrameSpan, RunSpan, Span, total

UNKNOWN = "?"  # the program of a run whose beginning was not heard


class Place(NamedTuple):
    """What the current task has worked on last; `call` is None between two calls."""

    run: str
    state: int
    call: int | None = None


# Set in the context of whoever reports, read when a run starts there: so a run is placed under the
# state that its own task has worked on, however many tasks there are.
PLACE: ContextVar[Place | None] = ContextVar("structgen_trace_place", default=None)


class Node(ABC):
    """A span while it grows."""

    __slots__ = ("children", "end", "error", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.end: float | None = None
        self.error = ""
        self.children: list[Node] = []

    def close(self, end: float) -> None:
        """It has ended, unless it had before."""
        if self.end is None:
            self.end = max(end, self.start)

    @abstractmethod
    def freeze(self, children: tuple[Span, ...]) -> Span:
        """The span, with its children's spans."""


class Branch(Node):
    """A branch while it grows."""

    __slots__ = ("path",)

    def __init__(self, start: float, path: tuple[int, ...]) -> None:
        super().__init__(start)
        self.path = path

    def freeze(self, children: tuple[Span, ...]) -> BranchSpan:
        """The branch's span."""
        return BranchSpan(branch=self.path, start=self.start, end=self.end, children=children)


class Frame(Node):
    """A program on a state while it runs."""

    __slots__ = ("program", "state")

    def __init__(self, start: float, program: str, state: State) -> None:
        super().__init__(start)
        self.program, self.state = program, state

    def freeze(self, children: tuple[Span, ...]) -> FrameSpan:
        """The frame's span."""
        return FrameSpan(
            program=self.program,
            branch=self.state.path,
            start=self.start,
            end=self.end,
            error=self.error,
            children=children,
        )


class Call(Node):
    """A call while it runs."""

    __slots__ = (
        "cut",
        "first",
        "kind",
        "name",
        "reason",
        "reasoning",
        "state",
        "text",
        "tokens",
        "usage",
        "waited",
    )

    def __init__(self, start: float, kind: CallKind, name: str, state: State) -> None:
        super().__init__(start)
        self.kind, self.name, self.state = kind, name, state
        self.waited = 0.0
        self.first: float | None = None
        self.reason: FinishReason | None = None
        self.tokens = 0
        self.usage: Usage | None = None
        self.text = self.reasoning = ""
        self.cut = False

    def write(self, event: TextDelta, limit: int, at: float) -> None:
        """Take some of its text, as much as is kept."""
        if self.first is None:
            self.first = max(at, self.start)
        self.tokens += event.tokens
        if event.channel == "reasoning":
            self.reasoning = self._grown(self.reasoning, event.text, limit)
        else:
            self.text = self._grown(self.text, event.text, limit)

    def choose(self, text: str, limit: int) -> None:
        """Take the text of its choice."""
        self.text = self._grown("", text, limit)

    def _grown(self, text: str, more: str, limit: int) -> str:
        room = limit - len(text)
        self.cut = self.cut or len(more) > room
        return text + more[:room] if room > 0 else text

    def spent(self) -> Usage:
        """Its tokens; until they are reported, those that came."""
        if self.usage is None or self.usage == Usage():
            return Usage(completion_tokens=self.tokens)
        return self.usage

    def freeze(self, children: tuple[Span, ...]) -> CallSpan:
        """The call's span."""
        return CallSpan(
            kind=self.kind,
            name=self.name,
            branch=self.state.path,
            start=self.start,
            waited=self.waited,
            first_token=self.first,
            end=self.end,
            usage=self.spent(),
            reason=self.reason,
            error=self.error,
            text=self.text,
            reasoning=self.reasoning,
            cut=self.cut,
            children=children,
        )


class State:
    """A state of a run: the programs that are on it, and where its spans hang."""

    __slots__ = ("frames", "last", "node")

    def __init__(self, node: Run | Branch) -> None:
        self.node = node
        self.frames: list[Frame] = []
        self.last: Call | None = None

    @property
    def path(self) -> tuple[int, ...]:
        """Its index path of forks; () for the first state and one whose fork was not heard."""
        return self.node.path if isinstance(self.node, Branch) else ()

    @property
    def innermost(self) -> Node:
        """Where a new span of this state hangs."""
        return self.frames[-1] if self.frames else self.node


class Run(Node):
    """A run while it runs."""

    __slots__ = ("before", "calls", "id", "program", "states", "usage")

    def __init__(self, start: float, name: str, program: str) -> None:
        super().__init__(start)
        self.id, self.program = name, program
        self.before = PLACE.get()  # where its task goes on when it has ended
        self.usage: Usage | None = None
        self.states: dict[int, State] = {}
        self.calls: dict[int, Call] = {}

    def spent(self) -> Usage:
        """Its tokens; until they are reported, those of its calls."""
        calls = total(call.spent() for call in self.calls.values())
        return calls if self.usage is None else self.usage

    def freeze(self, children: tuple[Span, ...]) -> RunSpan:
        """The run's span."""
        return RunSpan(
            run=self.id,
            program=self.program,
            start=self.start,
            end=self.end,
            usage=self.spent(),
            error=self.error,
            children=children,
        )


class Fold:
    """The runs that have been heard of."""

    def __init__(self, began: float, text_limit: int) -> None:
        """`began` is the clock's reading at which the trace's time is 0."""
        self._began, self._limit = began, text_limit
        self._runs: dict[str, Run] = {}
        self._roots: list[Run] = []
        # In order of creation, so that children stand behind their parents.
        self._nodes: list[Node] = []

    def knows(self, event: Event) -> bool:
        """Whether an event is of a run that was heard of, or starts one inside such a run."""
        parent = event.parent if isinstance(event, RunStarted) else ""
        return event.run in self._runs or parent in self._runs

    def tell(self, event: Event) -> None:
        """Take an event. Raises nothing, whatever the order of events."""
        at = event.at - self._began
        if isinstance(event, RunStarted):
            self._start(event, at)
            return
        run = self._runs.get(event.run) or self._open(event.run, UNKNOWN, at)
        match event:
            case TextDelta() | CallStarted() | CallEnded():  # the most frequent ones
                self._call(run, event, at)
            case RunEnded():
                _end(run, event, at)
            case ProgramEntered():
                self._enter(run, event, at)
            case ProgramLeft():
                _leave(self._state(run, event.state, at), event, at)
            case BranchOpened():
                self._fork(run, event, at)
            case BranchClosed():
                if (state := run.states.get(event.state)) is not None:
                    _close(state, at)
            case VariableSet():
                _choose(run, event, self._limit)
            case _:
                pass  # an event of a later version: nothing here can show it

    def freeze(self) -> tuple[RunSpan, ...]:
        """The spans of all runs as they are now."""
        frozen: dict[Node, Span] = {}
        for node in reversed(self._nodes):
            frozen[node] = node.freeze(tuple(frozen[child] for child in node.children))
        roots = [frozen[run] for run in self._roots]
        return tuple(root for root in roots if isinstance(root, RunSpan))

    def usage(self) -> Usage:
        """Tokens of all runs."""
        return total(run.spent() for run in self._runs.values())

    # ------------------------------------------------------------ growing

    def _add(self, node: Node, parent: Node, run: Run | None = None) -> None:
        parent.children.append(node)
        self._nodes.append(node)
        if run is not None and run.end is not None:
            node.close(node.start)  # said after the run's end: nothing will end it

    def _start(self, event: RunStarted, at: float) -> None:
        if (known := self._runs.get(event.run)) is not None:
            # Its beginning comes late: it keeps its place, else two runs could be in each other.
            known.program = event.program
            return
        run = self._open(event.run, event.program, at, _home(self._runs, event.parent))
        PLACE.set(Place(run.id, 0))

    def _open(self, name: str, program: str, at: float, home: Node | None = None) -> Run:
        run = self._runs[name] = Run(at, name, program)
        run.states[0] = State(run)
        if home is None:
            self._roots.append(run)
            self._nodes.append(run)
        else:
            self._add(run, home)
        return run

    def _state(self, run: Run, number: int, at: float) -> State:
        if number not in run.states:
            branch = Branch(at, ())
            self._add(branch, run, run)
            run.states[number] = State(branch)
        return run.states[number]

    def _enter(self, run: Run, event: ProgramEntered, at: float) -> None:
        state = self._state(run, event.state, at)
        frame = Frame(at, event.program, state)
        self._add(frame, state.innermost, run)
        state.frames.append(frame)
        if run.program == UNKNOWN and event.state == 0:
            run.program = event.program
        PLACE.set(Place(run.id, event.state))

    def _fork(self, run: Run, event: BranchOpened, at: float) -> None:
        parent = self._state(run, event.parent, at)
        known = run.states.get(event.state)
        if known is None:
            branch = Branch(at, event.branch)
            self._add(branch, parent.innermost, run)
            run.states[event.state] = State(branch)
        elif isinstance(known.node, Branch):
            known.node.path = event.branch  # heard of before its fork was

    def _call(self, run: Run, event: CallStarted | TextDelta | CallEnded, at: float) -> None:
        call = run.calls.get(event.call)
        if call is None:
            state = self._state(run, event.state, at)
            kind = event.kind if isinstance(event, CallStarted) else "gen"
            call = run.calls[event.call] = Call(at, kind, event.name, state)
            self._add(call, state.innermost, run)
            state.last = call
        match event:
            case TextDelta():
                call.write(event, self._limit, at)
            case CallStarted():
                call.kind, call.name = event.kind, event.name
                PLACE.set(Place(run.id, event.state, event.call))
            case CallEnded():
                # Overrides the end that its run's end may have given it.
                call.end = max(at, call.start)
                call.reason, call.error = event.reason, event.error
                call.usage, call.waited = event.usage, max(event.waited, 0.0)
                PLACE.set(Place(run.id, event.state))


def _home(runs: Mapping[str, Run], parent: str) -> Node | None:
    """What a run hangs under: what its task has worked on, or else its parent run's program."""
    if (run := runs.get(parent)) is None:
        return None
    place = PLACE.get()
    if place is None or place.run != parent:
        return run.states[0].innermost
    call = run.calls.get(place.call) if place.call is not None else None
    if call is not None and call.end is None:
        return call
    state = run.states.get(place.state, run.states[0])
    return state.innermost if state.node.end is None else run.states[0].innermost


def _end(run: Run, event: RunEnded, at: float) -> None:
    PLACE.set(run.before)
    run.close(at)
    run.usage, run.error = event.usage, event.error
    for call in run.calls.values():
        if call.end is None:
            call.close(at)
            call.reason = "abort"  # nothing outlives its run: what was not finished was aborted
    for state in run.states.values():
        _close(state, at)


def _close(state: State, at: float) -> None:
    for frame in state.frames:
        frame.close(at)
    state.frames.clear()
    state.node.close(at)


def _leave(state: State, event: ProgramLeft, at: float) -> None:
    names = [frame.program for frame in state.frames]
    if event.program not in names:
        return
    while state.frames:
        frame = state.frames.pop()
        frame.close(at)
        if frame.program == event.program:
            frame.error = event.error
            return


def _choose(run: Run, event: VariableSet, limit: int) -> None:
    """The value of a select is its text: it has no deltas."""
    state = run.states.get(event.state)
    call = state.last if state is not None else None
    if call is None or call.kind != "select" or call.name != event.name:
        return
    if isinstance(event.value, str):
        call.choose(event.value, limit)
