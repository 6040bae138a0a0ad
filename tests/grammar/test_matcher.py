"""Masks against an obvious matcher: every token of a vocabulary, in states met at random."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from structgen.engine.constraints import vocabulary_of as vocabulary_of_checkpoint
from structgen.errors import ConstraintError, GenerationError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Vocabulary, allow
from structgen.models.checkpoint import open_checkpoint
from structgen.request import Choice, Regex
from tests.grammar.derivatives import (
    ATOMS,
    TREES,
    Atom,
    Either,
    Join,
    Place,
    Repeat,
    Shortest,
    Tree,
    follow,
    legal,
    source,
    vocabulary_of,
)

EXAMPLES = int(os.environ.get("STRUCTGEN_GRAMMAR_EXAMPLES", "150"))

BYTES = [bytes([byte]) for byte in range(256)]
HOLE, CONTROL, ENDING = 256, 257, 258
PIECES = ("aa", "a0", "0 ", "\n\n", "你a", "é你", "😀😀", "ab0", "Kk", "ßa", "  ", "b\n")
TOKENS = [
    *BYTES,
    b"",
    b"<a>",
    b"0",  # ends an output, so it is no text although it has one
    *(piece.encode() for piece in PIECES),
    "é".encode()[1:] + b"a",  # tokens that begin or end inside a character
    "a你".encode()[:-1],
    "你".encode()[1:] + "😀".encode()[:2],
    "😀".encode()[2:] + b"0",
    b"aa",  # there twice
]
VOCABULARY = vocabulary_of(TOKENS, textless=(CONTROL, ENDING), size=len(TOKENS) + 9)
TEXTS = {n: data for n, data in enumerate(TOKENS) if data and n not in {CONTROL, ENDING}}


def compiled(tree: Tree, vocabulary: Vocabulary = VOCABULARY) -> Grammar:
    """The grammar of a tree; examples that are refused, rightly, are no examples."""
    try:
        return compile_constraint(Regex(source(tree)), vocabulary)
    except ConstraintError as error:
        assume("too many ways" not in str(error))
        assume("empty text only" not in str(error))
        raise


def check(grammar: Grammar, tree: Tree, draw: random.Random, steps: int) -> None:
    """Compare everything that the matcher says, along one way through the pattern."""
    matcher = grammar.matcher()
    place: Place | None = Place(tree)
    text = b""
    for _ in range(steps):
        assert place is not None
        places = {token: place.after(data) for token, data in TEXTS.items()}
        expected = [token for token, after in places.items() if after is not None]
        assert legal(matcher) == expected, f"{source(tree)!r} after {text!r}"
        assert matcher.complete == place.complete
        assert matcher.finished == (place.complete and not expected)
        if not place.begun and not isinstance(tree, Shortest):
            assert matcher.complete == bool(re.fullmatch(source(tree), text.decode()))
        if not expected:
            return
        token = draw.choice(expected)
        matcher.accept(token)
        place, text = places[token], text + TEXTS[token]


class TestAMask:
    @given(tree=TREES, seed=st.integers(0, 9))
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
    @example(tree=Join((Atom("a"), Repeat(Atom("😀"), 0, None))), seed=0)
    @example(tree=Either((Atom("é"), Join((Atom("é"), Atom("é"))))), seed=0)
    @example(tree=Repeat(Atom("[^a]"), 0, 3), seed=0)
    def test_allows_what_the_pattern_allows_and_nothing_else(self, tree: Tree, seed: int) -> None:
        check(compiled(tree), tree, random.Random(seed), steps=6)

    @given(
        body=st.sampled_from(ATOMS).map(Atom) | TREES,
        low=st.integers(0, 2),
        before=st.sampled_from(["a", "0a", "😀"]),
        after=st.sampled_from(["a", "b0", "é", "\\n"]),
        seed=st.integers(0, 9),
    )
    @settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True)
    def test_of_a_lazy_end_goes_on_to_the_first_match_only(
        self, body: Tree, low: int, before: str, after: str, seed: int
    ) -> None:
        tree = Join((*map(Atom, before), Repeat(body, low, None), *_atoms(after)))
        pattern = before + f"(?:{source(body)}){{{low},}}?" + after
        assume(re.fullmatch(f"(?:{source(body)})", "") is None)

        check(
            compile_constraint(Regex(pattern), VOCABULARY),
            Shortest(tree),
            random.Random(seed),
            steps=6,
        )

    @pytest.mark.parametrize(
        ("pattern", "text"),
        [
            (r"\{.*?\}", b"{a}"),
            (r"(\{.*?\})$", b"{a}"),
            (r"x+\{(?:.|\n)*?\}(?:a{3})", b"xx{}aaa"),
            (r'"[^"]*?"', b'"a"'),
        ],
    )
    def test_knows_the_lazy_ends(self, pattern: str, text: bytes) -> None:
        beyond = text[-1:] + b"x"
        grammar = compile_constraint(Regex(pattern), vocabulary_of([*BYTES, beyond]))
        matcher = follow(grammar, list(text))

        assert matcher.finished
        assert 256 not in legal(follow(grammar, list(text[:-1])))

    @pytest.mark.parametrize("pattern", ["a*?", "a*?b*", r"(?:a*?|b)c*", "a+?b?"])
    def test_of_other_lazy_repeats_is_that_of_greedy_ones(self, pattern: str) -> None:
        lazy = compile_constraint(Regex(pattern), VOCABULARY)
        greedy = compile_constraint(Regex(pattern.replace("?b", "b", 1)), VOCABULARY)

        for text in (b"", b"a", b"aa"):
            assert legal(follow(lazy, list(text))) == legal(follow(greedy, list(text)))

    def test_never_allows_a_token_without_text(self) -> None:
        matcher = compile_constraint(Regex(r"(?s).*"), VOCABULARY).matcher()
        found = legal(matcher)

        assert {HOLE, CONTROL, ENDING}.isdisjoint(found)
        assert max(found) < len(TOKENS)
        assert ord("0") in found  # the character can be written, with another token

    def test_never_offers_the_spelling_of_a_control_token_as_that_token(self) -> None:
        assert legal(compile_constraint(Regex("<a>"), VOCABULARY).matcher()) == [ord("<")]

    def test_is_empty_after_the_end(self) -> None:
        matcher = follow(compile_constraint(Regex("ab"), VOCABULARY), list(b"ab"))

        assert matcher.complete
        assert matcher.finished
        assert legal(matcher) == []

    def test_does_not_single_out_the_usual_spelling_of_what_is_certain(self) -> None:
        matcher = compile_constraint(Regex("aaaa"), VOCABULARY).matcher()

        assert [TOKENS[token] for token in legal(matcher)] == [b"a", b"aa", b"aa"]


def _atoms(text: str) -> list[Atom]:
    return [Atom(text)] if text.startswith("\\") else [Atom(letter) for letter in text]


class TestAMatcher:
    def test_goes_its_own_way(self) -> None:
        grammar = compile_constraint(Choice(("ab", "a0")), VOCABULARY)
        one, other = follow(grammar, list(b"ab")), follow(grammar, list(b"a"))

        assert one.finished
        assert not other.complete
        assert legal(other) == [ord("0"), ord("b")]
        assert not grammar.matcher().complete

    def test_refuses_a_token_that_the_mask_does_not_allow(self) -> None:
        matcher = compile_constraint(Regex("ab"), VOCABULARY).matcher()

        with pytest.raises(GenerationError, match="could not be followed any further"):
            matcher.accept(ord("x"))

    def test_says_when_the_backend_gives_up(self) -> None:
        # The trial text of this pattern takes its first branch, which is harmless.
        pattern = "x{300}|(?:(?:a|aa|aaa){1,16}){1,200}"
        matcher = compile_constraint(Regex(pattern), VOCABULARY).matcher()

        def write_on() -> None:
            for _ in range(1000):
                legal(matcher)
                matcher.accept(ord("a"))

        with pytest.raises(GenerationError, match=r"any further: .*too many .*simpler pattern"):
            write_on()

    def test_reads_a_mask_as_wide_as_the_logits(self) -> None:
        for size in (len(TOKENS), 31 + len(TOKENS) // 32 * 32, 32 + len(TOKENS) // 32 * 32):
            vocabulary = vocabulary_of(TOKENS[: size - 1], size=size)

            assert vocabulary.words == -(-size // 32)
            assert 97 in legal(compile_constraint(Regex("a"), vocabulary).matcher())

    def test_sees_no_tokens_behind_the_logits(self) -> None:
        matcher = compile_constraint(
            Regex("a+"), vocabulary_of([*BYTES, b"aa"], size=256)
        ).matcher()

        assert legal(matcher) == [97]


class TestAllowing:
    def test_sets_bits(self) -> None:
        row = np.zeros(3, np.int32)
        allow(row, [0, 31, 32, 95])
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")

        assert np.flatnonzero(bits).tolist() == [0, 31, 32, 95]

    def test_leaves_out_what_has_no_bit(self) -> None:
        row = np.zeros(1, np.int32)
        allow(row, [32, 1000])

        assert not row.any()


class TestAVocabularyWithGaps:
    def test_writes_only_characters_that_it_can_finish(self) -> None:
        letters = [byte for byte in BYTES if byte not in {b"\x04", b"\xf1"}]
        vocabulary = vocabulary_of(letters)
        place = {data: n for n, data in enumerate(letters)}
        matcher = compile_constraint(Regex("(?s)."), vocabulary).matcher()

        assert place[b"\x03"] in legal(matcher)
        assert all(letters[token] not in {b"\xf1", b"\x04"} for token in legal(matcher))
        with pytest.raises(ConstraintError, match="characters that the model has tokens for"):
            compile_constraint(Regex("a\x04"), vocabulary)
        with pytest.raises(ConstraintError, match=r"'b\\x04' has '\\x04', which the model has no"):
            compile_constraint(Choice(("a", "b\x04")), vocabulary)

    def test_of_whole_characters_knows_those(self) -> None:
        vocabulary = vocabulary_of([b"a", "é".encode(), "你".encode(), b"ab", b"\xe4"])
        matcher = compile_constraint(Regex(r"\w+"), vocabulary).matcher()

        assert vocabulary.spelled == ((97, 97), (0xE9, 0xE9), (0x4F60, 0x4F60))
        assert {0, 1, 2} <= set(legal(matcher))

    def test_without_any_gap_writes_everything(self) -> None:
        assert vocabulary_of(BYTES).spelled == ((0, 0xD7FF), (0xE000, 0x10FFFF))


@pytest.fixture(scope="module")
def real(default_model: Path) -> tuple[Vocabulary, list[bytes]]:
    """The vocabulary of the default model, and the bytes of its text tokens."""
    checkpoint = open_checkpoint(default_model)
    tokenizer = checkpoint.tokenizer
    table = [
        b"" if token in tokenizer.control_ids else data
        for token, data in enumerate(tokenizer.token_bytes)
    ]
    return vocabulary_of_checkpoint(checkpoint, len(table)), table


REAL_PATTERNS = (
    r"[-+]?[0-9]*\.?[0-9]+",
    r"\{.*?\}",
    r"[\w\.-]+@[\w\.-]+\.\w+",
    r"(?:😀|🚀){3}",
    "[\u4e00-\u9fff]{1,8}",
    r"(?i)(?:yes|no|maybe), (?:because .{3,40}|of course)\.",
    r"\d{4}-\d\d-\d\d(?: \d\d:\d\d)?",
    r"(?:[a-z]{1,9} ){2,5}[A-Z]+",
    r"\w+(?:, \w+)*",
    "<\\|im_end\\|>|<.+>",
)


@pytest.mark.slow
class TestTheDefaultModelsVocabulary:
    @pytest.mark.parametrize("pattern", REAL_PATTERNS)
    def test_writes_texts_that_match(
        self, real: tuple[Vocabulary, list[bytes]], pattern: str
    ) -> None:
        vocabulary, table = real
        grammar = compile_constraint(Regex(pattern), vocabulary)
        draw = random.Random(pattern)
        texts = [written(grammar, table, draw) for _ in range(30)]

        whole = [text for text, complete in texts if complete]
        assert all(re.fullmatch(pattern, text.decode()) for text in whole)
        assert len(whole) >= 10
        assert all(table[token] for token in legal(grammar.matcher()))

    @pytest.mark.parametrize(
        ("tree", "text"),
        [
            (Join((Atom("\\{"), Repeat(Atom("."), 0, None), Atom("\\}"))), '{"a": '),
            (Repeat(Either((Atom("😀"), Atom("🚀"))), 3, 3), "😀"),
            (Repeat(Atom(r"\w"), 2, 6), "日本"),
            (Join((Repeat(Atom("[^\\W\\d]"), 1, None), Repeat(Atom("\\d"), 0, 2))), "ab1"),
        ],
        ids=["braces", "emoji", "words", "names"],
    )
    def test_is_masked_exactly(
        self, real: tuple[Vocabulary, list[bytes]], tree: Tree, text: str
    ) -> None:
        vocabulary, table = real
        place = Place(tree).after(text.encode())
        assert place is not None
        grammar = compile_constraint(Regex(source(tree)), vocabulary)
        matcher = follow(grammar, vocabulary.backend.greedy_tokenize(text))
        # Four bytes begin no character of the planes 4 to 11 here: there is no token for that.
        spelled = [n for n, data in enumerate(table) if data and data[0] not in {0xF1, 0xF2}]

        assert legal(matcher) == [n for n in spelled if place.after(table[n]) is not None]


def written(grammar: Grammar, table: Sequence[bytes], draw: random.Random) -> tuple[bytes, bool]:
    """What a model without sense writes within 60 tokens, and whether that is complete."""
    matcher, text = grammar.matcher(), b""
    for _ in range(60):
        if matcher.finished or (matcher.complete and draw.random() < 0.2):
            break
        allowed = legal(matcher)
        ends = [token for token in allowed if table[token] in {b"}", b">", b"@", b".", b"a"}]
        token = draw.choice(ends if ends and draw.random() < 0.3 else allowed)
        text += table[token]
        matcher.accept(token)
    return text, matcher.complete
