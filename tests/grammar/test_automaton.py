"""The first match to end: against `re` on every piece of the text, and what it may cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from structgen.errors import ConstraintError
from structgen.grammar.automaton import (
    KEPT_CHARACTERS,
    KEPT_KINDS,
    MOST_CHARACTERS,
    Search,
    automaton_of,
    is_slow,
)
from tests.grammar.patterns import compiled, first_end, found, patterns, plain_patterns, texts

thorough = settings(max_examples=200, deadline=None)


def search_of(*patterns: str) -> Search:
    """A search for patterns, if none of them is refused."""
    try:
        return Search(automaton_of(patterns))
    except ConstraintError:
        assume(False)
        raise


def beginnings(pattern: str, text: str, letters: str, longest: int) -> int:
    """How many characters at the end of `text` some further ones would make a match."""
    whole = compiled(pattern)
    endings = [
        "".join(ending)
        for length in range(1, longest + 1)
        for ending in itertools.product(letters, repeat=length)
    ]
    for start in range(len(text)):
        if any(whole.fullmatch(text + ending, start) for ending in endings):
            return len(text) - start
    return 0


class TestTheFirstMatch:
    @given(pattern=patterns, text=texts)
    @settings(max_examples=300, deadline=None)
    @example(pattern=r"\bab|b", text="ab")
    @example(pattern=r"(?:^|\n)a", text="b\na")
    @example(pattern=r"a\Bb", text="ab")
    def test_ends_where_re_finds_one_by_trying_everything(self, pattern: str, text: str) -> None:
        search = search_of(pattern)

        assert search.scan(text, allow=True) == first_end([pattern], text)

    @given(several=st.lists(plain_patterns, min_size=2, max_size=3), text=texts)
    @thorough
    def test_of_several_patterns_is_the_first_of_any(self, several: list[str], text: str) -> None:
        search = search_of(*several)

        assert search.scan(text, allow=True) == first_end(several, text)

    @given(pattern=patterns, text=texts, places=st.lists(st.integers(0, 9), max_size=3))
    @thorough
    def test_is_the_same_however_the_text_is_cut(
        self, pattern: str, text: str, places: list[int]
    ) -> None:
        search, read, length = search_of(pattern), 0, 0

        for start, end in itertools.pairwise([0, *sorted(places), len(text)]):
            count, length = search.scan(text[start:end], allow=True)
            read += count
            if length:
                break

        assert (read, length) == first_end([pattern], text)

    @given(pattern=patterns, text=texts, allowed=st.integers(0, 9))
    @thorough
    def test_counts_only_from_where_it_is_allowed_to_end(
        self, pattern: str, text: str, allowed: int
    ) -> None:
        search, whole = search_of(pattern), compiled(pattern)
        expected = next(
            (
                (end, end - start)
                for end in range(allowed + 1, len(text) + 1)
                for start in range(end)
                if whole.fullmatch(text, start, end)
            ),
            (max(len(text), allowed), 0),
        )

        passed_over = search.scan(text[:allowed], allow=False)
        read, length = search.scan(text[allowed:], allow=True)

        assert passed_over == (len(text[:allowed]), 0)
        assert (allowed + read, length) == expected

    @pytest.mark.parametrize(
        ("pattern", "text", "before", "match"),
        [
            (r"\n+", "a\n\n", "a", "\n"),
            (r"\n{2,}", "a\n\n\n", "a", "\n\n"),
            ("a.*b", "xaabab", "x", "aab"),
            ("[a-z]+[0-9]", "1abc2", "1", "abc2"),
            ("cat|category", "category", "", "cat"),
            (r"\bend\W", "bend. end.", "bend. ", "end."),
            (r"a(?:\b|)", "xa.", "x", "a"),
            ("^#", "a\n#", "a\n#", ""),
            (r"(?:^|\n)#", "a\n#", "a", "\n#"),
            (r"\d+(?:,\d{3})*\.", "is 1,234.", "is ", "1,234."),
            ("😀[🏻-🏿]?!", "a😀🏽!", "a", "😀🏽!"),
        ],
    )
    def test_by_example(self, pattern: str, text: str, before: str, match: str) -> None:
        read, length = found([pattern], text)

        assert (text[: read - length], text[read - length : read]) == (before, match)


class TestWhatIsHeld:
    @given(
        pattern=st.recursive(
            st.sampled_from(["a", "b", ".", "[ab]", "[^b]", r"\n", r"\w"]),
            lambda inner: st.one_of(
                st.builds("{}{}".format, inner, inner),
                st.builds("(?:{}|{})".format, inner, inner),
                st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?"])),
            ),
            max_leaves=4,
        ),
        text=st.text("ab\n", max_size=7),
    )
    @settings(max_examples=200, deadline=None)
    def test_is_what_more_text_would_make_a_match(self, pattern: str, text: str) -> None:
        search = search_of(pattern)

        for end, character in enumerate(text, start=1):
            search.scan(character, allow=False)

            assert search.held == beginnings(pattern, text[:end], "ab\n", longest=4)

    @given(pattern=patterns, text=texts)
    @thorough
    def test_is_at_least_what_a_match_takes(self, pattern: str, text: str) -> None:
        search, held = search_of(pattern), 0

        for character in text:
            _, length = search.scan(character, allow=True)
            assert length <= held + 1
            if length:
                break
            held = search.held

    def test_is_nothing_at_first(self) -> None:
        assert search_of("^a").held == 0

    def test_is_everything_while_a_match_may_still_come(self) -> None:
        search = search_of("a[^b]*b")

        search.scan("xxa" + "c" * 500, allow=True)

        assert search.held == 501

    def test_ends_where_the_match_cannot_come_any_more(self) -> None:
        search = search_of("a.*b")

        search.scan("xxacc\n", allow=True)

        assert search.held == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("patterns", "message"),
        [
            (["a{1000}b{1000}"], r"'a\{1000\}b\{1000\}': more than 2,000 states in all .*; repeat"),
            (["(?:a{100}){100}"], r"more than 2,000 states in all"),
            (["(?:(?:(?:a{1999}){1999}){1999}){1999}"], r"more than 2,000 states"),
            (["a{1500}", "b{1500}"], r"'b\{1500\}': more than 2,000 states in all"),
            (["(?:a?){500}b"], r"'\(\?:a\?\)\{500\}b': there are too many ways .*; repeat less"),
            ([r"end\b"], r"'end\\\\b': a \\b or \\B at its end .*; write .* \\W"),
            ([r"a", r"b(?:c|\B)"], r"'b\(\?:c\|\\\\B\)': a \\b or \\B at its end"),
            (["b^a"], r"'b\^a': it never matches; \^ is the beginning of the output"),
            (["a", "b^a"], r"'b\^a': it never matches"),
            ([r"\b\Ba"], r"it never matches"),
            (["a" * 5001, "b" * 5000], r"longer than 10,000 characters in all; write less"),
        ],
    )
    def test_say_what_it_is_and_what_to_write(self, patterns: list[str], message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            automaton_of(patterns)

    @pytest.mark.parametrize("nothing", ["", "b{0}", "(?:|b{0}){9}"])
    def test_are_not_for_repeats_of_nothing(self, nothing: str) -> None:
        pattern = f"(?:(?:(?:(?:{nothing}){{1999}}){{1999}}){{1999}}){{1999}}a"

        assert found([pattern], "ba") == (2, 1)

    @pytest.mark.parametrize(
        "pattern", [r"[^\n]{0,900}END", "|".join(f"word{n:03}" for n in range(240)), "x{1998}"]
    )
    def test_leave_what_is_large_but_sensible(self, pattern: str) -> None:
        assert automaton_of([pattern]).places


class TestCost:
    @pytest.mark.parametrize(
        "pattern", ["(?:a+)+b", "(?:a|a)*b", "(?:a?){30}a{30}b", "(?:.*){9}b", "a.{500}b"]
    )
    def test_has_at_most_one_thread_a_place(self, pattern: str) -> None:
        """The texts and patterns that take a backtracking engine for ever."""
        automaton = automaton_of([pattern])
        search, most = Search(automaton), 0

        for _ in range(1500):
            search.scan("a", allow=True)
            most = max(most, len(search._threads))

        assert most <= len(automaton.places)

    def test_is_that_of_few_rows_however_many_characters_come(self) -> None:
        search = search_of(*(f"[{chr(n)}-\uffff]x" for n in range(0x4E00, 0x4E00 + 200)))

        for code in range(0x4DF0, 0x4DF0 + 3 * KEPT_CHARACTERS):
            search.scan(chr(code), allow=True)

            assert len(search._kinds) <= KEPT_KINDS
            assert sum(map(len, search._rows)) <= KEPT_CHARACTERS

    def test_forgotten_rows_are_found_again(self) -> None:
        several = [f"[{chr(n)}-\uffff]x" for n in range(0x4E00, 0x4E00 + 200)]
        text = "".join(map(chr, range(0x4DF0, 0x4F00))) + "ax" + "\u4e00x"

        assert found(several, text) == (len(text), 2)

    def test_of_building_is_known_to_be_small(self) -> None:
        assert not is_slow(["a.*b", "\n"])
        assert is_slow(["a{2}"])
        assert is_slow(["a" * MOST_CHARACTERS])
