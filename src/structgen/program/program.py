"""`@program`: a coroutine function that moves a State, as something that can be run.

Owns   the function and its default options. Used by users, the command line and the server.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from structgen.backend import Backend
from structgen.options import GenOptions, request_from
from structgen.program.cursor import Cursor
from structgen.program.result import Result
from structgen.program.run import Run
from structgen.program.state import State

P = ParamSpec("P")
R = TypeVar("R")
S_contra = TypeVar("S_contra", contravariant=True)


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
    """

    def __init__(
        self,
        function: Callable[Concatenate[State, P], Coroutine[Any, Any, R]],
        options: GenOptions | None = None,
    ) -> None:
        """`options` are default options of every generation."""
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"@program needs an `async def` function, got {function!r}")
        self.function = function
        self.options: GenOptions = options or {}
        functools.update_wrapper(self, function)

    def __call__(self, s: State, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run inline, on a state that the caller has: its text and variables are shared."""
        if not isinstance(s, State):
            raise TypeError(
                f"a program is called with the State of another program, got {type(s).__name__}; "
                f"write `await {self.__name__}.run(backend, ...)` to start it on a backend"
            )
        if not self.options:
            return self.function(s, *args, **kwargs)
        return self._inline(s, *args, **kwargs)

    async def run(self, backend: Backend, /, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """Run on a backend, with a fresh state.

        Raises what the program raises. When it ends, by whatever way, requests that it has left
        unfinished are aborted; who still waits for one gets a `StateClosedError`.
        """
        if isinstance(backend, State):
            raise TypeError(
                f"run() takes a backend; on a State, call the program inline: "
                f"`await {self.__name__}(s, ...)`"
            )
        if not hasattr(backend, "generate"):
            raise TypeError(
                f"run() takes an engine or another backend first, got {type(backend).__name__}; "
                "write `async with Engine('smollm2-135m') as engine:` and pass the engine"
            )
        run = Run(backend)
        cursor = Cursor(run, self.options)
        try:
            value = await self.function(State(cursor), *args, **kwargs)
        finally:
            await run.end()
        return Result(value, run.usage, cursor.transcript, cursor.variables, run.chat)

    def using(self, **options: Unpack[GenOptions]) -> Program[P, R]:
        """The same program with other default options.

        Options of a single `gen` come before these. With `seed` the whole run is reproducible:
        each request gets a seed of its own, derived from this one, the branch and how many calls
        and forks its state had made, so that branches differ and reruns agree.

        Raises `OptionError` for an option that is unknown or out of range.
        """
        merged: GenOptions = {**self.options, **options}
        request_from((), merged)
        return Program(self.function, merged)

    def __get__(self, instance: object, owner: type | None = None) -> Program[..., R]:
        """A program that is a method, bound to its object like any method."""
        if instance is None:
            return self
        return Program(MethodType(self.function, instance), self.options)

    def __repr__(self) -> str:
        return f"<program {self.__module__}.{self.__qualname__}>"

    async def _inline(self, s: State, *args: P.args, **kwargs: P.kwargs) -> R:
        with s.using(**self.options):
            return await self.function(s, *args, **kwargs)

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
