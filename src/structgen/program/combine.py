"""Combinators over branches: the first that returns, the most frequent value, the best one.

Owns   nothing; the tasks of a call live inside it.
Holds  when a combinator returns or raises, all tasks that it started have ended: no request of a
       branch that lost is left in the backend.
Used   by `Branches`.

A vote over sampled answers is self-consistency (Wang et al., 2022). To stop as soon as the rest
cannot change it is the idea of adaptive consistency (Aggarwal et al., 2023), here without its
statistics: only when it is certain.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from structgen.errors import OptionError
from structgen.program.tasks import EXITS, cut, failure_of, raise_exit, start

S = TypeVar("S")
T = TypeVar("T")


class Winner(msgspec.Struct, Generic[T], frozen=True):
    """The branch that won.

    index   of the branch
    value   what the function returned there
    score   what `best_of` gave it, None for a race
    """

    index: int
    value: T
    score: float | None = None


class Vote(msgspec.Struct, Generic[T], frozen=True):
    """What most branches said.

    value     of the lowest of the branches that agree on it
    count     how many do
    counts    votes by key (by value, if there is no key), the most frequent first
    indexes   of the branches that voted for `value`

    Branches that were cancelled because they could not change the outcome are not counted.
    """

    value: T
    count: int
    counts: dict[Hashable, int]
    indexes: tuple[int, ...]


async def race(states: Sequence[S], function: Callable[[S, int], Awaitable[T]]) -> Winner[T]:
    """Await `function(state, index)` for all states at once; the first that returns wins.

    The others are cancelled and waited for. What fails before only drops out; if all fail, their
    errors are raised as an `ExceptionGroup`, in the order of the states.
    """
    won: list[Winner[T]] = []

    async def run(state: S, index: int) -> None:
        value = await function(state, index)
        if not won:
            won.append(Winner(index, value))

    failures = await _Contest("race", lambda _: bool(won)).hold(states, run)
    if won:
        return won[0]
    raise BaseExceptionGroup(f"all {len(states)} branches of the race failed", failures)


async def vote(
    states: Sequence[S],
    function: Callable[[S, int], Awaitable[T]],
    key: Callable[[T], Hashable] | None = None,
) -> Vote[T]:
    """Await `function(state, index)` for all states at once; the most frequent value wins.

    key   what makes two values the same vote; without it, that they are equal

    A tie goes to the value of the lowest branch. As soon as no other value can overtake, the
    rest is cancelled, which never changes the value. A branch that fails before that fails the
    vote as it fails `Branches.map`: the answer that is missing could have changed the outcome.

    Raises `TypeError` for a value that is not hashable.
    """
    ballots: _Ballots[T] = _Ballots(len(states))

    async def run(state: S, index: int) -> None:
        value = await function(state, index)
        if not ballots.decided:
            ballots.cast(index, value, _hashable(value if key is None else key(value)))

    contest = _Contest("vote", lambda failed: failed or ballots.decided)
    if failures := await contest.hold(states, run):
        raise BaseExceptionGroup("branches of the vote failed", failures)
    return ballots.outcome()


async def best_of(
    states: Sequence[S],
    function: Callable[[S, int], Awaitable[T]],
    score: Callable[[S, T], float | Awaitable[float]],
) -> Winner[T]:
    """Await `function(state, index)` for all states at once; the value of the highest score wins.

    score   called with the state and the value as soon as its branch has returned; may be async

    A tie goes to the lowest branch. When a function or a score fails, the others are cancelled
    and the errors raised as an `ExceptionGroup`, as by `Branches.map`.
    """
    values: dict[int, T] = {}
    scores: dict[int, float] = {}

    async def run(state: S, index: int) -> None:
        values[index] = value = await function(state, index)
        scores[index] = await _number(score(state, value))

    if failures := await _Contest("best_of", lambda failed: failed).hold(states, run):
        raise BaseExceptionGroup("branches of best_of failed", failures)
    best = max(scores, key=lambda index: (scores[index], -index))
    return Winner(best, values[best], scores[best])


class _Contest:
    """Work on all states at once, until all have ended or it is over; what is left is cancelled.

    No task is cancelled twice, which would disturb its cleaning up.
    """

    def __init__(self, name: str, over: Callable[[bool], bool]) -> None:
        """`over` is asked whenever a branch has ended, and told whether any has failed."""
        self._name, self._over = name, over
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failures: dict[int, BaseException] = {}
        self._left: set[int] = set()

    async def hold(
        self, states: Sequence[S], work: Callable[[S, int], Coroutine[Any, Any, None]]
    ) -> list[BaseException]:
        """What failed, in the order of the states.

        That is what failed before it was over; and what failed while it was cancelled, if it was
        over by a failure. An exit ends it at once, and is raised as it is.
        """
        if not states:
            raise OptionError("states", f"{self._name}() needs at least one branch")
        self._left = set(range(len(states)))
        self._end = asyncio.get_running_loop().create_future()
        try:
            for index, state in enumerate(states):
                # An eager task may have ended it before the next one was made.
                if not self._over(False):
                    task = start(partial(work, state, index))
                    self._tasks[index] = task
                    task.add_done_callback(partial(self._look, index))
            await self._end
        finally:
            await cut(self._tasks.values())
        ended = [task for task in self._tasks.values() if not task.cancelled()]
        raise_exit(task.exception() for task in ended)
        for index in self._left & self._tasks.keys() if self._failures else ():
            if not self._tasks[index].cancelled():
                self._note_failure(index)
        return [self._failures[index] for index in sorted(self._failures)]

    def _look(self, index: int, _task: asyncio.Task[None]) -> None:
        """A branch has ended."""
        if not self._end.done():
            self._left.discard(index)
            self._note_failure(index)
            exits = isinstance(self._failures.get(index), EXITS)
            if exits or not self._left or self._over(bool(self._failures)):
                self._end.set_result(None)

    def _note_failure(self, index: int) -> None:
        if (error := failure_of(self._tasks[index], f"branch {index}")) is not None:
            error.add_note(f"in branch {index}")
            self._failures[index] = error


class _Ballots(Generic[T]):
    """The votes that were cast, and what those that are missing could still change."""

    def __init__(self, number: int) -> None:
        self.pending = set(range(number))
        self._values: dict[int, T] = {}
        self._votes: dict[Hashable, list[int]] = {}

    def cast(self, index: int, value: T, key: Hashable) -> None:
        """Branch `index` votes."""
        self.pending.discard(index)
        self._values[index] = value
        self._votes.setdefault(key, []).append(index)

    @property
    def decided(self) -> bool:
        """Whether no other value can overtake any more."""
        if not self._votes:
            return False
        first, *rivals = self._ranked()
        leader = _rank(self._votes[first])
        # At worst, all that are missing agree on one rival, or on a value nobody has named yet.
        unnamed: list[int] = []
        others = [*(self._votes[key] for key in rivals), unnamed]
        return all(_rank([*votes, *self.pending]) < leader for votes in others)

    def outcome(self) -> Vote[T]:
        """The outcome as it stands."""
        ranked = self._ranked()
        indexes = tuple(sorted(self._votes[ranked[0]]))
        return Vote(
            value=self._values[indexes[0]],
            count=len(indexes),
            counts={key: len(self._votes[key]) for key in ranked},
            indexes=indexes,
        )

    def _ranked(self) -> list[Hashable]:
        return sorted(self._votes, key=lambda key: _rank(self._votes[key]), reverse=True)


def _rank(indexes: Sequence[int]) -> tuple[int, float]:
    """Greater for more votes, then for a lower branch among them."""
    return len(indexes), -min(indexes, default=math.inf)


def _hashable(key: object) -> Hashable:
    if inspect.isawaitable(key):
        if inspect.iscoroutine(key):
            key.close()
        raise TypeError("vote() needs keys at once, and this key function is async; use `def`")
    try:
        hash(key)
    except TypeError:
        raise TypeError(
            f"vote() counts values that are equal, and {type(key).__name__} cannot be counted: it "
            "is not hashable; return something that is, or pass a key, such as key=str"
        ) from None
    return key


async def _number(score: float | Awaitable[float]) -> float:
    """A score that can be compared. Raises `TypeError` for no number, `OptionError` for NaN."""
    found = await score if inspect.isawaitable(score) else score
    if not isinstance(found, numbers.Real):
        raise TypeError(
            f"the score of best_of() is a number, got {type(found).__name__}; write float(...)"
        )
    if math.isnan(found):
        raise OptionError("score", "NaN is neither higher nor lower than another score")
    return float(found)
