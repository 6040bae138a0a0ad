"""The run of a program: it owns every request that its states have made and not finished.

Owns   leases (live generations, waits, open fork scopes), the run's id, usage, budget, events.
Holds  when the program has ended, however it ended, nothing of the run is left in the backend.
Used   by `Program` (which ends it), `Cursor`, `Generation` and `Branches` (which ask through it).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import anyio
import msgspec

from structgen.backend import Backend
from structgen.errors import (
    BudgetError,
    ConcurrentUseError,
    ConstraintError,
    StateClosedError,
    StructgenError,
    UnsupportedError,
)
from structgen.events import (
    LISTENERS,
    BranchClosed,
    BranchOpened,
    Event,
    Listener,
    RunEnded,
)
from structgen.options import in_words, request_from
from structgen.program.tasks import cut, result_of, start
from structgen.request import Prompt, Request, Usage
from structgen.waiting import outlast

T = TypeVar("T")
Place = tuple[int, ...]

CURRENT_RUN: ContextVar[str] = ContextVar("structgen_run", default="")

ENDED = (
    "the program that owns this State ended while {what} was still running, and it was aborted; "
    "await everything inside the program"
)
LEFT = (
    "the fork scope of this branch was left by an error while {what} was still running, and it "
    "was aborted"
)


class Budget(msgspec.Struct, frozen=True):
    """What one run may use: completion tokens of all its requests, seconds. None is no limit."""

    tokens: int | None = None
    seconds: float | None = None


NO_BUDGET = Budget()


class Lease(Protocol):
    """Something in the backend that a run has taken and must give back."""

    @property
    def place(self) -> Place:
        """Where in the program it was taken; see `Cursor.place`."""
        ...

    def cut(self, reason: str) -> None:
        """Interrupt whoever waits for it: with the run's error if it has one, else `reason`."""
        ...

    async def close(self) -> None:
        """Give it back, unless that was done; returns when it is given back."""
        ...


class Settling(Protocol):
    """A cursor, as far as a run has to do with what waits on it."""

    place: Place
    busy: str | None

    def discard(self) -> None:
        """Forget what is pending."""
        ...


class Run:
    """One run of a program on a backend."""

    __slots__ = (
        "_branches",
        "_leases",
        "_listeners",
        "_tasks",
        "_unsettled",
        "backend",
        "budget",
        "calls",
        "chat",
        "ended",
        "exhausted",
        "id",
        "scopes",
        "spent",
        "states",
        "usage",
    )

    def __init__(
        self, backend: Backend, budget: Budget = NO_BUDGET, listeners: Iterable[Listener] = ()
    ) -> None:
        self.backend = backend
        self.budget = budget
        self.chat = backend.chat  # texts can be read, and a result made, after the backend closed
        self.id = secrets.token_hex(8)
        self.ended = False
        self.exhausted: str | None = None  # the budget that is used up
        self.usage = Usage()
        self.spent = 0  # completion tokens, counted as they arrive
        self.states = itertools.count()
        self.scopes = itertools.count(1)
        self.calls = itertools.count(1)
        self._listeners = (*LISTENERS.get(), *listeners)
        self._leases: dict[Lease, None] = {}  # in the order in which they were taken
        self._branches: dict[int, None] = {}  # told to be open, in the order of their opening
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unsettled: dict[Settling, Callable[[], str]] = {}

    # ------------------------------------------------------------ events

    @property
    def heard(self) -> bool:
        """Whether anybody listens: events need not be made for nobody."""
        return bool(self._listeners)

    def tell(self, kind: Callable[..., Event], /, **fields: Any) -> None:
        """Tell the listeners that something happened."""
        if self._listeners:
            event = kind(run=self.id, at=time.perf_counter(), **fields)
            for listener in self._listeners:
                listener(event)

    # ------------------------------------------------------------ what may go on

    def require_open(self, action: str) -> None:
        """Raise `StateClosedError` when the program has ended, `BudgetError` without budget."""
        if self.ended:
            raise StateClosedError(
                f"{action} after the program that owns this State has ended; states live as long "
                "as the call of run(): read what they hold from its Result"
            )
        if self.exhausted is not None:
            raise self.budget_error()

    def left(self) -> int | None:
        """Completion tokens that a request may generate, and one more, which breaks the budget."""
        limit = self.budget.tokens
        return None if limit is None else max(1, limit - self.spent + 1)

    def spend(self, tokens: int) -> None:
        """Count completion tokens; when they exceed the budget, everything live is cut off."""
        self.spent += tokens
        limit = self.budget.tokens
        if limit is not None and self.spent > limit and self.exhausted is None:
            self.exhausted = "tokens"
            self.cut("")

    def budget_error(self) -> BudgetError:
        """The error of a run that has used up a budget."""
        if self.exhausted == "seconds":
            said = f"the run was not finished within its budget of {self.budget.seconds:g} s"
        else:
            said = f"the run has generated more than its budget of {self.budget.tokens} tokens"
        return BudgetError(f"{said}; what it had live was aborted", self.exhausted or "tokens")

    def request(self, prompt: Prompt, options: Mapping[str, Any], **fields: Any) -> Request:
        """Build a request.

        Raises `OptionError`, and for what the backend lacks `ConstraintError` or
        `UnsupportedError`.
        """
        request = request_from(prompt, options, **fields)
        able = self.backend.capabilities
        if request.constraint is not None:
            kind = type(request.constraint).__struct_config__.tag
            if kind not in able.constraints:
                raise ConstraintError(
                    f"this backend cannot enforce {in_words(request.constraint)}; it can enforce "
                    f"{', '.join(sorted(able.constraints)) or 'no constraints'}"
                )
        if request.sampling.stop_regex and not able.stop_regex:
            raise UnsupportedError(
                "this backend has no stop_regex; use stop=[...] with the strings themselves"
            )
        want = request.want
        wants_logprobs = want.logprobs or want.top_logprobs or want.prompt_logprobs is not None
        if wants_logprobs and not able.logprobs:
            raise UnsupportedError("this backend reports no logprobs; generate without them")
        return request

    # ------------------------------------------------------------ leases

    def take(self, lease: Lease) -> None:
        """Own a lease until it is dropped."""
        self._leases[lease] = None

    def drop(self, lease: Lease) -> None:
        """Forget a lease that was given back."""
        self._leases.pop(lease, None)

    async def waiting(self, what: str, place: Place, call: Callable[[], Awaitable[T]]) -> T:
        """Await something of the backend that the end of the run, or of a scope, interrupts."""
        wait = Wait(self, what, place)
        self.take(wait)
        try:
            return await wait.interruptible(call)
        finally:
            self.drop(wait)
            wait.over()

    def cut(self, reason: str, place: Place = ()) -> list[Lease]:
        """Interrupt all that was taken at `place` or in branches that start there."""
        found = [each for each in self._leases if each.place[: len(place)] == place]
        for lease in found:
            lease.cut(reason)
        return found

    async def end(self) -> None:
        """End the run: interrupt who still waits for it, give back what it still has."""
        self.ended = True
        tasks, leases = tuple(self._tasks), self.cut(ENDED)
        if leases or tasks:
            # Whoever cancels meanwhile: the requests must not be left to the backend.
            ending = start(lambda: _ended(tasks, leases))
            try:
                await outlast(ending)
            finally:
                result_of(ending)

    def tell_end(self, error: str) -> None:
        """Tell the listeners that nothing more comes."""
        for state in tuple(self._branches):
            self.branch_closed(state)
        self.tell(RunEnded, usage=self.usage, error=error)

    def branch_opened(self, state: int, parent: int, branch: tuple[int, ...]) -> None:
        """Tell of a branch."""
        if self._listeners:
            self._branches[state] = None
            self.tell(BranchOpened, state=state, parent=parent, branch=branch)

    def branch_closed(self, state: int) -> None:
        """Tell of its end, once."""
        if state in self._branches:
            del self._branches[state]
            self.tell(BranchClosed, state=state)

    def aside(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run something that nobody waits for; it ends with the run, its failure is nobody's."""
        task = start(lambda: _quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ what waits to be awaited

    def unsettled(self, cursor: Settling, describe: Callable[[], str] | None) -> None:
        """A cursor has expressions that were not run (or, with None, has them no more)."""
        if describe is None:
            self._unsettled.pop(cursor, None)
        else:
            self._unsettled[cursor] = describe

    def discard(self, place: Place) -> None:
        """Drop what waits on cursors in branches that start at `place`, where nothing runs."""
        for cursor in tuple(self._unsettled):
            if cursor.place[: len(place)] == place and cursor.busy is None:
                cursor.discard()

    def forgotten(self) -> list[str]:
        """What was appended and never run, in words."""
        return [describe() for describe in self._unsettled.values()]


class Interruption:
    """A wait that others may interrupt: the state shared by generations and plain waits."""

    __slots__ = ("_calm", "_reason", "_run", "_scope", "_what", "place")

    def __init__(self, run: Run, what: str, place: Place) -> None:
        self.place = place
        self._run, self._what = run, what
        self._reason: str | None = None
        self._scope: anyio.CancelScope | None = None
        self._calm: anyio.Event | None = None

    def cut(self, reason: str) -> None:
        """Interrupt the task that waits; it raises what `_why` says."""
        self._reason = reason
        if self._scope is not None:
            self._scope.cancel()

    async def interruptible(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await what `cut` may interrupt."""
        if self._scope is not None:
            raise ConcurrentUseError("two tasks read one stream; let one read and pass it on")
        if self._reason is None:
            # A scope interrupts this wait and nothing else: the task that waits here may be
            # anybody's, and cancelling it would end more than this request.
            self._scope = scope = anyio.CancelScope()
            with scope:
                try:
                    return await call()
                finally:
                    self._scope = None
                    if self._calm is not None:
                        self._calm.set()
        raise self._why()

    async def calm(self) -> None:
        """Wait until nobody waits in here any more."""
        if self._scope is not None:
            self._calm = anyio.Event()
            await self._calm.wait()

    def _why(self) -> StructgenError:
        if not self._run.ended and self._run.exhausted is not None:
            return self._run.budget_error()
        return StateClosedError((self._reason or ENDED).format(what=self._what))


class Wait(Interruption):
    """A lease on one call of the backend that gives itself back when it is interrupted."""

    __slots__ = ("_over",)

    def __init__(self, run: Run, what: str, place: Place) -> None:
        super().__init__(run, what, place)
        self._over = False

    def over(self) -> None:
        """The call has returned or raised."""
        self._over = True

    async def close(self) -> None:
        """Wait until the call is over."""
        if not self._over:
            await self.calm()


class ForkScope:
    """The fork scope of some branches in the backend; until it is opened, that of their parent."""

    __slots__ = ("_context", "_run", "id", "outer", "place")

    def __init__(self, run: Run, outer: ForkScope | None, place: Place) -> None:
        self._run, self.outer, self.place = run, outer, place
        self._context: AbstractAsyncContextManager[int] | None = None
        self.id = 0

    @property
    def innermost(self) -> int:
        """Id of the innermost scope that is open here, 0 for none."""
        scope: ForkScope | None = self
        while scope is not None and not scope.id:
            scope = scope.outer
        return scope.id if scope is not None else 0

    async def open(self, prefix: Prompt) -> None:
        """Keep `prefix` cached until the scope is closed."""
        context = self._run.backend.scope(prefix)
        self.id = await context.__aenter__()
        self._context = context
        self._run.take(self)
        if self._run.ended:
            await self.close()
            self._run.require_open("a fork scope")

    def cut(self, reason: str) -> None:
        """Nobody waits for a scope."""

    async def close(self) -> None:
        """Close it, if it is open."""
        context, self._context, self.id = self._context, None, 0
        if context is not None:
            self._run.drop(self)
            await context.__aexit__(None, None, None)


async def _ended(tasks: Iterable[asyncio.Task[Any]], leases: Sequence[Lease]) -> None:
    try:
        await close_all(leases)
    finally:
        await cut(tasks)


async def close_all(leases: Sequence[Lease]) -> None:
    """Give back some leases, last taken first, whatever each of them raises."""
    async with AsyncExitStack() as stack:
        for lease in leases:
            stack.push_async_callback(lease.close)


def derived_seed(seed: int, path: Sequence[int]) -> int:
    """The seed of one call: a hash of the run's seed and the place of the call in the program.

    `path` is, for each fork on the way from the root state, how many calls and forks its parent
    had made before and the index of the branch; then how many the state had made before this
    call, and the number of the sample where there are several. So branches differ, forks of one
    state differ, and a rerun makes the same choices.
    """
    text = ",".join(str(number) for number in (seed, *path))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def _quietly(work: Callable[[], Awaitable[object]]) -> None:
    try:
        await work()
    except Exception:  # noqa: BLE001 - priming ahead is a favour: what needs it will raise itself
        return
