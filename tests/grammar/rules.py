"""Random grammars of rules, as EBNF and as all their short texts: the obvious way to derive them.

A rule is a tree here: a str for a text, a tuple of a word and what it is about for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from hypothesis import strategies as st

Node = Any
Rules = Mapping[str, Node]


def texts(alphabet: str, most: int) -> list[str]:
    """All texts of so many characters at most."""
    return ["".join(each) for n in range(most + 1) for each in product(alphabet, repeat=n)]


NAMES = ("root", "x", "y-1")
COUNTS = ((0, None), (1, None), (0, 1), (2, 2), (1, 2), (0, 2), (2, None), (0, 0))


def grammars(alphabet: str) -> st.SearchStrategy[Rules]:
    """Rules `NAMES`, which mention each other as they like."""
    classes = [("set", letters) for letters in (alphabet, alphabet[:2], alphabet[-1])]
    words = [*alphabet, alphabet[:2], alphabet[:1] * 2, alphabet[1] + alphabet[0], ""]
    leaves = st.sampled_from([*words, *classes, *(("rule", name) for name in NAMES)])
    counts = st.sampled_from(COUNTS)
    nodes = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.just("join"), st.lists(inner, min_size=2, max_size=3)),
            st.tuples(st.just("either"), st.lists(inner, min_size=2, max_size=3)),
            st.tuples(st.just("repeat"), inner, counts),
        ),
        max_leaves=7,
    )
    return st.fixed_dictionaries(dict.fromkeys(NAMES, nodes))


def written(rules: Rules) -> str:
    """The rules as EBNF."""
    return "\n".join(f"{name} ::= {_written(node)}" for name, node in rules.items())


def _written(node: Node) -> str:
    match node:
        case str():
            return f'"{node}"'
        case "set", letters:
            return f"[{letters}]"
        case "rule", name:
            return str(name)
        case "join", parts:
            return f"({' '.join(map(_written, parts))})"
        case "either", options:
            return f"({' | '.join(map(_written, options))})"
        case "repeat", part, (least, most):
            return f"({_written(part)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(node)


def derived(rules: Rules, most: int) -> dict[str, set[str]]:
    """The texts of each rule that have so many characters at most."""
    found: dict[str, set[str]] = {name: set() for name in rules}
    while True:
        new = {name: _derived(node, found, most) for name, node in rules.items()}
        if new == found:
            return found
        found = new


def _derived(node: Node, known: Mapping[str, set[str]], most: int) -> set[str]:
    match node:
        case str():
            return {node} if len(node) <= most else set()
        case "set", letters:
            return set(letters)
        case "rule", name:
            return known[name]
        case "join", parts:
            found = {""}
            for part in parts:
                found = _joined(found, _derived(part, known, most), most)
            return found
        case "either", options:
            return set().union(*(_derived(option, known, most) for option in options))
        case "repeat", part, (low, high):
            inner = _derived(part, known, most)
            now = {""}
            for _ in range(low):
                now = _joined(now, inner, most)
            found = set(now)
            for _ in range(most + 1 if high is None else high - low):
                now = _joined(now, inner, most)
                found |= now
            return found
    raise AssertionError(node)


def _joined(some: set[str], others: set[str], most: int) -> set[str]:
    return {a + b for a in some for b in others if len(a) + len(b) <= most}
