"""Who runs in the next step, and with how many tokens.

Owns   the queues, and every change of a sequence's slots: taking, publishing, giving back.
Holds  a running sequence has exactly one lock (on `node`), a waiting one has none; a request
       that was admitted gets at least one token in the step that admits it.
Used   by `core`, which calls `plan` when no step is in flight.

There are no prefill and decode phases: in each step a sequence's computed tokens catch up with
its known ones (the unified rule of vLLM V1). A prompt longer than the chunk takes several steps,
a retracted sequence computes its output like a prompt.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec

from structgen.core.pool import Pool
from structgen.core.radix import Ids, Node, Radix
from structgen.core.sequence import Sequence, Status
from structgen.request import Namespace

AGING = 64  # tokens of cache hit that one pass of being overtaken is worth
RESERVE = 32  # slots in a row that a decoding sequence takes at once
FORESEEN = 4096  # tokens that an output is expected to have at most, whatever its request allows
COMPARED = 128  # waiting requests whose cache hit is looked up; beyond that order is by arrival


class Slice(msgspec.Struct, frozen=True):
    """The part of a sequence that a step computes: tokens [start, start + count).

    Keys and values of the tokens before `fresh` are in the tree already: those rows run for
    their logits only and write to the padding slot.
    """

    sequence: Sequence
    start: int
    count: int
    fresh: int


class Scope:
    """An open fork scope: keeps the longest cached part of its prefix from eviction."""

    def __init__(self, namespace: Namespace, ids: Ids) -> None:
        self.namespace = namespace
        self.ids = ids
        self.node: Node | None = None
        self.length = 0
        self.soft = False  # its pin was given up under pressure


class Counters:
    """Running totals, for statistics."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.prefilled_tokens = 0
        self.retractions = 0
        self.evicted_tokens = 0


class Schedule:
    """Admission, order, chunking, retraction, and the fork scopes' pins."""

    def __init__(
        self, pool: Pool, *, chunk_size: int, max_running: int, radix: bool, pin_share: float = 0.5
    ) -> None:
        self.pool = pool
        self.radix = Radix()
        self.counters = Counters()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.admitted: list[int] = []  # by the last plan, for the first time
        self.scopes: dict[int, Scope] = {}
        self._cached = radix
        self._chunk_size = chunk_size
        self._max_running = max_running
        self._pin_cap = int(pool.total * pin_share)
        # Expected share of its remaining output that a running request will really write;
        # SGLang's new-token ratio: it decays while all goes well and jumps after a retraction.
        self._expected = 0.7

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the waiting requests have, prompts and what retracted ones wrote."""
        return sum(sequence.known for sequence in self.waiting)

    # ------------------------------------------------------------ planning

    def plan(self) -> list[Slice]:
        """Choose the slices of the next step; empty only if there is no work."""
        slices: list[Slice] = []
        self.admitted.clear()
        budget = self._chunk_size
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING:
                continue  # retracted a moment ago, to make room for an older one
            # A token that was drawn comes on top; those forced after it share the chunk.
            decoding = sequence.decoding
            count = min(sequence.to_compute, budget + decoding)
            if count and self._provide(sequence, count):
                slices.append(self._slice(sequence, count))
                budget -= slices[-1].count - decoding
        self._admit(slices, budget)
        if not slices and self.waiting:
            # Nothing runs, so only pins can be in the way; work goes before warmth.
            self._soften()
            self._admit(slices, budget)
            assert slices, "a request that fits the pool could not be admitted to an idle engine"
        self._expected = max(0.1, self._expected - 0.001)
        return slices

    def _admit(self, slices: list[Slice], budget: int) -> None:
        if budget <= 0 or len(self.running) >= self._max_running:
            return
        for sequence in self._ranked():
            if budget <= 0 or len(self.running) >= self._max_running:
                break
            if not self._fits(sequence):
                break
            self._start(sequence)
            count = min(sequence.to_compute, budget)
            self._adopt(sequence)
            # Sequences that were planned before this one must keep their slots, so nobody is
            # retracted for it.
            if not self._make_room(self._missing(sequence, count)):
                self._send_back(sequence)
                break
            self._take(sequence, self._missing(sequence, count))
            slices.append(self._slice(sequence, count))
            budget -= slices[-1].count
            for other in self.waiting:
                other.passed_over += other.arrival < sequence.arrival

    def _ranked(self) -> list[Sequence]:
        """Waiting requests, best first: priority, then longest cache hit with aging, then age.

        The longest-prefix-first order of SGLang, which starves requests that never hit; here
        each time that a later arrival overtakes counts as `AGING` tokens of hit.
        """
        candidates = self.waiting
        if len(candidates) > COMPARED:
            # Not the first in the list: retracted ones, though older, stand at its end.
            candidates = heapq.nsmallest(
                COMPARED, candidates, key=lambda s: (-s.request.priority, s.arrival)
            )
        if len(candidates) < 2:
            return list(candidates)

        def rank(sequence: Sequence) -> tuple[int, int, int]:
            worth = self._hit(sequence)[0] + AGING * sequence.passed_over
            return -sequence.request.priority, -worth, sequence.arrival

        return sorted(candidates, key=rank)

    def _hit(self, sequence: Sequence) -> tuple[int, int]:
        if not self._cached:
            return 0, 0
        ids = sequence.ids[: sequence.known]
        return self.radix.peek(sequence.request.namespace, ids)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether admitting leaves room for what the running ones are expected to write."""
        if not self.running:
            return True
        hit, unlocked = self._hit(sequence)
        room = self.pool.free + self.radix.evictable - unlocked
        for other in self.running:
            room += other.allocated - self._final_length(other)
        return room >= self._final_length(sequence) - hit

    def _final_length(self, sequence: Sequence) -> int:
        """Slots that a sequence is expected to need in the end."""
        rest = min(sequence.max_length - sequence.known, FORESEEN)
        return sequence.known + int(self._expected * rest)

    def _start(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda s: (-s.request.priority, s.arrival))
        if self._cached:
            sequence.node = self.radix.root(sequence.request.namespace)

    def _send_back(self, sequence: Sequence) -> None:
        self.release(sequence)
        sequence.status = Status.WAITING
        sequence.cached = sequence.cached if sequence.counted else 0
        self.waiting.append(sequence)

    # ------------------------------------------------------------ slots

    def _slice(self, sequence: Sequence, count: int) -> Slice:
        """The next `count` tokens of a sequence that has slots for them."""
        start = sequence.computed
        count = min(count, sequence.to_compute)
        if not sequence.counted:
            sequence.counted = True
            self.admitted.append(sequence.id)
            self.counters.prompt_tokens += sequence.prompt_length
            self.counters.cached_tokens += sequence.cached
        if sequence.decoding:
            return Slice(sequence, start, count, max(start, sequence.shared))
        # Forced tokens that run for the first time are no prompt, though they run with it.
        self.counters.prefilled_tokens += max(0, min(start + count, sequence.drawn) - start)
        fresh = self._publish(sequence, start + count) if self._cached else start
        return Slice(sequence, start, count, max(start, fresh))

    def _adopt(self, sequence: Sequence) -> None:
        """Take over what the tree has beyond the tokens that this sequence has, also of this step.

        Two requests that compute the same long prompt thereby take turns, chunk by chunk.
        """
        if not self._cached or self._hit(sequence)[0] <= sequence.shared:
            return
        ids = sequence.ids[: sequence.known]
        node, slots = self.radix.match(sequence.request.namespace, ids)
        hit = len(slots)
        self.pool.give_back(sequence.own_slots()[: hit - sequence.shared].copy())
        self._move_lock(sequence, node)
        sequence.replace_slots(slots)
        sequence.shared = hit
        sequence.allocated = max(sequence.allocated, hit)
        reached = max(sequence.computed, min(hit, sequence.match_limit))
        if not sequence.resumed:
            gain = max(0, min(reached, sequence.prompt_length) - sequence.computed)
            sequence.cached += gain
            self.counters.cached_tokens += gain if sequence.counted else 0
        sequence.computed = reached

    def _publish(self, sequence: Sequence, stop: int) -> int:
        """Hand the tokens before `stop` to the tree, before they are computed.

        Returns how many of them were there already.
        """
        if stop <= sequence.shared:
            return sequence.shared
        space, ids = sequence.request.namespace, sequence.ids[:stop]
        node, known = self.radix.insert(space, ids, sequence.slots[:stop], pending=True)
        if known > sequence.shared:
            # A sequence retracted a moment ago left the very tokens that this one is to compute.
            self.pool.give_back(sequence.slots[sequence.shared : known].copy())
            sequence.replace_slots(self.radix.match(space, ids)[1][:known])
        self._move_lock(sequence, node)
        sequence.shared = stop
        scope = self.scopes.get(sequence.request.lineage.scope)
        if scope is not None:
            self._pin(scope)
        return known

    def _missing(self, sequence: Sequence, count: int) -> int:
        """Slots that are missing for the next `count` tokens."""
        return max(0, min(sequence.computed + count, sequence.known) - sequence.allocated)

    def _provide(self, sequence: Sequence, count: int) -> bool:
        """Get slots for the next `count` tokens of a running sequence, whoever has to give way.

        False: it had to give way itself.
        """
        if not sequence.decoding:
            self._adopt(sequence)
        while not self._make_room(missing := self._missing(sequence, count)):
            if not self._retract_for(sequence):
                return False
        reserve = 0
        if missing and sequence.decoding:
            ahead = min(RESERVE, sequence.max_length - sequence.allocated)
            reserve = max(0, min(ahead, self.pool.free) - missing)
        self._take(sequence, missing + reserve)
        return True

    def _take(self, sequence: Sequence, count: int) -> None:
        if not count:
            return
        have = sequence.allocated
        after = int(sequence.slots[have - 1]) if have else 0
        sequence.slots[have : have + count] = self.pool.take(count, after=after)
        sequence.allocated = have + count

    def _make_room(self, count: int) -> bool:
        """Free slots without hurting anybody: evict, then call in unused reserves."""
        if self.pool.free < count:
            evicted = self.radix.evict(count - self.pool.free)
            self.counters.evicted_tokens += len(evicted)
            self.pool.give_back(evicted)
        if self.pool.free < count:
            for other in self.running:
                self._trim(other)
        return self.pool.free >= count

    def _trim(self, sequence: Sequence) -> None:
        """Give back slots taken ahead of need; a slice planned in this step keeps its own."""
        keep = max(sequence.known, sequence.shared)
        if sequence.allocated > keep:
            self.pool.give_back(sequence.slots[keep : sequence.allocated].copy())
            sequence.allocated = keep

    def _retract_for(self, sequence: Sequence) -> bool:
        """Send the last-ranked running sequence back to the queue; False if it is this one.

        The first-ranked one is never retracted for another, so it always finishes; alone with
        pins in its way it makes them soft.
        """
        victim = self.running[-1]
        if victim is sequence and len(self.running) == 1:
            softened = self._soften()
            assert softened, "a request that fits the pool found no room in it"
            return True
        self.counters.retractions += 1
        self._expected = min(1.0, self._expected + 0.2)
        victim.resumed = True
        self._send_back(victim)
        return victim is not sequence

    def _move_lock(self, sequence: Sequence, node: Node) -> None:
        self.radix.lock(node)
        if sequence.node is not None:
            self.radix.unlock(sequence.node)
        sequence.node = node

    def release(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Take a sequence out of the running ones and give up everything it holds.

        What it has computed goes to the tree, unlocked; if it is not `trusted` it goes nowhere,
        and what it has published is taken out again, unless somebody else holds or has proven it.
        """
        self.running.remove(sequence)
        shared, written = sequence.shared, max(sequence.computed, sequence.shared)
        if sequence.node is None:
            self.pool.give_back(sequence.slots[: sequence.allocated].copy())
        elif trusted:
            ids, slots = sequence.ids[:written], sequence.slots[:written]
            _, known = self.radix.insert(sequence.request.namespace, ids, slots)
            # Another request has computed [shared, known) as well: the tree keeps that one's.
            self.pool.give_back(sequence.slots[shared:known].copy())
            self.pool.give_back(sequence.slots[written : sequence.allocated].copy())
            self.radix.unlock(sequence.node)
        else:
            self.pool.give_back(sequence.own_slots().copy())
            self.radix.unlock(sequence.node)
            doubted = {node for node in sequence.node.path() if not node.proven}
            self.retreat(doubted.__contains__)
            self.pool.give_back(self.radix.discard(sequence.node))
        sequence.node = None
        sequence.forget_slots()

    # ------------------------------------------------------------ scopes

    def open_scope(self, number: int, namespace: Namespace, ids: Ids) -> None:
        """Keep the cached part of `ids` from eviction, now and as more of it gets cached."""
        scope = self.scopes[number] = Scope(namespace, ids)
        self._pin(scope)

    def close_scope(self, number: int) -> None:
        """Drop the scope's pin."""
        scope = self.scopes.pop(number)
        if scope.node is not None:
            self.radix.unpin(scope.node)

    def _pin(self, scope: Scope) -> None:
        if scope.soft or scope.length == len(scope.ids) or not self._cached:
            return
        if self.radix.peek(scope.namespace, scope.ids)[0] <= scope.length:
            return
        node, slots = self.radix.match(scope.namespace, scope.ids)
        self.radix.pin(node)
        if scope.node is not None:
            self.radix.unpin(scope.node)
        scope.node, scope.length = node, len(slots)
        if self.radix.pinned > self._pin_cap:
            self._unpin(scope)
            scope.soft = True

    def _unpin(self, scope: Scope) -> None:
        if scope.node is not None:
            self.radix.unpin(scope.node)
        scope.node, scope.length = None, 0

    def _soften(self) -> bool:
        """Give up every pin. Their prefixes stay cached until the room is really needed."""
        pinned = [scope for scope in self.scopes.values() if scope.node is not None]
        for scope in pinned:
            self._unpin(scope)
            scope.soft = True
        return bool(pinned)

    def retreat(self, doubted: Callable[[Node], bool]) -> None:
        """Let go of pinned nodes that are to be taken out; what is above them stays pinned."""
        for scope in self.scopes.values():
            path = list(scope.node.path()) if scope.node is not None else []
            highest = max((i for i, node in enumerate(path) if doubted(node)), default=-1)
            if highest < 0:
                continue
            kept = path[highest + 1 : highest + 2]
            for node in kept:
                self.radix.pin(node)
            self._unpin(scope)
            for node in kept:
                scope.node, scope.length = node, node.depth
