"""Structural tags as terms: what fits them, by xgrammar's word, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xgrammar
import xgrammar.testing

from structgen.errors import OptionError
from structgen.grammar.compiler import compile_constraint
from structgen.request import Structure
from structgen.server.openai.structural_tags import _REFUSED, _TYPES, structural_tag
from structgen.terms import Fixed, Free, Json, Sequence, Term
from tests.grammar.derivatives import vocabulary_of

BYTES = [bytes([byte]) for byte in range(256)]
VOCABULARY = vocabulary_of(BYTES)
# Tokens that reach from one part of a structural tag into the next.
ACROSS = [
    *(b"</f>y", b"</", b"a>x", b"<f", b"=a", b"f=b>1", b"x<f", b"</a></", b"<a><b", b"x</b>"),
    *(b"1</f><f=", b"></a", b"f>, <", b'{"n', b"1}</f", b"/>a"),
]
CUT = vocabulary_of([*BYTES, *ACROSS])

Format = dict[str, Any]
TEXT: Format = {"type": "any_text"}
DIGIT: Format = {"type": "regex", "pattern": "[0-9]"}
A: Format = {"type": "const_string", "value": "a"}
NUMBER: Format = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
ONE = '{"n": 1}'


def tag(begin: str, content: Format = TEXT, end: str | list[str] = "</>") -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(type_: str, **fields: Any) -> Format:
    return {"type": type_, **fields}


def term(format_: Format) -> Term:
    return structural_tag({"type": "structural_tag", "format": format_}, "f")


CALLS = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", DIGIT, "</f>")]
TRIGGERED = of("triggered_tags", triggers=["<f="], tags=CALLS)
SEPARATED = of("tags_with_separator", tags=CALLS, separator=", ")
DISPATCH = of("dispatch", rules=[["<d>", DIGIT], ["<a>", A]])
FORMATS = {
    "const": A,
    "schema": NUMBER,
    "regex": DIGIT,
    "grammar": of("grammar", grammar='root ::= "x" root | "y"'),
    "text": TEXT,
    "text without": of("any_text", excludes=["<", "no"]),
    "sequence": of("sequence", elements=[A, DIGIT, A]),
    "text before": of("sequence", elements=[TEXT, tag("<a>"), A]),
    "or": of("or", elements=[A, DIGIT, tag("<a>")]),
    "text or": of("or", elements=[of("any_text", excludes=["<"]), tag("<a>", DIGIT)]),
    "tag": tag("<a>", DIGIT, "</a>"),
    "tag of text": tag("<a>", TEXT, "</a>"),
    "tag of ends": tag("<a>", TEXT, ["</a>", "</b>"]),
    "tag without end": tag("<a>", DIGIT, ""),
    "tag in tag": tag("<a>", tag("<b>", TEXT, "</b>"), "</a>"),
    "triggered": TRIGGERED,
    "triggered at least one": {**TRIGGERED, "at_least_one": True},
    "triggered once": {**TRIGGERED, "stop_after_first": True},
    "triggered exactly one": {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
    "triggered without": {**TRIGGERED, "excludes": ["no"]},
    "triggered in a tag": tag("<t>", TRIGGERED, "</t>"),
    "separated": SEPARATED,
    "separated at least one": {**SEPARATED, "at_least_one": True},
    "separated once": {**SEPARATED, "stop_after_first": True},
    "optional": of("sequence", elements=[of("optional", content=DIGIT), A]),
    "star": of("star", content=DIGIT),
    "plus": of("plus", content=tag("<a>")),
    "repeat": of("repeat", min=1, max=2, content=DIGIT),
    "repeat without end": of("repeat", min=2, max=-1, content=DIGIT),
    "dispatch": DISPATCH,
    "dispatch once": {**DISPATCH, "loop": False},
}
TEXTS = [
    *(
        "a",
        "1",
        "12",
        "123",
        "a1a",
        "aa",
        "1a",
        "x",
        "y",
        "xxy",
        "no",
        "b",
        "<",
        "a<b",
        "<f",
        "<f=",
    ),
    *(ONE, '{"n":1}', '{"n": 1, "m": 2}', '{"n": 1}a'),
    *("<a>1</a>", "<a>12</a>", "<a>1", "<a>x</a>", "<a>x</b>", "<a></a>", "<a>1</>", "<a>x</>"),
    *("hello<a>x</>a", "<a>x</>a", "hello<a>x</>", "<a>x</><a>y</>", "<a>x</a>x", "<a>x</a></a>"),
    *("<a><b>x</b></a>", "<a><b>x</a></b>", "<a><b></b></a>"),
    *(f"<f=a>{ONE}</f>", "<f=b>1</f>", "<f=b>x</f>", "<f=c>1</f>", "<f=b>1</f>x", "x<f=b>1</f>"),
    *("<f=b>1</f><f=b>2</f>", f"x<f=b>1</f>y<f=a>{ONE}</f>z", "x<f=b>1</f>no", "no<f=b>1</f>"),
    *("<f=b>1</f>, <f=b>2</f>", "<f=b>1</f>,<f=b>2</f>", "<f=b>1</f>, "),
    *("<t>x<f=b>1</f>y</t>", "<t></t>", "<t>x", "<t><f=c></t>", "<t>x</t>y"),
    *("<d>1", "<d>x", "x<d>1y<a>a", "x<d>1", "x<d>1y", "<a>a", "<a>ab<d>", "<a>b"),
]


def cut(data: bytes) -> Iterator[int]:
    """The tokens of a text, wherever one fits that reaches across."""
    at = 0
    while at < len(data):
        found = next((n for n, each in enumerate(ACROSS) if data.startswith(each, at)), None)
        yield data[at] if found is None else 256 + found
        at += 1 if found is None else len(ACROSS[found])


def fits_xgrammar(format_: Format, text: str) -> bool:
    tags = xgrammar.StructuralTag.from_json({"type": "structural_tag", "format": format_})
    grammar = xgrammar.Grammar.from_structural_tag(tags)
    return bool(xgrammar.testing._is_grammar_accept_string(grammar, text))


class TestAFormat:
    @pytest.mark.parametrize("name", FORMATS)
    def test_means_what_xgrammar_says(self, name: str) -> None:
        format_ = FORMATS[name]
        grammar = compile_constraint(Structure(term(format_)), VOCABULARY)

        ours = [text for text in TEXTS if grammar.accepts(text)]

        assert ours == [text for text in TEXTS if fits_xgrammar(format_, text)]
        assert ours

    @pytest.mark.parametrize("name", ["tag of ends", "tag in tag", "triggered", "separated"])
    def test_means_the_same_however_tokens_cut_its_texts(self, name: str) -> None:
        grammar = compile_constraint(Structure(term(FORMATS[name])), CUT)

        for text in TEXTS:
            matcher, fits = grammar.matcher(), True
            for token in cut(text.encode()):
                row = np.zeros(matcher.words, dtype=np.int32)
                matcher.fill(row)
                fits = bool(int(row[token // 32]) >> token % 32 & 1)
                if not fits:
                    break
                matcher.accept(token)

            assert (fits and matcher.complete) == fits_xgrammar(FORMATS[name], text), text

    def test_may_leave_out_the_type_of_a_tag(self) -> None:
        untyped = [{name: each[name] for name in ("begin", "content", "end")} for each in CALLS]

        assert term({**TRIGGERED, "tags": untyped}) == term(TRIGGERED)

    @pytest.mark.parametrize(
        ("most", "layout"), [(None, None), (0, (",", ":")), (1, (", ", ": ")), (2, None), (9, None)]
    )
    def test_bounds_white_space(self, most: int | None, layout: tuple[str, str] | None) -> None:
        found = term({**NUMBER, "max_whitespace_cnt": most})

        assert isinstance(found, Json)
        assert found.separators == layout

    def test_may_be_any_json(self) -> None:
        assert term(of("json_schema", json_schema=True)) == Json("true")


class TestTheOlderForm:
    def test_is_triggered_tags(self) -> None:
        given = {
            "structures": [
                {"begin": "<f=a>", "schema": NUMBER["json_schema"], "end": "</f>"},
                {"begin": "<f=b>", "schema": '{"type": "integer"}', "end": "</f>"},
            ],
            "triggers": ["<f="],
        }
        tags = [CALLS[0], tag("<f=b>", of("json_schema", json_schema={"type": "integer"}), "</f>")]

        assert structural_tag(given, "f") == term({**TRIGGERED, "tags": tags})

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"triggers": ["<"]}, "f: expected format, or structures and triggers"),
            ({"structures": []}, "f: expected format, or structures"),
            ({"structures": [], "triggers": ["<"]}, "f.tags: there must be at least one"),
            (
                {"structures": [{"begin": "<", "schema": "{", "end": ""}], "triggers": ["<"]},
                r"f.structures\[0\].schema: it is no JSON",
            ),
            (
                {"structures": [{"begin": "<", "schema": "3", "end": ""}], "triggers": ["<"]},
                r"f.structures\[0\].schema: expected a JSON Schema",
            ),
            ({"format": A, "triggers": []}, "f.triggers: it is the older form; leave"),
        ],
        ids=str,
    )
    def test_is_whole_and_alone(self, given: Format, why: str) -> None:
        with pytest.raises(OptionError, match=why):
            structural_tag(given, "f")


def deep(levels: int) -> Format:
    found = A
    for _ in range(levels):
        found = of("optional", content=found)
    return found


class TestWhatNoTermCanSay:
    @pytest.mark.parametrize(
        ("format_", "why"),
        [
            (of("token", token=3), r"f\.format\.type: token: a term is made of texts"),
            (of("exclude_token"), "exclude_token: a term is made of texts"),
            (of("any_tokens"), "any_tokens: a term is made of texts"),
            (
                of("token_triggered_tags", trigger_tokens=[], tags=[]),
                "token_triggered_tags: a term",
            ),
            (of("token_dispatch", rules=[]), "token_dispatch: a term is made of texts"),
            (of("qwen_xml_parameter", json_schema={}), "qwen_xml_parameter: arguments as XML"),
            (of("nope"), r"f\.format\.type: nope: unknown; the types are const_string, json_s"),
            ({}, r"f\.format\.type: it is missing"),
            ({**A, "valu": "b"}, r"f\.format\.valu: unknown field"),
            (of("const_string"), r"f\.format\.value: it is missing"),
            (of("const_string", value=3), r"f\.format\.value: Expected `str`, got `int`"),
            ({**NUMBER, "style": "qwen_xml"}, r"f\.format\.style: expected json, got 'qwen_xml'"),
            ({**NUMBER, "any_order": True}, r"f\.format\.any_order: objects have all"),
            ({**NUMBER, "excludes": ["x"]}, r"f\.format\.excludes: it cannot be enforced in JSON"),
            ({**NUMBER, "max_whitespace_cnt": -1}, r"max_whitespace_cnt: must be at least 0"),
            ({**TEXT, "max_tokens": 3}, r"f\.format\.max_tokens: it cannot be enforced in free"),
            ({**TEXT, "max_chars": 3}, r"f\.format\.max_chars: it cannot be enforced in free"),
            (of("grammar", grammar="", syntax="lark"), r"f\.format\.syntax: expected ebnf"),
            (tag("<a>", TEXT, ["</a>", ""]), r"f\.format\.end: one of the ends is empty"),
            (of("tag", begin=of("token", token=1), content=A, end=""), r"begin: Expected `str`"),
            (of("sequence", elements=[]), r"f\.format\.elements: there must be at least one"),
            (of("or", elements=[]), r"f\.format\.elements: there must be at least one"),
            (of("sequence", elements=[A, of("nope")]), r"f\.format\.elements\[1\]\.type: nope"),
            (of("sequence", elements=[TEXT, DIGIT]), r"f\.format\.elements\[0\]: free text has to"),
            (of("star", content=TEXT), r"f\.format\.content: free text has to stand at the end"),
            (tag("<a>", of("or", elements=[A, TEXT])), r"content\.elements\[1\]: free text has to"),
            (
                of("sequence", elements=[of("optional", content=TEXT), A]),
                r"\[0\]\.content: free te",
            ),
            (of("repeat", min=3, max=2, content=A), r"f\.format\.max: expected 0 <= min <= max"),
            ({**TRIGGERED, "triggers": []}, r"f\.format\.triggers: there must be at least one"),
            ({**TRIGGERED, "tags": []}, r"f\.format\.tags: there must be at least one"),
            ({**TRIGGERED, "triggers": ["<g"]}, r"f\.format\.tags\[0\]\.begin: expected a text"),
            (
                {**TRIGGERED, "triggers": ["<f", "<"]},
                r"tags\[0\]\.begin: expected a text that begi",
            ),
            ({**SEPARATED, "tags": []}, r"f\.format\.tags: there must be at least one"),
            ({**DISPATCH, "rules": []}, r"f\.format\.rules: there must be at least one"),
            (
                of("dispatch", rules=[["<", of("regex")]]),
                r"f\.format\.rules\[0\]\[1\]\.pattern: it",
            ),
            (deep(600), "f: it is nested too deeply"),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_is_refused_with_the_path_of_its_field(self, format_: Format, why: str) -> None:
        with pytest.raises(OptionError, match=why):
            term(format_)

    def test_is_another_type_of_the_whole(self) -> None:
        with pytest.raises(OptionError, match=r"f\.type: expected structural_tag, got 'tag'"):
            structural_tag({"type": "tag", "format": A}, "f")

    def test_is_an_unknown_field_of_the_whole(self) -> None:
        with pytest.raises(OptionError, match=r"f\.fromat: unknown field"):
            structural_tag({"fromat": A}, "f")


class TestFreeText:
    def test_ends_at_what_follows_it(self) -> None:
        found = term(of("sequence", elements=[{**TEXT, "excludes": ["!"]}, A, TEXT]))

        assert found == Sequence((Free(("!", "a")), Fixed("a"), Free()))


class TestTheTypes:
    def test_are_all_that_xgrammar_has(self) -> None:
        """One that is new there has to be looked at here."""
        schemas = xgrammar.StructuralTag.model_json_schema()["$defs"].values()
        theirs = {
            each["properties"]["type"]["const"]
            for each in schemas
            if each["title"].endswith("Format")
        }

        assert theirs == {*_TYPES, *_REFUSED}
