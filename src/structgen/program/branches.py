"""Branches of a state: work on all of them, keep their prefix cached, join them.

Owns   the states of one fork, and the fork scope while `async with` is open.
Used   by `State.fork`, which makes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar, overload

from structgen.errors import (
    ConcurrentUseError,
    JoinError,
    OptionError,
    StateError,
    UnknownVariableError,
)
from structgen.program.cursor import Cursor
from structgen.program.run import ForkScope
from structgen.program.variables import Value
from structgen.transcript.chain import Said, Transcript
from structgen.transcript.layout import lay_out

if TYPE_CHECKING:
    from structgen.program.state import State

T = TypeVar("T")


# Sequence[State] would promise that indexing with a str is a TypeError; reads of variables by
# name are worth more here, so the protocol is kept by duck typing: len, [i], [a:b], iteration.
class Branches:
    """The branches of one fork, in order.

    branches[i]        the i-th state
    branches["x"]      the variable of every branch, as a list
    branches += text   append to every branch; `lambda i: text` appends to each its own
    """

    __slots__ = ("_cursors", "_open", "_parent", "_scope", "_start", "_states")

    def __init__(
        self,
        parent: Cursor,
        cursors: Sequence[Cursor],
        states: Sequence[State],
        start: Transcript,
        scope: ForkScope,
    ) -> None:
        """`start` is the transcript at the fork; `states` are the faces of `cursors`."""
        self._parent, self._cursors, self._states = parent, tuple(cursors), tuple(states)
        self._start, self._scope = start, scope
        self._open = False

    # ------------------------------------------------------------ the states

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, key: int) -> State: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[State]: ...
    @overload
    def __getitem__(self, key: str) -> list[Value]: ...
    def __getitem__(self, key: int | slice | str) -> State | Sequence[State] | list[Value]:
        if isinstance(key, str):
            return [state[key] for state in self._states]
        return self._states[key]

    def __setitem__(self, index: int, state: State) -> None:
        """Python calls this after `branches[i] += text`; branches cannot be replaced."""
        if state is not self._states[index]:
            raise TypeError("a branch cannot be replaced; append to it with branches[i] += '...'")

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __iadd__(self, text: str | Callable[[int], str]) -> Self:
        for index, state in enumerate(self._states):
            state.append(text(index) if callable(text) else text)
        return self

    # ------------------------------------------------------------ the scope

    async def __aenter__(self) -> Self:
        """Keep what was said before the fork in the backend's cache until the block ends."""
        self._parent.run.require_open("a fork scope")
        if self._open:
            raise StateError("this fork scope is open already; fork again for another one")
        self._open = True
        prefix = lay_out(self._start.said(), self._parent.run.chat).parts
        if prefix:
            await self._scope.open(prefix)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        await self._scope.close()

    # ------------------------------------------------------------ working on all of them

    async def map(self, function: Callable[[State, int], Awaitable[T]]) -> list[T]:
        """Await `function(state, index)` for all branches at once; results in branch order.

        When one fails, the others are cancelled and their requests aborted, and the errors are
        raised as an `ExceptionGroup`.
        """

        async def work(state: State, index: int) -> T:
            return await function(state, index)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(work(state, index)) for index, state in enumerate(self._states)
            ]
        return [task.result() for task in tasks]

    # ------------------------------------------------------------ joining

    async def join(self, mode: Literal["gather", "append"] = "gather") -> None:
        """Bring what the branches made into their parent.

        "gather"   each variable that the parent does not have becomes the list of its values in
                   branch order; variables of the parent and its text stay as they are
        "append"   what each branch said since the fork is appended to the parent, branch after
                   branch, with the exact tokens; variables stay as they are

        Raises `JoinError` where a list would have holes ("gather"), where the parent has said
        something since the fork or a branch is inside a role that it opened ("append"), and
        `ConcurrentUseError` while an operation runs on a branch or the parent.
        """
        self._parent.run.require_open("join()")
        for cursor in (self._parent, *self._cursors):
            if cursor.busy is not None:
                raise ConcurrentUseError(f"join() while {cursor.busy} runs; await it first")
        match mode:
            case "gather":
                self._gather()
            case "append":
                self._append()
            case _:
                raise OptionError("mode", f"expected 'gather' or 'append', got {mode!r}")

    def _gather(self) -> None:
        parent = self._parent.variables
        names = [name for cursor in self._cursors for name in cursor.variables.names()]
        new = [name for name in dict.fromkeys(names) if name not in parent]
        lists = [[self._read(index, name) for index in range(len(self))] for name in new]
        for name, values in zip(new, lists, strict=True):
            parent.write(name, values)

    def _read(self, index: int, name: str) -> Value:
        try:
            return self._cursors[index].variables.read(name)
        except UnknownVariableError as reason:
            raise JoinError(
                f"branch {index} would leave a hole in the list {name!r}: {reason}; "
                "set it in every branch, or read the branches one by one"
            ) from reason

    def _append(self) -> None:
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
