"""The order in which sequences with common beginnings are neighbours, kept from step to step.

Owns   the last order, and how many first slots each sequence has in common with the one before it.
Holds  sequences stand in ascending order of their slots, equal ones by their rows; that order, and
       all it says about common beginnings, is the one that sorting anew would give.
Used   by `segment_plan.SegmentPlanner`.

Sorted by their slots, sequences below any fork are neighbours, to any depth. How many first slots
neighbours have in common then says all there is to know about the tree, as the LCP array of a
suffix array does (Kasai et al. 2001): sequences i < j have in common the least of
common[i + 1 : j + 1]. So one that ends is taken out without a look at any slot, and slots that are
added at the end matter only to a sequence that was another's beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from structgen.kernels.attention import Layout

Slots = NDArray[np.int64]

# More new sequences than one in so many are sorted with all others, not put in one by one.
FEW = 4


class Reader(NamedTuple):
    """One sequence with new tokens: rows [first, first + queries) over `context`; see `Layout`."""

    first: int
    queries: int
    context: Slots
    origin: object


def readers_of(layout: Layout) -> Iterator[Reader]:
    """The sequences of a step that have queries; each has an origin, if only for this step."""
    starts = layout.query_start_b1.tolist()
    origins = layout.origin_b
    for b, context in enumerate(layout.context_b):
        if starts[b + 1] > starts[b]:
            origin = object() if origins is None else origins[b]
            yield Reader(starts[b], starts[b + 1] - starts[b], context, origin)


class _Place(NamedTuple):
    """A reader that goes on, and what it has in common with the one before it: then and now."""

    old: Reader
    new: Reader
    common_old: int
    common: int


class SlotTree:
    """Sequences in the order of their slots.

    readers    in order
    common     common[i]: how many first slots reader i has in common with reader i - 1; 0 for the
               first
    """

    def __init__(self) -> None:
        self.readers: list[Reader] = []
        self.common: list[int] = []

    def update(self, readers: Sequence[Reader]) -> None:
        """Order these sequences, from the last order as far as they were in it."""
        coming = {id(reader.origin): reader for reader in readers}
        assert len(coming) == len(readers), "two sequences of a step have the same origin"
        places = self._places(coming)
        self.readers = [place.new for place in places]
        self.common = [place.common for place in places]
        for reader in self.readers:
            del coming[id(reader.origin)]
        if len(coming) * FEW > len(readers):
            self._sort(readers)
        else:
            for reader in coming.values():
                self._put_in(reader)

    def _places(self, coming: dict[int, Reader]) -> list[_Place]:
        """Those of the last order that go on and stand in order still."""
        places: list[_Place] = []
        least = 0
        for old, with_last in zip(self.readers, self.common, strict=True):
            least = min(least, with_last)
            new = coming.get(id(old.origin))
            if new is None or len(new.context) < len(old.context):
                continue
            common = least
            # Only where one was the beginning of the other do added slots say anything new.
            while places and least == len(places[-1].old.context):
                last = places[-1]
                common = common_beginning(last.new.context, new.context, least)
                if _precedes(last.new, new, common):
                    break
                places.pop()
                common = least = min(least, last.common_old)
            places.append(_Place(old, new, least, common))
            least = len(old.context)
        return places

    def _sort(self, readers: Sequence[Reader]) -> None:
        # Big-endian, bytes compare as the numbers they stand for: one memcmp a comparison.
        self.readers = sorted(readers, key=lambda r: (r.context.astype(">i4").tobytes(), r.first))
        pairs = pairwise(reader.context for reader in self.readers)
        self.common = [0, *(common_beginning(a, b) for a, b in pairs)][: len(readers)]

    def _put_in(self, reader: Reader) -> None:
        low, high = 0, len(self.readers)
        before = after = 0
        while low < high:
            middle = (low + high) // 2
            other = self.readers[middle]
            # What both borders of the search begin with, everything between them begins with.
            common = common_beginning(other.context, reader.context, min(before, after))
            if _precedes(other, reader, common):
                low, before = middle + 1, common
            else:
                high, after = middle, common
        self.readers.insert(low, reader)
        self.common[low : low + 1] = [before, after] if low < len(self.common) else [before]


def common_beginning(a: Slots, b: Slots, known: int = 0) -> int:
    """How many first slots are the same, of which `known` are known to be."""
    length = min(len(a), len(b))
    done, step = known, 256
    while done < length:
        piece = slice(done, min(done + step, length))
        different = a[piece] != b[piece]
        if different.any():
            return done + int(different.argmax())
        done, step = done + step, step * 4
    return length


def _precedes(a: Reader, b: Reader, common: int) -> bool:
    if common == len(a.context):
        return common < len(b.context) or a.first < b.first
    return common < len(b.context) and bool(a.context[common] < b.context[common])
