"""Terms: how they are joined, and that they stay plain: equal, hashable and serialisable."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from structgen.errors import ConstraintError
from structgen.request import Constraint, Structure
from structgen.terms import (
    Capture,
    Either,
    Fixed,
    Free,
    Json,
    Pattern,
    Repeat,
    Rules,
    Sequence,
    Term,
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
    text,
)

FIVE: Any = 5  # where a text should be
SOMETHING: Any = object()
A, B, C = Fixed("a"), Fixed("b"), Fixed("c")


class TestPlus:
    def test_puts_one_after_the_other(self) -> None:
        assert literal("a") + literal("b") == Sequence((A, B))

    def test_takes_a_str_on_either_side(self) -> None:
        assert "a" + regex("x") + "b" == Sequence((A, Pattern("x"), B))

    def test_makes_one_sequence_of_several(self) -> None:
        assert Sequence((A, B, C, A)) == (A + B) + (C + A)

    def test_binds_closer_than_either(self) -> None:
        assert Either((A, Sequence((B, C)))) == A | B + C

    @pytest.mark.parametrize("other", [5, None, b"a", ["a"]])
    def test_takes_nothing_else(self, other: object) -> None:
        with pytest.raises(TypeError, match="unsupported operand"):
            literal("a") + other  # type: ignore[operator]  # what is tested


class TestOr:
    def test_takes_one_or_the_other(self) -> None:
        assert "a" | literal("b") | "c" == Either((A, B, C))


class TestTheFunctions:
    @pytest.mark.parametrize(
        ("made", "term"),
        [
            (json(int), Json('{"type":"integer"}')),
            (json(), Json("true")),
            (json('{"const": 1}', (",", ":")), Json('{"const": 1}', (",", ":"))),
            (ebnf('root ::= "a"'), Rules('root ::= "a"')),
            (choice(["a", "b"]), Either((A, B))),
            (choice(iter("a")), A),
            (sequence("a"), A),
            (sequence(), Sequence(())),
            (optional("a"), Repeat(A, 0, 1)),
            (repeat("a"), Repeat(A, 0, None)),
            (repeat("a", 2, 3), Repeat(A, 2, 3)),
            (text(), Free(())),
            (text(until="ab"), Free(("ab",))),
            (text(until=["a", "b"]), Free(("a", "b"))),
            (capture("x", "a"), Capture("x", A)),
        ],
    )
    def test_make_terms(self, made: Term, term: Term) -> None:
        assert made == term

    def test_make_tags_of_free_text_and_what_follows_each(self) -> None:
        made = tagged({"<a>": "x", "<b>": json(int) + "</b>"}, at_least=2)

        free = Free(("<a>", "<b>"))
        begun = Either(
            (
                Sequence((Fixed("<a>"), Fixed("x"))),
                Sequence((Fixed("<b>"), Json('{"type":"integer"}'), Fixed("</b>"))),
            )
        )
        assert made == Sequence((Repeat(Sequence((free, begun)), 2), free))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: literal(FIVE), "literal: expected a str, got 5"),
            (lambda: choice("abc"), "choice: expected several texts, got 'abc'; write a list"),
            (lambda: choice([FIVE]), "expected a str, got 5"),
            (lambda: choice([]), "nothing to choose from"),
            (either, "nothing to choose from; give at least one option"),
            (lambda: sequence("a", FIVE), "expected a term or a str, got 5; write literal"),
            (lambda: capture("", "a"), "expected a name, got ''"),
            (lambda: capture("x", FIVE), "expected a term or a str, got 5"),
            (lambda: tagged({}), "there are no tags"),
            (lambda: json(SOMETHING), "has no JSON schema"),
        ],
    )
    def test_refuse_what_is_no_term(self, make: object, message: str) -> None:
        with pytest.raises(ConstraintError, match=message):
            make()  # type: ignore[operator]  # each is a function


class TestATerm:
    TERM = capture("all", "a" + repeat(regex("b") | json(int) | ebnf("root ::= x"), 1, 2)) + text()

    def test_is_equal_to_one_made_alike(self) -> None:
        assert literal("a") + regex("b") == literal("a") + regex("b")
        assert hash(literal("a") + regex("b")) == hash(literal("a") + regex("b"))
        assert literal("a") != regex("a")

    def test_comes_back_from_json_and_msgpack(self) -> None:
        constraint = Structure(self.TERM)

        for form in (msgspec.json, msgspec.msgpack):
            found = form.decode(form.encode(constraint), type=Constraint)

            assert found == constraint
            assert hash(found) == hash(constraint)

    def test_never_changes(self) -> None:
        with pytest.raises(AttributeError, match="immutable"):
            A.text = "b"  # type: ignore[misc]  # what is tested
