"""EBNF: what a grammar derives is what its mask lets through, and what cannot be is refused."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import example, given, settings

from structgen.errors import ConstraintError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.ebnf import rules_of
from structgen.grammar.matcher import Vocabulary
from structgen.request import Ebnf
from tests.grammar.derivatives import vocabulary_of
from tests.grammar.rules import Rules, derived, grammars, is_ambiguous, texts, written

VOCABULARY = vocabulary_of([bytes([byte]) for byte in range(256)])


def compiled(grammar: str, vocabulary: Vocabulary = VOCABULARY) -> Grammar:
    return compile_constraint(Ebnf(grammar), vocabulary)


def accepted(grammar: str, texts: list[str]) -> list[bool]:
    found = compiled(grammar)
    return [found.accepts(text) for text in texts]


class TestAGrammar:
    @pytest.mark.parametrize(
        ("grammar", "accept", "reject"),
        [
            ('root ::= root "a" | "b"', ["b", "baa"], ["a", "", "ab"]),
            ("root ::= 'it''s' | 'a\"b'", ["its", 'a"b'], ["it's"]),
            (r'root ::= "\x41\u00e9\U0001F600\n\t\r\"\'\\"', ["Aé😀\n\t\r\"'\\"], ["A"]),
            (r"root ::= [a\-c\]\^]+", ["a-c]^"], ["b", "\\"]),
            ("root ::= [-a] [a-] [^-a]", ["-ab", "a-b"], ["--a", "bbb"]),
            ("root ::= [^a-c\\n] x\nx ::= [\\x30-\\x39]", ["d1", "😀9"], ["a1", "\n1", "dx"]),
            ('root ::= "a"{2} "b"{1,} "c"{,2} "d"{1,2}', ["aabd", "aabbccdd"], ["abd", "aabcccd"]),
            ('root ::= ("a" | "b" "c")* ("" | "d")', ["", "abca", "d", "bcd"], ["b", "dd"]),
            ('root\n  ::= "a" # one ::= not a rule\n  | x-1\n\nx-1 ::=\n "b"', ["a", "b"], ["c"]),
            ("root ::= [a-z]* [a-z]", ["a", "abc"], ["", "1"]),
            ('root ::= id id\nid ::= [a-z]+ | "(" root ")"', ["ab", "a(bc)", "abcd"], ["a", "(a)"]),
            ('root ::= "(" root ")" | "(" ")"', ["()", "((()))"], ["", "(()", "())"]),
            ('root ::= "a" root "b" root | ""', ["", "ab", "aabb", "abab"], ["a", "ba", "aab"]),
            ('root ::= x{3}\nx ::= "a" | "b" x', ["aaa", "babbaa"], ["aa", "aaaa", "aab"]),
            ("root ::= e\ne ::= e '+' e | [0-9]+", ["1", "1+22+3"], ["+", "1+", "1++2"]),
            ('root ::= ws "a" ws\nws ::= [ \\n]*', ["a", " \n a  "], ["", " "]),
            ('root ::= "a" ws ws b\nws ::= " "*\nb ::= "b" | b "c"', ["ab", "a   bc"], ["a b "]),
        ],
    )
    def test_derives_its_texts_and_no_others(
        self, grammar: str, accept: list[str], reject: list[str]
    ) -> None:
        assert accepted(grammar, accept + reject) == [True] * len(accept) + [False] * len(reject)

    def test_may_have_keywords_that_are_names_too(self) -> None:
        grammar = 'root ::= item ("," item)*\nitem ::= "or" | name "=" root | name\nname ::= [a-z]+'

        assert accepted(grammar, ["or", "or,orb", "or=or,x=a", "or=", ","]) == [
            *(True, True, True),
            *(False, False),
        ]

    def test_may_be_deep_where_it_has_many_rules(self) -> None:
        chain = "\n".join(f'r{n} ::= "a" r{n + 1}' for n in range(900))
        grammar = f'root ::= r0\n{chain}\nr900 ::= "b" | "(" root ")"'

        assert accepted(grammar, ["a" * 900 + "b", "a" * 899 + "b"]) == [True, False]

    @pytest.mark.parametrize(
        "grammar",
        [
            "\n".join(
                ["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60)), "r60 ::= 'a'"]
            ),
            f'root ::= "{"ab" * 1000}" root? | [a-z]+ "." root',
            "root ::= (x | [a-z0-9]+) '.' root?\nx ::= " + "|".join(f'"w{n}"' for n in range(3000)),
            'root ::= ((("a" root?){0,4096}){0,4096}){0,4096}',
            "root ::= " + " ".join('"a"?' for _ in range(2000)),
            'root ::= root root root | root root | "a" | ""',
        ],
        ids=["doubling", "long text", "many texts", "nested counts", "optional", "ambiguous"],
    )
    def test_that_explodes_is_compiled_or_refused_in_time(self, grammar: str) -> None:
        began = time.thread_time()

        with contextlib.suppress(ConstraintError):
            compiled(grammar)

        assert time.thread_time() - began < 5

    @settings(deadline=None, max_examples=60)
    @given(grammars("ab"))
    @example({"root": ("repeat", ("rule", "x"), (0, None)), "x": ("join", [("rule", "root"), "a"])})
    @example(
        {
            "root": ("repeat", ("rule", "x"), (0, None)),
            "x": ("join", [("rule", "root"), ("repeat", "a", (0, None))]),
        }
    )
    def test_derives_what_trying_everything_derives(self, rules: Rules) -> None:
        check(rules, "ab", 4)

    @settings(deadline=None, max_examples=60)
    @given(grammars("aéè"))
    def test_does_so_where_characters_share_their_first_byte(self, rules: Rules) -> None:
        check(rules, "aéè", 3)


def check(rules: Rules, alphabet: str, most: int) -> None:
    """The short texts of rules are accepted and no others, or the rules are refused for cause."""
    known, grammar, refusal = derived(rules, most), None, ""
    try:
        grammar = compiled(written(rules))
    except ConstraintError as error:
        refusal = str(error)
    if grammar is not None:
        assert [text for text in texts(alphabet, most) if grammar.accepts(text)] == [
            text for text in texts(alphabet, most) if text in known["root"]
        ]
    elif "in too many ways at once" in refusal:
        assert is_ambiguous(rules, alphabet, most)
    elif "empty text only" in refusal:
        assert known["root"] <= {""}
    else:
        assert not all(known.values())


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", r"no rule root, .*there is none at all"),
        ("# nothing\n", "no rule root"),
        ('start ::= "a"', r"no rule root, .*there are start.*write root ::= "),
        ("root ::= foo", r"line 1, rule root .*there is no rule foo; write foo ::="),
        ("root ::= x\nx ::= y", r"line 2, rule x \('x ::= y'\): there is no rule y"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3, rule root .*a second time; .*after \\|"),
        ('root ::= "a" root', r"line 1, rule root .*it can never end, .*leads to root again"),
        ('root ::= "a" | x\nx ::= y\ny ::= x "b"', "line 2, rule x .*never end"),
        ('root ::= ""', "the empty text only; write what is to be generated"),
        ('root ::= x*\nx ::= "" ""', "the empty text only"),
        ("root ::=", 'nothing in an alternative; write ""'),
        ('root ::= "a" |', "nothing in an alternative"),
        ('root ::= ("a"', r"line 1, .*a group that is not closed"),
        ('root ::= "a")', r"a \) that closes no group"),
        ('"a" ::= root', "a rule is expected here"),
        ("root ::= *", r"\* has nothing to repeat"),
        ('root ::= "a"{3,2}', "more before its comma"),
        ('root ::= "a"{5000}', r"more than 4096 times; .*max_tokens"),
        ('root ::= "a"{99999999999}', "repeats too often"),
        ('root ::= "a"{,}', "says nothing"),
        ('root ::= "a" {x}', r"a \{ that is no count"),
        ('root ::= "a', r"a text that is not closed on its line; write \\n"),
        ("root ::= 'a\n'", "a text that is not closed"),
        ("root ::= [a", "a class that is not closed"),
        ("root ::= []", r"a class of no character; write \\] .*any character"),
        ("root ::= [b-a]", "b-a ends before it begins"),
        ("root ::= [^\\x00-\\U0010ffff]", "a class of no character that the model has tokens for"),
        (r'root ::= "\ud800"', r"U\+D800 is no character of its own"),
        (r'root ::= "\U00110000"', r"U\+110000 is no character"),
        (r'root ::= "\x4"', "2 hexadecimal digits are expected"),
        (r"root ::= [\d]+", r"\\d has no meaning here; .*\[0-9\]"),
        ("root ::= .", r"\. is no class here; write \[\^\\n\]"),
        ("root ::= /a/", "a pattern in /"),
        ('root ::= "a"i', r"a letter right after a text; .*write \[aA\]"),
        ('root ::= Token("a")', r"Token\(...\): there are no macros"),
        ('root = "a"', "a single =; a rule is written name ::="),
        ('root: "a"', "a single :; a rule is written name ::="),
        ('root ::= "a" (= "b")', "looking ahead is not supported"),
        ('root ::= "a";', "a ; ; a rule ends where the next one begins: leave it out"),
        ("root ::= <name>", "names stand without brackets"),
        ("root ::= " + "(" * 50 + '"a"' + ")" * 50, "more than 40 groups in one another"),
        ("root ::= [a-z]" + " " * 64_000, r"characters, more than 64000"),
        ("\n".join(f'r{n} ::= "a"' for n in range(1200)), "more than 1000 rules"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused_with_advice(
    grammar: str, message: str
) -> None:
    with pytest.raises(ConstraintError, match=message) as caught:
        compiled(grammar)

    assert str(caught.value).startswith("EBNF")
    assert len(str(caught.value)) < 500


def test_what_is_no_grammar_is_refused() -> None:
    with pytest.raises(ConstraintError, match="expected a grammar as a string, got 5"):
        rules_of(5)  # type: ignore[arg-type]  # what is tested


class TestCharactersWithoutATokenOfTheirs:
    VOCABULARY = vocabulary_of([b"a", b"b", b"\xc3"])

    def test_are_refused_in_a_text(self) -> None:
        with pytest.raises(ConstraintError, match=r"line 1, rule root .*'é' is a character that"):
            compiled('root ::= "aé"', self.VOCABULARY)

    def test_are_left_out_of_a_class(self) -> None:
        grammar = compiled('root ::= [ab-zé] root | "b"', self.VOCABULARY)

        assert "a-b" in grammar.source.lark
        assert grammar.matches([0, 1, 1])


class TestARuleThatIsItsOwnBeginningOrEnd:
    @pytest.mark.parametrize(
        ("grammar", "accept", "reject"),
        [
            ("root ::= [a-z] root | [a-z]", ["a", "b" * 3000], ["", "b" * 3000 + "1"]),
            ("root ::= root [a-z] | [a-z]", ["a", "b" * 3000], ["", "b" * 3000 + "1"]),
            ('root ::= "(" c ")"\nc ::= [a-z] c | ""', ["()", f"({'a' * 3000})"], ["(", "(a"]),
            ('root ::= "a" root | "b" root | "c"', ["c", "ab" * 1500 + "c"], ["ab", "cc"]),
            ('root ::= root | "a" root | ""', ["", "aaa"], ["b"]),
            ('root ::= "a" root "b" | root "c" | "d"', ["adb", "dc", "adcbc"], ["ad", "cd"]),
            ('root ::= root "a" | "b" root | "c"', ["c", "bbca", "bca"], ["acb", "b"]),
        ],
    )
    def test_is_followed_however_long_the_text_is(
        self, grammar: str, accept: list[str], reject: list[str]
    ) -> None:
        assert accepted(grammar, accept) == [True] * len(accept)
        assert accepted(grammar, reject) == [False] * len(reject)


class TestAGrammarWithoutShortTexts:
    def test_is_refused_however_few_rules_it_has(self) -> None:
        rules = "\n".join(f"r{n} ::= r{n + 1} r{n + 1} r{n + 1} r{n + 1}" for n in range(40))
        long = f'r0\n{rules}\nr40 ::= "a"'

        for beginning in (f"root ::= {long}", f'root ::= "b" | {long}'):
            with pytest.raises(ConstraintError, match="no text of less than 250,000 characters"):
                compiled(beginning)

    def test_is_fine_with_another_way_to_end(self) -> None:
        rules = "\n".join(f'r{n} ::= "a" | r{n + 1} r{n + 1} r{n + 1}' for n in range(20))

        grammar = compiled(f'root ::= r0\n{rules}\nr20 ::= root "b"')

        assert grammar.accepts("aaa")
