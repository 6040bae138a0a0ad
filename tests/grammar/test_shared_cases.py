"""Faults that others were reported for, and 200 schemas from real use, if the data are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.schemas import samples, structgen, tally
from structgen.errors import ConstraintError
from structgen.grammar.compiler import compile_constraint
from structgen.request import Constraint, Ebnf, JsonSchema, Regex
from tests.grammar.schema.values import VOCABULARY
from tests.shared_cases import rows

FAULTS, SCHEMAS = rows("grammar_faults.jsonl"), rows("schemas_dev.jsonl")
KINDS: dict[str, Callable[[Any], Constraint]] = {
    "ebnf": Ebnf,
    "regex": Regex,
    "json_schema": lambda schema: JsonSchema(json.dumps(schema, ensure_ascii=False)),
}


@pytest.mark.skipif(not FAULTS, reason="the data are not there")
class TestTheFaultsOfOthers:
    @pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in FAULTS])
    def test_are_none_here(self, row: dict[str, Any]) -> None:
        try:
            grammar = compile_constraint(KINDS[row["kind"]](row["grammar"]), VOCABULARY)
        except ConstraintError:
            # Malformed, beyond any automaton, or never more than the empty text.
            assert row.get("expect_error") or not any(row["accept"])
            return
        # A slash is written as it is: the one escape that masks do not have.
        accepted = [grammar.accepts(text.replace(r"\/", "/")) for text in row["accept"]]

        assert not row.get("expect_error")
        # Where there is a policy, one of several spellings of a value is enough.
        assert any(accepted) if "policy" in row else all(accepted)
        assert not any(grammar.accepts(text) for text in row["reject"])


@pytest.mark.skipif(not SCHEMAS, reason="the data are not there")
class TestRealSchemas:
    def test_are_taken_and_mean_what_they_say(self) -> None:
        found, count = tally(structgen, SCHEMAS), len(SCHEMAS)

        assert found.accepted == 0
        assert found.rejected < 0.015 * found.valid
        assert found.refused < 0.04 * count
        assert found.exact >= 0.8 * count

    def test_have_texts_that_pass_the_check(self) -> None:
        tried, ended, passed = samples(SCHEMAS, 5)

        assert ended > 0.9 * tried
        assert passed >= 0.99 * ended
