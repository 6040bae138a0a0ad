"""Whatever a model writes under our masks is what was asked for, as validators of others have it.

What is refused, does not end, or is found faulty by the final check is judged by nobody here: how
much that may be, of all examples, is bounded. STRUCTGEN_SAMPLED_EXAMPLES sets how many constraints
are tried.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schemas import sampled
from structgen.errors import ConstraintError
from structgen.grammar.compiler import compile_constraint
from structgen.request import Constraint, JsonSchema, Regex
from tests.grammar.derivatives import TREES, Tree, source
from tests.grammar.schema.random_schemas import Schema, schema
from tests.grammar.schema.values import VOCABULARY

EXAMPLES = int(os.environ.get("STRUCTGEN_SAMPLED_EXAMPLES", "500"))
TEXTS = 3  # of each constraint
REFERENCES = ("#", "#/$defs/one", "#/$defs/two")
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    "unheard-of",
)


def finite(text: str) -> float | int:
    """A number as it is; `jsonschema` counts in floats else, and knows none beyond the largest."""
    number = max(-sys.float_info.max, min(sys.float_info.max, float(text)))
    if number.is_integer() and 0 < abs(number) < sys.float_info.max:
        exact = Decimal(text)  # of other exponents there may be none
        return int(exact) if exact == exact.to_integral_value() else number
    return number


class Tally:
    """How far examples come: of constraints, those compiled; of texts, those ended and passed."""

    def __init__(self) -> None:
        self.constraints = self.compiled = self.ended = self.passed = 0

    def texts(self, constraint: Constraint, chance: random.Random) -> Iterator[str]:
        """Texts that are written under a constraint and pass its final check."""
        self.constraints += 1
        try:
            grammar = compile_constraint(constraint, VOCABULARY)
        except ConstraintError:
            return  # what is refused, and how, is the matter of other tests
        self.compiled += 1
        for _ in range(TEXTS):
            text = sampled(grammar, chance)
            if text is None:
                continue
            self.ended += 1
            if grammar.fault(text) is None:
                self.passed += 1
                yield text

    def require(self, *, compiled: float, ended: float, passed: float) -> None:
        """Fail where too few came far enough to be judged."""
        assert self.compiled >= compiled * self.constraints, vars(self)
        assert self.ended >= ended * TEXTS * self.compiled, vars(self)
        assert self.passed >= passed * self.ended, vars(self)


def richer(chance: random.Random) -> Schema:
    """A random schema; every other one refers to named schemas and to itself, and has formats."""
    asked = schema(chance)
    if not isinstance(asked, dict) or chance.random() < 0.5:
        return asked
    named = {name: schema(chance, 2) for name in ("one", "two")}
    # What was chosen twice is one object: a copy of each is changed.
    asked = dict(json.loads(json.dumps({**asked, "$defs": named})))
    for place in list(parts(asked)):
        if chance.random() < 0.3:
            place["$ref"] = chance.choice(REFERENCES)
        elif chance.random() < 0.5:
            place["format"] = chance.choice(FORMATS)
    return asked


def parts(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of parts of a value, in which one that refers to the whole leads further down."""
    single = ("items", "contains", "additionalProperties")
    found: list[Any] = [asked[word] for word in single if word in asked]
    found += asked.get("prefixItems", ())
    for word in ("properties", "patternProperties"):
        found += asked.get(word, {}).values()
    inside = [each for each in found if isinstance(each, dict)]
    yield from inside
    for each in (*inside, *asked.get("$defs", {}).values()):
        if isinstance(each, dict):
            yield from parts(each)


def test_texts_of_a_schema_are_valid_or_known_not_to_be() -> None:
    tally, words = Tally(), Counter[str]()
    for seed in range(EXAMPLES * 3 // 4):
        chance = random.Random(seed)
        asked = richer(chance)
        written = json.dumps(asked)
        judge = jsonschema.Draft202012Validator(asked)
        for text in tally.texts(JsonSchema(written), chance):
            assert judge.is_valid(json.loads(text, parse_float=finite)), (asked, text)
            words.update(word for word in ('"$ref"', '"format"') if word in written)

    tally.require(compiled=0.9, ended=0.8, passed=0.97)
    assert min(words[word] for word in ('"$ref"', '"format"')) >= 0.05 * tally.passed, words


def test_texts_of_a_pattern_match_it() -> None:
    tally = Tally()

    @settings(max_examples=EXAMPLES // 4, deadline=None, derandomize=True, database=None)
    @given(TREES, st.integers(0, 2**32))
    def example(tree: Tree, seed: int) -> None:
        pattern = source(tree)
        for text in tally.texts(Regex(pattern), random.Random(seed)):
            assert re.fullmatch(pattern, text), (pattern, text)

    example()

    tally.require(compiled=0.9, ended=0.8, passed=1.0)
