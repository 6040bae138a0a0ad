"""What rules derive: whether anything at all, whether more than the empty text, and an example.

Holds  time in proportion to the size of the rules, however they refer to each other.
Used   by `ebnf` and `structure`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from structgen.grammar.form.tree import (
    Chars,
    Either,
    Form,
    Join,
    Marker,
    Repeat,
    Rule,
    Text,
    Until,
    Value,
    parts_of,
    rules_in,
)

SAMPLED = 100  # characters of an example
_DEEP = 6  # rules inside rules that an example may take without looking for its end
_ROUNDS = 8  # that an example takes through a repeat without an end
_MOST_STEPS = 5_000
_MOST_PASSES = 50  # over the rules; two are enough where no rule refers to itself


def users_of(rules: Mapping[str, Form]) -> dict[str, set[str]]:
    """For each rule those that mention it."""
    found: dict[str, set[str]] = {name: set() for name in rules}
    for name, form in rules.items():
        for mentioned in rules_in(form):
            found[mentioned].add(name)
    return found


def ranks_of(rules: Mapping[str, Form]) -> dict[str, int]:
    """For each rule that can end, a number: some way through it needs smaller ones only."""
    users = users_of(rules)
    found: dict[str, int] = {}
    todo = list(rules)
    while todo:
        later: dict[str, None] = {}
        for name in todo:
            if name not in found and _ends(rules[name], found):
                found[name] = len(found)
                later |= dict.fromkeys(users[name])
        todo = [name for name in later if name not in found]
    return found


def _ends(form: Form, known: Mapping[str, int], below: int | None = None) -> bool:
    """Whether some way through it needs known rules only, those with numbers `below` if given."""
    match form:
        case Rule(name):
            return name in known and (below is None or known[name] < below)
        case Join(parts):
            return all(_ends(part, known, below) for part in parts)
        case Either(options):
            return any(_ends(option, known, below) for option in options)
        case Repeat(part, least):
            return not least or _ends(part, known, below)
        case _:
            return True


def longest_way(rules: Mapping[str, Form]) -> float:
    """Characters of the shortest text of a rule, for the rule of which that is most.

    So much may be certain to come next in the middle of a text; infinite if it is not known.
    """
    found, order = dict.fromkeys(rules, math.inf), list(ranks_of(rules))
    for _ in range(_MOST_PASSES):
        before = dict(found)
        for name in order:
            found[name] = _shortest(rules[name], found)
        if found == before:
            return max(found.values(), default=0)
    return math.inf


def _shortest(form: Form, known: Mapping[str, float]) -> float:
    match form:
        case Rule(name):
            return known[name]
        case Join(parts):
            return sum(_shortest(part, known) for part in parts)
        case Either(options):
            return min((_shortest(option, known) for option in options), default=math.inf)
        case Repeat(part, least):
            return least * _shortest(part, known) if least else 0
        case Text(text) | Marker(text) | Until(_, text):
            return len(text)
        case _:
            return 1


def speaks(rules: Mapping[str, Form], start: str) -> bool:
    """Whether a rule derives any text that is not empty, where every rule can end."""
    todo, seen = [rules[start]], {start}
    while todo:
        at = todo.pop()
        if not isinstance(at, Join | Either | Repeat | Rule):
            return True
        if isinstance(at, Rule) and at.name not in seen:
            seen.add(at.name)
            todo.append(rules[at.name])
        todo += parts_of(at)
    return False


def sample_of(rules: Mapping[str, Form], start: str) -> str:
    """A text that fits, or the beginning of one: long where repeats allow that."""
    text = ""
    for piece in _pieces(rules, start):
        text += piece
        if len(text) >= SAMPLED:
            break
    return text[:SAMPLED]


def _pieces(rules: Mapping[str, Form], start: str) -> Iterator[str]:
    """An example, piece by piece; cut off where it takes too many steps."""
    ranks = ranks_of(rules)
    # What is still to come, in how many rules it is, and below which number its end lies.
    todo: list[tuple[Form, int, int]] = [(Rule(start), 0, len(ranks))]
    for step in range(_MOST_STEPS):
        if not todo:
            return
        form, depth, rank = todo.pop()
        match form:
            case Rule(name):
                todo.append((rules[name], depth + 1, ranks[name]))
            case Join(parts):
                todo += [(part, depth, rank) for part in reversed(parts)]
            case Either(options):
                ways = [each for each in options if depth <= _DEEP or _ends(each, ranks, rank)]
                todo.append((ways[step % len(ways)], depth, rank))
            case Repeat(part, least, most):
                rounds = max(least, _ROUNDS) if most is None else most
                todo += [(part, depth, rank)] * (rounds if depth <= _DEEP else least)
            case Value():
                return  # its texts are not known here
            case _:
                yield _piece(form)


def _piece(form: Form) -> str:
    match form:
        case Text(text) | Marker(text) | Until(_, text):
            return text
        case Chars(ranges):
            return chr(ranges[0][0])
        case _:
            return ""
