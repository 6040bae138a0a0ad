"""How much work it is to check a value: a validator may take for ever, and cannot be stopped.

A validator looks at a place of the value once for every way that leads to it through the schema.
`allOf` of two references, each of which leads to such an `allOf` again, are a million ways after
twenty steps, and a schema that refers to itself twice has as many in a value that is twenty deep.
Here the ways are counted and not walked: what is below a schema at a place is counted once.

Holds  the count is never less than what a validator visits, within a small factor.
Used   by `judging`, before a validator is asked.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

from structgen.grammar.schema.bundling import Bundle
from structgen.grammar.schema.keywords import PREFIX, Json, inner

# To know what was not evaluated, a validator evaluates all that stands beside it again.
_AGAIN = 3
_MOST_PLACES = 30_000  # pairs of a schema and a place that are looked at; 1 us each

_BESIDE_LISTED = ("allOf", "anyOf", "oneOf")
_BELOW = ("items", "contains", "additionalProperties", "propertyNames")
_BELOW_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
_BELOW_LISTED = ("prefixItems",)
_BELOW_NAMED = ("properties", "patternProperties")


class Effort:
    """Counts the visits that a validator makes under one schema."""

    def __init__(self, bundle: Bundle) -> None:
        """Visits of any one place are counted at once, where the schema is no part of itself."""
        self._bundle = bundle
        self._unrolled: dict[str, float] = {}
        whole = (bundle.root, *bundle.defs.values())
        self._evaluating = any(True for each in whole for _ in _evaluating(each))
        self._most = self._size(bundle.root, ())

    def within(self, most: int, value: Json, length: int | None = None) -> bool:
        """Whether a validator makes so many visits at most; not, if that takes long to know.

        length   of the value's text, if it is known: there are not more places in it
        """
        if length is not None and self._most * length <= most:
            return True
        try:
            return (
                _Count(self._bundle, evaluating=self._evaluating).of(self._bundle.root, value)
                <= most
            )
        except (OverflowError, RecursionError):
            return False

    def _size(self, schema: Json, inside: tuple[str, ...]) -> float:
        """How many schemas there are with references written out; infinite if it is endless."""
        if not isinstance(schema, dict):
            return 1
        found = 1.0
        for each in self._inside(schema):
            found += self._size(each, inside)
        for name in _referred(schema, self._bundle):
            found += self._named(name, inside)
        return found * _factor(schema)

    def _inside(self, schema: dict[str, Json]) -> Iterator[Json]:
        yield from _beside(schema, evaluating=self._evaluating)
        yield from _dependent(schema)
        yield from _below(schema)

    def _named(self, name: str, inside: tuple[str, ...]) -> float:
        if name in inside:
            return math.inf
        if name not in self._unrolled:
            self._unrolled[name] = self._size(self._bundle.defs[name], (*inside, name))
        return self._unrolled[name]


class Unrolled:
    """Counts the steps that a validator takes while it is built: for `unevaluated...` it follows
    all ways through references that lead to what is evaluated."""

    def __init__(self, bundle: Bundle, most: int) -> None:
        self._bundle, self._most = bundle, most
        self._steps = 0

    def is_short(self) -> bool:
        """Whether there are so many steps at most."""
        whole = (self._bundle.root, *self._bundle.defs.values())
        try:
            for schema in (found for each in whole for found in _evaluating(each)):
                self._follow(schema, frozenset())
        except (OverflowError, RecursionError):
            return False
        return True

    def _follow(self, schema: Json, inside: frozenset[str]) -> None:
        if not isinstance(schema, dict):
            return
        self._steps += 1
        if self._steps > self._most:
            raise OverflowError
        for each in (*_beside(schema, evaluating=True), *_dependent(schema)):
            self._follow(each, inside)
        for name in _referred(schema, self._bundle):
            if name not in inside:
                self._follow(self._bundle.defs[name], inside | {name})


class _Count:
    """One count, for one value."""

    def __init__(self, bundle: Bundle, *, evaluating: bool) -> None:
        self._bundle, self._evaluating = bundle, evaluating
        # By identity: the schema and the value live longer than this.
        self._counted: dict[tuple[int, int], float] = {}

    def of(self, schema: Json, value: Json) -> float:
        """The visits below a schema at a place."""
        if not isinstance(schema, dict):
            return 0
        key = (id(schema), id(value))
        found = self._counted.get(key)
        if found is None:
            if len(self._counted) >= _MOST_PLACES:
                raise OverflowError
            self._counted[key] = math.inf  # of what comes back to itself at the same place
            found = self._counted[key] = self._count(schema, value)
        return found

    def _count(self, schema: dict[str, Json], value: Json) -> float:
        beside = sum(self.of(each, value) for each in _beside(schema, evaluating=self._evaluating))
        if isinstance(value, dict):
            beside += sum(self.of(each, value) for each in _dependent(schema, value))
        for name in _referred(schema, self._bundle):
            beside += self.of(self._bundle.defs[name], value)
        found = 1 + beside * _factor(schema)
        if isinstance(value, dict):
            found += sum(self._member(schema, name, each) for name, each in value.items())
        elif isinstance(value, list):
            found += sum(self._item(schema, place, each) for place, each in enumerate(value))
        return found

    def _member(self, schema: dict[str, Json], name: str, value: Json) -> float:
        properties = schema.get("properties", {})
        # Patterns are taken to match, and not to match.
        found = self.of(properties.get(name, True), value)
        for each in schema.get("patternProperties", {}).values():
            found += self.of(each, value)
        if name not in properties:
            found += self.of(schema.get("additionalProperties", True), value)
        found += self.of(schema.get("unevaluatedProperties", True), value)
        return found + self.of(schema.get("propertyNames", True), name)

    def _item(self, schema: dict[str, Json], place: int, value: Json) -> float:
        first = schema.get("prefixItems", ())
        found = self.of(first[place] if place < len(first) else schema.get("items", True), value)
        for keyword in ("contains", "unevaluatedItems"):
            found += self.of(schema.get(keyword, True), value)
        return found


def _factor(schema: dict[str, Json]) -> int:
    return _AGAIN if any(keyword in schema for keyword in _BELOW_UNEVALUATED) else 1


def _referred(schema: dict[str, Json], bundle: Bundle) -> Iterator[str]:
    """The names of what a schema refers to; where a dynamic reference leads depends on the way to
    it: all that it may be is taken together."""
    if (reference := schema.get("$ref")) is not None:
        yield reference.removeprefix(PREFIX)
    if (reference := schema.get("$dynamicRef")) is not None:
        yield from sorted(bundle.dynamic[reference])


def _evaluating(schema: Json) -> Iterator[dict[str, Json]]:
    """The schemas in a schema that ask what was evaluated."""
    if isinstance(schema, dict) and any(keyword in schema for keyword in _BELOW_UNEVALUATED):
        yield schema
    for _, each in inner(schema):
        yield from _evaluating(each)


def _beside(schema: dict[str, Json], *, evaluating: bool) -> Iterator[Json]:
    """The schemas inside of a schema that see the same value; but references, and those that
    depend on its keys."""
    # What follows a condition means nothing without one. A condition that nothing follows is looked
    # at only for what it evaluates.
    followed = evaluating or "then" in schema or "else" in schema
    conditional = ("if", "then", "else") if "if" in schema and followed else ()
    return _inside(schema, ("not", *conditional), _BESIDE_LISTED)


def _dependent(schema: dict[str, Json], names: Container[str] | None = None) -> Iterator[Json]:
    """The schemas that see the same value if it has a key; of some keys, or of all."""
    for name, each in schema.get("dependentSchemas", {}).items():
        if names is None or name in names:
            yield each


def _below(schema: dict[str, Json]) -> Iterator[Json]:
    """Those that see parts of it."""
    yield from _inside(schema, (*_BELOW, *_BELOW_UNEVALUATED), _BELOW_LISTED)
    for keyword in _BELOW_NAMED:
        yield from schema.get(keyword, {}).values()


def _inside(
    schema: dict[str, Json], single: tuple[str, ...], listed: tuple[str, ...]
) -> Iterator[Json]:
    yield from (schema[keyword] for keyword in single if keyword in schema)
    for keyword in listed:
        yield from schema.get(keyword, ())
