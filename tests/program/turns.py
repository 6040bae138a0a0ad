"""What is left of a coroutine that is cancelled, whichever of its awaits it stands at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

MOST_TURNS = 300


class Clean:
    """Compares what lives on now with what lived when it was made."""

    def __init__(self) -> None:
        self._tasks, self._threads = self._now()

    def left(self) -> set[str]:
        """Names of tasks and threads that were not there before."""
        tasks, threads = self._now()
        return {str(each) for each in (tasks - self._tasks) | (threads - self._threads)}

    @staticmethod
    def _now() -> tuple[set[Any], set[Any]]:
        return set(asyncio.all_tasks()), set(threading.enumerate())


async def turns(number: int) -> None:
    """Let the loop turn."""
    for _ in range(number):
        await asyncio.sleep(0)


async def cancel_everywhere(
    work: Callable[[], Coroutine[Any, Any, object]], check: Callable[[], None]
) -> int:
    """Run `work` again and again, each time cancelled one turn of the loop later.

    After each time `check` is called, and neither tasks nor threads may be left. Returns after
    how many turns it was first too late to cancel it.
    """
    for number in range(MOST_TURNS):
        clean = Clean()
        task = asyncio.create_task(work())
        await turns(number)
        if task.done():
            task.result()
            return number
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), f"after {number} turns: {task!r}"
        assert clean.left() == set(), f"after {number} turns"
        check()
    raise AssertionError(f"it had not ended after {MOST_TURNS} turns")
