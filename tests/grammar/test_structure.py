"""Terms as constraints: what fits, what is captured, what is refused."""

from __future__ import annotations

import json as json_text
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.errors import ConstraintError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.request import Structure
from structgen.terms import (
    Capture,
    Either,
    Fixed,
    Free,
    Pattern,
    Repeat,
    Rules,
    Sequence,
    Term,
    TermLike,
    capture,
    choice,
    ebnf,
    either,
    json,
    literal,
    optional,
    regex,
    repeat,
    sequence,
    tagged,
    term_of,
    text,
)
from tests.grammar.derivatives import vocabulary_of
from tests.grammar.rules import texts

VOCABULARY = vocabulary_of([bytes([byte]) for byte in range(256)])
INTEGERS = {"type": "array", "items": {"type": "integer"}}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COMPACT = (",", ":")


def compiled(term: TermLike) -> Grammar:
    return compile_constraint(Structure(term_of(term)), VOCABULARY)


# ---------------------------------------------------------------- random terms, and `re`


def terms() -> st.SearchStrategy[Term]:
    """Terms over a, b and c without free text and recursion; Python's patterns can say them."""
    leaves: st.SearchStrategy[Term] = st.sampled_from(
        [
            *map(Fixed, ("a", "b", "ab", "ba", "")),
            *map(Pattern, ("a*b", "[ab]+", "b?a", "(?:ab)*c", "a{1,2}", "[^a]")),
            Rules('root ::= "a" x | "b"\nx ::= [ab]*'),
        ]
    )
    counts = st.sampled_from([(0, None), (1, None), (0, 1), (1, 2), (2, 2)])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map(lambda each: Sequence(tuple(each))),
            st.lists(inner, min_size=2, max_size=3).map(lambda each: Either(tuple(each))),
            st.builds(lambda part, n: Repeat(part, *n), inner, counts),
            st.builds(Capture, st.sampled_from("xy"), inner),
        ),
        max_leaves=6,
    )


def as_pattern(term: Term) -> str:
    """The term as a pattern of `re`."""
    found = ""
    match term:
        case Fixed(words):
            found = re.escape(words)
        case Pattern(pattern):
            found = pattern
        case Rules():
            found = "a[ab]*|b"
        case Free(until):
            found = f"(?:(?!{'|'.join(map(re.escape, until)) or '(?!)'})[^~])*"
        case Sequence(parts):
            found = "".join(map(as_pattern, parts))
        case Either(options):
            found = "|".join(map(as_pattern, options))
        case Repeat(part, least, most):
            found = f"{as_pattern(part)}{{{least},{'' if most is None else most}}}"
        case Capture(_, part):
            found = as_pattern(part)
    return f"(?:{found})"


class TestATerm:
    @settings(deadline=None, max_examples=100)
    @given(terms())
    def test_lets_through_what_a_pattern_for_it_matches(self, term: Term) -> None:
        pattern = re.compile(as_pattern(term))
        fitting = [each for each in texts("abc", 4) if pattern.fullmatch(each)]
        if not any(fitting):
            return

        grammar = compiled(term)

        assert [each for each in texts("abc", 4) if grammar.accepts(each)] == fitting

    @settings(deadline=None, max_examples=100)
    @given(terms())
    def test_captures_what_its_parts_match(self, term: Term) -> None:
        whole = capture("whole", term)
        pattern = re.compile(as_pattern(term))
        fitting = [each for each in texts("abc", 3) if pattern.fullmatch(each)]
        if not any(fitting):
            return

        grammar = compiled(whole)

        for each in fitting:
            first, *others = grammar.captures(each)
            assert first == ("whole", each)
            for name, piece in others:
                assert any(re.fullmatch(as_pattern(part), piece) for part in captured(term, name))

    @pytest.mark.parametrize(
        ("term", "accept", "reject"),
        [
            (regex("[a-z]*") + regex("[a-z]"), ["a", "abc"], ["", "1"]),
            ("é" + regex("[éè]+") + "è", ["ééè", "éèè"], ["éè", "éé"]),
            (repeat(regex(r"\w+") + optional(","), 1, 2), ["a", "ab,c", "a,b,"], ["", "a,b,c"]),
            (choice(["cat", "category"]) + "egory", ["category", "categoryegory"], ["cat"]),
            (ebnf('root ::= "(" root ")" | "x"') + "x", ["xx", "((x))x"], ["x", "(x)"]),
            (json(INTEGERS, COMPACT) + "x", ["[1,2]x", "[]x"], ["[1,2]", "[1, 2]x"]),
            (json(int) + "," + json(int), ["1,2", "-10,0"], ["1,", "12"]),
            (json(int) | json(str), ["1", '"a"'], ["a", "1.5"]),
            ("v=" + (json(int) | "none"), ["v=5", "v=none"], ["v=", "v=5none"]),
            (regex(r"\{.*?\}"), ["{a}"], ["{a}b}"]),
            ("<" + regex(".*?") + ">", ["<>", "<a>b>"], ["<a"]),
        ],
    )
    def test_does_not_care_where_its_parts_meet(
        self, term: Term, accept: list[str], reject: list[str]
    ) -> None:
        grammar = compiled(term)

        assert [grammar.accepts(each) for each in accept + reject] == [
            *[True] * len(accept),
            *[False] * len(reject),
        ]

    def test_has_fixed_texts_that_leave_no_choice(self) -> None:
        matcher = compiled("Name: " + regex("[a-z]+") + "; age: " + json(int)).matcher()
        row = np.zeros(matcher.words, np.int32)
        written = ""
        for letter in "Name: bo; age: ":
            matcher.fill(row)
            allowed = [token for token in range(256) if row[token >> 5] >> (token & 31) & 1]
            written += letter if allowed == [ord(letter)] else "?"
            matcher.accept(ord(letter))

        assert written == "Name: ??? age: "


def captured(term: Term, name: str) -> list[Term]:
    """The parts that a name stands for."""
    match term:
        case Sequence(parts) | Either(parts):
            return [found for part in parts for found in captured(part, name)]
        case Repeat(part):
            return captured(part, name)
        case Capture(each, part):
            return [part] * (each == name) + captured(part, name)
        case _:
            return []


class TestCaptures:
    @pytest.mark.parametrize(
        ("term", "text", "found"),
        [
            (capture("a", regex("[a-z]+")) + "-" + capture("b", regex(".*")), "x-y", ("x", "y")),
            (capture("a", regex("[a-z]*")) + capture("b", regex("[a-z]*")), "xy", ("xy", "")),
            (capture("a", json(OBJECT)) + capture("b", text()), '{"a": 1} x', ('{"a": 1}', " x")),
            (capture("a", "x" + capture("b", "y") + "z"), "xyz", ("xyz", "y")),
            (capture("a", repeat(ebnf('root ::= "a"'))) + capture("b", "b"), "aab", ("aa", "b")),
            (
                capture("a", text(until="</t>")) + "</t>" + capture("b", json(int)),
                "1 < 2</t>5",
                ("1 < 2", "5"),
            ),
        ],
    )
    def test_are_the_texts_of_their_parts(
        self, term: Term, text: str, found: tuple[str, str]
    ) -> None:
        grammar = compiled(term)

        assert grammar.source.captures == ("a", "b")
        assert grammar.captures(text) == tuple(zip("ab", found, strict=True))

    def test_are_in_the_order_of_the_text(self) -> None:
        grammar = compiled(repeat(capture("x", regex("[a-z]+")) + ",") + "." + capture("x", "y"))

        assert grammar.captures("a,bc,.y") == (("x", "a"), ("x", "bc"), ("x", "y"))
        assert grammar.captures(".y") == (("x", "y"),)

    def test_of_what_is_not_there_are_left_out(self) -> None:
        grammar = compiled("a" + optional("," + capture("x", "b")) + (capture("y", "c") | "d"))

        assert grammar.captures("ad") == ()
        assert grammar.captures("a,bc") == (("x", "b"), ("y", "c"))

    def test_of_json_go_to_the_schema_that_it_is_valid_under(self) -> None:
        grammar = compiled(capture("n", json(int)) | capture("s", json(str)))

        assert grammar.captures("5") == (("n", "5"),)
        assert grammar.captures('"a"') == (("s", '"a"'),)

    def test_of_a_text_that_does_not_fit_are_an_error(self) -> None:
        with pytest.raises(ConstraintError, match="captures of a text that does not fit"):
            compiled(capture("x", "a") + "b").captures("ac")

    def test_take_time_in_proportion_to_the_text(self) -> None:
        word = capture("w", regex("a|aa")) + optional(regex("a*")) + optional(capture("v", "a"))
        grammar = compiled(repeat(word) + "b")
        began = time.perf_counter()

        found = grammar.captures("a" * 300 + "b")

        assert found == (("w", "aa"),)
        assert time.perf_counter() - began < 10

    def test_are_none_where_nothing_is_captured(self) -> None:
        assert compiled(literal("a")).captures("a") == ()


class TestFreeText:
    @settings(deadline=None, max_examples=60)
    @given(
        st.sampled_from(["a", "b", ""]),
        st.lists(st.sampled_from(["a", "b", "ab", "aa", "aba", "c"]), min_size=1, max_size=2),
        st.sampled_from(["", "a", "bc"]),
    )
    def test_goes_up_to_the_first_of_its_strings(
        self, before: str, until: list[str], after: str
    ) -> None:
        if any(one != other and one in other for one in until for other in until):
            return
        free = Free(tuple(dict.fromkeys(until)))
        term = sequence(before, free, either(*until), after)
        pattern = re.compile(as_pattern(term))

        grammar = compiled(term)

        assert [each for each in texts("abc", 5) if grammar.accepts(each)] == [
            each for each in texts("abc", 5) if pattern.fullmatch(each)
        ]

    def test_at_the_end_has_none_of_its_strings(self) -> None:
        grammar = compiled("x" + text(until=["ab", "\n"]))

        assert [each for each in texts("ab", 3) if grammar.accepts(f"x{each}")] == [
            each for each in texts("ab", 3) if "ab" not in each
        ]

    @pytest.mark.parametrize(
        ("term", "accept", "reject"),
        [
            (optional("ab") + text(until="c") + "cd", ["cd", "abcd", "bacd"], ["ab", "abcc"]),
            ((text(until="a") + "a" | "xy") + "z", ["az", "xyz", "xyaz"], ["xya", "xyzz", "z"]),
            (repeat(text(until="a") + "a", 2, 2) + "b", ["aab", "xaxab"], ["ab", "aaab"]),
            (regex("x*") + text(until="y"), ["", "xx", "xaz"], ["y", "xy"]),
        ],
    )
    def test_may_begin_like_what_stands_beside_it(
        self, term: Term, accept: list[str], reject: list[str]
    ) -> None:
        grammar = compiled(term)

        assert [grammar.accepts(each) for each in accept + reject] == [
            *[True] * len(accept),
            *[False] * len(reject),
        ]

    def test_may_be_all_there_is(self) -> None:
        grammar = compiled(text())

        assert grammar.accepts("anything\n😀")

    def test_may_end_in_several_ways(self) -> None:
        grammar = compiled(capture("t", text(until=["\n", "; "])) + ("\n" | literal("; x")) + "y")

        assert grammar.captures("a;b\ny") == (("t", "a;b"),)
        assert grammar.captures("a; xy") == (("t", "a"),)
        assert not grammar.accepts("a; y")

    @pytest.mark.parametrize(
        ("term", "message"),
        [
            (text() + "a", "ends before nothing, but is followed by .*'a'"),
            (text(until="a") + "b", r"ends before 'a', but is followed by Fixed\(text='b'\)"),
            (text(until="a") + (literal("a") | "b"), "followed by .*'b'"),
            (text(until="a") + regex("a"), "write a fixed text that begins with such a string"),
            (repeat(text(until="a")), "a text without an end stands before something else"),
            ((text(until="a") | "b") + "a", "a text without an end stands before"),
            (text(until=["a", "ba"]) + "a", "'ba' in `until` has 'a' in it, and would never"),
            (text(until="") + "a", "an empty string in `until`"),
            (text(until="a" * 300) + "a", "more than 256 characters in `until`"),
            (
                (text(until="a") + "a" + json(str) | "xy") + "z",
                "free text stands beside something else",
            ),
        ],
    )
    def test_is_refused_where_its_end_would_not_be_known(self, term: Term, message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            compiled(term)


class TestTags:
    TERM = tagged({"<tool>": capture("call", json(OBJECT)) + "</tool>", "<b>": "x"})

    def test_let_free_text_have_none(self) -> None:
        assert compiled(self.TERM).accepts("no tool < here")

    def test_are_followed_by_their_term(self) -> None:
        grammar = compiled(self.TERM)
        output = 'a<tool>{"a": 1}</tool> b <b>x<tool>{"a": 2}</tool>'

        assert grammar.accepts(output)
        assert grammar.captures(output) == (("call", '{"a": 1}'), ("call", '{"a": 2}'))
        assert not grammar.accepts("a<tool>")
        assert not grammar.accepts("a<b>y")
        assert not grammar.accepts('<tool>{"a": "x"}</tool>')

    def test_may_have_to_be_there(self) -> None:
        grammar = compiled(tagged({"<b>": "x"}, at_least=2))

        assert grammar.accepts("<b>x <b>x.")
        assert not grammar.accepts("<b>x.")

    def test_stand_in_terms(self) -> None:
        grammar = compiled(
            "<think>" + capture("t", text(until="</think>")) + "</think>" + self.TERM
        )

        output = '<think>Is a < b?</think>So: <tool>{"a": 3}</tool>'
        assert grammar.captures(output) == (
            ("t", "Is a < b?"),
            ("call", '{"a": 3}'),
        )


class TestJsonInATerm:
    def test_is_checked_in_the_end(self) -> None:
        grammar = compiled("a: " + json({"type": "object"}) + ".")
        duplicates = 'a: {"k": 1, "k": 2}.'

        assert grammar.path.endswith("final check")
        assert grammar.matches((), duplicates)
        assert grammar.fault(duplicates) == "JSON at character 3: duplicate key 'k'"
        assert not grammar.accepts(duplicates)
        assert grammar.fault('a: {"k": 1, "j": 2}.') is None

    def test_is_checked_wherever_it_stands(self) -> None:
        grammar = compiled(repeat(json({"type": "object"}) + "\n"))

        assert grammar.fault('{"a": 1}\n{"b": 1, "b": 2}\n') == (
            "JSON at character 9: duplicate key 'b'"
        )

    @pytest.mark.parametrize(
        ("term", "message"),
        [
            (json(int) + "5", "may be a number is followed by a digit, .*another text between"),
            (json() + json(), "may be a number is followed by"),
            (json(float) + optional("e"), "may be a number is followed by"),
            (json(str) | regex('".*'), "stands beside something else that may begin with the same"),
            (json(bool) | "to", "write one JSON schema for both, with anyOf"),
            (json({"$ref": "#/$defs/x", "$defs": {"x": OBJECT}}) | "{", "stands beside"),
        ],
    )
    def test_is_refused_where_its_end_or_beginning_would_not_be_known(
        self, term: Term, message: str
    ) -> None:
        with pytest.raises(ConstraintError, match=message):
            compiled(term)

    @pytest.mark.parametrize(
        "schema",
        [OBJECT, {"const": "x"}, {"enum": [True, None]}, {"anyOf": [OBJECT, INTEGERS]}],
        ids=json_text.dumps,
    )
    def test_may_be_followed_by_a_digit_where_it_is_no_number(self, schema: object) -> None:
        assert compiled(json(json_text.dumps(schema)) + "5" + json(int)).source.judge


class TestATermThatCannotBe:
    @pytest.mark.parametrize(
        ("term", "message"),
        [
            (Fixed(""), "the empty text only"),
            (optional(""), "the empty text only"),
            (Sequence(()), "the empty text only"),
            ("a" + regex("(?=b)"), r"^regex '\(\?=b\)': it has a look-ahead"),
            ("a" + ebnf("root ::= x"), "^EBNF line 1, rule root .*there is no rule x"),
            ("a\ud800" + literal("b"), "half of a surrogate pair"),
            (Repeat(Fixed("a"), 3, 2), "from 3 to 2 times"),
            (Repeat(Fixed("a"), -1), "from -1 to None times"),
            (repeat("a", 0, 5000), "more than 4096 times"),
            (Sequence((Fixed("a"), 5)), "expected a term, got 5"),  # type: ignore[arg-type]
            (Fixed(5), "expected a str, got 5"),  # type: ignore[arg-type]
            (sequence(*["a"] * 10_001), "more than 10000 parts"),
            (literal("a" * 200_001), "200000 characters in all"),
            (json({"title": "a" * 1_000_001}), "1000000 of schemas"),
        ],
    )
    def test_is_refused_with_advice(self, term: Term, message: str) -> None:
        with pytest.raises(ConstraintError, match=message) as caught:
            compiled(term)

        assert len(str(caught.value)) < 600

    def test_is_refused_fast_where_it_is_deep(self) -> None:
        term = literal("a")
        for _ in range(50_000):
            term = Capture("x", term)

        with pytest.raises(ConstraintError, match="more than 40 parts in one another"):
            compiled(term)

    def test_is_refused_where_captures_are_repeated_without_measure(self) -> None:
        inner = repeat(capture("x", "a"), 0, 4000)

        with pytest.raises(ConstraintError, match="captures or JSON are repeated too often"):
            compiled(repeat(inner + "b", 0, 4000))
