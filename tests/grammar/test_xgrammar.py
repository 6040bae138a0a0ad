"""Masks of xgrammar for the schemas that are for it: as llguidance has them, and as they mean.

Known differences of spelling, in which both are JSON: xgrammar lets a string hold DEL and `\\/`,
and writes no whole number as `-0`.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from structgen.engine.constraints import vocabulary_of as vocabulary_of_checkpoint
from structgen.errors import ConstraintError, GenerationError
from structgen.grammar.compiler import Grammar, _compiled
from structgen.grammar.gate import closed
from structgen.grammar.matcher import Vocabulary
from structgen.grammar.schema.layout import layout
from structgen.grammar.source import Source
from structgen.grammar.xgrammar_matcher import Compiler, XgrammarMatcher
from structgen.models.checkpoint import open_checkpoint
from tests.grammar.closed_schemas import SCHEMAS, SEPARATORS, Schema, spoiled, text_of, value_of
from tests.grammar.derivatives import follow, legal
from tests.shared_cases import rows

EXAMPLES = int(os.environ.get("STRUCTGEN_GRAMMAR_EXAMPLES", "150"))
REAL = rows("schemas_dev.jsonl")

FORMATS = jsonschema.FormatChecker(["uuid"])
BYTES = [bytes([byte]) for byte in range(256)]
HOLE, CONTROL, SURROGATE = 256, 257, 258
TOKENS = [*BYTES, b"", b"</s>", b"\xed\xa0\x80", b'": ', b'",', b"]]", b"\xa0a", b"\xad\xe3\x81"]


def _encode(text: str) -> Sequence[int]:
    return text.encode()


def vocabulary_of(tokens: Sequence[bytes] = BYTES, textless: Sequence[int] = ()) -> Vocabulary:
    return Vocabulary(tokens, textless, len(tokens), _encode)


PLAIN = vocabulary_of()
VOCABULARY = vocabulary_of(TOKENS, (CONTROL,))


def by_xgrammar(
    schema: Schema,
    separators: tuple[str, str] | None = None,
    vocabulary: Vocabulary = PLAIN,
) -> Grammar:
    text = closed(schema)
    assert text is not None
    vocabulary.derived(Compiler)
    return _compiled(Source("s", "", closed=text, separators=separators), vocabulary)


def by_llguidance(
    schema: Schema,
    separators: tuple[str, str] | None = None,
    vocabulary: Vocabulary = PLAIN,
) -> Grammar:
    lark = f"start: %json {json.dumps({**schema, 'x-guidance': layout(separators)})}"
    return _compiled(Source("s", lark), vocabulary)


def alike(ours: set[int], theirs: set[int], vocabulary: Vocabulary) -> bool:
    """Whether two masks differ only in the spellings named above."""
    more = {vocabulary.tokens[token] for token in ours - theirs}
    less = {vocabulary.tokens[token] for token in theirs - ours}
    spelled_here = all(b"\x7f" in data or b"/" in data for data in more)
    return spelled_here and all(b"0" in data for data in less)


def begun(text: bytes) -> bool:
    """Whether a text ends inside of a character."""
    return text.decode(errors="ignore").encode() != text


def walked(ours: Grammar, theirs: Grammar, draw: random.Random, steps: int) -> None:
    """One random way through both, that both allow; at every step they say the same."""
    one, other = ours.matcher(), theirs.matcher()
    text = b""
    for _ in range(steps):
        masks = set(legal(one)), set(legal(other))
        assert alike(*masks, PLAIN), text
        assert (one.complete, one.finished) == (other.complete, other.finished), text
        if not begun(text):  # inside of a character xgrammar cannot say what is forced
            assert list(one.forced(40)) == list(other.forced(40)), text
        both = sorted(masks[0] & masks[1])
        if not both:
            return
        signs = [token for token in both if token in b'"}],:']
        token = draw.choice(signs if signs and draw.random() < 0.4 else both)
        text += PLAIN.tokens[token]
        one.accept(token)
        other.accept(token)


class TestMasks:
    @given(schema=SCHEMAS, separators=st.sampled_from(SEPARATORS), seed=st.integers(0, 2**32))
    @settings(max_examples=EXAMPLES // 3, deadline=None)
    @example(schema={"type": "string"}, separators=None, seed=0)
    @example(schema={"enum": [1, 12, 123]}, separators=None, seed=3)
    @example(
        schema={"anyOf": [{"const": 1}, {"type": "integer", "minimum": 12}]},
        separators=None,
        seed=1,
    )
    def test_are_those_of_the_other_engine(
        self, schema: Schema, separators: tuple[str, str] | None, seed: int
    ) -> None:
        try:
            theirs = by_llguidance(schema, separators)
        except ConstraintError:  # it knows that two forms of `anyOf` contradict, and such
            return
        ours = by_xgrammar(schema, separators)

        draw = random.Random(seed)
        for _ in range(2):
            walked(ours, theirs, draw, 25)

    @given(schema=SCHEMAS, separators=st.sampled_from(SEPARATORS), seed=st.integers(0, 2**32))
    @settings(max_examples=EXAMPLES // 3, deadline=None)
    def test_let_through_what_is_valid(
        self, schema: Schema, separators: tuple[str, str] | None, seed: int
    ) -> None:
        grammar = by_xgrammar(schema, separators)
        valid = jsonschema.Draft202012Validator(schema, format_checker=FORMATS).is_valid

        draw = random.Random(seed)
        value = value_of(schema, draw)
        assert grammar.accepts(text_of(value, separators))
        for each in (spoiled(value, draw) for _ in range(8)):
            assert grammar.accepts(text_of(each, separators)) == valid(each), each

    def test_allow_two_characters_of_white_space_and_none_around(self) -> None:
        schema = {"type": "array", "items": {"const": 1}}
        grammar = by_xgrammar(schema)

        assert grammar.accepts("[ \n1\t\r,  1  ]")
        assert not any(map(grammar.accepts, ["[   1]", "[1   ]", "[1   ,1]", " [1]", "[1] "]))

    @pytest.mark.parametrize("separators", SEPARATORS[1:])
    def test_keep_to_the_separators(self, separators: tuple[str, str]) -> None:
        properties: Schema = {"a": {"const": 1}, "b": {"type": "array", "items": {"const": 2}}}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        grammar = by_xgrammar(schema, separators)
        item, colon = separators

        assert grammar.accepts(f'{{"a"{colon}1{item}"b"{colon}[2{item}2]}}')
        assert not grammar.accepts('{"a"  :1}')
        assert not grammar.accepts(f'{{ "a"{colon}1}}')
        assert not grammar.accepts("{ }")

    def test_hold_no_surrogate_byte_by_byte(self) -> None:
        grammar = by_xgrammar({"type": "string"}, vocabulary=VOCABULARY)
        matcher = follow(grammar, list(b'"\xed'))

        assert [token for token in legal(matcher) if token < 256] == list(range(0x80, 0xA0))
        assert len(TOKENS) - 2 not in legal(matcher)
        with pytest.raises(GenerationError, match="token 160 is not allowed"):
            matcher.accept(0xA0)
        matcher.accept(0x9F)
        assert 0xA0 in legal(matcher)

    def test_hold_no_token_without_text(self) -> None:
        matcher = follow(by_xgrammar({"type": "string"}, vocabulary=VOCABULARY), list(b'"'))

        assert {HOLE, CONTROL, SURROGATE}.isdisjoint(legal(matcher))
        assert max(legal(matcher)) < len(TOKENS)
        assert set(b"</s>") <= set(legal(matcher))

    def test_hold_tokens_that_close_two_arrays(self) -> None:
        schema: Schema = {"type": "array", "items": {"type": "array", "items": {"type": "null"}}}
        grammar = by_xgrammar(schema, vocabulary=VOCABULARY)

        assert TOKENS.index(b"]]") in legal(follow(grammar, list(b"[[null")))
        assert TOKENS.index(b"]]") not in legal(follow(grammar, list(b"[[null]")))

    def test_are_as_wide_as_the_logits(self) -> None:
        for size in (256, 257, 287, 288, 289):
            tokens = [*BYTES, *[b""] * (size - 257), b'"a"'][:size]
            matcher = by_xgrammar({"const": "a"}, vocabulary=vocabulary_of(tokens)).matcher()

            assert matcher.words == -(-size // 32)
            assert legal(matcher) == ([34] if size == 256 else [34, size - 1])


class TestAMatcher:
    SCHEMA: ClassVar[Schema] = {"anyOf": [{"enum": [1, 12]}, {"const": "a"}]}

    def test_goes_its_own_way(self) -> None:
        grammar = by_xgrammar(self.SCHEMA)
        one, other = follow(grammar, list(b"12")), follow(grammar, list(b'"'))

        assert one.finished
        assert not other.complete
        assert legal(other) == [ord("a")]
        assert legal(grammar.matcher()) == [ord('"'), ord("1")]

    def test_knows_where_the_output_may_end_and_where_it_must(self) -> None:
        grammar = by_xgrammar(self.SCHEMA)
        found = [follow(grammar, list(text)) for text in (b"", b"1", b"12", b'"a', b'"a"')]

        assert [each.complete for each in found] == [False, True, True, False, True]
        assert [each.finished for each in found] == [False, False, True, False, True]
        assert legal(found[1]) == [ord("2")]
        assert legal(found[2]) == []
        assert [list(each.forced(9)) for each in found] == [[], [], [], [ord('"')], []]

    @pytest.mark.parametrize("token", [ord("x"), HOLE, CONTROL, SURROGATE, -1, 10**6])
    def test_refuses_a_token_that_the_mask_does_not_allow(
        self, token: int, capfd: pytest.CaptureFixture[str]
    ) -> None:
        matcher = by_xgrammar(self.SCHEMA, vocabulary=VOCABULARY).matcher()
        before = legal(matcher)

        with pytest.raises(GenerationError, match=f"any further: token {token} is not allowed"):
            matcher.accept(token)
        assert legal(matcher) == before
        assert capfd.readouterr().err == ""

    def test_refuses_tokens_after_the_end(self, capfd: pytest.CaptureFixture[str]) -> None:
        matcher = follow(by_xgrammar(self.SCHEMA), list(b"12"))

        with pytest.raises(GenerationError, match="not allowed"):
            matcher.accept(ord("1"))
        assert capfd.readouterr().err == ""

    def test_forces_what_is_certain_up_to_a_limit(self) -> None:
        schema: Schema = {
            "type": "object",
            "properties": {"größe": {"type": "null"}},
            "required": ["größe"],
            "additionalProperties": False,
        }
        matcher = by_xgrammar(schema, (",", ":")).matcher()

        assert bytes(matcher.forced(99)) == '{"größe":null}'.encode()
        assert bytes(matcher.forced(3)) == b'{"g'
        assert legal(matcher) == [ord("{")]


class TestCompiling:
    def test_says_which_engine_makes_the_mask(self) -> None:
        class Anything:
            def fault(self, text: str) -> str | None:
                return None if text else "empty"

        source = Source("s", "start: %json {}", judge=Anything())
        closed_source = Source("s", "", closed='{"type": "null"}', judge=Anything())

        assert by_xgrammar({"type": "null"}).path == "xgrammar"
        assert by_llguidance({"type": "null"}).path == "llguidance"
        assert _compiled(source, PLAIN).path == "llguidance, final check"
        assert _compiled(closed_source, PLAIN).path == "xgrammar, final check"

    def test_is_for_vocabularies_that_have_the_compiler_at_hand(self) -> None:
        source = Source("s", "start: %json {}", closed='{"type": "null"}')
        vocabulary = vocabulary_of()

        assert _compiled(source, vocabulary).path == "llguidance"
        vocabulary.derived(Compiler)
        assert _compiled(source, vocabulary).path == "xgrammar"

    def test_leaves_unusual_separators_to_the_other_engine(self) -> None:
        separators = (",", ":\t")
        lark = "start: %json " + json.dumps({"type": "null", "x-guidance": layout(separators)})
        source = Source("s", lark, closed='{"type": "null"}', separators=separators)
        PLAIN.derived(Compiler)

        assert _compiled(source, PLAIN).path == "llguidance"

    def test_reads_a_vocabulary_once(self) -> None:
        vocabulary = vocabulary_of()
        found: list[Compiler] = []
        threads = [
            threading.Thread(target=lambda: found.append(vocabulary.derived(Compiler)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(set(map(id, found))) == 1
        assert isinstance(by_xgrammar({"type": "null"}).matcher(), XgrammarMatcher)

    def test_counts_what_a_grammar_takes(self) -> None:
        small, large = (by_xgrammar({"enum": ["x" * count]}).size for count in (1, 4000))

        assert 1_000 < small < large

    @given(schema=SCHEMAS)
    @settings(max_examples=EXAMPLES // 3, deadline=None)
    def test_draws_no_warning(self, schema: Schema) -> None:
        # The library writes its warnings past Python, to the second file of the process.
        assert self.console(schema) == b""

    def console(self, schema: Schema) -> bytes:
        text = closed(schema)
        assert text is not None
        compiler = PLAIN.derived(Compiler)
        read, write = os.pipe()
        kept = os.dup(2)
        os.dup2(write, 2)
        try:
            compiler.compiled(text, None)
        finally:
            os.dup2(kept, 2)
            os.close(write)
            os.close(kept)
        with os.fdopen(read, "rb") as pipe:
            return pipe.read()

    def test_would_meet_warnings_otherwise(self) -> None:
        schema = json.dumps({"type": "number", "multipleOf": 0.5})
        assert closed(json.loads(schema)) is None


@pytest.mark.skipif(not REAL, reason="the data are not there")
class TestRealSchemas:
    def test_are_judged_as_a_validator_does(self) -> None:
        taken = [(row["schema"], row) for row in REAL if closed(row["schema"]) is not None]
        assert len(taken) >= 15

        wrong = []
        for schema, row in taken:
            grammar = by_xgrammar(schema)
            validator = jsonschema.validators.validator_for(schema)(schema)
            for value in (*row["valid"], *row["invalid"]):
                ordered = reordered(value, schema, schema)
                if grammar.accepts(text_of(ordered, None)) != validator.is_valid(value):
                    wrong.append((row["id"], value))
        assert wrong == []


def reordered(value: object, schema: Schema, root: Schema) -> object:
    """A value with the keys of its objects in the schema's order, as far as that is plain."""
    while "$ref" in schema:
        _, group, name = schema["$ref"].split("/")
        schema = root[group][name]
    for form in schema.get("anyOf", ()):
        value = reordered(value, form, root)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        names = [name for name in known if name in value]
        names += [name for name in value if name not in known]
        return {name: reordered(value[name], known.get(name, {}), root) for name in names}
    if isinstance(value, list):
        items = schema.get("items", {})
        return [reordered(each, items if isinstance(items, dict) else {}, root) for each in value]
    return value


@pytest.mark.slow
class TestTheDefaultModelsVocabulary:
    SCHEMA: ClassVar[Schema] = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
            "size": {"type": ["number", "null"]},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    VALUE: ClassVar[Schema] = {
        "name": 'Ünal "Ann" 😀',
        "age": 34,
        "tags": [["a", "b c"], []],
        "size": -1.5,
    }

    @pytest.mark.parametrize("separators", [None, (",", ":")])
    def test_is_masked_alike(self, default_model: Path, separators: tuple[str, str] | None) -> None:
        checkpoint = open_checkpoint(default_model)
        vocabulary = vocabulary_of_checkpoint(checkpoint, checkpoint.tokenizer.vocab_size)
        one = by_xgrammar(self.SCHEMA, separators, vocabulary).matcher()
        other = by_llguidance(self.SCHEMA, separators, vocabulary).matcher()
        text = text_of(self.VALUE, separators)
        control = np.array(sorted(checkpoint.tokenizer.control_ids))

        for token in checkpoint.tokenizer.encode(text, start=False):
            ours, theirs = set(legal(one)), set(legal(other))
            assert alike(ours, theirs, vocabulary)
            assert ours.isdisjoint(control)
            assert list(one.forced(40)) == list(other.forced(40))
            one.accept(token)
            other.accept(token)
        assert one.finished
        assert other.finished
