"""The keywords of JSON Schema: from which draft to which each is one, and where schemas are in it.

Owns   the ways through a schema. A property may have any name, also that of a keyword: so nothing
       else may go by the keys that it meets.
Used   by everything here that looks into schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from types import MappingProxyType
from typing import Any

Json = Any  # a value as `json` reads it

PREFIX = "#/$defs/"  # of the references of a schema in normal form; see `bundling`


class Draft(IntEnum):
    """A draft of JSON Schema; later ones compare greater."""

    DRAFT_4 = 4
    DRAFT_6 = 6
    DRAFT_7 = 7
    DRAFT_2019_09 = 2019
    DRAFT_2020_12 = 2020


# The first and the last draft of each keyword that constrains. Elsewhere it is an annotation.
_ALWAYS = (Draft.DRAFT_4, Draft.DRAFT_2020_12)
_SINCE_6 = (Draft.DRAFT_6, Draft.DRAFT_2020_12)
_SINCE_7 = (Draft.DRAFT_7, Draft.DRAFT_2020_12)
_SINCE_2019 = (Draft.DRAFT_2019_09, Draft.DRAFT_2020_12)
_SPANS = MappingProxyType(
    dict.fromkeys(
        (
            *("$ref", "type", "enum", "allOf", "anyOf", "oneOf", "not", "format", "pattern"),
            *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum"),
            *("exclusiveMaximum", "multipleOf", "items", "minItems", "maxItems", "uniqueItems"),
            *("properties", "patternProperties", "additionalProperties", "required"),
            *("minProperties", "maxProperties"),
        ),
        _ALWAYS,
    )
    | dict.fromkeys(("const", "contains", "propertyNames"), _SINCE_6)
    | dict.fromkeys(("if", "then", "else"), _SINCE_7)
    | dict.fromkeys(
        (
            *("dependentRequired", "dependentSchemas", "minContains", "maxContains"),
            *("unevaluatedItems", "unevaluatedProperties"),
        ),
        _SINCE_2019,
    )
    | dict.fromkeys(("prefixItems", "$dynamicRef"), (Draft.DRAFT_2020_12, Draft.DRAFT_2020_12))
    | {
        "$recursiveRef": (Draft.DRAFT_2019_09, Draft.DRAFT_2019_09),
        "additionalItems": (Draft.DRAFT_4, Draft.DRAFT_2019_09),
        # Later drafts have it only for old schemas; then it is meant.
        "dependencies": (Draft.DRAFT_4, Draft.DRAFT_2020_12),
    }
)

SCHEMA = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "else", "if", "not", "then"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    )
)
SCHEMAS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
NAMED = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties", "dependencies")
)


def known(keyword: str, draft: Draft) -> bool:
    """Whether a keyword constrains in a draft."""
    span = _SPANS.get(keyword)
    return span is not None and span[0] <= draft <= span[1]


def inner(schema: Json) -> Iterator[tuple[tuple[str, ...], Json]]:
    """The schemas right inside of a schema, each with the steps that lead to it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in SCHEMA or (keyword == "items" and not isinstance(value, list)):
            yield (keyword,), value
        elif (keyword in SCHEMAS or keyword == "items") and isinstance(value, list):
            for index, each in enumerate(value):
                yield (keyword, str(index)), each
        elif keyword in NAMED and isinstance(value, dict):
            for name, each in value.items():
                if isinstance(each, dict | bool):  # not the lists of `dependencies`
                    yield (keyword, name), each


def mapped(schema: Json, change: Callable[[Json], Json]) -> Json:
    """A schema with each schema right inside of it changed."""
    made = dict(schema) if isinstance(schema, dict) else schema
    for (keyword, *rest), each in inner(schema):
        if not rest:
            made[keyword] = change(each)
            continue
        if made[keyword] is schema[keyword]:
            made[keyword] = schema[keyword].copy()
        step = int(rest[0]) if isinstance(made[keyword], list) else rest[0]
        made[keyword][step] = change(each)
    return made


def without(schema: Json, names: Collection[str]) -> Json:
    """A schema in normal form, with references to these definitions false, at any depth."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if reference is not None and reference.removeprefix(PREFIX) in names:
        return False
    return mapped(schema, lambda each: without(each, names))


def referred(schema: Json) -> set[str]:
    """The definitions that a schema in normal form refers to, at any depth."""
    found: set[str] = set()
    todo = [schema]
    while todo:
        each = todo.pop()
        if isinstance(each, dict) and "$ref" in each:
            found.add(each["$ref"].removeprefix(PREFIX))
        todo += (inside for _, inside in inner(each))
    return found
