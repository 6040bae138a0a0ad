"""Waiting for what must come to its end, whoever cancels meanwhile; and letting others run.

Owns   nothing. Used by whatever starts tasks, and ends them in the same block, and by whatever
       has so much to do on the event loop that others would notice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, TypeVar

import anyio

T = TypeVar("T")
TURN = 0.005  # seconds of work after which others have their turn


async def outlast(*tasks: asyncio.Future[Any]) -> None:
    """Wait until tasks are done, however they end; a cancellation is heeded after that."""
    cancelled: asyncio.CancelledError | None = None
    # The shield keeps anyio's cancellation out, but not a plain `Task.cancel`.
    with anyio.CancelScope(shield=True):
        while pending := [task for task in tasks if not task.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as error:
                cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, or asyncio would report it as lost
    if cancelled is not None:
        raise cancelled


async def in_turns(items: Iterable[T]) -> list[T]:
    """The items, which take long to make all together: other tasks run in between."""
    found: list[T] = []
    began = time.perf_counter()
    for item in items:
        found.append(item)
        if time.perf_counter() - began > TURN:
            await asyncio.sleep(0)
            began = time.perf_counter()
    return found
