"""Keywords about an object as a whole, in words of what each single property may be.

Each function gives a schema to be added to the one that has the keyword, or None where there is
none that says it exactly, or only a very long one. They are in normal form, not relaxed yet.

Used   by `weakening`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb

from structgen.grammar.schema.keywords import Json

MOST_OPTIONS = 64  # of one keyword
MOST_PROPERTIES = 40  # optional ones, of which some must be there

Object = dict[str, Json]


def absent(names: Sequence[str]) -> Object:
    """The object has none of these properties."""
    return {"type": "object", "properties": dict.fromkeys(names, False)}


def dependent(name: str, needed: Json, *, only_objects: bool) -> Object:
    """Whoever has a property satisfies a schema, or has other properties, too."""
    if isinstance(needed, list):
        then: Object = {"type": "object", "required": [name, *needed]}
    else:
        then = {"type": "object", "required": [name], "allOf": [needed]}
    return {"anyOf": [absent([name]), then, *_no_object(only_objects)]}


def counted(schema: Object, *, only_objects: bool) -> Object | None:
    """`minProperties` and `maxProperties`, where not all properties are required."""
    required = list(dict.fromkeys(schema.get("required", ())))
    declared = [n for n, each in schema.get("properties", {}).items() if each is not False]
    optional = [name for name in declared if name not in required]
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    least = int(schema.get("minProperties", 0)) - len(required)
    most = schema.get("maxProperties")
    room = None if most is None else int(most) - len(required)
    if room is not None and closed and room >= len(optional):
        room = None
    if room is None:
        if least <= 0:
            return {}
        options = _at_least(optional, least, closed=closed)
    else:
        options = _subsets(optional, least, room, closed=closed)
    if options is None:
        return None
    bounds: Object = {} if closed else {"minProperties": max(least, 0) + len(required)}
    if room is not None and not closed:
        bounds["maxProperties"] = room + len(required)
    found = [
        absent([n for n in without if n not in present])
        | ({"required": present} if present else {})
        | (bounds if full else {})
        for present, without, full in options
    ]
    return {"anyOf": [*found, *_no_object(only_objects)]}


# Which properties there are, which there are not, and whether all are one or the other.
_Option = tuple[list[str], list[str], bool]


def _at_least(optional: list[str], least: int, *, closed: bool) -> list[_Option] | None:
    """`least` of the optional ones, or fewer and others: by the first of them that are there."""
    if len(optional) > MOST_PROPERTIES or comb(len(optional) + 1, least) > MOST_OPTIONS:
        return None
    found: list[_Option] = []
    for chosen in combinations(range(len(optional)), least):
        present = [optional[n] for n in chosen]
        without = [name for name in optional[: chosen[-1]] if name not in present]
        found.append((present, without, False))
    for few in range(0 if closed else least):
        found += (
            (list(names), [n for n in optional if n not in names], True)
            for names in combinations(optional, few)
        )
    return found if len(found) <= MOST_OPTIONS else None


def _subsets(optional: list[str], least: int, most: int, *, closed: bool) -> list[_Option] | None:
    """Every set of optional ones that is not too large."""
    sizes = range(max(least, 0) if closed else 0, min(most, len(optional)) + 1)
    if sum(comb(len(optional), size) for size in sizes) > MOST_OPTIONS:
        return None
    return [
        (list(names), [n for n in optional if n not in names], True)
        for size in sizes
        for names in combinations(optional, size)
    ]


def _no_object(only_objects: bool) -> list[Object]:
    others = ["null", "boolean", "number", "string", "array"]
    return [] if only_objects else [{"type": others}]


class Evaluated:
    """The properties and items that a schema looks at, with all that applies in the same place."""

    def __init__(self, defs: dict[str, Json], prefix: str) -> None:
        self.names: dict[str, None] = {}
        self.patterns: dict[str, None] = {}
        self.items = 0
        self.all_names = self.all_items = False
        self.contains = False  # which items are looked at depends on what they are
        self.exact = True  # False: it depends on the value
        self._defs, self._prefix = defs, prefix
        self._seen: set[str] = set()

    def add(self, schema: Json) -> None:
        """Add what a schema looks at, `unevaluated...` left out."""
        if not isinstance(schema, dict):
            return
        self.names |= dict.fromkeys(schema.get("properties", ()))
        self.patterns |= dict.fromkeys(schema.get("patternProperties", ()))
        self.items = max(self.items, len(schema.get("prefixItems", ())))
        self.all_names = self.all_names or "additionalProperties" in schema
        self.all_items = self.all_items or "items" in schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._seen:
            self._seen.add(reference)
            self.add(self._defs[reference.removeprefix(self._prefix)])
        for each in schema.get("allOf", ()):
            self.add(each)
        for each in _conditional(schema):
            self.exact = False
            before = self.all_names, self.all_items
            self.add(each)
            # Under a condition, all may be looked at: then nothing is certain.
            if (self.all_names, self.all_items) != before:
                self.exact = False
        self.contains = self.contains or "contains" in schema
        if {"contains", "unevaluatedProperties", "unevaluatedItems"} & schema.keys():
            self.exact = False


def _conditional(schema: Object) -> Iterator[Json]:
    for keyword in ("anyOf", "oneOf"):
        yield from schema.get(keyword, ())
    for keyword in ("if", "then", "else"):
        if keyword in schema:
            yield schema[keyword]
    yield from schema.get("dependentSchemas", {}).values()
