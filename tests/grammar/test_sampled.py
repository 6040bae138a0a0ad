"""Whatever a model writes under our masks is what was asked for, as validators of others have it.

STRUCTGEN_SAMPLED_EXAMPLES sets how many constraints are tried.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schemas import sampled
from structgen.errors import ConstraintError
from structgen.grammar.compiler import compile_constraint
from structgen.request import JsonSchema, Regex
from tests.grammar.derivatives import TREES, Tree, source
from tests.grammar.schema.random_schemas import schema
from tests.grammar.schema.values import VOCABULARY

EXAMPLES = int(os.environ.get("STRUCTGEN_SAMPLED_EXAMPLES", "2000"))
TEXTS = 3  # of each constraint


def finite(text: str) -> float:
    """JSON has no largest number, and `jsonschema` cannot take one that is infinite in Python."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


@settings(max_examples=EXAMPLES * 3 // 4, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32))
def test_texts_of_a_schema_are_valid_or_known_not_to_be(seed: int) -> None:
    chance = random.Random(seed)
    asked = schema(chance)
    try:
        grammar = compile_constraint(JsonSchema(json.dumps(asked)), VOCABULARY)
    except ConstraintError:
        return  # what is refused is the matter of other tests
    judge = jsonschema.Draft202012Validator(asked)
    for _ in range(TEXTS):
        text = sampled(grammar, chance)
        if text is None or grammar.fault(text) is not None:
            continue
        assert judge.is_valid(json.loads(text, parse_float=finite)), (asked, text)


@settings(max_examples=EXAMPLES // 4, deadline=None, derandomize=True, database=None)
@given(TREES, st.integers(0, 2**32))
def test_texts_of_a_pattern_match_it(tree: Tree, seed: int) -> None:
    pattern = source(tree)
    try:
        grammar = compile_constraint(Regex(pattern), VOCABULARY)
    except ConstraintError:
        return
    chance = random.Random(seed)
    for _ in range(TEXTS):
        text = sampled(grammar, chance)
        assert text is None or re.fullmatch(pattern, text), (pattern, text)
