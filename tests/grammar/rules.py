"""Random grammars of rules, as EBNF and as all their short texts: the obvious way to derive them.

A rule is a tree here: a str for a text, a tuple of a word and what it is about for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


Ways = dict[tuple[str, str], int]  # in how many a rule derives a text


def is_ambiguous(rules: Rules, alphabet: str, most: int) -> bool:
    """Whether a text of so many characters at most is derived in more than one way."""
    known: Ways = {}
    return _is_cyclic(rules) or any(
        _ways(("rule", "root"), text, rules, known) > 1 for text in texts(alphabet, most)
    )


def _ways(node: Node, text: str, rules: Rules, known: Ways) -> int:
    """In how many ways a node derives a text, where no rule is cyclic."""
    match node:
        case str():
            return int(node == text)
        case "set", letters:
            return int(len(text) == 1 and text in letters)
        case "rule", name:
            if (name, text) not in known:
                known[name, text] = 0  # met again below, it is beside what is not empty
                known[name, text] = _ways(rules[name], text, rules, known)
            return known[name, text]
        case "join", parts:
            return _ways_in_a_row(parts, text, rules, known)
        case "either", options:
            return sum(_ways(option, text, rules, known) for option in options)
        case "repeat", part, (low, high):
            last = max(low, len(text)) + 1 if high is None else high
            counts = range(low, last + 1)
            return sum(_ways_in_a_row([part] * count, text, rules, known) for count in counts)
    raise AssertionError(node)


def _ways_in_a_row(parts: Sequence[Node], text: str, rules: Rules, known: Ways) -> int:
    if not parts:
        return int(not text)
    found = 0
    for at in range(len(text) + 1):
        # The rest first: a rule inside of itself is asked only where something stands beside it.
        if rest := _ways_in_a_row(parts[1:], text[at:], rules, known):
            found += rest * _ways(parts[0], text[:at], rules, known)
    return found


def _is_cyclic(rules: Rules) -> bool:
    """Whether a rule derives itself and nothing beside: its texts are derived in endless ways."""
    known = derived(rules, 0)
    alone = {name: _alone(node, known) for name, node in rules.items()}
    for _ in rules:
        alone = {
            name: found.union(*(alone[each] for each in found)) for name, found in alone.items()
        }
    return any(name in found for name, found in alone.items())


def _alone(node: Node, known: Mapping[str, set[str]]) -> set[str]:
    """The rules that may be all there is of a node, the rest of it being empty."""
    match node:
        case "rule", name:
            return {name}
        case "join", parts:
            empty = ["" in _derived(part, known, 0) for part in parts]
            rests = [empty[:at] + empty[at + 1 :] for at in range(len(parts))]
            whole = [part for part, rest in zip(parts, rests, strict=True) if all(rest)]
            return set().union(*(_alone(part, known) for part in whole))
        case "either", options:
            return set().union(*(_alone(option, known) for option in options))
        case "repeat", part, (low, high):
            one = high != 0 and (low < 2 or "" in _derived(part, known, 0))
            return _alone(part, known) if one else set()
        case _:
            return set()


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
