"""`@program`: a coroutine function that moves a State, as something that can be run.

Owns   the function, its default options, what was bound, and its budget.
Used   by users, the command line and the server.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import (
    AsyncIterable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from types import MethodType
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

import anyio

from structgen.backend import Backend
from structgen.errors import BudgetError, OptionError, StateClosedError, leaves
from structgen.events import (
    Listener,
    ProgramEntered,
    ProgramLeft,
    RunStarted,
)
from structgen.options import GenOptions, frozen, merged, request_from
from structgen.program import operations
from structgen.program.batch import BatchResults, run_batch
from structgen.program.blocking import Blocked, run_sync
from structgen.program.cursor import Cursor
from structgen.program.result import Result
from structgen.program.run import CURRENT_RUN, NO_BUDGET, Budget, Run
from structgen.program.state import State
from structgen.program.tasks import named
from structgen.program.watch import RunStream
from structgen.sampling import check_range, check_whole

P = ParamSpec("P")
R = TypeVar("R")
S_contra = TypeVar("S_contra", contravariant=True)
Progress = bool | Callable[[int, int], None]


class Program(Generic[P, R]):
    """A program: run it on a backend, or call it inline on a State.

        @program
        async def tip(s: State, topic: str) -> str:
            s.user(f"One tip about {topic}, please.")
            with s.assistant():
                return await s.gen("tip", max_tokens=40)

        result = await tip.run(engine, "sleep")     # result.value, result["tip"], result.usage
        text = await tip(s, "sleep")                # inside another program, on its state

    It keeps the function's name, docstring and signature (whose first parameter is the State).
    `using`, `bind` and `budget` give copies; a program never changes.
    """

    def __init__(
        self,
        function: Callable[Concatenate[State, P], Coroutine[Any, Any, R]],
        options: GenOptions | None = None,
        *,
        bound: Mapping[str, Any] | None = None,
        budget: Budget = NO_BUDGET,
    ) -> None:
        """`options` are default options of every generation, `bound` arguments given ahead."""
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"@program needs an `async def` function, got {function!r}")
        self.function = function
        self.options: GenOptions = options or {}
        self.bound: Mapping[str, Any] = bound or {}
        self.limits = budget
        functools.update_wrapper(self, function, updated=())

    # ------------------------------------------------------------ copies

    def using(self, **options: Unpack[GenOptions]) -> Program[P, R]:
        """The same program with other default options.

        Options of a single `gen` come before these. With `seed` the whole run is reproducible:
        each request gets a seed of its own, derived from this one, the branch and how many calls
        and forks its state had made, so that branches differ and reruns agree.

        Raises `OptionError` for an option that is unknown or out of range.
        """
        given: Any = merged(self.options, frozen(options))
        request_from((), given)
        return self._copy(options=given)

    def bind(self, **arguments: Any) -> Program[..., R]:
        """The same program with some arguments given, like `functools.partial`.

        Arguments of the call come before them. Raises `TypeError` for a name that the program
        does not have.
        """
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        known = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
        open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters)
        if not open_ended and (unknown := sorted(set(arguments) - known)):
            raise TypeError(
                f"{self.__name__} has no parameter {unknown[0]!r}; it has {', '.join(known)}"
            )
        return self._copy(bound={**self.bound, **arguments})

    def budget(self, *, tokens: int | None = None, seconds: float | None = None) -> Program[P, R]:
        """The same program with limits for each run.

        tokens    completion tokens of all its requests together, those of branches included
        seconds   from its start to its end

        A run that exceeds one ends by `BudgetError`: in time at most one step of the engine late,
        in tokens by at most one token for each request that was live.
        """
        check_whole("tokens", tokens, low=1, optional=True)
        check_range("seconds", seconds, 0.0, 1e9, open_low=True, optional=True)
        return self._copy(budget=Budget(tokens, seconds))

    def _copy(self, **changes: Any) -> Program[P, R]:
        fields: dict[str, Any] = {
            "function": self.function,
            "options": self.options,
            "bound": self.bound,
            "budget": self.limits,
        }
        return Program(**{**fields, **changes})

    def __get__(self, instance: object, owner: type | None = None) -> Program[..., R]:
        """A program that is a method, bound to its object like any method."""
        if instance is None:
            return self
        return self._copy(function=MethodType(self.function, instance))

    # ------------------------------------------------------------ inline

    def __call__(self, s: State, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run inline, on a state that the caller has: its text and variables are shared."""
        if not isinstance(s, State):
            raise TypeError(
                f"a program is called with the State of another program, got {type(s).__name__}; "
                f"write `await {self.__name__}.run(backend, ...)` to start it on a backend"
            )
        if self.limits != NO_BUDGET:
            raise OptionError(
                "budget",
                f"it is kept by a run; inline, {self.__name__} shares the budget of its caller",
            )
        return self._inline(s, *args, **self._arguments(args, kwargs))

    async def _inline(self, s: State, /, *args: Any, **kwargs: Any) -> R:
        cursor = s._cursor  # noqa: SLF001 - a program and its state are one thing in two files
        with s.using(**self.options), self._frame(cursor):
            return await self.function(s, *args, **kwargs)

    @contextmanager
    def _frame(self, cursor: Cursor) -> Iterator[None]:
        """Report that the program runs on this state now."""
        run, name = cursor.run, self.__name__
        run.tell(ProgramEntered, state=cursor.number, program=name)
        error = ""
        try:
            yield
        except BaseException as failure:
            error = named(failure)
            raise
        finally:
            run.tell(ProgramLeft, state=cursor.number, program=name, error=error)

    # ------------------------------------------------------------ running

    async def run(self, backend: Backend, /, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """Run on a backend, with a fresh state.

        Raises what the program raises, and `BudgetError` where its budget is used up. When it
        ends, by whatever way, requests that it has left unfinished are aborted; who still waits
        for one gets a `StateClosedError`. What was appended to the first state and not awaited is
        run at the end; on a branch it is a `ResourceWarning`.
        """
        return await self._run(backend, args, kwargs)

    @overload
    async def run_batch(
        self,
        backend: Backend,
        items: Iterable[Any],
        /,
        *,
        concurrency: int = 64,
        progress: Progress = False,
        return_exceptions: Literal[False] = False,
    ) -> list[Result[R]]: ...
    @overload
    async def run_batch(
        self,
        backend: Backend,
        items: Iterable[Any],
        /,
        *,
        concurrency: int = 64,
        progress: Progress = False,
        return_exceptions: bool,
    ) -> list[Result[R] | Exception]: ...
    async def run_batch(
        self,
        backend: Backend,
        items: Iterable[Any],
        /,
        *,
        concurrency: int = 64,
        progress: Progress = False,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Run once for each item; results in the order of the items.

        items               mappings (keyword arguments), tuples (positional ones) or, for a
                            program of one argument, anything else
        concurrency         runs that are live at once; the engine batches what they ask for
        progress            True for a bar on stderr, or a function of (done, total)
        return_exceptions   an item that fails leaves its exception in its place. Without it
                            `BatchError` is raised when all have ended; its `.outcomes` has every
                            result, so that one failure loses nothing.
        """
        self._check_backend(backend)
        return await run_batch(
            functools.partial(self._run, backend),
            items,
            concurrency=concurrency,
            progress=progress,
            return_exceptions=return_exceptions,
        )

    @overload
    def iter_batch(
        self,
        backend: Backend,
        items: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        concurrency: int = 64,
        return_exceptions: Literal[False] = False,
    ) -> BatchResults[Result[R]]: ...
    @overload
    def iter_batch(
        self,
        backend: Backend,
        items: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        concurrency: int = 64,
        return_exceptions: bool,
    ) -> BatchResults[Result[R] | Exception]: ...
    def iter_batch(
        self,
        backend: Backend,
        items: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        concurrency: int = 64,
        return_exceptions: bool = False,
    ) -> BatchResults[Any]:
        """Run once for each item and read the results, in order, as they come.

            async with judge.iter_batch(engine, essays) as results:
                async for result in results: ...

        Items are taken from their source as results are read: at most `concurrency` are taken
        and not handed out. Leaving the block early cancels what runs.
        """
        self._check_backend(backend)
        return BatchResults(
            functools.partial(self._run, backend),
            items,
            concurrency=concurrency,
            return_exceptions=return_exceptions,
        )

    def stream(self, backend: Backend, /, *args: P.args, **kwargs: P.kwargs) -> RunStream[R]:
        """Run, and read what happens as it happens.

            async with chat.stream(engine, "Hello") as run:
                async for piece in run.text("answer"):
                    print(piece, end="")
            print(run.result.usage)

        `async for event in run` gives all events, see `structgen.events`. Leaving the block
        early cancels the program and aborts its requests.
        """

        self._check_backend(backend)

        def start(listener: Listener) -> Coroutine[Any, Any, Result[R]]:
            return self._run(backend, args, kwargs, listener)

        return RunStream(start)

    def run_sync(
        self, backend: Backend | Blocked, /, *args: P.args, **kwargs: P.kwargs
    ) -> Result[R]:
        """Run from code that is not async, on an event loop in a thread of its own.

        backend   an engine that is not open: it is opened for this call and closed after it; or
                  one that `blocking(...)` keeps open for many calls

        Works in a notebook too, whose own loop waits meanwhile. Raises what `run` raises.
        """
        return run_sync(lambda opened: self._run(opened, args, kwargs), backend)

    async def _run(
        self,
        backend: Backend,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *listeners: Listener,
    ) -> Result[R]:
        self._check_backend(backend)
        run = Run(backend, self.limits, listeners)
        cursor = Cursor(run, self.options)
        run.tell(RunStarted, program=self.__name__, parent=CURRENT_RUN.get())
        token = CURRENT_RUN.set(run.id)
        error = ""
        try:
            value = await self._timed(run, cursor, args, kwargs)
        except BaseException as failure:
            error = named(failure)
            raise
        finally:
            CURRENT_RUN.reset(token)
            try:
                await run.end()
            finally:
                run.tell_end(error)
        return Result(value, run.usage, cursor.transcript, cursor.variables.detached(), cursor.chat)

    async def _timed(
        self, run: Run, cursor: Cursor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> R:
        seconds = run.budget.seconds
        if seconds is None:
            return await self._whole(run, cursor, args, kwargs)
        with anyio.move_on_after(seconds):
            return await self._whole(run, cursor, args, kwargs)
        run.exhausted = "seconds"
        raise run.budget_error()

    async def _whole(
        self, run: Run, cursor: Cursor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> R:
        try:
            with self._frame(cursor):
                value = await self.function(State(cursor), *args, **self._arguments(args, kwargs))
                if cursor.pending:
                    await operations.settle(cursor, ahead=False)
        except Exception as error:
            # In branches it comes in a group, and what the program makes of it does not matter.
            if run.exhausted is not None and all(
                isinstance(each, BudgetError | StateClosedError) for each in leaves(error)
            ):
                raise run.budget_error() from error
            raise
        if run.exhausted is not None:
            raise run.budget_error()
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError(
                f"{self.__name__} returned the coroutine {value.__qualname__}, which nobody has "
                "awaited: write `return await ...`"
            )
        self._warn_of_forgotten(run)
        return value

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a call: those of `bind`, unless the call gives them itself."""
        if not self.bound:
            return dict(kwargs)
        parameters = list(inspect.signature(self.function).parameters)[1:]
        taken = set(parameters[: len(args)])
        return {**{k: v for k, v in self.bound.items() if k not in taken}, **kwargs}

    def _warn_of_forgotten(self, run: Run) -> None:
        """What was appended to a branch and never awaited was never run."""
        if forgotten := run.forgotten():
            warnings.warn(
                f"{self.__name__} ended before it had run {'; '.join(forgotten)}: write "
                "`await branch`, `await branches.settle()` or `async with s.fork(n)`",
                ResourceWarning,
                stacklevel=2,
            )

    def _check_backend(self, backend: object) -> None:
        if isinstance(backend, State):
            raise TypeError(
                f"run() takes a backend; on a State, call the program inline: "
                f"`await {self.__name__}(s, ...)`"
            )
        if isinstance(backend, Blocked):
            raise TypeError(
                f"run() cannot await what blocking() keeps on a loop of its own; call "
                f"{self.__name__}.run_sync(...) with it"
            )
        if isinstance(backend, type) or not hasattr(backend, "generate"):
            raise TypeError(
                f"run() takes an engine or another backend first, got {type(backend).__name__}; "
                "write `async with Engine('smollm2-135m') as engine:` and pass the engine"
            )

    def __repr__(self) -> str:
        return f"<program {self.__module__}.{self.__qualname__}>"

    # `functools.update_wrapper` sets these on every program.
    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]


class ProgramMethod(Protocol[S_contra, P, R]):
    """What type checkers see of a program in a class: a descriptor that binds like a method."""

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(self, instance: S_contra, owner: type, /) -> Program[P, R]: ...


@overload
def program(function: Callable[Concatenate[State, P], Coroutine[Any, Any, R]]) -> Program[P, R]: ...
@overload
def program(
    function: Callable[Concatenate[S_contra, State, P], Coroutine[Any, Any, R]],
) -> ProgramMethod[S_contra, P, R]: ...
def program(function: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """Make a program of an `async def` function, or method, whose first argument is a State."""
    return Program(function)
