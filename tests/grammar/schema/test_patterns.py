"""Patterns, beside the two readers that judge: Python's `re` and the validator's own."""

from __future__ import annotations

import itertools
import json
import re

import jsonschema_rs
import pytest

from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.schema.patterns import other_than, translated
from structgen.request import JsonSchema
from tests.grammar.schema.values import VOCABULARY

EXACT = (
    *("b", "^a|b$", "^cat$|^dog$", "^(cat|dog)$", "(^|,)x(,|$)", r"^[a-z]+\.[A-Z]{2,3}$", "x|^$"),
    *(r"^\d+$", r"\D", r"^[\w.-]+@[\w-]+$", r"^[^\s]+$", r"[\s\S]", r"^\S*$", r"^a\/b$", "^.$"),
    *("a{2}", "^(?:ab?){1,3}$", "^$", "", "^^a$$", r"^([a-z]|[0-9])+$", "^(a|^b)c", r"^\u00e9$"),
    *("^#(?:[0-9a-fA-F]{3}){1,2}$", r"^-?[0-9]+(\.[0-9]+)?$|^$", "^a.*?b", "(?:^x|a)b"),
)
LOOSE = ("^(?!ab)a.*$", "a$b", r"^(a|b)\1$", r"\bfoo\b", "(?=a)b|^c", "a^b")
TEXTS = (
    *("".join(each) for n in range(4) for each in itertools.product("ab,x1", repeat=n)),
    *("cat", "dog", "cow", "a@b", "ab.CD", "#fff", "#ffffff", "1.5", "é", "a b", "a\nb", "a/b"),
    *("foo", "a foo b", "xfoo", "bc", "ac", "😀", "A", "-"),
)


def strings(**keywords: object) -> Grammar:
    return compile_constraint(JsonSchema({"type": "string", **keywords}), VOCABULARY)


def passes(grammar: Grammar, text: str) -> bool:
    """Whether the mask lets a string through."""
    return grammar.matches((), json.dumps(text, ensure_ascii=False))


def found(pattern: str, text: str) -> bool:
    """Whether Python finds the pattern; where the validator differs, nothing is asserted."""
    return re.search(pattern, text) is not None


class TestATranslation:
    @pytest.mark.parametrize("pattern", EXACT)
    def test_matches_where_the_pattern_is_found(self, pattern: str) -> None:
        translation = translated(pattern)
        assert translation is not None
        grammar = strings(pattern=pattern)
        oracle = jsonschema_rs.Draft202012Validator({"pattern": pattern})

        assert translation.exact
        wrong = [
            text
            for text in TEXTS
            if found(pattern, text) == oracle.is_valid(text) != passes(grammar, text)
        ]
        assert wrong == []

    @pytest.mark.parametrize("pattern", LOOSE)
    def test_matches_more_where_no_automaton_can_follow(self, pattern: str) -> None:
        translation = translated(pattern)
        assert translation is not None
        grammar = strings(pattern=pattern)

        assert not translation.exact
        assert [t for t in TEXTS if found(pattern, t) and not passes(grammar, t)] == []

    @pytest.mark.parametrize("pattern", ["(", "a{,3}", "x" * 5_000])
    def test_is_none_of_what_cannot_be_read(self, pattern: str) -> None:
        assert translated(pattern) is None


class TestWords:
    WORDS = ("root", "ro", "b", "", "bä")

    def test_are_told_from_all_others(self) -> None:
        assert other_than(self.WORDS) is not None
        grammar = strings(**{"not": {"enum": self.WORDS}})
        texts = (*TEXTS, *self.WORDS, "r", "roo", "roots", "bä!", "\n")

        assert [t for t in texts if passes(grammar, t) == (t in self.WORDS)] == []

    def test_are_none_if_they_are_too_many(self) -> None:
        assert other_than(f"word {n}" for n in range(1_000)) is None

    def test_are_exactly_those_that_are_listed_as_names(self) -> None:
        schema = {"type": "object", "propertyNames": {"enum": ["a", "é", "."]}}
        grammar = compile_constraint(JsonSchema(schema), VOCABULARY)
        texts = {t: json.dumps({t: 1}, ensure_ascii=False) for t in (*TEXTS, ".")}

        assert {t for t, text in texts.items() if grammar.matches((), text)} == {"a", "é", "."}
