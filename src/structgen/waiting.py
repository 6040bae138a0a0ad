"""Waiting for what must come to its end, whoever cancels meanwhile.

Owns   nothing. Used by whatever starts tasks, and ends them in the same block.
"""

from __future__ import annotations

import asyncio
from typing import Any

import anyio


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
