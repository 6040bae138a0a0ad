"""The radix tree: prefixes to slots. A slot in these tests is named after what it holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgen.core.radix import Ids, Node, Radix
from structgen.request import Namespace

HERE, THERE = Namespace(), Namespace(tenant="there")


def ids(text: str) -> Ids:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


class Tree:
    """A radix tree that is spoken to in strings."""

    def __init__(self, *texts: str) -> None:
        self.radix = Radix()
        self._slots = 0
        for text in texts:
            self.add(text)

    def add(self, text: str, space: Namespace = HERE, *, pending: bool = False) -> Node:
        """Insert with new slots for all; returns the node."""
        slots = np.arange(self._slots + 1, self._slots + 1 + len(text))
        self._slots += len(text)
        return self.radix.insert(space, ids(text), slots, pending=pending)[0]

    def match(self, text: str, space: Namespace = HERE) -> list[int]:
        return [int(slot) for slot in self.radix.match(space, ids(text))[1]]

    def node(self, text: str) -> Node:
        node, slots = self.radix.match(HERE, ids(text))
        assert len(slots) == len(text)
        return node

    def paths(self, space: Namespace = HERE) -> list[str]:
        """The paths of all leaves."""
        found: list[str] = []
        for namespace, node in self.radix.nodes():
            if namespace == space and not node.children:
                parts = [bytes(step.tokens.tolist()).decode() for step in node.path()]
                found.append("".join(reversed(parts)))
        return sorted(found)


class TestMatching:
    def test_finds_the_longest_prefix(self) -> None:
        tree = Tree("abcd")

        assert tree.match("abxy") == [1, 2]

    def test_finds_nothing_in_an_empty_tree(self) -> None:
        tree = Tree()

        assert tree.match("abc") == []

    def test_ends_exactly_at_a_node(self) -> None:
        tree = Tree("abcd")

        node, _ = tree.radix.match(HERE, ids("ab"))

        assert node.depth == 2

    def test_keeps_what_hangs_below_a_split(self) -> None:
        tree = Tree("abcd")
        tree.match("ab")

        assert tree.match("abcd") == [1, 2, 3, 4]

    def test_does_not_follow_a_node_that_differs_at_its_first_token(self) -> None:
        tree = Tree("ab", "cd")

        assert tree.match("bd") == []

    def test_is_only_looked_up_by_a_peek(self) -> None:
        tree = Tree("abcd")

        assert tree.radix.peek(HERE, ids("abx")) == (2, 2)
        assert len(list(tree.radix.nodes())) == 1

    def test_tells_by_a_peek_how_much_could_be_evicted(self) -> None:
        tree = Tree("abcd")
        tree.radix.lock(tree.node("ab"))

        assert tree.radix.peek(HERE, ids("abcd")) == (4, 2)


class TestInserting:
    def test_keeps_the_slots_that_were_there_first(self) -> None:
        tree = Tree("abc")
        _, known = tree.radix.insert(HERE, ids("abcd"), np.array([91, 92, 93, 94]))

        assert known == 3
        assert tree.match("abcd") == [1, 2, 3, 94]

    def test_adds_a_sibling_where_two_differ(self) -> None:
        tree = Tree("abc", "abd")

        assert tree.paths() == ["abc", "abd"]
        assert tree.match("abd") == [1, 2, 6]
        assert tree.radix.size == 4

    def test_adds_nothing_for_what_is_there(self) -> None:
        tree = Tree("abc")

        tree.add("ab")

        assert tree.paths() == ["abc"]
        assert tree.radix.size == 3

    def test_does_not_alias_the_arrays_of_the_caller(self) -> None:
        tree = Tree()
        tokens, slots = ids("abc"), np.array([1, 2, 3])
        tree.radix.insert(HERE, tokens, slots)
        tokens[:] = slots[:] = 0

        assert tree.match("abc") == [1, 2, 3]


class TestNamespaces:
    def test_never_share(self) -> None:
        tree = Tree("abc")

        assert tree.radix.peek(THERE, ids("abc")) == (0, 0)
        assert tree.match("abc", THERE) == []

    def test_hold_the_same_text_side_by_side(self) -> None:
        tree = Tree("abc")
        tree.add("abc", THERE)

        assert (tree.match("abc"), tree.match("abc", THERE)) == ([1, 2, 3], [4, 5, 6])

    def test_leave_nothing_behind_when_they_are_empty(self) -> None:
        tree = Tree("abc")
        tree.add("abc", THERE)
        tree.match("x", Namespace(tenant="only asked"))
        tree.radix.root(Namespace(tenant="only named"))

        tree.radix.evict(6)

        assert tree.radix._roots == {}


class TestLocks:
    def test_protect_a_node_and_all_before_it(self) -> None:
        tree = Tree("abcd", "abxy")
        tree.radix.lock(tree.node("abcd"))

        tree.radix.evict(6)

        assert tree.paths() == ["abcd"]

    def test_protect_a_node_that_was_offered_before(self) -> None:
        tree = Tree()
        tree.radix.lock(tree.add("abc"))

        assert tree.radix.evict(3).tolist() == []

    def test_are_counted(self) -> None:
        tree = Tree("abc")
        tree.radix.lock(tree.node("abc"))
        tree.radix.lock(tree.node("abc"))
        tree.radix.unlock(tree.node("abc"))

        assert tree.radix.evict(3).tolist() == []

    def test_move_tokens_from_evictable_to_locked_and_back(self) -> None:
        tree = Tree("abcd", "abxy")
        node = tree.node("abcd")
        tree.radix.lock(node)
        locked = (tree.radix.evictable, tree.radix.locked)
        tree.radix.unlock(node)

        assert locked == (2, 4)
        assert (tree.radix.evictable, tree.radix.locked) == (6, 0)

    def test_stay_whole_when_a_locked_node_is_split(self) -> None:
        tree = Tree("abcd")
        node = tree.node("abcd")
        tree.radix.lock(node)
        tree.match("ab")

        assert tree.radix.evict(4).tolist() == []
        tree.radix.unlock(node)
        assert tree.radix.evictable == 4

    def test_cannot_be_undone_more_often_than_done(self) -> None:
        tree = Tree("abc")

        with pytest.raises(AssertionError, match="unlocked more often"):
            tree.radix.unlock(tree.node("abc"))


class TestPins:
    def test_are_locks(self) -> None:
        tree = Tree("abc")
        tree.radix.pin(tree.node("abc"))

        assert tree.radix.evict(3).tolist() == []

    def test_count_a_token_once_however_often_it_is_pinned(self) -> None:
        tree = Tree("abcd")
        tree.radix.pin(tree.node("abcd"))
        tree.radix.pin(tree.node("ab"))

        assert tree.radix.pinned == 4

    def test_go_one_by_one(self) -> None:
        tree = Tree("abcd")
        whole, half = tree.node("abcd"), tree.node("ab")
        tree.radix.pin(whole)
        tree.radix.pin(half)
        tree.radix.unpin(whole)

        assert tree.radix.pinned == 2
        assert sorted(tree.radix.evict(4).tolist()) == [3, 4]

    def test_are_not_undone_by_an_unlock(self) -> None:
        tree = Tree("abc")
        tree.radix.pin(tree.node("abc"))

        with pytest.raises(AssertionError, match="unlocked more often"):
            tree.radix.unlock(tree.node("abc"))


class TestEviction:
    def test_takes_the_least_recently_used_leaf_first(self) -> None:
        tree = Tree("abc", "xyz", "klm")
        tree.match("abc")

        tree.radix.evict(1)

        assert tree.paths() == ["abc", "klm"]

    def test_takes_leaves_before_what_they_hang_from(self) -> None:
        tree = Tree("abc", "abd")

        tree.radix.evict(2)

        assert tree.match("ab") == [1, 2]

    def test_goes_on_with_a_parent_that_has_no_children_left(self) -> None:
        tree = Tree("abc", "abd")

        assert sorted(tree.radix.evict(4).tolist()) == [1, 2, 3, 6]

    def test_takes_what_was_made_of_a_prefix_before_the_prefix(self) -> None:
        tree = Tree("ab", "abcd")
        tree.match("xy")

        tree.radix.evict(1)

        assert tree.paths() == ["ab"]

    def test_takes_at_least_what_was_asked(self) -> None:
        tree = Tree("abc", "xyz")

        assert len(tree.radix.evict(4)) == 6

    def test_takes_what_there_is(self) -> None:
        tree = Tree("abc")

        assert len(tree.radix.evict(99)) == 3
        assert tree.radix.size == 0

    def test_finds_a_leaf_again_after_its_lock_is_gone(self) -> None:
        tree = Tree("abc")
        node = tree.node("abc")
        tree.radix.lock(node)
        tree.radix.evict(3)
        tree.radix.unlock(node)

        assert len(tree.radix.evict(3)) == 3

    def test_does_not_take_what_is_not_computed_yet(self) -> None:
        tree = Tree()
        tree.add("abc", pending=True)

        assert tree.radix.evict(3).tolist() == []
        tree.radix.land()
        assert len(tree.radix.evict(3)) == 3


class TestTheHeapOfLeaves:
    def test_does_not_grow_with_use(self) -> None:
        tree = Tree("abc", "abd", "xyz")
        for _ in range(100):
            tree.match("abd")
            node = tree.node("xyz")
            tree.radix.lock(node)
            tree.radix.unlock(node)

        assert len(tree.radix._leaves) <= 4

    def test_does_not_grow_with_what_is_discarded(self) -> None:
        tree = Tree("abc")
        for _ in range(100):
            tree.radix.discard(tree.add("xyz"))

        assert len(tree.radix._leaves) <= 2


class TestWithdrawing:
    def test_takes_out_what_the_step_should_have_computed(self) -> None:
        tree = Tree("ab")
        tree.add("abcd", pending=True)

        assert sorted(tree.radix.withdraw().tolist()) == [5, 6]
        assert tree.paths() == ["ab"]

    def test_takes_out_what_hangs_below(self) -> None:
        tree = Tree()
        tree.add("ab", pending=True)
        tree.add("abcd")

        assert len(tree.radix.withdraw()) == 4
        assert tree.radix.size == 0

    def test_takes_out_both_halves_of_a_node_that_was_split(self) -> None:
        tree = Tree()
        tree.add("abcd", pending=True)
        tree.match("ab")

        assert len(tree.radix.withdraw()) == 4

    def test_leaves_alone_what_has_landed(self) -> None:
        tree = Tree()
        tree.add("ab", pending=True)
        tree.radix.land()

        assert tree.radix.withdraw().tolist() == []
        assert tree.paths() == ["ab"]


class TestDiscarding:
    def test_takes_out_the_path(self) -> None:
        tree = Tree("xyz")

        tree.radix.discard(tree.add("abc"))

        assert tree.paths() == ["xyz"]

    def test_stops_at_what_somebody_holds(self) -> None:
        tree = Tree("abcd")
        tree.radix.lock(tree.node("ab"))

        tree.radix.discard(tree.node("abcd"))

        assert tree.paths() == ["ab"]

    def test_stops_at_what_has_given_finite_logits(self) -> None:
        tree = Tree("abcd")
        tree.radix.prove(tree.node("ab"))

        tree.radix.discard(tree.node("abcd"))

        assert tree.paths() == ["ab"]

    def test_takes_what_hangs_below_with_it(self) -> None:
        tree = Tree("abcd", "abxy")

        tree.radix.discard(tree.node("ab"))

        assert tree.paths() == []

    def test_keeps_the_proof_of_a_node_that_is_split_later(self) -> None:
        tree = Tree("abcd")
        tree.radix.prove(tree.node("abcd"))

        tree.radix.discard(tree.node("ab"))

        assert tree.paths() == ["abcd"]


TEXTS = st.lists(st.text("ab", min_size=1, max_size=8), max_size=12)


class TestAnyTree:
    @given(TEXTS, st.text("ab", max_size=8))
    def test_matches_the_longest_common_prefix_with_what_was_inserted(
        self, texts: list[str], wanted: str
    ) -> None:
        tree = Tree(*texts)
        longest = max(
            (n for n in range(len(wanted) + 1) for t in texts if t[:n] == wanted[:n]), default=0
        )

        assert len(tree.match(wanted)) == longest

    @given(TEXTS, st.integers(1, 40))
    def test_loses_as_many_tokens_as_eviction_returns_slots(
        self, texts: list[str], count: int
    ) -> None:
        tree = Tree(*texts)
        before = tree.radix.size

        gone = len(tree.radix.evict(count))

        assert gone >= min(count, before)
        assert tree.radix.size == sum(len(node.slots) for _, node in tree.radix.nodes())
        assert tree.radix.size == before - gone
