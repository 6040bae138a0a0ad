"""Where the slots of each sequence stand in one table of i32, which goes on from step to step.

Owns   the table, and a region of it for each sequence: its context from position 0 on, and room.
Holds  what was written for a position stays as it is while the sequence comes in every step, unless
       it outgrows its room. `edits` is all that has changed since the step before.
Used   by `segment_plan.SegmentPlanner`; the device has a copy that takes the same edits.

A region for each sequence is the table of lightllm's TokenAttention and of SGLang. Branches of a
fork each have their common prefix in their region; only one of them is read for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from structgen.kernels.slot_tree import Reader

LEAST = 4096  # slots of the smallest table
ROOM = 256  # a region has room for so many more slots, or for a quarter more


@dataclass(frozen=True, slots=True)
class Edits:
    """What a step has written.

    whole     everything: the table was laid out anew, and may be another array
    ranges    else these [from, to)
    at, slots else, and these single places: `at` has been given `slots`
    """

    whole: bool = False
    ranges: list[tuple[int, int]] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Region:
    """Places [start, start + room), of which `length` are written. Keeps the origin's identity."""

    origin: object
    start: int
    length: int
    room: int


class SlotTable:
    """Slots by sequence and position: position n of a reader stands at its start + n.

    slots_c   the table; what stands outside of any reader's context is left over or nothing
    edits     what the last `update` has written
    """

    def __init__(self) -> None:
        self.slots_c = np.zeros(0, np.int32)
        self.edits = Edits()
        self._regions: dict[int, _Region] = {}
        self._end = 0  # of the last region

    @property
    def used(self) -> int:
        """Places behind these are in no region."""
        return self._end

    def update(self, readers: Sequence[Reader]) -> list[int]:
        """Where each of these sequences starts; all others lose their region."""
        self.edits = Edits()
        regions = [self._regions.get(id(reader.origin)) for reader in readers]
        placed: list[_Region] = []
        for reader, region in zip(readers, regions, strict=True):
            length = len(reader.context)
            if region is None or length > region.room:
                placed.append(self._place(reader))
            else:
                placed.append(region)
                if length > region.length:
                    self._append(region, reader.context)
        self._regions = {id(region.origin): region for region in placed}
        if self._end > len(self.slots_c):
            self._lay_out(readers, placed)
        return [region.start for region in placed]

    def _place(self, reader: Reader) -> _Region:
        length = len(reader.context)
        region = _Region(reader.origin, self._end, length, length + max(ROOM, length // 4))
        self._end += region.room
        if self._end <= len(self.slots_c):
            self._write(region.start, reader.context)
        return region

    def _append(self, region: _Region, context: NDArray[np.int64]) -> None:
        start = region.start + region.length
        if len(context) == region.length + 1:
            slot = int(context[-1])
            self.slots_c[start] = slot
            self.edits.at.append(start)
            self.edits.slots.append(slot)
        else:
            self._write(start, context[region.length :])
        region.length = len(context)

    def _write(self, start: int, slots: NDArray[np.int64]) -> None:
        self.slots_c[start : start + len(slots)] = slots
        self.edits.ranges.append((start, start + len(slots)))

    def _lay_out(self, readers: Sequence[Reader], regions: Sequence[_Region]) -> None:
        """Give every sequence a new region, in a table of which at least half is left."""
        needed = sum(region.room for region in regions)
        size = max(len(self.slots_c), LEAST, 1 << (2 * needed - 1).bit_length())
        slots_c = np.zeros(size, np.int32)
        self._end = 0
        for reader, region in zip(readers, regions, strict=True):
            region.start, region.length = self._end, len(reader.context)
            slots_c[region.start : region.start + region.length] = reader.context
            self._end += region.room
        self.slots_c, self.edits = slots_c, Edits(whole=True)
