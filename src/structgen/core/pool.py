"""The pool of token slots: which are free, and how to hand them out in runs.

Owns   the numbers of the slots, not the tensors behind them (those belong to the runner).
Holds  a slot is free, in limbo, or owned by exactly one holder (a radix node or a sequence);
       slot 0 is padding and is never handed out; nothing becomes free while a step is in flight
       (the limbo rule: what is given back meanwhile waits until that step has been committed).
Used   by `schedule` and `core`; the radix tree only passes slots on.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
NO_SLOTS: Slots = np.empty(0, np.int64)


class Pool:
    """Free slots as sorted, disjoint, maximal runs `[start, stop)`.

    Contiguous runs matter on the CPU: attention reads them as a slice, without a gather.
    """

    def __init__(self, slots: int) -> None:
        """`slots` counts the usable ones; they are numbered 1..slots."""
        self.total = slots
        self.free = slots
        self.in_limbo = 0
        self._starts = [1] if slots else []
        self._stops = [slots + 1] if slots else []
        self._limbo: list[Slots] = []
        self._in_flight = False

    def take(self, count: int, after: int = 0) -> Slots:
        """Take `count` slots; the caller has checked that so many are free.

        They continue slot `after` where that is possible, else they are the first run that is
        long enough, else the first runs there are.
        """
        assert 0 <= count <= self.free, f"{count} slots asked for, {self.free} free"
        pieces: list[Slots] = []
        wanted = count
        while wanted:
            index = self._run_after(after)
            if index is None:
                index = self._first_fit(wanted)
            start = self._starts[index]
            taken = min(wanted, self._stops[index] - start)
            pieces.append(np.arange(start, start + taken, dtype=np.int64))
            if start + taken == self._stops[index]:
                del self._starts[index], self._stops[index]
            else:
                self._starts[index] = start + taken
            after = start + taken - 1
            wanted -= taken
        self.free -= count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [NO_SLOTS])

    def give_back(self, slots: Slots) -> None:
        """Give slots back; they are free at once, or after the step in flight."""
        if not slots.size:
            return
        if self._in_flight:
            self._limbo.append(slots)
            self.in_limbo += slots.size
        else:
            self._release(slots)

    def launch(self) -> None:
        """A step starts to read slots: nothing becomes free until `land`."""
        assert not self._in_flight, "a step is in flight already"
        self._in_flight = True

    def land(self) -> None:
        """The step in flight has ended: what was given back meanwhile is free now."""
        self._in_flight = False
        for slots in self._limbo:
            self._release(slots)
        self._limbo.clear()
        self.in_limbo = 0

    def free_slots(self) -> Slots:
        """Every free slot, ascending; for checks of the invariants."""
        runs = [np.arange(a, b) for a, b in zip(self._starts, self._stops, strict=True)]
        return np.concatenate(runs or [NO_SLOTS])

    def limbo_slots(self) -> Slots:
        """Every slot in limbo; for checks of the invariants."""
        return np.concatenate(self._limbo or [NO_SLOTS])

    def _run_after(self, slot: int) -> int | None:
        if not slot:
            return None
        index = bisect_left(self._starts, slot + 1)
        found = index < len(self._starts) and self._starts[index] == slot + 1
        return index if found else None

    def _first_fit(self, wanted: int) -> int:
        for index, start in enumerate(self._starts):
            if self._stops[index] - start >= wanted:
                return index
        return 0

    def _release(self, slots: Slots) -> None:
        ordered = np.sort(slots)
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        for run in np.split(ordered, breaks):
            self._release_run(int(run[0]), int(run[-1]) + 1)
        self.free += slots.size

    def _release_run(self, start: int, stop: int) -> None:
        index = bisect_left(self._starts, start)
        left_ok = index == 0 or self._stops[index - 1] <= start
        right_ok = index == len(self._starts) or stop <= self._starts[index]
        if not (left_ok and right_ok):
            raise AssertionError(f"slots {start}..{stop - 1} were given back twice")
        joins_left = index > 0 and self._stops[index - 1] == start
        joins_right = index < len(self._starts) and self._starts[index] == stop
        if joins_left and joins_right:
            self._stops[index - 1] = self._stops[index]
            del self._starts[index], self._stops[index]
        elif joins_left:
            self._stops[index - 1] = stop
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._stops.insert(index, stop)
