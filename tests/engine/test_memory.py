"""Memory that nobody uses goes back to the system, once in a while."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from structgen.engine.memory import Tidying, give_back

MEGABYTE = 1 << 20
HOLE = 64 << 10  # too small for a mapping of its own, so that it lies in the heap


@pytest.fixture
def holes() -> Iterator[int]:
    """Leave holes in the heap between small objects; how many bytes they come to."""
    pieces = [bytearray(HOLE) for _ in range(2000)]
    kept = pieces[::2]
    pieces.clear()
    yield len(kept) * HOLE
    kept.clear()


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not Path("/proc").exists(), reason="glibc's heap"
)
class TestTidying:
    def test_gives_back_what_nobody_uses(self, holes: int) -> None:
        before = resident()
        give_back()

        assert before - resident() > holes / 2

    def test_does_so_when_it_is_time_to(self, holes: int) -> None:
        before = resident()
        Tidying(every=0.0).between_steps()

        assert before - resident() > holes / 2

    def test_does_nothing_before(self, holes: int) -> None:
        before = resident()
        Tidying(every=1000.0).between_steps()

        assert abs(before - resident()) < holes / 4
