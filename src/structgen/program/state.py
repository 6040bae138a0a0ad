"""The state of a program: what a program appends to, generates on and forks.

Owns   its cursor. Holds no more than that: a `State` is the face of a `Cursor`.
Used   by programs, which get theirs from `Program.run`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

import msgspec

from structgen.chat import Message, Role
from structgen.errors import ConcurrentUseError, OptionError, RoleError
from structgen.options import GenOptions, constraining, frozen, merged, request_from
from structgen.output.choices import Method
from structgen.output.tools import Called, ToolFunction, toolbox
from structgen.program import expression, operations
from structgen.program.branches import Branches
from structgen.program.calls.tools import Calling, OnError, checked_role
from structgen.program.cursor import Cursor
from structgen.program.expression import (
    CallOptions,
    CloseRole,
    CloseScope,
    Expression,
    Gen,
    OpenRole,
    OpenScope,
    Pick,
    SelectOptions,
)
from structgen.program.pieces import Pieces
from structgen.program.variables import Meta, Value
from structgen.request import Prompt, Usage, prompt_text
from structgen.sampling import check_flag
from structgen.terms import Term
from structgen.transcript.layout import lay_out, messages_in

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


class State:
    """What a program has said so far, and the variables it has set.

    Append with `s += "text"`, or within roles with `s.user("text")` and `with s.assistant():`.
    Generate with `await s.gen("name")` and read `s["name"]`. Work in parallel on `s.fork(n)`.

    Expressions can be appended too: `s += assistant("It is " + gen("x"))`. From the first `gen`
    or `select` on, what is appended waits for `await s` (or the next awaited call, or the end of
    the program), which runs it in order. A state changes only inside your own await on it.

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

        Raises `PendingError` for one that was appended but not awaited yet, and
        `UnknownVariableError`, which names the variables that exist and carries the error of the
        generation that would have set this one.
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
        cursor.require_settled("the text")
        return lay_out(cursor.transcript.said(), cursor.chat).parts

    def messages(self) -> list[Message]:
        """What was said in roles, as messages; text outside of roles is in none of them."""
        self._cursor.require_settled("the messages")
        return messages_in(self._cursor.transcript.said())

    async def tokens(self) -> tuple[int, ...]:
        """The token ids of all that was said, exactly as they would be sent now.

        What a model wrote is there as it wrote it. What is told here stays the beginning of what
        follows: text that is appended later begins a token of its own. Raises `PromptError` where
        nothing was said, `UnsupportedError` on a backend that tells no ids.
        """
        return await operations.encode(self._cursor)

    # ------------------------------------------------------------ appending

    def append(self, what: Expression | str) -> None:
        """Append text or an expression, as `+=` does: for lambdas and nested functions.

        Raises `TypeError` for anything else, and says what to write.
        """
        if isinstance(what, str) and not self._cursor.pending:
            self._cursor.require_idle("append()")
            self._cursor.transcript.append(what)
        else:
            self._cursor.append(expression.expression_of(what))

    def __iadd__(self, what: Expression | str) -> Self:
        self.append(what)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        """Run what was appended and not run yet; the value is the state itself."""
        return self.settle().__await__()

    async def settle(self) -> Self:
        """What `await s` does, as a coroutine: for `TaskGroup.create_task(s.settle())`.

        What fails stays the first thing that is pending: awaiting again tries it again, and
        `discard()` drops it.
        """
        await operations.settle(self._cursor)
        return self

    def discard(self) -> None:
        """Drop what was appended and not run yet, such as a generation that keeps failing."""
        self._cursor.require_idle("discard()")
        self._cursor.discard()

    def __setitem__(self, name: str, value: Value) -> None:
        """Set a variable; nothing is appended."""
        self._cursor.run.require_open("an assignment")
        self._cursor.write(expression.variable_name(name), value)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Set a variable to all the text that is appended in the block, the markup of roles aside.

        After an exception in the block the variable is not set, and reading it tells why.
        """
        cursor = self._cursor
        cursor.require_idle("var_scope()")
        number = next(cursor.run.scopes)
        cursor.append(OpenScope(expression.variable_name(name), number))
        try:
            yield
        except BaseException as error:
            cursor.leave_scope(name, number, error)
            raise
        cursor.append(CloseScope(name, number))

    # ------------------------------------------------------------ roles

    @overload
    def system(self, /) -> AbstractContextManager[None]: ...
    @overload
    def system(self, content: Expression | str, /) -> None: ...
    def system(self, *content: Expression | str) -> AbstractContextManager[None] | None:
        """Say `content` as the system, or open a block: `with s.system(): ...`."""
        return self._say("system", content)

    @overload
    def user(self, /) -> AbstractContextManager[None]: ...
    @overload
    def user(self, content: Expression | str, /) -> None: ...
    def user(self, *content: Expression | str) -> AbstractContextManager[None] | None:
        """Say `content` as the user, or open a block: `with s.user(): ...`."""
        return self._say("user", content)

    @overload
    def assistant(self, /) -> AbstractContextManager[None]: ...
    @overload
    def assistant(self, content: Expression | str, /) -> None: ...
    def assistant(self, *content: Expression | str) -> AbstractContextManager[None] | None:
        """Say `content` as the assistant, or open a block: `with s.assistant(): ...`."""
        return self._say("assistant", content)

    def _say(
        self, role: Role, content: tuple[Expression | str, ...]
    ) -> AbstractContextManager[None] | None:
        if not content:
            return self._block(role)
        if len(content) > 1:
            raise TypeError(f"{role}() takes one content; join them: s.{role}(a + b)")
        said = expression.expression_of(content[0])
        self._cursor.require_idle(f"{role}()")
        self._cursor.append(expression.Chain((OpenRole(role), said, CloseRole(role))))
        return None

    @contextmanager
    def _block(self, role: Role) -> Iterator[None]:
        cursor = self._cursor
        cursor.require_idle(f"{role}()")
        cursor.append(OpenRole(role))
        try:
            yield
        except BaseException:
            cursor.close()
            raise
        if cursor.role != role:
            raise RoleError(f"the block of {role!r} was ended inside it; leave that to the block")
        if not cursor.close():
            raise ConcurrentUseError(
                f"the block of {role!r} ended while {cursor.busy} was running in it; "
                "await it inside the block"
            )

    # ------------------------------------------------------------ generating

    @overload
    async def gen(
        self, name: str | Term | None = None, /, **options: Unpack[CallOptions]
    ) -> str: ...
    @overload
    async def gen(
        self, name: str | None = None, /, *, type: TypeForm[T], **options: Unpack[CallOptions]
    ) -> T: ...
    @overload
    async def gen(
        self,
        name: str | Term | None = None,
        /,
        *,
        n: int,
        pick: Pick = 0,
        **options: Unpack[CallOptions],
    ) -> list[str]: ...
    @overload
    async def gen(
        self,
        name: str | None = None,
        /,
        *,
        n: int,
        type: TypeForm[T],
        pick: Pick = 0,
        **options: Unpack[CallOptions],
    ) -> list[T]: ...
    @overload
    async def gen(
        self,
        name: str | None = None,
        /,
        *,
        choices: Sequence[str],
        by: Method | None = None,
        **options: Unpack[CallOptions],
    ) -> str: ...
    async def gen(
        self,
        name: str | Term | None = None,
        /,
        *,
        type: object = str,  # noqa: A002 - the word that users know
        n: int | None = None,
        pick: Pick = 0,
        choices: Sequence[str] | None = None,
        by: Method | None = None,
        **options: Unpack[CallOptions],
    ) -> Value:
        """Generate, append what was generated, and return it.

        name      of the variable to set, if any; or a term, which constrains the output
        type      a type: the output is constrained to it, and its value returned
        n         that many completions of one prompt; the value, and the variable, is their list
        pick      which of the n goes into the text: an index, or a function of the list
        choices   the same as `select(choices=...)`, with its options `by`, `temperature`, `seed`
        options   see `CallOptions`; they come before those of `using`, and what is given nowhere
                  is up to the model's defaults

        The captures of a term, whether it is given in place of the name or as `constraint`, become
        variables of their names: the text, a list of texts where a capture may stand several times
        (for samples: a list of these), None where the output went another way.

        Raises `PromptError` on a state without text, `OptionError` for options that cannot be
        used, `ConstraintError` and `UnsupportedError` for what the backend cannot do,
        `DeadlineError` after `timeout` or `deadline`, `IncompleteOutputError` where a typed
        output was cut off, `ConcurrentUseError` while another operation runs on this state, and
        whatever the backend raises for this request.
        """
        call = expression.call_of(name, type, n, pick, choices, by, options)
        if isinstance(call, Gen):
            return await operations.generate(self._cursor, call)
        return await operations.select(self._cursor, call)

    async def select(
        self,
        name: str | None = None,
        /,
        choices: Sequence[str] | None = None,
        **options: Unpack[SelectOptions],
    ) -> str:
        """Choose one of `choices` by its exact log-probability here, append it, and return it.

        The model is asked once for all of them: what choices have in common is computed once.
        `s.meta(name).choices` has every choice with its tokens, log-probabilities, score and
        probability. Choices are encoded as parts of their own, so a word in the middle of a
        sentence begins with its space: `["yes", "no"]` after "Answer: " (see `heal`), or
        `[" yes", " no"]` after "Answer:".

        Options: see `SelectOptions`. Raises `OptionError` for choices or options that cannot be
        used, `UnsupportedError` on a backend that cannot score, and what `gen` raises.
        """
        return await operations.select(self._cursor, expression.select(name, choices, **options))

    async def call(
        self,
        tools: Sequence[ToolFunction],
        name: str | None = None,
        *,
        choice: str = "required",
        parallel: bool = False,
        on_error: OnError = "tell",
        role: Role = "tool",
        **options: Unpack[CallOptions],
    ) -> Called:
        """Have the model call one of some async functions, run it, and append call and result.

        The model's turn is JSON that nothing but a call of one of the tools can be, its arguments
        of the types that the function's annotations name; the result is a turn of the role `tool`.
        Write it outside of roles. The value, and the variable, is a sequence of results.

        tools      async functions, every parameter annotated; the docstring tells what it does.
                   They are described to the model where its template has a place for tools; where
                   it has none, describe them in the prompt (`describe_tools`)
        name       of the variable to set, if any
        choice     "required": the model calls a tool; "auto": it may answer in text instead, and
                   then there are no results; or the name of the tool that it must call
        parallel   several calls at once: they run concurrently, and when one ends the call by an
                   error the others are cancelled
        on_error   "tell": what a tool raises is told to the model in place of a result; "raise"
        role       of the results' turns: "tool", or "user" for templates that have no such role
        options    see `CallOptions`; `timeout` binds the model and the tools together

        Raises `OptionError` for what cannot be a tool, `RoleError` inside a role, `TemplateError`
        where the template has no such turns, and what `gen` raises. The state is then as it was.
        """
        check_flag("parallel", parallel)
        checked_role(role, on_error)
        box = toolbox(tools, choice, parallel=parallel)
        gen = expression.call_of(name, str, None, 0, None, None, options)
        assert isinstance(gen, Gen), "no choices were given"
        if (other := constraining(gen.options)) is not None:
            raise OptionError(other, "the output of call() is a call of a tool; drop it")
        if gen.reasoning is not None:
            raise OptionError("reasoning", "the output of call() is a call of a tool; drop it")
        gen = msgspec.structs.replace(gen, form=box.form, verb="call")
        return await operations.call(self._cursor, Calling(gen, box, role, on_error))

    def stream(
        self,
        name: str | Term | None = None,
        /,
        *,
        type: object = str,  # noqa: A002 - the word that users know
        **options: Unpack[CallOptions],
    ) -> AbstractAsyncContextManager[Pieces]:
        """Generate, and read the text piece by piece: `async with s.stream("x") as pieces:`.

        A piece is a str; its `channel` tells reasoning from the answer. Leaving the block keeps
        what was read, in the state and in the variable, and aborts the rest. Leaving it by an
        exception keeps nothing.

        With `type` the variable is the value, once all of it was read, and has none if the block
        was left before. `pieces.objects()` gives the JSON value as far as it has come.

        Options and errors are those of `gen`; those that need the whole output (`n`, `choices`,
        `retries`) are not for streams.
        """
        if refused := sorted({"n", "pick", "choices", "by", "retries"} & options.keys()):
            raise OptionError(
                refused[0], "it needs the whole output, which a stream does not wait for; use gen()"
            )
        call = expression.call_of(name, type, None, 0, None, None, options)
        assert isinstance(call, Gen), "no choices were given"
        return Pieces(self._cursor, call)

    async def prime(self) -> Usage:
        """Have the backend compute all that was said, so that what follows finds it cached."""
        return await operations.prime(self._cursor)

    @contextmanager
    def using(self, **options: Unpack[GenOptions]) -> Iterator[None]:
        """Default options inside a block: `with s.using(temperature=0): ...`.

        They come before those of an outer block and of `Program.using`. Branches that are forked
        inside keep them. Raises `OptionError` for an option that is unknown or out of range.
        """
        given = frozen(options)
        request_from((), merged(self._cursor.options, given))
        with self._cursor.using(given):
            yield

    # ------------------------------------------------------------ forking

    def fork(self, n: int) -> Branches:
        """Make `n` branches that go on from here, each with its own variables from now on.

        The branches can be used at once; of a state on which something is pending, after
        `async with s.fork(n) as branches:` has settled it. That block also keeps what was said so
        far in the backend's cache until it ends, and settles the branches at its end. This state
        is not changed by what the branches do; see `Branches.join`.

        Raises `OptionError` (a `ValueError`) for n < 1.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError("n", f"fork(n) makes n >= 1 branches, got {n!r}")
        self._cursor.require_idle("fork()")
        return Branches(self._cursor, n, State)

    def copy(self) -> State:
        """A state like this one that goes its own way: the only branch of `fork(1)`."""
        self._cursor.require_settled("copy()")
        return self.fork(1)[0]

    def __repr__(self) -> str:
        names = ", ".join(self._cursor.variables.names())
        pending = f" pending=[{self._cursor.waiting()}]" if self._cursor.pending else ""
        return f"<State branch={self.branch} variables=[{names}]{pending}>"
