"""Memory that the allocator holds although nobody uses it: given back to the system.

glibc serves the large arrays of a step and the small objects of requests from one heap. Where a
small object comes to stand in the hole that a large array left, the next large array needs new
memory at the end: under load the resident set of a process grows by megabytes a minute while
what is in use stays the same. Once in a while the pages of all holes are given back; it takes
some 10 ms, where the holes come to 100 MB, and those that the next steps need come back by page
faults, some 40 MB where 256 requests run.

Used   by `loop`, between steps, on the thread that computes.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

EVERY = 10.0  # seconds of work between two times


class Tidying:
    """Gives unused memory back, at most once in a while."""

    def __init__(self, every: float = EVERY) -> None:
        self._every = every
        self._last = time.monotonic()

    def between_steps(self) -> None:
        """Give unused memory back, if it is time to."""
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            give_back()


def give_back() -> None:
    """Give the unused memory of the process back to the system; only glibc has to be told."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None  # another C library, which has no such heap
    return trim
