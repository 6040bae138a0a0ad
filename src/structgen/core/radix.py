"""The radix tree: which token prefixes have their keys and values in the pool.

Owns   the mapping from token prefixes to slots, one tree per namespace. Owns no tensor.
Holds  every slot in the tree is in exactly one node; a locked node's ancestors are locked, a
       proven one's are proven; `evictable + locked == size`; a parent was used no earlier than
       its children.
Used   by `schedule` (match, publish, lock, evict) and `core` (insert, unlock).

The tree is the one of SGLang's RadixAttention (Zheng et al., 2024) at token granularity. New here:
nodes are published when a step is planned, before they are computed, so that requests of the same
step share them; they are `pending` until the step lands and are taken out again if it fails.
A node is `proven` once finite logits have been computed from it: whatever breaks later, its keys
and values are good.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from structgen.core.pool import NO_SLOTS, Slots
from structgen.request import Namespace

Ids = NDArray[np.int64]
NO_IDS: Ids = np.empty(0, np.int64)


class Node:
    """A run of tokens and the slots that hold their keys and values."""

    __slots__ = (
        "children",
        "dead",
        "locks",
        "namespace",
        "offered",
        "parent",
        "pending",
        "pins",
        "proven",
        "slots",
        "tokens",
        "used",
    )

    def __init__(self, parent: Node | None, tokens: Ids, slots: Slots) -> None:
        self.parent = parent
        self.namespace: Namespace | None = None  # of a root
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.pins = 0
        self.used = 0
        self.pending = False
        self.proven = False
        self.dead = False
        self.offered = False  # stands in the heap of leaves

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def depth(self) -> int:
        """Tokens from the root to the end of this node."""
        return sum(len(node.tokens) for node in self.path())


class Radix:
    """Prefix trees over token ids, one root per namespace."""

    def __init__(self) -> None:
        self.evictable = 0
        self.locked = 0
        self.pinned = 0
        self._roots: dict[Namespace, Node] = {}
        self._clock = 0
        self._pending: list[Node] = []
        # A heap of (used, order, node); entries go stale when a node is used or locked: `evict`.
        self._leaves: list[tuple[int, int, Node]] = []
        self._order = 0
        self._dead = 0  # entries of the heap whose node is no longer in the tree

    @property
    def size(self) -> int:
        """Tokens in all trees."""
        return self.evictable + self.locked

    def peek(self, namespace: Namespace, ids: Ids) -> tuple[int, int]:
        """Length of the longest prefix of `ids` in the tree, and how much of it is evictable."""
        node, length, unlocked = self._roots.get(namespace), 0, 0
        while node is not None and length < len(ids):
            node = node.children.get(int(ids[length]))
            if node is None:
                break
            common = _common(node.tokens, ids[length:])
            length += common
            unlocked += 0 if node.locks else common
            if common < len(node.tokens):
                break
        return length, unlocked

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace's tree: what a holder of nothing holds.

        One without children is not kept, or the map would grow with every namespace ever named.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = Node(None, NO_IDS, NO_SLOTS)
            root.namespace = namespace
        return root

    def match(self, namespace: Namespace, ids: Ids) -> tuple[Node, Slots]:
        """The node that ends exactly where the longest prefix of `ids` in the tree ends.

        Splits a node that matches in part. Every node on the path counts as used now. Returns
        the node (the root for no match) and the slots of the matched tokens.
        """
        node = self.root(namespace)
        length = 0
        found: list[Slots] = []
        self._clock += 1
        while length < len(ids):
            child = node.children.get(int(ids[length]))
            if child is None:
                break
            common = _common(child.tokens, ids[length:])
            if common < len(child.tokens):
                child = self._split(child, common)
            child.used = self._clock
            found.append(child.slots)
            length += common
            node = child
        return node, np.concatenate(found) if found else NO_SLOTS

    def insert(
        self, namespace: Namespace, ids: Ids, slots: Slots, *, pending: bool = False
    ) -> tuple[Node, int]:
        """Add `ids` with their slots; the tree owns the slots of what was not there yet.

        Returns the node that ends at the last id, and how many leading ids were there before:
        of those the tree keeps its own slots, and the caller still owns the ones it brought.
        """
        node, there = self.match(namespace, ids)
        known = len(there)
        if known < len(ids):
            leaf = Node(node, ids[known:].copy(), slots[known:].copy())
            leaf.used = self._clock
            leaf.pending = pending
            node.children[int(ids[known])] = leaf
            if node.parent is None:
                self._roots[namespace] = node
            self.evictable += len(leaf.tokens)
            if pending:
                self._pending.append(leaf)
            self._offer(leaf)
            node = leaf
        return node, known

    def land(self) -> None:
        """The step that computes the pending nodes has succeeded."""
        for node in self._pending:
            node.pending = False
            self._offer(node)
        self._pending.clear()

    def withdraw(self) -> Slots:
        """The step that should have computed the pending nodes has failed: take them out.

        What hangs below them goes too: without its prefix it cannot be used. Nothing may hold a
        lock there any more. Returns the slots, for the caller to free.
        """
        doomed = _subtree([node for node in self._pending if not node.dead])
        self._pending.clear()
        return self._take_out(doomed)

    def prove(self, node: Node) -> None:
        """Finite logits have been computed from this node and all before it."""
        for step in node.path():
            if step.proven:
                break
            step.proven = True

    def discard(self, node: Node) -> Slots:
        """Take out the end of a path whose values are not to be trusted.

        That is what is neither proven nor locked, with all that hangs below it. What is locked
        stays until its holder fails or proves it.
        """
        top: Node | None = None
        for step in node.path():
            if step.locks or step.proven:
                break
            top = step
        return self._take_out(_subtree([top] if top else []))

    def lock(self, node: Node) -> None:
        """Protect a node and its ancestors from eviction; one `unlock` per `lock`."""
        for step in node.path():
            if not step.locks:
                self.evictable -= len(step.tokens)
                self.locked += len(step.tokens)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of exactly this node."""
        for step in node.path():
            assert step.locks > step.pins, "unlocked more often than locked"
            step.locks -= 1
            if not step.locks:
                self.evictable += len(step.tokens)
                self.locked -= len(step.tokens)
                self._offer(step)

    def pin(self, node: Node) -> None:
        """Lock a node on behalf of a fork scope: counted apart, so that it can be capped."""
        self.lock(node)
        for step in node.path():
            self.pinned += 0 if step.pins else len(step.tokens)
            step.pins += 1

    def unpin(self, node: Node) -> None:
        """Undo one `pin` of exactly this node."""
        for step in node.path():
            assert step.pins, "unpinned more often than pinned"
            step.pins -= 1
            self.pinned -= 0 if step.pins else len(step.tokens)
        self.unlock(node)

    def evict(self, count: int) -> Slots:
        """Take out unlocked leaves, least recently used first, until `count` tokens are gone.

        May take more (whole leaves go) or fewer (nothing else is unlocked). Returns the slots.
        """
        gone: list[Slots] = []
        missing = count
        while missing > 0 and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.offered = False
            self._dead -= node.dead
            if node.dead or node.locks or node.children or node.pending:
                continue  # stale: it is offered again when it becomes evictable
            if node.used != used:
                self._offer(node)
                continue
            missing -= len(node.tokens)
            gone.append(self._take_out([node]))
        return np.concatenate(gone) if gone else NO_SLOTS

    def nodes(self) -> Iterator[tuple[Namespace, Node]]:
        """Every node of every tree, parents first; for checks of the invariants."""
        for namespace, root in self._roots.items():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield namespace, node
                stack.extend(node.children.values())

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` tokens; the new upper part inherits its locks and place.

        Holders of `node` keep it: what they hold still ends where it ended.
        """
        assert node.parent is not None
        upper = Node(node.parent, node.tokens[:length], node.slots[:length])
        upper.locks, upper.pins, upper.used = node.locks, node.pins, node.used
        upper.pending, upper.proven = node.pending, node.proven
        if upper.pending:
            self._pending.append(upper)
        upper.children[int(node.tokens[length])] = node
        node.parent.children[int(node.tokens[0])] = upper
        node.parent, node.tokens, node.slots = upper, node.tokens[length:], node.slots[length:]
        return upper

    def _take_out(self, nodes: Sequence[Node]) -> Slots:
        slots: list[Slots] = []
        for node in nodes:
            assert not node.locks
            assert not node.children
            assert node.parent is not None
            del node.parent.children[int(node.tokens[0])]
            node.dead = True
            self._dead += node.offered
            self.evictable -= len(node.tokens)
            slots.append(node.slots)
            self._offer(node.parent)
            if node.parent.namespace is not None and not node.parent.children:
                del self._roots[node.parent.namespace]
        if 2 * self._dead > len(self._leaves):
            self._leaves = [entry for entry in self._leaves if not entry[-1].dead]
            heapq.heapify(self._leaves)
            self._dead = 0
        return np.concatenate(slots) if slots else NO_SLOTS

    def _offer(self, node: Node) -> None:
        if node.parent is None or node.children or node.locks or node.pending or node.dead:
            return
        if node.offered:
            return  # one entry a node, so that the heap cannot outgrow the tree
        node.offered = True
        self._order += 1
        heapq.heappush(self._leaves, (node.used, self._order, node))


def _subtree(tops: Sequence[Node]) -> list[Node]:
    """The nodes at or below any of `tops`, each once, children before their parents."""
    found: dict[Node, int] = {}
    stack = [(top, top.depth) for top in tops]
    while stack:
        node, depth = stack.pop()
        if node not in found:
            found[node] = depth
            stack.extend((child, depth + len(child.tokens)) for child in node.children.values())
    return sorted(found, key=lambda node: -found[node])


def _common(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
