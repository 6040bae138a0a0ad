"""Random patterns and texts, and the first match to end as `re` finds it by trying everything."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from hypothesis import strategies as st

from structgen.grammar.automaton import Search, automaton_of

# Few characters, so that matches are frequent: of words and none, digits, spaces, of two bytes.
LETTERS = "aab1é \n-"
SETS = (
    *("a", "b", "é", " ", r"\n", ".", "[ab]", "[^a]", "[a-c1]", r"[^\s-]", "[]a]", r"[\d-]"),
    *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\x61", r"\u00e9", r"\-", "-"),
)
COUNTS = ("*", "+", "?", "{2}", "{1,}", "{,2}", "{1,2}", "{0}", "*?", "+?", "??", "{1,3}?")
texts = st.text(LETTERS, max_size=9)


def _longer(patterns: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.sampled_from(("(?:{})", "({})"))
    return st.one_of(
        st.lists(patterns, min_size=2, max_size=3).map("".join),
        st.builds("(?:{}|{})".format, patterns, patterns),
        st.builds(
            lambda group, inner, count: group.format(inner) + count,
            groups,
            patterns,
            st.sampled_from(COUNTS),
        ),
    )


plain_patterns = st.recursive(st.sampled_from(SETS), _longer, max_leaves=6)
patterns = st.recursive(st.sampled_from((*SETS, "^", r"\A", r"\b", r"\B")), _longer, max_leaves=6)


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as `re` understands it; what it might understand some day is no matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return re.compile(pattern)


def first_end(patterns: Sequence[str], text: str) -> tuple[int, int]:
    """Where the first match to end does, and the length of the longest that ends there; or
    the length of the text, and 0."""
    found = [compiled(pattern) for pattern in patterns]
    for end in range(1, len(text) + 1):
        for start in range(end):
            if any(each.fullmatch(text, start, end) for each in found):
                return end, end - start
    return len(text), 0


def found(patterns: Sequence[str], text: str) -> tuple[int, int]:
    """Where the first match ends, and its length; of a text that is read in one."""
    return Search(automaton_of(patterns)).scan(text, allow=True)
