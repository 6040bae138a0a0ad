"""Branches of a state: work on all of them, keep their prefix cached, join them.

Owns   the states of one fork, and the fork scope while `async with` is open.
Holds  what runs on a branch when its `async with` block ends by an error is aborted with it.
Used   by `State.fork`, which makes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import anyio

from structgen.errors import (
    ConcurrentUseError,
    JoinError,
    OptionError,
    StateError,
    UnknownVariableError,
)
from structgen.program import combine, operations
from structgen.program.combine import Vote, Winner
from structgen.program.cursor import Cursor
from structgen.program.expression import Expression
from structgen.program.run import LEFT, ForkScope, close_all
from structgen.program.tasks import all_of, kept, raise_exit
from structgen.program.variables import Value
from structgen.transcript.chain import Said, Transcript
from structgen.transcript.layout import lay_out

if TYPE_CHECKING:
    from structgen.program.state import State

T = TypeVar("T")
Face = Callable[[Cursor], "State"]


# Sequence[State] would promise that indexing with a str is a TypeError; reads of variables by
# name are worth more here, so the protocol is kept by duck typing: len, [i], [a:b], iteration.
class Branches:
    """The branches of one fork, in order.

    branches[i]        the i-th state
    branches["x"]      the variable of every branch, as a list
    branches += text   append to every branch, also an expression; `lambda i: text` appends to
                       each branch its own
    """

    __slots__ = ("_count", "_cursors", "_face", "_open", "_parent", "_scope", "_start", "_states")

    def __init__(self, parent: Cursor, count: int, face: Face) -> None:
        """`face` makes the state of a cursor. On a pending parent, entering makes the branches."""
        self._parent, self._count, self._face = parent, count, face
        self._open = False
        self._cursors: tuple[Cursor, ...] = ()
        self._states: tuple[State, ...] = ()
        self._scope: ForkScope | None = None
        self._start: Transcript | None = None
        if not parent.pending:
            self._make()

    def _make(self) -> None:
        cursors, self._scope = self._parent.fork(self._count)
        self._start = self._parent.transcript.fork()
        self._cursors = tuple(cursors)
        self._states = tuple(self._face(each) for each in cursors)

    def _made(self) -> tuple[State, ...]:
        if not self._states:
            self._parent.require_settled("branches")
            raise StateError(
                "these branches were made of a state that was not settled then; fork it again, or "
                "use `async with s.fork(n) as branches:`, which settles it first"
            )
        return self._states

    # ------------------------------------------------------------ the states

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, key: int) -> State: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[State]: ...
    @overload
    def __getitem__(self, key: str) -> list[Value]: ...
    def __getitem__(self, key: int | slice | str) -> State | Sequence[State] | list[Value]:
        if isinstance(key, str):
            return [state[key] for state in self._made()]
        return self._made()[key]

    def __setitem__(self, index: int, state: State) -> None:
        """Python calls this after `branches[i] += text`; branches cannot be replaced."""
        if state is not self._made()[index]:
            raise TypeError("a branch cannot be replaced; append to it with branches[i] += '...'")

    def __iter__(self) -> Iterator[State]:
        return iter(self._made())

    def __iadd__(self, what: Expression | str | Callable[[int], Expression | str]) -> Self:
        for index, state in enumerate(self._made()):
            state.append(what(index) if callable(what) else what)
        return self

    # ------------------------------------------------------------ the scope

    async def __aenter__(self) -> Self:
        """Settle the parent; keep what it has said in the backend's cache until the block ends."""
        self._parent.run.require_open("a fork scope")
        if self._open:
            raise StateError("this fork scope is open already; fork again for another one")
        if not self._states:
            await operations.settle(self._parent)
            self._make()
        assert self._start is not None
        assert self._scope is not None
        prefix = lay_out(self._start.said(), self._parent.chat).parts
        if prefix:
            await self._scope.open(prefix)
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Settle all branches at once; after an error, abort what still runs on them."""
        self._open = False
        assert self._scope is not None
        try:
            if error is None:
                self._require_idle("the fork block ended")
                await self.settle()
        except BaseException:
            await self._abandon()
            raise
        else:
            if error is not None:
                await self._abandon()
        finally:
            await self._scope.close()
            for cursor in self._cursors:
                self._parent.run.branch_closed(cursor.number)

    async def _abandon(self) -> None:
        """Abort what runs on these branches and below; who waits for it gets `StateClosedError`."""
        assert self._scope is not None
        leases = self._parent.run.cut(LEFT, self._scope.place)
        with anyio.CancelScope(shield=True):
            await close_all([each for each in leases if each is not self._scope])
        # What waits on them, or on forks of them, was part of what failed.
        self._parent.run.discard(self._scope.place)

    def _require_idle(self, action: str) -> None:
        for index, cursor in enumerate(self._cursors):
            if cursor.busy is not None:
                raise ConcurrentUseError(
                    f"{action} while {cursor.busy} runs on branch {index}; await it first"
                )

    # ------------------------------------------------------------ working on all of them

    async def settle(self) -> None:
        """Run what was appended to the branches, all of them at once.

        When one fails, the others are cancelled, and the errors raised as an `ExceptionGroup`.
        """
        self._made()
        waiting = [cursor for cursor in self._cursors if cursor.pending]
        if waiting:
            await all_of([partial(operations.settle, cursor) for cursor in waiting])

    async def map(self, function: Callable[[State, int], Awaitable[T]]) -> list[T]:
        """Await `function(state, index)` for all branches at once; results in branch order.

        When one fails, the others are cancelled and their requests aborted, and the errors are
        raised as an `ExceptionGroup`.
        """

        async def work(state: State, index: int) -> T:
            return await function(state, index)

        return await all_of(
            [partial(work, state, index) for index, state in enumerate(self._made())]
        )

    async def race(self, function: Callable[[State, int], Awaitable[T]]) -> Winner[T]:
        """Await `function(state, index)` for all branches; the first that returns wins.

        The others are cancelled and their requests aborted. Only if all fail are their errors
        raised, as an `ExceptionGroup`.
        """
        return await combine.race(self._made(), function)

    async def vote(
        self,
        function: Callable[[State, int], Awaitable[T]],
        key: Callable[[T], Any] | None = None,
    ) -> Vote[T]:
        """Await `function(state, index)` for all branches; the most frequent value wins.

        `key` says which values count as equal. As soon as nothing else can win, the rest is
        cancelled. Ties go to the value of the lowest branch.
        """
        return await combine.vote(self._made(), function, key)

    async def best_of(
        self,
        function: Callable[[State, int], Awaitable[T]],
        score: Callable[[State, T], float | Awaitable[float]],
    ) -> Winner[T]:
        """Await `function(state, index)` for all branches; the value of the highest score wins."""
        return await combine.best_of(self._made(), function, score)

    # ------------------------------------------------------------ joining

    async def join(
        self, mode: Literal["gather", "append"] = "gather", *, return_exceptions: bool = False
    ) -> None:
        """Settle the branches and bring what they made into their parent.

        "gather"   each variable that the parent does not have becomes the list of its values in
                   branch order; variables of the parent and its text stay as they are
        "append"   what each branch said since the fork is appended to the parent, branch after
                   branch, with the exact tokens; variables stay as they are

        When a branch fails, the others are cancelled and the errors raised as an
        `ExceptionGroup`. With `return_exceptions` the others go on, and in the lists of "gather"
        the error stands in its branch's place.

        Raises `JoinError` where a list would have holes ("gather"), where the parent has said
        something since the fork or a branch is inside a role that it opened ("append"), and
        `ConcurrentUseError` while an operation runs on a branch or the parent.
        """
        self._made()
        self._require_still()
        if mode not in {"gather", "append"}:
            raise OptionError("mode", f"expected 'gather' or 'append', got {mode!r}")
        if return_exceptions and mode == "append":
            raise OptionError("return_exceptions", "text of a failed branch cannot be appended")
        errors: list[BaseException | None] = [None] * self._count
        if return_exceptions:
            errors = await asyncio.gather(
                *(kept(partial(operations.settle, cursor)) for cursor in self._cursors),
                return_exceptions=True,
            )
            raise_exit(errors)
            for cursor, error in zip(self._cursors, errors, strict=True):
                if error is not None:
                    cursor.discard()  # it has been handed out: nobody is to try it again
        else:
            await self.settle()
        self._require_still()  # while the branches were settled, others could go on
        if mode == "gather":
            self._gather(errors if return_exceptions else None)
        else:
            self._append()

    def _require_still(self) -> None:
        self._parent.require_idle("join()")
        self._parent.require_settled("join()")
        self._require_idle("join()")

    def _gather(self, errors: Sequence[BaseException | None] | None) -> None:
        parent = self._parent.variables
        names = [name for cursor in self._cursors for name in cursor.variables.names()]
        if errors is not None:
            # A variable that failed in every branch is missed in all of them, not forgotten.
            names += [
                name
                for cursor in self._cursors
                for name, error in cursor.variables.failed().items()
                if parent.failed().get(name) is not error
            ]
        new = [name for name in dict.fromkeys(names) if name not in parent]
        lists = [[self._read(index, name, errors) for index in range(self._count)] for name in new]
        placed = {id(value) for values in lists for value in values}
        if lost := [error for error in errors or () if error and id(error) not in placed]:
            raise BaseExceptionGroup("errors of branches for which no list has a place", lost)
        for name, values in zip(new, lists, strict=True):
            self._parent.write(name, values)

    def _read(self, index: int, name: str, errors: Sequence[BaseException | None] | None) -> Value:
        variables = self._cursors[index].variables
        if errors is not None and name not in variables:
            reason = variables.failed().get(name) or errors[index]
            if reason is not None:
                return reason
        try:
            return variables.read(name)
        except StateError as reason:
            raise JoinError(
                f"branch {index} would leave a hole in the list {name!r}: {reason}; "
                "set it in every branch, or read the branches one by one"
            ) from (reason if isinstance(reason, UnknownVariableError) else None)

    def _append(self) -> None:
        assert self._start is not None
        start, parent = self._start.seal(), self._parent.transcript
        if not parent.is_at(start):
            raise JoinError(
                "join('append') after the parent has said more since the fork; join before you "
                "append to the parent, or use join('gather')"
            )
        said: list[Said] = []
        for index, cursor in enumerate(self._cursors):
            if cursor.transcript.role != parent.role:
                raise JoinError(
                    f"branch {index} is inside its role {cursor.transcript.role!r}; leave that "
                    "block before join('append')"
                )
            said += cursor.transcript.said(since=start)
        parent.repeat(said)
