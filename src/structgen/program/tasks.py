"""Ending tasks for certain, and telling what they ended by.

Owns nothing. Used by whatever of the program room starts tasks, which ends them here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import anyio

from structgen.errors import StructgenError


async def outlast(work: Coroutine[Any, Any, None]) -> None:
    """Do some work to its end, whoever cancels meanwhile: that is heeded after it."""
    task = asyncio.create_task(work)
    try:
        await _until_done([task])
    finally:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def cut(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, however they end.

    A cancellation of the caller that arrives meanwhile is heeded after that.
    """
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    try:
        await _until_done(tasks)
    finally:
        for task in tasks:
            if not task.cancelled():
                task.exception()  # looked at, or asyncio would report it as lost


async def _until_done(tasks: Iterable[asyncio.Task[Any]]) -> None:
    cancelled: asyncio.CancelledError | None = None
    # The shield keeps anyio's cancellation out, but not a plain `Task.cancel`.
    with anyio.CancelScope(shield=True):
        while pending := [task for task in tasks if not task.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


def failure_of(task: asyncio.Task[Any], who: str) -> BaseException | None:
    """What a task that has ended failed with, None if it returned.

    What an async iterator could not raise as it is becomes another error: to whoever reads, a
    bare `CancelledError` would look like a cancellation, and `StopAsyncIteration` like the end.
    """
    try:
        task.result()
    except asyncio.CancelledError as error:
        text = (
            f"{who} was cancelled from within: it cancelled itself, or awaited a task that was "
            "cancelled; catch asyncio.CancelledError around that await if it may happen"
        )
        return _caused(StructgenError(text), error)
    except StopAsyncIteration as error:
        return _caused(RuntimeError(f"{who} raised StopAsyncIteration"), error)
    except BaseException as error:  # noqa: BLE001 - handed on to whoever waits for the task
        return error
    return None


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error
