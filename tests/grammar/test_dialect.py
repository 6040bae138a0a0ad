"""Patterns: what is refused and how that reads, and that what is accepted means what `re` means."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from structgen.errors import ConstraintError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.dialect import MOST_CHARACTERS, from_choice, from_regex
from structgen.request import Choice, Regex
from tests.grammar.derivatives import vocabulary_of

VOCABULARY = vocabulary_of([bytes([byte]) for byte in range(256)])


def accepts(grammar: Grammar, text: str) -> bool:
    return grammar.matches(list(text.encode()))


def in_python(source: str) -> str:
    """A translation, which has no flags and only classes that are written out, for `re`."""
    return re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", source)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", r"an empty pattern .*leave out the constraint"),
        ("()", r"matches the empty text only; write what is to be generated"),
        ("a{0}", "empty text only"),
        ("(?:|)", "empty text only"),
        ("[", "unterminated character set"),
        ("(abc", "missing .*, unterminated subpattern"),
        ("*a", "nothing to repeat"),
        ("a{3,2}", "min repeat greater than max repeat"),
        (r"\p{L}", r"bad escape \\p"),
        (r"abc\z", r"bad escape \\z"),
        ("a{4294967295}", "too large"),
        ("x[[:alpha:]]", r"\[:alpha:\] is no class in Python, .*write \[A-Za-z\]"),
        (r"(a|b)\1", "a back-reference, .*write the text out"),
        (r"(?P<x>a)(?P=x)", "a back-reference"),
        ("(a)?(?(1)b|c)", r"a condition on a group; write the alternatives out with \|"),
        ("(?=a)a", "a look-ahead, .*write the alternatives out"),
        ("a(?!b).", "a look-ahead"),
        ("(?<=a)b", "a look-behind"),
        ("(?<!a)b", "a look-behind"),
        (r"\bfoo", r"\\b or \\B, .*write the neighbours out"),
        (r"a\Bb", r"\\b or \\B"),
        ("(?>a+)b", r"an atomic group; write \(\?:\.\.\.\)"),
        ("a++b", r"a possessive repeat; drop its \+"),
        ("a$b", r"\$ or \\Z inside of it; anchors only stand at the ends"),
        ("a^b", r"\^ or \\A inside of it"),
        ("(?m)a$\n^b", r"\$ or \\Z inside"),
        ("(?:^a)*", r"\^ or \\A inside"),
        ("a?^b", r"\^ or \\A inside"),
        (r"a[^\s\S]", "matches no text at all"),
        ("\ud800", "matches no text at all"),
        ("(?:a{1,100}){1,100}", "10000 counted repeats .*bound the length with max_tokens"),
        ("a{5000}", "5000 counted repeats"),
        (r"(?:(?:a|aa|aaa){1,16}){1,200}", "too many ways at once.*bound fewer repeats"),
        (r"\w" * 60, r"written out, take more than \d+ characters; use smaller classes"),
        ("(?:" * 800 + "a" + ")" * 800, "nested too deeply"),
        ("a" * (MOST_CHARACTERS + 1), "for a list of texts use choices"),
    ],
)
def test_a_pattern_that_cannot_be_enforced_is_refused_with_advice(
    pattern: str, message: str
) -> None:
    quoted = "^regex " + re.escape(repr(pattern)[:30].rstrip("'\""))
    with pytest.raises(ConstraintError, match=message) as caught:
        compile_constraint(Regex(pattern), VOCABULARY)

    assert re.match(quoted, str(caught.value))
    assert len(str(caught.value)) < 600


def test_what_is_no_pattern_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"expected a pattern as a string, got b'a'"):
        from_regex(b"a")  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"[-+]?[0-9]*\.?[0-9]+", ["-1.5", ".5", "7", "1.", "-", "", "+12.25", "1.2.3"]),
        ("^a|b$", ["a", "b", "ab", ""]),
        (r"\A(?:yes|no)\Z", ["yes", "no", "Ayes", "yesZ"]),
        ("(?m)^a$", ["a", "a\n", "\na"]),
        ("(^a|b)c", ["ac", "bc", "c"]),
        ("a(b$|c)?", ["a", "ab", "ac", "abc"]),
        (r"(?P<y>\d{4})-(?P<m>\d\d)", ["2024-05", "24-05", "２０２４-05"]),
        ("(?i)yes|no", ["YES", "no", "yeſ", "maybe"]),
        ("(?i:a)b", ["Ab", "ab", "AB"]),
        ("(?s:.)a(?-i:b)", ["\nab", "xab", "xaB"]),
        ("(?x) a # one\n b{2}", ["abb", "a bb", "ab"]),
        ("a{,3}b", ["b", "aaab", "aaaab"]),
        ("a{,x}|{|a{", ["a{,x}", "{", "a{", "a"]),
        ("[:alpha:]{2}", ["::", "a:", "b:"]),
        (".{2}", ["ab", "a\n", "你😀", "\r\r", "\x85\u2028"]),
        (r"[\w\.-]+@[\w\.-]+\.\w+", ["a.b@c.de", "a@b", "é@ü.ж"]),
        ("[\u4e00-\u9fff]{1,4}", ["你好", "hello", "你好你好你"]),
        (r"(😀|🚀){3}", ["😀🚀😀", "😀🚀", "😀🚀😀😀"]),
        (r"a|b*?|c+?", ["", "a", "bb", "cc", "bc"]),
        (r"(?#note)[]a]+[^]a]", ["]ax", "a]", "x"]),
        (r"/\*.*\*/", ["/* a */", "/**/", "/*\n*/"]),
        (r"a\0\x7f\u00e9\U0001F600\t", ["a\0\x7fé😀\t", "a"]),
        ("(?:a|b*)*c", ["c", "abbac", "ab"]),
        ("(?:(?:)|a){2}", ["", "a", "aa", "aaa"]),
        ("a(?:|(?:[^\\s\\S]b))c", ["ac", "abc"]),
        ("[\ud800-\uffff]x", ["\uffffx", "ax"]),
        ('"(?:[^"\\\\]|\\\\.)*"', ['"a\\"b"', '"a"b"', '""']),
    ],
)
def test_an_accepted_pattern_means_what_it_means_to_re(pattern: str, texts: list[str]) -> None:
    grammar = compile_constraint(Regex(pattern), VOCABULARY)

    assert [accepts(grammar, text) for text in texts] == [
        re.fullmatch(pattern, text) is not None for text in texts
    ]


class TestFlags:
    """Of a pattern, of groups, and of groups in them: what is in force is what `re` takes."""

    WHOLE = ("", "(?a)", "(?i)", "(?ai)", "(?s)", "(?x)", "(?m)")
    GROUPS = ("a", "u", "i", "ai", "ui", "-i", "a-i", "u-i", "s", "-s", "x", "-x", "m")
    # A digit, a letter and a space that only Unicode knows; k has another case there, too.
    CHARACTERS = ("0", "٣", "é", "k", "K", "\u212a", " ", "\u2003", "\n", "x")
    # Each class has a sign before it, by which texts tell them apart.
    EACH = r"(?:1\d|2\D|3\s|4k|5[^k]|6.|7[ k]|8 x)"

    @pytest.mark.parametrize("whole", WHOLE)
    def test_of_groups_in_groups_are_those_of_re(self, whole: str) -> None:
        texts = [f"{n}{each}" for n in range(1, 9) for each in self.CHARACTERS] + ["8", "8 x", "8x"]
        wrong = []
        for outer, inner in itertools.product(self.GROUPS, repeat=2):
            # Before, in and after the inner group: what it changes ends with it.
            pattern = f"{whole}(?{outer}:^b{self.EACH}|(?{inner}:i{self.EACH})|a{self.EACH}$)"
            ours, judge = re.compile(in_python(from_regex(pattern).source)), re.compile(pattern)
            wrong += [
                (pattern, place + text)
                for place in "bia"
                for text in texts
                if bool(ours.fullmatch(place + text)) != bool(judge.fullmatch(place + text))
            ]
        assert wrong == []

    @pytest.mark.parametrize(
        "pattern", [r"(?a)(?u:\W)", r"(?a:(?u:\w))", r"(?a:(?u:(?a:\W)))", r"(?u:(?a:\w)\w)"]
    )
    def test_that_say_which_letters_there_are_replace_each_other(self, pattern: str) -> None:
        grammar = compile_constraint(Regex(pattern), VOCABULARY)
        texts = ["é", "a", " ", "\u2003", "ж", "aé", "éa"]

        assert [accepts(grammar, text) for text in texts] == [
            re.fullmatch(pattern, text) is not None for text in texts
        ]


class TestALazyEnd:
    @pytest.mark.parametrize(
        ("pattern", "lazy"),
        [
            (r"\{.*?\}", True),
            (r"^(\{.*?\})$", True),
            (r"a+\{.*?\}x{3}", True),
            (r"\{.*\}", False),
            (r".*?", False),
            (r"a.*?b?", False),
            (r"a.*?b*", False),
            (r"a.{3}?b", False),
            (r"(a.*?)b+", False),
            (r"(a(b.*?)c?)(d)", False),
            (r"(a(b.*?))(?:c)(d)", True),
        ],
    )
    def test_is_a_lazy_repeat_and_a_fixed_text(self, pattern: str, lazy: bool) -> None:
        assert from_regex(pattern).lazy == lazy

    def test_lets_the_output_end_at_the_first_match(self) -> None:
        grammar = compile_constraint(Regex(r"\{.*?\}"), VOCABULARY)

        assert accepts(grammar, "{a}")
        assert not accepts(grammar, "{a}b}")


class TestChoices:
    def test_are_the_texts_and_nothing_else(self) -> None:
        options = ("cat", "category", "a.b*", "在线", "😀", " x/", "\n", "")
        grammar = compile_constraint(Choice(options), VOCABULARY)

        assert all(accepts(grammar, text) for text in options)
        assert not any(accepts(grammar, text) for text in ("ca", "cate", "axbb", "在", "catcat"))

    def test_may_be_many(self) -> None:
        options = tuple(f"item_{number:05d}" for number in range(20_000))
        grammar = compile_constraint(Choice(options), VOCABULARY)

        assert accepts(grammar, "item_19999")
        assert not accepts(grammar, "item_20000")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ((), "nothing to choose from; give at least one text"),
            (("",), "nothing to choose from"),
            ("cat", "expected a list of strings, got 'cat'"),
            (5, "expected a list of strings, got 5"),
            (("a", 5), r"expected a list of strings, got \('a', 5\)"),
            (("a", "b\udc80"), r"'b\\udc80' has '\\udc80', .*half of a surrogate pair"),
            (("a" * 400_001,), "400001 characters in all, more than 400000; choose in two steps"),
            (("a",) * 30_001, "30001 options, more than 30000; choose in two steps"),
        ],
    )
    def test_that_cannot_be_made_are_refused(self, options: Any, message: str) -> None:
        with pytest.raises(ConstraintError, match=f"^choices: .*{message}"):
            from_choice(options)
