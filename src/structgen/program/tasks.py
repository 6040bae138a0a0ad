"""Starting tasks, ending them for certain, and telling what they ended by.

Owns   nothing.
Holds  what a user's code in a task raises reaches whoever waits for the task, and nobody else: not
       even `sys.exit()` ends the event loop, and with it all that runs there.
Used   by whatever of the program room starts tasks, which ends them here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from structgen.errors import StructgenError
from structgen.waiting import outlast

T = TypeVar("T")
EXITS = (SystemExit, KeyboardInterrupt)
"""What asyncio raises out of its loop when a task ends by it."""


class Exit(BaseException):
    """What a task has ended by in place of one of `EXITS`, which is its cause."""


def start(work: Callable[[], Awaitable[T]], name: str | None = None) -> asyncio.Task[T]:
    """Start a task for `await work()`; `result_of` and `failure_of` tell what it ended by."""
    return asyncio.create_task(kept(work), name=name)


async def kept(work: Callable[[], Awaitable[T]]) -> T:
    """Await `work()`. Raises `Exit` where that would end the event loop."""
    try:
        return await work()
    except EXITS as error:
        raise Exit from error


def result_of(task: asyncio.Task[T]) -> T:
    """What a task that has ended returned; raises what it raised."""
    try:
        return task.result()
    except Exit as error:
        raise _meant(error) from None


async def all_of(works: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Do some works at once. When one fails, the others are cancelled.

    The errors are raised as an `ExceptionGroup`; an exit, when the others have ended, as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(kept(work)) for work in works]
    except BaseExceptionGroup as error:
        raise_exit(error.exceptions)
        raise
    return [task.result() for task in tasks]


def raise_exit(errors: Iterable[BaseException | None]) -> None:
    """Raise the first exit among what tasks have ended by, if there is one."""
    for error in errors:
        if isinstance(error, Exit):
            raise _meant(error) from None
        if isinstance(error, EXITS):
            raise error


async def cut(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, however they end.

    A cancellation of the caller that arrives meanwhile is heeded after that.
    """
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await outlast(*tasks)


def failure_of(task: asyncio.Task[Any], who: str) -> BaseException | None:
    """What a task that has ended failed with, None if it returned.

    What an async iterator could not raise as it is becomes another error: to whoever reads, a
    bare `CancelledError` would look like a cancellation, `StopAsyncIteration` like the end, and
    `GeneratorExit` as if the reader were closed.
    """
    try:
        task.result()
    except asyncio.CancelledError as error:
        text = (
            f"{who} was cancelled from within: it cancelled itself, or awaited a task that was "
            "cancelled; catch asyncio.CancelledError around that await if it may happen"
        )
        return _caused(StructgenError(text), error)
    except (StopAsyncIteration, GeneratorExit) as error:
        return _caused(RuntimeError(f"{who} raised {type(error).__name__}"), error)
    except Exit as error:
        return _meant(error)
    except BaseException as error:  # noqa: BLE001 - handed on to whoever waits for the task
        return error
    return None


def named(error: BaseException) -> str:
    """The type of an error and what it says, if its own code lets it say anything.

    What a cancellation says is of the scope that cancelled, and names nothing that users know.
    """
    if isinstance(error, asyncio.CancelledError):
        return type(error).__name__
    try:
        said = str(error)
    except Exception as failure:  # noqa: BLE001 - it must not take the place of the error
        said = f"(what it says is not known: its __str__ raised {type(failure).__name__})"
    return f"{type(error).__name__}: {said}"


def _meant(exit_: Exit) -> BaseException:
    assert exit_.__cause__ is not None, "`kept` raises it from its cause"
    return exit_.__cause__


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error
