"""Which JSON Schemas xgrammar's mask is exact for, written as it reads them best.

xgrammar compiles nearly every schema, but enforces some keywords only alone, some only in part and
some not at all, without a word. So nothing is handed to it as it came: what is known to be exact
is written anew from the few forms below, with references put in place and annotations left out. As
soon as anything else is met, the whole schema is not for xgrammar, and llguidance masks it.

These forms are exact, and masked alike by both engines:

- objects that are closed by `additionalProperties: false`, their properties and `required`
- arrays of one kind with `minItems` and `maxItems`; tuples of a fixed length
- strings without bounds, as a UUID, or with a pattern of a few plain classes; whole numbers with
  whole bounds
- numbers without bounds, true and false, null; enumerations of texts, whole numbers and these
- `anyOf` by itself, lists of types, references that do not lead back to themselves

Objects that are open are left out: to compile them takes seconds, and `propertyNames`, order and
duplicates are treated in another way. So are recursive schemas, in which masks and matching differ.

Holds  what is given out is within the limits here, which bound the time to compile it (0.3 s), and
       is nothing that xgrammar has a warning for: it would write that past Python to the console.
Used   by `schema`; what is given out is for `xgrammar_matcher`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MOST_DEPTH = 16
MOST_ITEMS = 4096
MOST_OPTIONAL = 12  # properties of one object: a mask inside of a string takes 10 us for each
# In all, and counted wherever they are referred to; `text`: characters of names, values, patterns.
MOST = MappingProxyType(
    {"properties": 64, "values": 200, "text": 8_000, "branches": 16, "repeats": 16}
)
LARGEST = 2**53  # of bounds and whole numbers: what every reader of JSON has exactly


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Before the draft that brings a keyword, it means nothing.
_DRAFTS = MappingProxyType(
    {
        "http://json-schema.org/draft-04/schema": _words("const prefixItems"),
        "http://json-schema.org/draft-06/schema": _words("prefixItems"),
        "http://json-schema.org/draft-07/schema": _words("prefixItems"),
        "https://json-schema.org/draft/2019-09/schema": _words("prefixItems"),
        "https://json-schema.org/draft/2020-12/schema": _words(""),
    }
)
_NUMERIC = _words("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf format")
# The keywords that say something about values of one type only.
_OF_TYPE = MappingProxyType(
    {
        "object": _words(
            "properties required additionalProperties patternProperties propertyNames "
            "minProperties maxProperties dependencies dependentRequired dependentSchemas "
            "unevaluatedProperties"
        ),
        "array": _words(
            "items prefixItems additionalItems minItems maxItems uniqueItems contains minContains "
            "maxContains unevaluatedItems"
        ),
        "string": _words(
            "minLength maxLength pattern format contentEncoding contentMediaType contentSchema"
        ),
        "integer": _NUMERIC,
        "number": _NUMERIC,
        "boolean": _words(""),
        "null": _words(""),
    }
)
_ANYWHERE = _words(
    "$ref $dynamicRef $recursiveRef $anchor $dynamicAnchor $recursiveAnchor $schema $id id "
    "allOf anyOf oneOf not if then else type enum const extends disallow divisibleBy x-guidance"
)
_ASSERTING = _ANYWHERE.union(*_OF_TYPE.values())
_TYPES = MappingProxyType({str: "string", bool: "boolean", int: "integer", type(None): "null"})

_CLASS = r"\[(?:[A-Za-z0-9_ ]|a-z|A-Z|0-9|a-f|A-F)+-?\]"
_PATTERN = re.compile(
    rf"\^(?:(?:[A-Za-z0-9_ -]|{_CLASS})(?:[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?)+\$"
)
# The repeats that each sign counts as; a run of `[a-z]+` makes an automaton grow without measure.
_WEIGHTS = MappingProxyType({"*": 2, "?": 2, "+": 4})
# What is spelled in more ways than one, or has no spelling.
_UNUSUAL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def closed(schema: object) -> str | None:
    """The schema as JSON text that xgrammar masks exactly; None where it may not.

    The layout is another question; see `laid_out`.
    """
    if not isinstance(schema, Mapping):
        return None
    try:
        return json.dumps(_Rewriting(schema).whole(), ensure_ascii=False)
    except (_InexactError, RecursionError):
        return None


def laid_out(separators: tuple[str, str] | None) -> bool:
    """Whether xgrammar writes JSON with these separators; with some, it fails to.

    Without any, it takes at most two characters of white space between tokens, as it should.
    """
    return separators is None or not set("".join(separators)) - set(" ,:")


class _InexactError(Exception):
    """Something that is not known to be exact."""


class _Rewriting:
    """One walk over a schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._counts: dict[str, int] = {}

    def whole(self) -> dict[str, Any]:
        """The schema in the forms that are exact."""
        draft = self._root.get("$schema", "https://json-schema.org/draft/2020-12/schema")
        known = _DRAFTS.get(draft.rstrip("#")) if isinstance(draft, str) else None
        if known is None:
            raise _InexactError
        self._unknown = known
        identity = {"$schema", "$id", "id"}
        root = {key: value for key, value in self._root.items() if key not in identity}
        return self._schema(root, 0, ())

    def _schema(self, node: object, depth: int, inside: tuple[str, ...]) -> dict[str, Any]:
        """One schema. `inside`: the references that lead here."""
        if not isinstance(node, Mapping) or depth > MOST_DEPTH:
            raise _InexactError
        given = _ASSERTING & node.keys()
        if given & self._unknown:
            raise _InexactError
        if given == {"$ref"}:
            return self._referred(node["$ref"], depth, inside)
        if given == {"anyOf"} and isinstance(node["anyOf"], list) and node["anyOf"]:
            self._count(branches=len(node["anyOf"]))
            branches = [self._schema(each, depth + 1, inside) for each in node["anyOf"]]
            return branches[0] if len(branches) == 1 else {"anyOf": branches}
        types = _types(node.get("type"))
        if given - {"type"} in ({"enum"}, {"const"}):
            return self._enumeration(node, types)
        if not types or given & _ANYWHERE != {"type"}:
            raise _InexactError
        self._count(branches=len(types) - 1)
        forms = [self._typed(each, node, depth, inside) for each in types]
        return forms[0] if len(forms) == 1 else {"anyOf": forms}

    def _referred(self, reference: object, depth: int, inside: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(reference, str) or reference in inside:
            raise _InexactError
        parts = reference.split("/")
        if len(parts) != 3 or parts[:2] not in (["#", "$defs"], ["#", "definitions"]):
            raise _InexactError
        found = self._root.get(parts[1])
        if re.search("[%~]", parts[2]) or not isinstance(found, Mapping) or parts[2] not in found:
            raise _InexactError
        return self._schema(found[parts[2]], depth + 1, (*inside, reference))

    def _enumeration(self, node: Mapping[str, Any], types: list[str]) -> dict[str, Any]:
        values = [node["const"]] if "const" in node else node["enum"]
        if not isinstance(values, list) or ("type" in node and not types):
            raise _InexactError
        kept: list[Any] = []
        for value in values:
            if type(value) not in _TYPES or (type(value) is int and abs(value) > LARGEST):
                raise _InexactError
            if type(value) is str:
                self._spelled(value)
            kind = _TYPES[type(value)]
            if not types or kind in types or (kind == "integer" and "number" in types):
                kept.append(value)
        if not kept:
            raise _InexactError
        self._count(values=len(kept))
        return {"enum": kept}

    def _typed(
        self, kind: str, node: Mapping[str, Any], depth: int, inside: tuple[str, ...]
    ) -> dict[str, Any]:
        """What a schema says about values of one type."""
        given = _OF_TYPE[kind] & node.keys()
        match kind:
            case "object" if given <= {"properties", "required", "additionalProperties"}:
                return self._object(node, depth, inside)
            case "array" if given <= {"items", "minItems", "maxItems", "prefixItems"}:
                return self._array(node, depth, inside)
            case "integer" if "multipleOf" not in given and "format" not in given:
                return {"type": kind, **_bounds(node)}
            case "string" if given == {"format"} and node["format"] == "uuid":
                return {"type": kind, "format": "uuid"}
            case "string" if given == {"pattern"}:
                return {"type": kind, "pattern": self._pattern(node["pattern"])}
            case _ if not given:
                return {"type": kind}
        raise _InexactError

    def _object(
        self, node: Mapping[str, Any], depth: int, inside: tuple[str, ...]
    ) -> dict[str, Any]:
        properties, required = node.get("properties", {}), node.get("required", [])
        if node.get("additionalProperties") is not False or not isinstance(properties, Mapping):
            raise _InexactError
        if not isinstance(required, list) or not _declared(required, properties):
            raise _InexactError
        if len(properties.keys() - set(required)) > MOST_OPTIONAL:
            raise _InexactError
        self._count(properties=len(properties))
        for name in properties:
            self._spelled(name)
        return {
            "type": "object",
            "properties": {
                name: self._schema(each, depth + 1, inside) for name, each in properties.items()
            },
            "required": required,
            "additionalProperties": False,
        }

    def _array(
        self, node: Mapping[str, Any], depth: int, inside: tuple[str, ...]
    ) -> dict[str, Any]:
        low = _whole(node.get("minItems", 0), 0, MOST_ITEMS)
        high = _whole(node["maxItems"], low, MOST_ITEMS) if "maxItems" in node else None
        bounds = {"minItems": low} if high is None else {"minItems": low, "maxItems": high}
        if "prefixItems" not in node:
            return {
                "type": "array",
                "items": self._schema(node.get("items"), depth + 1, inside),
            } | (bounds)
        items = node["prefixItems"]
        if not isinstance(items, list) or not low == high == len(items):
            raise _InexactError
        self._count(branches=len(items))
        forms = [self._schema(each, depth + 1, inside) for each in items]
        return {"type": "array", "prefixItems": forms, "items": False} | bounds

    def _pattern(self, pattern: object) -> str:
        if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern):
            raise _InexactError
        for sign, low, high in re.findall(r"([*+?])|\{(\d+)(?:,(\d*))?\}", pattern):
            most = _WEIGHTS[sign] if sign else int(high or low)
            if not sign and not int(low) <= most >= 1:
                raise _InexactError
            self._count(repeats=most)
        self._count(text=len(pattern))
        return pattern

    def _spelled(self, text: str) -> None:
        if _UNUSUAL.search(text):
            raise _InexactError
        self._count(text=len(text))

    def _count(self, **more: int) -> None:
        for name, number in more.items():
            self._counts[name] = self._counts.get(name, 0) + number
            if self._counts[name] > MOST[name]:
                raise _InexactError


def _types(given: object) -> list[str]:
    """The types of a schema, each said once; none where they are not known."""
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not all(type(each) is str for each in types):
        return []
    if not all(each in _OF_TYPE for each in types):
        return []
    return [each for each in dict.fromkeys(types) if each != "integer" or "number" not in types]


def _bounds(node: Mapping[str, Any]) -> dict[str, int]:
    """The bounds of whole numbers, both inclusive."""
    lows = [_whole(node[key]) + more for key, more in _LOWER.items() if key in node]
    highs = [_whole(node[key]) - less for key, less in _UPPER.items() if key in node]
    found = {"minimum": max(lows)} if lows else {}
    if highs:
        found["maximum"] = _whole(min(highs), max(lows, default=-LARGEST))
    return found


_LOWER = MappingProxyType({"minimum": 0, "exclusiveMinimum": 1})
_UPPER = MappingProxyType({"maximum": 0, "exclusiveMaximum": 1})


def _whole(value: object, low: int = -LARGEST, high: int = LARGEST) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _InexactError
    return value


def _declared(names: list[object], properties: Mapping[str, Any]) -> bool:
    return all(isinstance(name, str) and name in properties for name in names)
