"""What must hold in a core after whatever anybody did to it; raises AssertionError where not.

The letters are those of the state machine's docstring: Pool, Tree, Request, Scope, Progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from structgen.core.core import Core
from structgen.core.radix import Node, Radix
from structgen.core.sequence import Sequence, Status
from structgen.request import Namespace
from tests.core.fakes import POISON, TagMemory, extend, path_tags, root_tag


def check(core: Core, memory: TagMemory) -> set[int]:
    """Check everything; returns the tags of all paths in the trees, published ones included."""
    check_pool(core)
    tags = check_tree(core, memory)
    check_heap(core)
    check_scopes(core)
    check_requests(core, memory)
    return tags


def check_pool(core: Core) -> None:
    pool, schedule = core.pool, core.schedule
    owned = [pool.free_slots(), pool.limbo_slots()]
    owned += [sequence.own_slots() for sequence in schedule.running]
    owned += [node.slots for _, node in schedule.radix.nodes()]
    slots = np.sort(np.concatenate(owned))
    # P1 to P4 in one: every slot but the padding has exactly one owner.
    assert np.array_equal(slots, np.arange(1, pool.total + 1)), f"owned slots: {slots}"
    assert pool.free == len(owned[0])
    assert pool.in_limbo == len(owned[1])
    assert all(a < b for a, b in zip(pool._starts, pool._stops, strict=True))
    assert all(b < a for b, a in zip(pool._stops, pool._starts[1:], strict=False))
    assert core.in_flight or not pool.in_limbo
    for piece in core._in_flight or ():  # P5
        stop = piece.start + piece.count
        assert not set(piece.sequence.slots[:stop].tolist()) & set(owned[0].tolist())


def holders(core: Core) -> Iterator[tuple[Node, bool]]:
    """Every node that somebody holds, once for each holder, and whether that is a pin."""
    for sequence in core.schedule.running:
        if sequence.node is not None:
            yield sequence.node, False
    for scope in core.schedule.scopes.values():
        if scope.node is not None:
            yield scope.node, True


def check_tree(core: Core, memory: TagMemory) -> set[int]:
    radix = core.schedule.radix
    locks: Counter[int] = Counter()
    pins: Counter[int] = Counter()
    for held, pinned in holders(core):
        for step in held.path():
            locks[id(step)] += 1
            pins[id(step)] += pinned
    seen: set[int] = set()
    tags: set[int] = set()
    sums: Counter[str] = Counter()
    for namespace, root in radix._roots.items():
        assert root.children, "an empty root is kept"
        assert root.namespace == namespace
        stack = [(child, root_tag(namespace), False) for child in root.children.values()]
        _check_children(root)
        while stack:
            node, tag, unlanded = stack.pop()
            assert id(node) not in seen
            seen.add(id(node))
            unlanded = unlanded or node.pending
            assert len(node.tokens) == len(node.slots) > 0  # T1
            assert not node.dead
            assert node.locks == locks[id(node)], "T4: locks are not the holders below"
            assert node.pins == pins[id(node)]
            for token, slot in zip(node.tokens.tolist(), node.slots.tolist(), strict=True):
                tag = extend(tag, token)
                tags.add(tag)
                assert unlanded or memory.tags[slot] in {tag, POISON}, f"T7: slot {slot}"
            sums["locked" if node.locks else "evictable"] += len(node.tokens)
            sums["pinned"] += len(node.tokens) if node.pins else 0
            _check_children(node)
            stack.extend((child, tag, unlanded) for child in node.children.values())
    assert locks.keys() <= seen, "somebody holds a node that is not in the tree"
    found = (radix.evictable, radix.locked, radix.pinned)
    assert found == (sums["evictable"], sums["locked"], sums["pinned"])  # T5
    return tags


def _check_children(node: Node) -> None:
    for first, child in node.children.items():
        assert first == child.tokens[0]  # T2
        assert child.parent is node  # T3
        if node.parent is not None:
            assert child.locks <= node.locks  # T6
            assert child.used <= node.used  # T12
            assert child.proven <= node.proven


def check_heap(core: Core) -> None:
    radix = core.schedule.radix
    nodes = [node for _, node in radix.nodes()]
    heap = [id(node) for *_, node in radix._leaves]
    leaves = {id(n) for n in nodes if not (n.children or n.locks or n.pending)}
    assert leaves <= set(heap), "T10: a leaf that may go is not offered"
    assert len(set(heap)) == len(heap)
    assert len(heap) <= 2 * len(nodes) + 16, "the heap outgrows the tree"
    assert core.in_flight or not any(node.pending for node in nodes)


def check_scopes(core: Core) -> None:
    schedule = core.schedule
    assert schedule.radix.pinned <= schedule._pin_cap  # S4
    for scope in schedule.scopes.values():
        if scope.node is None:
            assert scope.length == 0
        else:  # S1; that the node is in the tree is T4
            assert not scope.soft
            assert scope.length == scope.node.depth
            assert np.array_equal(_tokens(scope.node), scope.ids[: scope.length])


def check_writes(core: Core, written: set[int]) -> None:
    """A step writes all of the tree that is not computed yet, and nothing that is."""
    for _, node in core.schedule.radix.nodes():
        slots = set(node.slots.tolist())
        assert slots <= written if node.pending else not slots & written


def check_requests(core: Core, memory: TagMemory) -> None:
    schedule = core.schedule
    assert set(core._sequences.values()) == {*schedule.running, *schedule.waiting}
    assert len(core._sequences) == len(schedule.running) + len(schedule.waiting)
    pieces = {piece.sequence.id: piece for piece in core._in_flight or ()}
    for sequence in schedule.waiting:
        assert sequence.status is Status.WAITING
        assert not sequence.aborted
        assert sequence.node is None
        assert sequence.shared == sequence.computed == sequence.allocated == 0
    for sequence in schedule.running:
        assert sequence.status is Status.RUNNING
        assert not sequence.aborted or sequence.id in pieces, "L3: an aborted request stays"
        _check_running(core, sequence)
        if sequence.id not in pieces:
            _check_content(sequence, memory)


def _check_running(core: Core, sequence: Sequence) -> None:
    assert 0 <= sequence.computed < sequence.known <= sequence.max_length  # R1
    assert max(sequence.shared, sequence.computed) <= sequence.allocated <= sequence.max_length
    assert 0 <= sequence.cached <= min(sequence.prompt_length, sequence.known - 1)
    assert sequence.prompt_length <= sequence.drawn <= sequence.known
    assert sequence.settled <= sequence.told <= sequence.output_length
    assert sequence.forced <= sequence.told
    if core.schedule._cached:
        assert sequence.node is not None
        assert sequence.node.depth == sequence.shared
        parts = [node.slots for node in sequence.node.path()][::-1]
        slots = np.concatenate(parts) if parts else sequence.slots[:0]
        assert np.array_equal(slots, sequence.slots[: sequence.shared])  # R3
        assert np.array_equal(_tokens(sequence.node), sequence.ids[: sequence.shared])
    else:
        assert sequence.node is None
        assert sequence.shared == 0


def _check_content(sequence: Sequence, memory: TagMemory) -> None:
    """R2: whoever is not in the step in flight has what it believes to have."""
    count = sequence.computed
    tags = path_tags(sequence.request.namespace, sequence.ids[:count].tolist())
    for tag, slot in zip(tags, sequence.slots[:count].tolist(), strict=True):
        assert memory.tags[slot] in {tag, POISON}


def path_nodes(radix: Radix, namespace: Namespace, ids: list[int]) -> Iterator[Node]:
    """The nodes that somebody who looks for `ids` finds, wholly or in part."""
    node, at = radix._roots.get(namespace), 0
    while node is not None and at < len(ids):
        node = node.children.get(ids[at])
        if node is None:
            break
        yield node
        tokens = node.tokens.tolist()
        if ids[at : at + len(tokens)] != tokens:
            break
        at += len(tokens)


def _tokens(node: Node) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    parts = [step.tokens for step in node.path()][::-1]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
