"""The state of a program: what a program appends to, generates on and forks.

Owns   its cursor. Holds no more than that: a `State` is the face of a `Cursor`.
Used   by programs, which get theirs from `Program.run`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Self, Unpack, overload

from structgen.chat import Message, Role
from structgen.errors import ConcurrentUseError, OptionError
from structgen.options import GenOptions, request_from
from structgen.program.branches import Branches
from structgen.program.cursor import Cursor, variable_name
from structgen.program.generation import Generation
from structgen.program.pieces import Pieces
from structgen.program.variables import Meta, Value
from structgen.request import Prompt, prompt_text
from structgen.transcript.layout import lay_out, messages_in


class State:
    """What a program has said so far, and the variables it has set.

    Append with `s += "text"`, or within roles with `s.user("text")` and `with s.assistant():`.
    Generate with `await s.gen("name")` and read `s["name"]`. Work in parallel on `s.fork(n)`.

    One operation runs on a state at a time. What fails or is cancelled leaves the state as it
    was before, so that retrying and falling back are ordinary code.
    """

    __slots__ = ("_cursor",)

    def __init__(self, cursor: Cursor) -> None:
        """Programs do not make states: `Program.run` and `fork` do."""
        self._cursor = cursor

    # ------------------------------------------------------------ reading

    def __getitem__(self, name: str) -> Value:
        """The value of a variable.

        Raises `UnknownVariableError`, which names the variables that exist and carries the error
        of the generation that would have set this one.
        """
        return self._cursor.variables.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._cursor.variables

    @property
    def branch(self) -> tuple[int, ...]:
        """The index path of forks that leads here from the first state of the program."""
        return self._cursor.branch

    def meta(self, name: str) -> Meta:
        """How a variable was generated: tokens, why it ended, usage, logprobs."""
        return self._cursor.variables.meta(name)

    def text(self) -> str:
        """All that was said, as the model reads it, the markup of roles included."""
        return prompt_text(self.parts())

    def parts(self) -> Prompt:
        """The prompt as it would be sent now."""
        cursor = self._cursor
        return lay_out(cursor.transcript.said(), cursor.run.chat).parts

    def messages(self) -> list[Message]:
        """What was said in roles, as messages; text outside of roles is in none of them."""
        return messages_in(self._cursor.transcript.said())

    # ------------------------------------------------------------ appending

    def append(self, text: str) -> None:
        """Append text. Raises `TypeError` for anything else, and says what to write."""
        if not isinstance(text, str):
            raise TypeError(_how_to_append(text))
        self._cursor.require_idle("append()")
        self._cursor.transcript.append(text)

    def __iadd__(self, text: str) -> Self:
        self.append(text)
        return self

    def __setitem__(self, name: str, value: Value) -> None:
        """Set a variable; nothing is appended."""
        self._cursor.run.require_open("an assignment")
        self._cursor.variables.write(variable_name(name), value)

    # ------------------------------------------------------------ roles

    @overload
    def system(self, /) -> AbstractContextManager[None]: ...
    @overload
    def system(self, content: str, /) -> None: ...
    def system(self, content: str | None = None, /) -> AbstractContextManager[None] | None:
        """Say `content` as the system, or open a block: `with s.system(): ...`."""
        return self._say("system", content)

    @overload
    def user(self, /) -> AbstractContextManager[None]: ...
    @overload
    def user(self, content: str, /) -> None: ...
    def user(self, content: str | None = None, /) -> AbstractContextManager[None] | None:
        """Say `content` as the user, or open a block: `with s.user(): ...`."""
        return self._say("user", content)

    @overload
    def assistant(self, /) -> AbstractContextManager[None]: ...
    @overload
    def assistant(self, content: str, /) -> None: ...
    def assistant(self, content: str | None = None, /) -> AbstractContextManager[None] | None:
        """Say `content` as the assistant, or open a block: `with s.assistant(): ...`."""
        return self._say("assistant", content)

    def _say(self, role: Role, content: str | None) -> AbstractContextManager[None] | None:
        if content is None:
            return self._block(role)
        if not isinstance(content, str):
            raise TypeError(_how_to_append(content))
        self._cursor.open(role)
        self._cursor.transcript.append(content)
        self._cursor.close()
        return None

    @contextmanager
    def _block(self, role: Role) -> Iterator[None]:
        self._cursor.open(role)
        try:
            yield
        except BaseException:
            self._cursor.close()
            raise
        if not self._cursor.close():
            raise ConcurrentUseError(
                f"the block of {role!r} ended while {self._cursor.busy} was running in it; "
                "await it inside the block"
            )

    # ------------------------------------------------------------ generating

    async def gen(self, name: str | None = None, /, **options: Unpack[GenOptions]) -> str:
        """Generate, append what was generated, and return it.

        name      of the variable to set, if any
        options   come before those of `using`; the rest is up to the model's defaults

        Raises `PromptError` on a state without text, `OptionError` for options that cannot be
        used, `ConstraintError` and `UnsupportedError` for what the backend cannot do,
        `ConcurrentUseError` while another operation runs on this state, and whatever the
        backend raises for this request.
        """
        cursor = self._cursor
        await cursor.begin(f"gen({name!r})" if name else "gen()")
        try:
            with cursor.noting(name):
                request, lost = cursor.ask(name, options)
                async with Generation(cursor.run, request) as generation:
                    completion = await generation.finish()
                return cursor.commit(name, completion, prefix_lost=lost)
        finally:
            cursor.end()

    def stream(
        self, name: str | None = None, /, **options: Unpack[GenOptions]
    ) -> AbstractAsyncContextManager[Pieces]:
        """Generate, and read the text piece by piece: `async with s.stream("x") as pieces:`.

        Leaving the block keeps what was read, in the state and in the variable, and aborts the
        rest. Leaving it by an exception keeps nothing. Options and errors are those of `gen`.
        """
        return Pieces(self._cursor, name, options)

    @contextmanager
    def using(self, **options: Unpack[GenOptions]) -> Iterator[None]:
        """Default options inside a block: `with s.using(temperature=0): ...`.

        They come before those of an outer block and of `Program.using`. Branches that are forked
        inside keep them. Raises `OptionError` for an option that is unknown or out of range.
        """
        cursor, before = self._cursor, self._cursor.options
        merged = {**before, **options}
        request_from((), merged)
        cursor.options = merged
        try:
            yield
        finally:
            cursor.options = before

    # ------------------------------------------------------------ forking

    def fork(self, n: int) -> Branches:
        """Make `n` branches that go on from here, each with its own variables from now on.

        The branches can be used at once. `async with s.fork(n) as branches:` also keeps what was
        said so far in the backend's cache until the block ends. This state is not changed by
        what the branches do; see `Branches.join`.

        Raises `OptionError` (a `ValueError`) for n < 1.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError("n", f"fork(n) makes n >= 1 branches, got {n!r}")
        cursors, scope = self._cursor.fork(n)
        start = self._cursor.transcript.fork()
        return Branches(self._cursor, cursors, [State(each) for each in cursors], start, scope)

    def copy(self) -> State:
        """A state like this one that goes its own way: the only branch of `fork(1)`."""
        return self.fork(1)[0]

    def __repr__(self) -> str:
        names = ", ".join(self._cursor.variables.names())
        return f"<State branch={self.branch} variables=[{names}]>"


def _how_to_append(value: object) -> str:
    if inspect.iscoroutine(value):
        value.close()  # it was not awaited on purpose: this error says so better than a warning
        return (
            f"cannot append the coroutine {value.__qualname__}: write `await s.gen(...)` on its "
            "own line; it appends what it generates by itself"
        )
    if isinstance(value, State):
        return "cannot append a State: append its text, s += other.text(), or fork it and join"
    return (
        f"cannot append {type(value).__name__} to a State, only str: "
        "write s += str(value) or s += f'{value}'"
    )
