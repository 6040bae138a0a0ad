"""What schemas have in common, and what one leaves out.

The work is done by the canonical forms of `jsonschema-rs`. An answer that is not certain is none.

Used   by `relaxing`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from math import prod
from typing import Any

import jsonschema_rs
from jsonschema_rs import canonical

from structgen.grammar.schema.keywords import PREFIX, Json, inner, referred

MOST_CHARACTERS = 20_000  # of a schema, with what it refers to
MOST_NEGATED = 4_000  # of a schema that is negated
MOST_WAYS = 100  # canonical forms write them all out, which cannot be stopped
MOST_DEPTH = 16  # that is looked at
MOST_OPENED = 4  # references to references
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Algebra:
    """Questions about the schemas of one bundle. Without `certain`, none has an answer."""

    def __init__(self, defs: dict[str, Json], *, certain: bool) -> None:
        self._defs, self._certain = defs, certain
        self._complements: dict[str, Json | None] = {}

    def of(self, schema: Json) -> jsonschema_rs.CanonicalSchema | None:
        """The canonical form of a schema."""
        if not self._certain:
            return None
        schema = self._opened(schema, MOST_OPENED)
        defs = self._reached(schema)
        if len(json.dumps([schema, defs])) > MOST_CHARACTERS:
            return None
        if _is_endless(schema, defs) or not _Ways(self._defs).are_few((schema, *defs.values())):
            return None
        whole = {"$schema": _DIALECT, "allOf": [schema], "$defs": defs}
        try:
            return jsonschema_rs.canonicalize(whole, validate_formats=False, offline=True)
        except (ValueError, jsonschema_rs.ReferencingError):
            return None

    def is_empty(self, schema: Json) -> bool:
        """Whether it is certain that no value satisfies a schema."""
        form = self.of(schema)
        return form is not None and form.satisfiability() is canonical.Satisfiability.NO

    def complement(self, schema: Json) -> Json | None:
        """A schema for all values that do not satisfy this one."""
        key = json.dumps(schema)
        if len(key) > MOST_NEGATED:
            return None
        if key not in self._complements:
            self._complements[key] = self._complement(schema)
        return copy.deepcopy(self._complements[key])

    def _complement(self, schema: Json) -> Json | None:
        form = self.of(schema)
        if form is None:
            return None
        try:
            found: Any = form.negate().to_json_schema()
        except ValueError:
            return None
        return self._plain(found)

    def _opened(self, schema: Json, depth: int) -> Json:
        """A schema with what it is a reference to in its place: the form of a name is a name."""
        if not isinstance(schema, dict) or not depth:
            return schema
        rest = {key: value for key, value in schema.items() if key not in {"$ref", "allOf"}}
        parts = [self._opened(each, depth) for each in schema.get("allOf", ())]
        if "$ref" in schema:
            target = self._defs[schema["$ref"].removeprefix(PREFIX)]
            parts.append(self._opened(target, depth - 1))
        if not rest and len(parts) == 1:
            return parts[0]
        return {**rest, "allOf": parts} if parts else rest

    def _plain(self, found: Json) -> Json | None:
        """A result without its frame, if it refers to definitions of this bundle only."""
        if isinstance(found, bool):
            return found
        found.pop("$schema", None)
        if found == {"not": {}}:
            return False
        return found if found.pop("$defs", {}).keys() <= self._defs.keys() else None

    def _reached(self, schema: Json) -> dict[str, Json]:
        """The definitions that a schema refers to, in the end."""
        return {name: self._defs[name] for name in _all_referred(schema, self._defs)}


def is_canonical(root: Json, defs: dict[str, Json]) -> bool:
    """Whether a bundle has a canonical form that is found soon."""
    short = len(json.dumps([root, defs])) <= 3 * MOST_CHARACTERS
    return short and not _is_endless(root, defs) and _Ways(defs).are_few((root, *defs.values()))


def _is_endless(schema: Json, defs: dict[str, Json]) -> bool:
    """Whether the making of a canonical form may not end, but crash.

    `jsonschema-rs` 0.61 follows what a schema evaluates, for `unevaluated...`, through references
    round and round.
    """
    if '"unevaluated' not in json.dumps([schema, defs]):
        return False
    return any(name in _all_referred(each, defs) for name, each in defs.items())


def _all_referred(schema: Json, defs: dict[str, Json]) -> list[str]:
    """The names of what a schema refers to, in the end."""
    found: dict[str, None] = {}
    todo = [schema]
    while todo:
        fresh = [name for name in sorted(referred(todo.pop())) if name not in found]
        found |= dict.fromkeys(fresh)
        todo += (defs[name] for name in fresh)
    return list(found)


class _Ways:
    """In how many ways a schema, or one inside of it, may be satisfied: an estimate."""

    def __init__(self, defs: dict[str, Json]) -> None:
        self._defs = defs
        self._known: dict[tuple[str, int], float] = {}

    def are_few(self, schemas: Iterable[Json]) -> bool:
        """Whether a canonical form, which writes them all out, is found soon."""
        return all(self._of(each, 0) <= MOST_WAYS for each in schemas)

    def _of(self, schema: Json, depth: int) -> float:
        if not isinstance(schema, dict) or depth > MOST_DEPTH:
            return 1
        inside = {steps: self._of(each, depth + 1) for steps, each in inner(schema)}
        dependent = (schema.get(f"dependent{each}", ()) for each in ("Required", "Schemas"))
        found = 2.0 ** sum(map(len, dependent))
        found *= prod(n for steps, n in inside.items() if steps[0] in {"allOf", "dependentSchemas"})
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                found *= sum(n for steps, n in inside.items() if steps[0] == keyword)
        if "oneOf" in schema:
            found = max(found, self._of_pairs(schema["oneOf"]))
        for keyword in ("if", "not"):
            if keyword in schema:
                found *= 1 + inside.get((keyword,), 1) + len(_required(schema[keyword]))
        if "$ref" in schema:
            found *= self._named(schema["$ref"].removeprefix(PREFIX), depth + 4)
        return max(found, *inside.values(), 1.0)

    def _of_pairs(self, branches: list[Json]) -> float:
        """The ways of `oneOf`: in each pair, one branch and what the other leaves out.

        By measurement: of n branches with m properties each, n^2 * m^3 microseconds.
        """
        largest = max((self._size(each) for each in branches), default=0)
        return float(len(branches) ** 2 * largest**3) / 1000

    def _size(self, schema: Json, depth: int = 3) -> int:
        """How many schemas there are in a schema and in what it refers to, not far down."""
        if not isinstance(schema, dict) or not depth:
            return 0
        found = sum(1 + self._size(each, depth - 1) for _, each in inner(schema))
        if "$ref" in schema:
            found += self._size(self._defs[schema["$ref"].removeprefix(PREFIX)], depth - 1)
        return found

    def _named(self, name: str, depth: int) -> float:
        if (name, depth) not in self._known:
            self._known[name, depth] = self._of(self._defs[name], depth)
        return self._known[name, depth]


def _required(schema: Json) -> list[str]:
    found: list[str] = schema.get("required", []) if isinstance(schema, dict) else []
    return found


def disjoint(
    left: jsonschema_rs.CanonicalSchema | None, right: jsonschema_rs.CanonicalSchema | None
) -> bool:
    """Whether it is certain that no value satisfies both."""
    if left is None or right is None:
        return False
    try:
        return left.intersect(right).satisfiability() is canonical.Satisfiability.NO
    except ValueError:
        return False
