"""Grammars: which kinds there are, that they do not change, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest

from structgen.errors import ConstraintError
from structgen.grammar.compiler import KINDS, compile_constraint
from structgen.request import Choice, Constraint, Ebnf, JsonSchema, Regex, Structure, Text
from structgen.terms import literal
from tests.grammar.derivatives import follow, legal, vocabulary_of

VOCABULARY = vocabulary_of([*(bytes([byte]) for byte in range(256)), b"ab", b"abc"])


class TestCompiling:
    def test_refuses_what_is_no_constraint(self) -> None:
        part: Any = Text("root")

        with pytest.raises(ConstraintError, match=r"root.*knows the constraints choice and ebnf"):
            compile_constraint(part, VOCABULARY)

    def test_knows_the_kinds_that_it_says(self) -> None:
        known: list[Constraint] = [
            *(Regex("a"), Choice(("a",)), JsonSchema({"type": "integer"})),
            *(Ebnf('root ::= "a"'), Structure(literal("a"))),
        ]

        assert {type(each).__struct_config__.tag for each in known} == KINDS
        assert all(compile_constraint(each, VOCABULARY) for each in known)


class TestAGrammar:
    def test_stays_at_the_beginning(self) -> None:
        grammar = compile_constraint(Regex("abc?"), VOCABULARY)
        before = legal(grammar.matcher())
        follow(grammar, [256, 99])

        assert legal(grammar.matcher()) == before == [97, 256, 257]

    def test_tells_whether_tokens_and_a_tail_are_complete(self) -> None:
        grammar = compile_constraint(Regex("ab(c|é)?"), VOCABULARY)

        assert grammar.matches([256])
        assert grammar.matches([257])
        assert grammar.matches([97], "bé")
        assert grammar.matches([], "ab")
        assert not grammar.matches([97])
        assert not grammar.matches([257], "c")
        assert not grammar.matches([256, *"é".encode()[:1]])

    def test_follows_texts_that_match_in_many_ways(self) -> None:
        # The backend counts its steps from mask to mask, and would give up without any.
        grammar = compile_constraint(Regex("(?:a{1,30}){1,30}"), VOCABULARY)

        assert grammar.matches([97] * 900)
        assert not grammar.matches([97] * 901)
