"""Sets of characters against `re` itself, over every code point."""

from __future__ import annotations

import re

import pytest

from structgen.grammar.characters import (
    EVERYTHING,
    LAST,
    PARSER,
    Ranges,
    complement,
    contains,
    intersection,
    matched,
    union,
)

CHARACTERS = "".join(map(chr, range(0xD800))) + "".join(map(chr, range(0xE000, LAST + 1)))


def ranges_of(pattern: str) -> Ranges:
    parsed = PARSER.parse(pattern)
    ((op, argument),) = list(parsed)
    return matched(op, argument, parsed.state.flags)


def found_by_re(pattern: str) -> Ranges:
    flags = pattern[: pattern.index(")") + 1] if pattern.startswith("(?") else ""
    runs = re.finditer(f"{flags}(?:{pattern.removeprefix(flags)})+", CHARACTERS)
    codes = [(ord(run[0][0]), ord(run[0][-1])) for run in runs]
    return union(codes)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"\w", r"\W", r"\d", r"\D", r"\s", r"\S", ".", r"\x41", "[a-z]", "[^a-z]", r"[^\n]"),
        *("[]a-]", r"[\]^]", r"[\w.-]", r"[^\W\d_]", r"[\u4e00-\u9fff]", "[\U0001f600-\U0001f64f]"),
        *("(?s).", r"(?a)\w", r"(?a)\W", r"(?a)[\d\s]", r"(?a)[^\s]"),
        *("(?i)k", "(?i)ß", "(?i)µ", "(?i)İ", "(?i)ı", "(?i)ſ", "(?i)ǅ", "(?i)1", "(?i)[^k]"),
        *("(?i)[a-z]", "(?i)[^a-z]", r"(?i)\w", r"(?i)[^\W_k-m]", "(?i)[ıİ]", "(?i)[à-Ѐ]"),
        *("(?ia)k", "(?ia)[k-ſ]", r"(?ia)\W", "(?i)[Ა-ᲿⰀ-Ⱞ]", "(?i)[\U00010400-\U00010420]"),
    ],
)
def test_a_set_is_what_re_matches(pattern: str) -> None:
    assert ranges_of(pattern) == found_by_re(pattern)


class TestRanges:
    def test_are_joined_where_they_touch(self) -> None:
        assert union([(5, 6), (1, 2), (3, 4), (9, 9), (5, 5)]) == ((1, 6), (9, 9))

    def test_hold_no_surrogates(self) -> None:
        assert union([(0xD7FF, 0xE000)]) == ((0xD7FF, 0xD7FF), (0xE000, 0xE000))
        assert union([(0xD800, 0xDFFF)]) == ()
        assert complement(()) == EVERYTHING

    def test_have_a_complement(self) -> None:
        assert complement(((0, 4), (6, 6))) == ((5, 5), (7, 0xD7FF), (0xE000, LAST))
        assert complement(EVERYTHING) == ()

    def test_intersect(self) -> None:
        assert intersection(((1, 5), (8, 9)), ((4, 8),)) == ((4, 5), (8, 8))

    def test_contain_their_ends(self) -> None:
        ranges = ((1, 3), (7, 7))

        assert [code for code in range(9) if contains(ranges, code)] == [1, 2, 3, 7]
