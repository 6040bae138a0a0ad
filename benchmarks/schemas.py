"""Real JSON Schemas: what structgen, llguidance alone and xgrammar alone make of them.

    python -m benchmarks.schemas SCHEMAS.jsonl [--samples 20]

Each line of the file has a `schema` and lists of `valid` and `invalid` instances. An instance is
written as `json.dumps` writes it, its keys in the schema's order first, and is accepted if the text
can be decoded to its end and passes the final check, where there is one. Texts are also sampled
from the masks by a random model that likes to close, and checked. The vocabulary is one token a
byte: what is accepted does not depend on it. Times are processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jsonschema.validators import validator_for
from llguidance import LLMatcher

from structgen.errors import ConstraintError, GenerationError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Vocabulary
from structgen.request import JsonSchema

Json = Any

BYTES = [bytes([byte]) for byte in range(256)]
VOCABULARY = Vocabulary(BYTES, [], 256)
CLOSING = [ord(character) for character in '"]}']
MOST_SAMPLED = 3_000  # characters

# ---------------------------------------------------------------- the order of keys


class Order:
    """Writes values with their keys in the order in which a schema declares them."""

    def __init__(self, schema: Json) -> None:
        self._root = schema
        self._validator = validator_for(schema)(schema)

    def of(self, value: Json) -> Json:
        """The value in order; keys that are not declared come after those that are."""
        return self._ordered(value, [self._root])

    def _ordered(self, value: Json, schemas: list[Json]) -> Json:
        applied = list(self._applied(value, schemas))
        if isinstance(value, list):
            return [self._ordered(each, _of_item(applied, n)) for n, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        names: dict[str, None] = {}
        for keyword in ("properties", "required"):
            for schema in applied:
                names |= dict.fromkeys(schema.get(keyword, ()))
        keys = [*(name for name in names if name in value), *(k for k in value if k not in names)]
        return {key: self._ordered(value[key], _of_key(applied, key)) for key in keys}

    def _applied(self, value: Json, schemas: list[Json]) -> Iterator[dict[str, Json]]:
        """The schemas, and those in them, that apply to the value."""
        for schema in schemas:
            if not isinstance(schema, dict):
                continue
            yield schema
            inside = [schema[keyword] for keyword in ("if", "then", "else") if keyword in schema]
            inside += schema.get("allOf", [])
            for keyword in ("anyOf", "oneOf"):
                options = schema.get(keyword, [])
                inside += [o for o in options if self._validator.evolve(schema=o).is_valid(value)]
            if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
                inside.append(self._target(schema["$ref"]))
            yield from self._applied(value, inside)

    def _target(self, reference: str) -> Json:
        found = self._root
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) else found.get(key, {})
        return found


def _of_key(applied: list[dict[str, Json]], key: str) -> list[Json]:
    found = []
    for schema in applied:
        patterns = schema.get("patternProperties", {})
        matching = [each for pattern, each in patterns.items() if re.search(pattern, key)]
        if key in schema.get("properties", {}):
            matching.append(schema["properties"][key])
        found += matching or [schema.get("additionalProperties")]
    return found


def _of_item(applied: list[dict[str, Json]], index: int) -> list[Json]:
    found = []
    for schema in applied:
        items = schema.get("items")
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems") if isinstance(items, list) else items
        found.append(first[index] if index < len(first) else rest)
    return found


# ---------------------------------------------------------------- contenders


def structgen(schema: Json) -> Grammar:
    return compile_constraint(JsonSchema(schema), VOCABULARY)


class Guidance:
    """llguidance, which refuses what it does not enforce."""

    def __init__(self, schema: Json) -> None:
        self._state = LLMatcher(VOCABULARY.backend, LLMatcher.grammar_from_json_schema(schema))
        if self._state.is_error():
            raise ConstraintError(self._state.get_error())

    def accepts(self, text: str) -> bool:
        state = self._state.deep_copy()
        data = list(text.encode())
        return state.try_consume_tokens(data) == len(data) and state.is_accepting()


class Xgrammar:
    """xgrammar, which compiles nearly everything."""

    def __init__(self, schema: Json, *, strict: bool) -> None:
        import xgrammar  # noqa: PLC0415 - takes seconds, and not everybody here needs it

        info = xgrammar.TokenizerInfo([*BYTES, b"</s>"], stop_token_ids=[256])
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        try:
            self._matcher = xgrammar.GrammarMatcher
            self._grammar = compiler.compile_json_schema(json.dumps(schema), strict_mode=strict)
        except RuntimeError as error:
            raise ConstraintError(str(error)) from None

    def accepts(self, text: str) -> bool:
        matcher = self._matcher(self._grammar)
        return matcher.accept_string(text) and matcher.is_completed()


Contender = Grammar | Guidance | Xgrammar
CONTENDERS: dict[str, Callable[[Json], Contender]] = {
    "structgen": structgen,
    "llguidance alone": Guidance,
    "xgrammar alone, strict": lambda schema: Xgrammar(schema, strict=True),
    "xgrammar alone, open": lambda schema: Xgrammar(schema, strict=False),
}


def sampled(grammar: Grammar, chance: random.Random) -> str | None:
    """A text that a random model writes under the mask; None if it does not end in time."""
    matcher = grammar.matcher()
    row = np.zeros(matcher.words, np.int32)
    written = bytearray()
    while not (matcher.complete and (matcher.finished or chance.random() < 0.5)):
        if len(written) >= MOST_SAMPLED:
            return None
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if not allowed:
            assert matcher.complete, f"a dead end after {bytes(written)!r}"
            break
        closing = [token for token in CLOSING if token in allowed]
        likes_to = chance.random() < 0.35 + len(written) / 400
        token = chance.choice(closing if closing and likes_to else allowed)
        matcher.accept(token)
        written.append(token)
    return written.decode()


# ---------------------------------------------------------------- the table


class Tally(msgspec.Struct):
    """What a contender makes of some schemas.

    refused, exact       schemas: not taken; enforced by the mask alone, where that is known
    valid, rejected      valid instances of those that were taken; of these, wrongly rejected
    invalid, accepted    invalid instances of those; of these, wrongly accepted
    milliseconds         that each took to compile, or to be refused
    """

    refused: int = 0
    exact: int = 0
    valid: int = 0
    rejected: int = 0
    invalid: int = 0
    accepted: int = 0
    milliseconds: list[float] = msgspec.field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        middle, most = statistics.median(self.milliseconds), max(self.milliseconds)
        return (
            *(f"{self.refused} of {len(self.milliseconds)}", f"{self.accepted} of {self.invalid}"),
            *(f"{self.rejected} of {self.valid}", str(self.exact or "-")),
            f"{middle:.1f} / {most:.0f} ms",
        )


def tally(compile_schema: Callable[[Json], Contender], cases: list[Json]) -> Tally:
    """Compile every schema, and judge its instances."""
    found = Tally()
    for case in cases:
        began = time.thread_time()
        try:
            grammar = compile_schema(case["schema"])
        except (ConstraintError, ValueError):
            found.refused += 1
            continue
        finally:
            found.milliseconds.append(1e3 * (time.thread_time() - began))
        found.exact += isinstance(grammar, Grammar) and not grammar.source.unmasked
        order = Order(case["schema"])
        texts = {
            kind: [json.dumps(order.of(value), ensure_ascii=False) for value in case[kind]]
            for kind in ("valid", "invalid")
        }
        found.valid += len(texts["valid"])
        found.invalid += len(texts["invalid"])
        found.rejected += sum(not accepts(grammar, text) for text in texts["valid"])
        found.accepted += sum(accepts(grammar, text) for text in texts["invalid"])
    return found


def accepts(grammar: Contender, text: str) -> bool:
    try:
        return bool(grammar.accepts(text))
    except GenerationError:
        return False


def samples(cases: list[Json], each: int) -> tuple[int, int, int]:
    """How many texts were sampled, how many of them ended, and how many passed the check."""
    chance = random.Random(0)
    ended = passed = tried = 0
    for case in cases:
        grammar = structgen(case["schema"])
        for _ in range(each):
            tried += 1
            text = sampled(grammar, chance)
            ended += text is not None
            passed += text is not None and grammar.fault(text) is None
    return tried, ended, passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--samples", type=int, default=20, help="texts of each schema (20)")
    options = parser.parse_args()
    cases = [json.loads(line) for line in options.schemas.read_text("utf-8").splitlines()]
    titles = (
        "",
        "refused",
        "invalid accepted",
        "valid rejected",
        "mask alone",
        "compile p50 / max",
    )
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for name, compile_schema in CONTENDERS.items():
        cells = tally(compile_schema, cases).cells()
        print(f"| {' | '.join((name, *cells))} |", flush=True)
    tried, ended, passed = samples(cases, options.samples)
    print(f"{tried} texts sampled from the masks: {ended} ended, of which {passed} pass the check")


if __name__ == "__main__":
    main()
