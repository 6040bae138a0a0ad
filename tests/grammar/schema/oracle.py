"""What the validator `jsonschema`, which shares no code with what is tested, says of a schema."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import jsonschema

from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.request import JsonSchema
from tests.grammar.schema.values import POOL, VOCABULARY, accepts, lets_through


def compiled(schema: Any) -> Grammar:
    """The grammar of a schema."""
    return compile_constraint(JsonSchema(json.dumps(schema)), VOCABULARY)


class Found(NamedTuple):
    """How the pool of values was judged."""

    wrong: list[Any]  # judged otherwise than by the oracle
    invalid: list[Any]  # let through by the mask
    unmasked: tuple[str, ...]


@lru_cache(maxsize=1)  # the two tests of a schema come one after the other
def judged(text: str) -> Found:
    """Compile a schema, given as text, and hold it against the oracle."""
    schema = json.loads(text)
    grammar = compiled(schema)
    default = jsonschema.Draft202012Validator
    oracle = jsonschema.validators.validator_for(schema, default)(schema)
    valid = [bool(oracle.is_valid(value)) for value in POOL]
    through = [lets_through(grammar, value) for value in POOL]
    accepted = [m and accepts(grammar, value) for m, value in zip(through, POOL, strict=True)]
    found = list(zip(POOL, valid, through, accepted, strict=True))
    return Found(
        [value for value, is_valid, _, accepts_it in found if accepts_it != is_valid],
        [value for value, is_valid, passes, _ in found if passes and not is_valid],
        grammar.source.unmasked,
    )
