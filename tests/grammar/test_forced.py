"""Forced tokens: what is given out is what the tokenizer writes for the whole text.

The oracle is the tokenizer itself. Small ones are made here, with merges drawn at random, so that
the cut of a text depends on what comes later in every way that it can.
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex as SplitRegex
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from structgen.engine.constraints import vocabulary_of as vocabulary_of_checkpoint
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Matcher, Vocabulary
from structgen.models.checkpoint import open_checkpoint
from structgen.request import Choice, Regex
from tests.grammar.derivatives import legal, vocabulary_of

EXAMPLES = int(os.environ.get("STRUCTGEN_GRAMMAR_EXAMPLES", "150"))

SPACE = "Ġ"  # how byte-level vocabularies spell a space
GPT2 = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
THREES = r"'s|'t| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def merging(letters: str, merges: Sequence[tuple[str, str]], split: str | None) -> Tokenizer:
    """A byte-level tokenizer of letters and merges."""
    spelled = [letter.replace(" ", SPACE) for letter in letters]
    pieces = dict.fromkeys(spelled)
    known: list[tuple[str, str]] = []
    for one, other in merges:
        pair = (one.replace(" ", SPACE), other.replace(" ", SPACE))
        if pair[0] in pieces and pair[1] in pieces and pair not in known:
            known.append(pair)
            pieces["".join(pair)] = None
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, known))
    levels: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ]
    if split is not None:
        levels.insert(0, pre_tokenizers.Split(SplitRegex(split), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(levels)
    return tokenizer


def encoding(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def vocabulary_for(tokenizer: Tokenizer, *, space: str = SPACE) -> Vocabulary:
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [piece.replace(space, " ").encode() for piece, _ in pieces]
    return Vocabulary(tokens, (), len(tokens), encoding(tokenizer))


def drawn(matcher: Matcher, wanted: Sequence[int], limit: int = 64) -> tuple[list[int], int]:
    """The tokens that a model has written who wants these, and how many of them were forced."""
    ids: list[int] = []
    count = 0
    while True:
        while forced := matcher.forced(limit):
            for token in forced:
                assert token in legal(matcher)
                matcher.accept(token)
            ids += forced
            count += len(forced)
        if ids != wanted[: len(ids)] or len(ids) == len(wanted):
            return ids, count
        assert wanted[len(ids)] in legal(matcher)
        matcher.accept(wanted[len(ids)])
        ids.append(wanted[len(ids)])


def first(constraint: Regex | Choice, vocabulary: Vocabulary, before: Sequence[int] = ()) -> str:
    """What is forced after some tokens, with a bar between tokens."""
    matcher = compile_constraint(constraint, vocabulary).matcher()
    for token in before:
        matcher.accept(token)
    return "|".join(written(vocabulary, token) for token in matcher.forced(64))


def written(vocabulary: Vocabulary, token: int) -> str:
    data: bytes = vocabulary.backend.decode_bytes([token])
    return data.decode()


LETTERS = "ab1 ,"
PIECE = st.text(LETTERS, min_size=1, max_size=3)
TEXT = st.text(LETTERS, min_size=1, max_size=9)


class TestForcedTokens:
    @given(
        merges=st.lists(st.tuples(PIECE, PIECE), max_size=14),
        start=st.text(LETTERS, max_size=7),
        ends=st.lists(st.text(LETTERS, max_size=6), min_size=1, max_size=4),
        split=st.sampled_from([None, GPT2, THREES]),
    )
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
    @example(  # the cut before the place where a longer token begins depends on it as well
        merges=[("a", "b"), ("1", "a"), ("b", ","), (",", " ")],
        start="1ab,",
        ends=[" ", "1"],
        split=None,
    )
    @example(merges=[(" ", " ")], start="a  ", ends=["b", ",", ""], split=GPT2)
    def test_are_those_of_the_whole_text(
        self, merges: list[tuple[str, str]], start: str, ends: list[str], split: str | None
    ) -> None:
        tokenizer = merging(LETTERS, merges, split)
        vocabulary = vocabulary_for(tokenizer)
        options = [start + end for end in ends if start + end]
        if not options:
            return
        grammar = compile_constraint(Choice(options), vocabulary)

        for text in options:
            wanted = encoding(tokenizer)(text)
            assert drawn(grammar.matcher(), wanted)[0] == wanted

    @given(
        scores=st.lists(st.tuples(TEXT, st.integers(1, 9)), max_size=8),
        start=TEXT,
        ends=st.lists(st.text(LETTERS, max_size=6), min_size=1, max_size=4),
    )
    @settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True)
    def test_are_those_of_the_likeliest_pieces(
        self, scores: list[tuple[str, int]], start: str, ends: list[str]
    ) -> None:
        # Scores that are no multiples of each other, so that no two cuts are as likely.
        pieces = dict.fromkeys(LETTERS) | {text: None for text, _ in scores}
        draw = random.Random(repr(scores))
        table = [(piece, -draw.uniform(1, 5)) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram([("", -99.0), *table], 0, byte_fallback=False))
        vocabulary = vocabulary_for(tokenizer)
        grammar = compile_constraint(Choice([start + end for end in ends]), vocabulary)

        for end in ends:
            wanted = encoding(tokenizer)(start + end)
            assert drawn(grammar.matcher(), wanted)[0] == wanted

    def test_end_where_a_longer_one_could_begin(self) -> None:
        tokenizer = merging("abcd", [("b", "c"), ("c", "d")], None)
        vocabulary = vocabulary_for(tokenizer)

        assert first(Regex("aab[cd]"), vocabulary) == "a|a"
        assert first(Regex("aab[d]"), vocabulary) == "a|a|b|d"
        assert first(Regex("aab[ab]"), vocabulary) == "a|a|b"
        assert first(Regex("aac?"), vocabulary) == "a|a"
        assert first(Regex("aac(?:d|a)?"), vocabulary) == "a|a"

    def test_take_the_tokens_before_them_into_account(self) -> None:
        tokenizer = merging("0123456789,", [("1", "2"), ("12", "3"), ("4", "5"), ("45", "6")], "…")
        vocabulary = vocabulary_for(tokenizer)
        three = encoding(tokenizer)("123")

        assert first(Regex("12345?6?"), vocabulary, three) == ""
        assert first(Regex("123456,"), vocabulary, three) == "456|,"

    def test_are_spelled_by_themselves_after_an_unusual_token(self) -> None:
        vocabulary = vocabulary_for(merging("ab", [("a", "b"), ("b", "b")], None))

        assert first(Regex("abb[ab]"), vocabulary, [0]) == ""
        assert first(Regex("abba"), vocabulary, [0]) == "bb|a"

    def test_are_not_more_than_the_limit(self) -> None:
        matcher = compile_constraint(
            Regex("abab"), vocabulary_for(merging("ab", [], None))
        ).matcher()

        assert [len(matcher.forced(limit)) for limit in (0, 1, 3, 4, 9)] == [0, 1, 3, 4, 4]

    def test_are_not_taken(self) -> None:
        matcher = compile_constraint(
            Regex("aba?"), vocabulary_for(merging("ab", [], None))
        ).matcher()
        before = legal(matcher)

        assert list(matcher.forced(9)) == [0, 1]
        assert legal(matcher) == before == [0]
        assert not matcher.complete

    def test_go_on_for_long(self) -> None:
        text = "ab" * 2000
        matcher = compile_constraint(
            Choice([text]), vocabulary_for(merging("ab", [("a", "b")], None))
        ).matcher()

        assert drawn(matcher, [2] * 2000, limit=300) == ([2] * 2000, 2000)
        assert matcher.finished

    @pytest.mark.parametrize("pattern", ["a", "ab", "aba"])
    def test_reach_the_end(self, pattern: str) -> None:
        matcher = compile_constraint(
            Regex(pattern), vocabulary_for(merging("ab", [("a", "b"), ("b", "a")], None))
        ).matcher()
        for token in matcher.forced(9):
            matcher.accept(token)

        assert matcher.finished
        assert list(matcher.forced(9)) == []

    def test_are_none_without_a_tokenizer(self) -> None:
        assert not compile_constraint(Regex("ab"), vocabulary_of([b"a", b"b"])).matcher().forced(9)


class TestCharactersInSeveralTokens:
    TOKENS = (*(bytes([byte]) for byte in range(256)), "é".encode(), b" \xf0\x9f")

    def vocabulary(self) -> Vocabulary:
        def encode(text: str) -> list[int]:
            data = text.encode().replace("é".encode(), b"\xff")
            ids: list[int] = []
            while data:
                if data.startswith(b" \xf0\x9f"):
                    ids.append(257)
                    data = data[3:]
                else:
                    ids.append(256 if data[:1] == b"\xff" else data[0])
                    data = data[1:]
            return ids

        return Vocabulary(self.TOKENS, (), len(self.TOKENS), encode)

    def after(self, pattern: str, before: bytes) -> bytes:
        matcher = compile_constraint(Regex(pattern), self.vocabulary()).matcher()
        for byte in before:
            matcher.accept(byte)
        return b"|".join(self.TOKENS[token] for token in matcher.forced(64))

    def test_are_not_begun(self) -> None:
        assert self.after("a(?:😀|😁)", b"") == b"a"
        assert self.after("a(?:é|è)", b"") == b"a"

    def test_are_written_where_all_of_them_is_certain(self) -> None:
        assert self.after("aé😀", b"") == b"a|\xc3\xa9|\xf0|\x9f|\x98|\x80"
        assert self.after("a 😀", b"") == b"a| \xf0\x9f|\x98|\x80"

    def test_are_finished(self) -> None:
        assert self.after("a(?:😀|é)a", "a😀".encode()[:2]) == b"\x9f|\x98|\x80|a"
        assert self.after("(?:😀|😁)", b"\xf0\x9f\x98") == b""
        assert self.after("(?:😀|a)b", b"\xf0\x9f\x98\x80") == b"b"

    def test_wait_where_a_token_may_begin_one(self) -> None:
        assert self.after("a (?:😀|b)", b"") == b"a"

    def test_can_be_cut_anew_by_what_follows(self) -> None:
        merges = [("©", "x"), ("Ã", "©"), ("a", "Ã")]  # é is these two, byte by byte
        tokenizer = merging("axÃ©", merges, None)
        encode = encoding(tokenizer)
        pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        tokens = [piece.encode("latin-1") for piece, _ in pieces]
        vocabulary = Vocabulary(tokens, (), len(tokens), encode)
        assert [tokens[token] for token in encode("aé")] == [b"a", b"\xc3\xa9"]
        assert [tokens[token] for token in encode("aéx")] == [b"a\xc3", b"\xa9x"]

        for text in ("aé", "aéx", "aéa"):
            matcher = compile_constraint(Regex("aé[ax]?"), vocabulary).matcher()
            assert drawn(matcher, encode(text))[0] == encode(text)


class TestTokenizersOfPieces:
    """SentencePiece: a space is a letter of its own, and any byte has a token."""

    PIECES = ("▁", "a", "b", '"', ":", "▁a", "▁b", "ab", "▁ab", '":', '▁"', "▁:", "▁▁")

    def vocabulary(self) -> tuple[Vocabulary, Callable[[str], list[int]]]:
        merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ('"', ":"), ("▁", '"')]
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        names = [*fallback, *self.PIECES]
        tokenizer = Tokenizer(
            models.BPE({name: n for n, name in enumerate(names)}, merges, byte_fallback=True)
        )
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [piece.replace("▁", " ").encode() for piece in self.PIECES]
        encode = encoding(tokenizer)
        return Vocabulary(tokens, (), len(tokens), encode), encode

    @pytest.mark.parametrize("ends", [("",), ("a", "b", '"'), ("é", "b"), (" a", "a")])
    @pytest.mark.parametrize("start", ["ab ab", 'ab "a": ', "  a", "é b", 'a": "', "ab  "])
    def test_are_followed(self, start: str, ends: tuple[str, ...]) -> None:
        vocabulary, encode = self.vocabulary()
        grammar = compile_constraint(Choice([start + end for end in ends]), vocabulary)

        for end in ends:
            wanted = encode(start + end)
            assert drawn(grammar.matcher(), wanted)[0] == wanted

    def test_force_whole_words(self) -> None:
        vocabulary, encode = self.vocabulary()
        matcher = compile_constraint(Regex('ab ab": [ab]'), vocabulary).matcher()

        assert list(matcher.forced(9)) == encode('ab ab":')

    def test_force_nothing_where_the_text_is_changed(self) -> None:
        tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
        tokenizer.normalizer = normalizers.Lowercase()
        vocabulary = Vocabulary([b"a", b"b", b"A"], (), 3, encoding(tokenizer))

        assert list(compile_constraint(Regex("Ab"), vocabulary).matcher().forced(9)) == []
        assert list(compile_constraint(Regex("ab"), vocabulary).matcher().forced(9)) == [0, 1]


@pytest.fixture(scope="module")
def real(default_model: Path) -> tuple[Vocabulary, Callable[[str], Sequence[int]]]:
    """The vocabulary of the default model, and how it encodes what continues a text."""
    checkpoint = open_checkpoint(default_model)
    vocabulary = vocabulary_of_checkpoint(checkpoint, checkpoint.tokenizer.vocab_size)
    return vocabulary, functools.partial(checkpoint.tokenizer.encode, start=False)


FIELDS = ("name", "age", "e-mail address", "Größe", "été", "名前", "a\\b", "x1", "city_of_birth")
VALUES = ('"Ann"', "12", "[1, 2, 3]", "true", '"Ünal 😀"', '""', "-0.5e3", '"  a  "', "null")


def record(separators: tuple[str, str], draw: random.Random) -> tuple[str, str]:
    """The pattern of a record with these separators between fields and after keys; a text of it."""
    item, colon = separators
    fields = [json.dumps(name, ensure_ascii=False) for name in draw.sample(FIELDS, 5)]
    value = r'(?:"[^"\\\x00-\x1f]*"|-?\d+(?:\.\d+)?(?:e\d+)?|\[(?:\d+(?:, ?)?)*\]|true|false|null)'
    pattern = item.join(f"{field}{colon}{value}" for field in fields).replace("\\b", "\\\\b")
    text = item.join(f"{field}{colon}{draw.choice(VALUES)}" for field in fields)
    return rf"\{{{pattern}\}}".replace("a\\\\\\b", "a\\\\\\\\b"), f"{{{text}}}"


@pytest.mark.slow
class TestTheDefaultModelsTokenizer:
    @pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n  ", ":  ")])
    def test_writes_the_whole_text_like_that(
        self,
        real: tuple[Vocabulary, Callable[[str], Sequence[int]]],
        separators: tuple[str, str],
    ) -> None:
        vocabulary, encode = real
        shares = []
        for seed in range(8):
            pattern, text = record(separators, random.Random(seed))
            grammar = compile_constraint(Regex(pattern), vocabulary)
            wanted = list(encode(text))
            ids, count = drawn(grammar.matcher(), wanted)
            assert ids == wanted
            shares.append(count / len(wanted))

        assert np.mean(shares) > 0.3

    def test_needs_no_drawing_of_what_is_certain(
        self, real: tuple[Vocabulary, Callable[[str], Sequence[int]]]
    ) -> None:
        vocabulary, encode = real
        grammar: Grammar = compile_constraint(Regex('{"answer": (?:true|false)}'), vocabulary)
        matcher = grammar.matcher()
        assert list(matcher.forced(64)) == encode('{"answer":')

        for token in encode('{"answer": tr'):
            matcher.accept(token)

        assert list(matcher.forced(64)) == encode("ue}")
