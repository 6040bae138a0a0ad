"""What is still running when a server has ended: tasks and threads that nobody can end.

Holds  a process ends soon after its server. A thread cannot be cancelled, and a task may refuse to
       be; the interpreter would wait for both, for as long as they take.
Used   by `engine`, which ends an event loop, and by `serve`, which ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_TASKS = 1.0  # seconds in which tasks that were cancelled end, and threads that nobody needs
_THREADS = 0.5  # seconds in which other threads end
_log = logging.getLogger("structgen.server")


async def tasks_left() -> list[str]:
    """End all other tasks of the loop; those that do not end in time, by name and line."""
    loop, own = asyncio.get_running_loop(), asyncio.current_task()
    # Cancelled, it would wait for its thread; so it is left to itself where that takes long.
    closing = asyncio.create_task(loop.shutdown_default_executor())
    others = asyncio.all_tasks() - {own, closing}
    for each in others:
        each.cancel()
    await asyncio.wait({*others, closing}, timeout=_TASKS)
    found = [_named(each) for each in asyncio.all_tasks() - {own, closing}]
    return found if closing.done() else [*found, "what runs in asyncio.to_thread"]


def threads_left(before: Iterable[threading.Thread]) -> list[str]:
    """Threads that the interpreter would wait for, by name and line, but those that were before."""
    known, until = {*before, threading.current_thread()}, time.monotonic() + _THREADS
    found: list[str] = []
    for each in threading.enumerate():
        if each.daemon or each in known:
            continue
        each.join(max(0.0, until - time.monotonic()))
        if each.is_alive():
            frame = sys._current_frames().get(each.ident or 0)  # noqa: SLF001 - public, documented
            found.append(f"thread {each.name}{_place(frame)}")
    return found


def end_process(code: int, left: Iterable[str]) -> None:
    """End the process at once, and log what it leaves behind."""
    _log.warning("ended, though this would not: %s", "; ".join(left))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _named(task: asyncio.Task[object]) -> str:
    frames = task.get_stack(limit=1)
    name = getattr(task.get_coro(), "__qualname__", task.get_name())
    return f"task {name}{_place(frames[0] if frames else None)}"


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
