"""The syntax of patterns: what is understood as `re` understands it, and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.errors import ConstraintError
from structgen.grammar.automaton import automaton_of
from structgen.grammar.pattern import ANY, DEEPEST, KINDS, MOST_REPEATS, CharSet, Repeat, parse
from tests.grammar.patterns import compiled, first_end, found, plain_patterns, texts

ALL = "".join(map(chr, range(0x110000)))
SIGNS = (
    *"ab1,-]}{[()|*+?.^$",
    *("[^", "(?:", "(?", "\\", "\\d", "\\W", "\\n", "\\b", "\\x61", "{2}", "{,1}", "{1,2}", "+?"),
)
thorough = settings(max_examples=200, deadline=None)


def refused(pattern: str) -> bool:
    try:
        automaton_of([pattern])
    except ConstraintError:
        return True
    return False


class TestKinds:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_have_the_characters_that_they_have_in_re(self, kind: str) -> None:
        inside = KINDS[kind]

        assert [c for c in ALL if inside(c)] == re.findall(f"\\{kind}", ALL)

    def test_the_dot_has_all_but_the_newline(self) -> None:
        outside = [c for c in ALL if c not in ANY]

        assert outside == ["\n"]


class TestSyntax:
    @given(signs=st.lists(st.sampled_from(SIGNS), max_size=7), text=texts)
    @settings(max_examples=400, deadline=None)
    def test_whatever_is_understood_means_what_it_means_to_re(
        self, signs: list[str], text: str
    ) -> None:
        pattern = "".join(signs)

        if not refused(pattern):
            assert found([pattern], text) == first_end([pattern], text)

    @given(pattern=plain_patterns)
    @thorough
    def test_only_the_empty_text_makes_a_pattern_of_known_signs_refused(self, pattern: str) -> None:
        assert refused(pattern) == (compiled(pattern).fullmatch("") is not None)

    @pytest.mark.parametrize(
        ("pattern", "text"),
        [
            ("a{", "a{"),
            ("a{}", "a{}"),
            ("a{x}", "a{x}"),
            ("{x", "{x"),
            ("a}]", "a}]"),
            ("[]]", "]"),
            ("[^]]", "a"),
            ("[a-]", "-"),
            ("[-a]", "-"),
            (r"[\d-]", "-"),
            (r"[a\-z]", "-"),
            (r"[\b]", "\b"),
            (r"\a\f\v\t\r\n", "\a\f\v\t\r\n"),
            (r"\U0001f600", "😀"),
            (r"\.\*\\\ \é", ".*\\ é"),
            ("(?:a|b){,2}c", "abc"),
            ("[[{&&]", "&"),
        ],
    )
    def test_of_corners(self, pattern: str, text: str) -> None:
        assert compiled(pattern).fullmatch(text)
        assert found([pattern], text) == (len(text), len(text))

    def test_of_sets_is_kept_in_the_tree(self) -> None:
        assert parse(r"[^a-c\d\s]") == CharSet(((97, 99),), "ds", negated=True)


class TestRefusals:
    @pytest.mark.parametrize(
        ("pattern", "message"),
        [
            ("a(?=b)", r"\(\?= is looking ahead .*; make it a part of the pattern"),
            ("a(?!b)", r"\(\?! is looking ahead .*; write a set such as \[\^x\]"),
            ("(?<=a)b", r"\(\?< is looking behind .*; make it a part"),
            ("(?<!a)b", r"\(\?< is looking behind .*; write a set"),
            (r"(a)\1", r"\\1 is a back-reference or an octal number .*; write out"),
            (r"\012", r"\\0 is a back-reference or an octal number .*; .*\\x00"),
            (r"[\1]", r"\\1 is a back-reference"),
            ("(?P=x)", r"a back-reference .*; write out"),
            ("(?P<x>a)", r"a named group .*; nothing is captured: write \(\?:...\)"),
            ("(?#x)a", r"a comment .*; leave it out"),
            ("(a)?(?(1)b|c)", r"a condition .*; write the two cases"),
            ("(?>a)b", r"an atomic group .*; nothing is ever tried twice"),
            ("(?i)a", r"\(\?i is a flag, or nothing known .*; write \[aA\]"),
            ("(?s:a)", r"\(\?s is a flag"),
            ("a++b", r"a possessive repeat .*; nothing is ever tried twice: drop the \+"),
            ("a{2}+b", r"a possessive repeat"),
            ("a**b", r"a repeat of a repeat .*; write \(\?:a\*\)\*"),
            ("a*?+b", r"a repeat of a repeat"),
            ("*a", r"there is nothing to repeat .*; write \\\*"),
            ("a|{2}", r"there is nothing to repeat"),
            ("^*a", r"cannot be repeated .*; write it once"),
            (r"\b?a", r"cannot be repeated"),
            ("end$", r"\$ is the end of the output, .*; write \\n for the end of a line"),
            (r"end\Z", r"\\Z is the end of the output"),
            (r"\p{L}", r"\\p has no meaning here .*; write p, or \\xhh or \\uhhhh"),
            (r"[\B]", r"\\B has no meaning here"),
            (r"\N{DASH}", r"\\N has no meaning here"),
            (r"\x4", r"\\x4 is no character .*; write 2 hexadecimal digits"),
            (r"\U00110000", r"\\U00110000 is no character"),
            ("a\\", r"it ends with a backslash .*; write \\\\"),
            ("[z-a]", r"a range that ends before it begins .*; write the smaller first"),
            (r"[a-\d]", r"a range has a character at both ends .*; write \\-"),
            (r"[\d-z]", r"a range has a character at both ends"),
            ("[ab", r"the set that opens at 0 is not closed; write \\\[ or \]"),
            ("a[]", r"the set that opens at 1 is not closed"),
            ("a(b", r"the group that opens at 1 is not closed; write \\\( or \)"),
            ("a)b", r"'\)' closes no group .*; write \\\)"),
            ("a{3,2}", r"\{3,2\} has more before its comma .*; write the smaller first"),
            ("a{2001}", r"\{2001\} repeats more than 2000 times .*; repeat less, or write \*"),
            ("a{" + "9" * 5000 + "}", r"repeats more than 2000 times"),
            ("a*", r"it matches the empty text, which is everywhere; demand a character: \+ for"),
            ("", r"it matches the empty text"),
            ("a|", r"it matches the empty text"),
            (r"\b", r"it matches the empty text"),
            ("^", r"it matches the empty text"),
            ("(?:a?b{0}){3}", r"it matches the empty text"),
            ("(" * (DEEPEST + 1) + "a", rf"more than {DEEPEST} groups in one another .*; use few"),
        ],
    )
    def test_say_what_it_is_and_what_to_write(self, pattern: str, message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            parse(pattern)

    def test_quote_the_pattern_and_say_where(self) -> None:
        with pytest.raises(ConstraintError, match=r"^stop_regex 'ab\\\\Z': .* \(at 4\); "):
            parse(r"ab\Z")

    def test_quote_no_more_than_a_line_of_it(self) -> None:
        with pytest.raises(ConstraintError) as caught:
            parse("a" * 5000 + "$")

        assert len(str(caught.value)) < 400

    def test_leave_groups_as_deep_as_allowed(self) -> None:
        assert found(["(" * DEEPEST + "a" + ")" * DEEPEST], "ba") == (2, 1)

    def test_leave_repeats_as_often_as_allowed(self) -> None:
        assert parse(f"a{{{MOST_REPEATS}}}") == Repeat(parse("a"), MOST_REPEATS, MOST_REPEATS)
