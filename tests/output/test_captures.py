"""Which names a term captures, and what their values are."""

from __future__ import annotations

from typing import Any

import pytest

from structgen.output.captures import captured
from structgen.request import Regex, Structure
from structgen.terms import Capture, Either, Fixed, Repeat, Sequence

A, B = Capture("a", Fixed("x")), Capture("b", Fixed("y"))


@pytest.mark.parametrize(
    ("term", "pairs", "values"),
    [
        (A, [("a", "x")], {"a": "x"}),
        (Fixed("x"), [], {}),
        (Sequence((A, B)), [("a", "x"), ("b", "y")], {"a": "x", "b": "y"}),
        (Either((A, B)), [("b", "y")], {"a": None, "b": "y"}),
        (Either((A, Sequence((A, B)))), [("a", "x")], {"a": "x", "b": None}),
        (Repeat(A, 0, 1), [], {"a": None}),
        (Repeat(A, 0, 2), [], {"a": []}),
        (Repeat(A), [("a", "x"), ("a", "z")], {"a": ["x", "z"]}),
        (Repeat(A, 0, 0), [], {}),
        (Repeat(Repeat(A, 0, 1), 2, 2), [("a", "x")], {"a": ["x"]}),
        (Sequence((A, A)), [("a", "x"), ("a", "z")], {"a": ["x", "z"]}),
        (Capture("c", Sequence((A, B))), [("c", "xy"), ("a", "x"), ("b", "y")], None),
    ],
    ids=str,
)
class TestTheCapturesOfATerm:
    def test_are_texts_and_lists_where_there_may_be_several(
        self, term: Any, pairs: Any, values: Any
    ) -> None:
        expected = {"c": "xy", "a": "x", "b": "y"} if values is None else values

        assert captured(Structure(term), pairs) == expected


@pytest.mark.parametrize("constraint", [None, Regex("a")])
def test_other_constraints_capture_nothing(constraint: Any) -> None:
    assert captured(constraint, ()) == {}
