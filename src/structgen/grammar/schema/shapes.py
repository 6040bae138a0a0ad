"""What can be read off a schema by looking at it: its types, values, ways, names, lists.

Used   by `weakening`.
"""

from __future__ import annotations

import json
from itertools import permutations
from math import prod

from structgen.grammar.schema import patterns
from structgen.grammar.schema.keywords import Json
from structgen.grammar.schema.numbers import is_held, plain

MOST_PERMUTED = 4  # values of which lists without repeats are written out

Object = dict[str, Json]


def types_of(schema: Object) -> set[str] | None:
    """The types that a schema names, if it does."""
    types = schema.get("type")
    return None if types is None else {types} if isinstance(types, str) else set(types)


def within(schema: Json, around: Object) -> Json:
    """A schema without the options that cannot be, as `around` is satisfied, too."""
    if not isinstance(schema, dict):
        return schema
    types = _kinds(around)
    found = dict(schema)
    if "anyOf" in schema:
        options = [within(each, around) for each in schema["anyOf"]]
        found["anyOf"] = [each for each in options if each is not False]
        if not found["anyOf"]:
            return False
        if found.keys() == {"anyOf"} and len(found["anyOf"]) == 1:
            return found["anyOf"][0]
    if types is not None and (own := _kinds(schema)) is not None and not types & own:
        return False
    inside = around.get("properties", {})
    if "properties" in schema:
        found["properties"] = {
            name: within(each, inside[name]) if isinstance(inside.get(name), dict) else each
            for name, each in schema["properties"].items()
        }
    return found


def _kinds(schema: Object) -> set[str] | None:
    """The types of the values that satisfy a schema, integers as numbers, where that is plain."""
    types = types_of(schema)
    if types is None and (
        values := schema.get("enum", [schema["const"]] if "const" in schema else None)
    ):
        types = {type_of(value) for value in values}
    return None if types is None else {"number" if t == "integer" else t for t in types}


def width(schema: Json) -> int:
    """In how many ways a weakened schema can be satisfied, as it is written."""
    if not isinstance(schema, dict):
        return 1
    ways = prod(width(each) for each in schema.get("allOf", ()))
    return ways * max(1, sum(width(each) for each in schema.get("anyOf", ())))


def type_of(value: object) -> str:
    """The type of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def values_of(schema: Json) -> list[Json] | None:
    """All values that may satisfy a schema, each once, if it lists them."""
    if not isinstance(schema, dict):
        return None
    if schema.get("type") == "boolean":
        return [False, True]
    if schema.keys() <= {"enum", "type"} and "enum" in schema:
        types = types_of(schema)
        if types is None or (
            types == {"string"} and all(isinstance(v, str) for v in schema["enum"])
        ):
            values = map(plain, schema["enum"])
            return list({json.dumps(each, sort_keys=True): each for each in values}.values())
    return None


def words_of(schema: Json) -> list[str] | None:
    """The strings that satisfy a schema, if it lists its values and says nothing else of them."""
    if not isinstance(schema, dict) or schema.keys() - {"enum", "const", "type"}:
        return None
    if not {"enum", "const"} & schema.keys():
        return None
    types = types_of(schema)
    if types is not None and "string" not in types:
        return []
    words = [word for word in schema.get("enum", [schema.get("const")]) if isinstance(word, str)]
    return [word for word in words if word == schema.get("const", word)]


def excluded(value: Json, types: set[str] | None) -> str | None:
    """A pattern for all strings but some, where there are only strings."""
    words = words_of(value) if types == {"string"} else None
    return None if words is None else patterns.other_than(words)


def allowed_names(value: Object) -> str | None:
    """A pattern for exactly the names that a schema allows; None if there is none, or no name."""
    types = types_of(value)
    if types is not None and "string" not in types:
        return None
    rest = {key: each for key, each in value.items() if key not in {"type", "format"}}
    found = None
    if (words := words_of(rest)) is not None:
        found = patterns.one_of(words) if words else None
    elif rest.keys() == {"not"}:
        found = excluded(rest["not"], {"string"})
    elif rest.keys() == {"pattern"}:
        translated = patterns.translated(rest["pattern"])
        found = translated.source if translated is not None and translated.exact else None
    elif rest and rest.keys() <= {"minLength", "maxLength"}:
        found = _of_length(rest)
    return None if found is None else f"^(?:{found})$"


def _of_length(bounds: Object) -> str | None:
    least = int(bounds.get("minLength", 0))
    most = int(bounds["maxLength"]) if "maxLength" in bounds else None
    return None if most is not None and most < least else patterns.of_length(least, most)


def has_loose_names(schema: Object) -> bool:
    """Whether which keys have a pattern is more than the mask knows."""
    found = [patterns.translated(each) for each in schema.get("patternProperties", ())]
    if all(each is not None and each.exact for each in found):
        return False
    closed = schema.get("additionalProperties") is False and len(found) == 1
    return not (closed and None not in found)


def unique(schema: Object, *, only_arrays: bool) -> tuple[bool, list[Json]]:
    """What `uniqueItems` adds to a schema, after whether that is all of it.

    only_arrays   the schema is for no other values
    """
    most = schema.get("maxItems")
    if most is not None and most <= 1:
        return True, []
    values = values_of(schema.get("items"))
    if values is None or "prefixItems" in schema:
        return False, []
    most = len(values) if most is None else min(int(most), len(values))
    listed = len(values) <= MOST_PERMUTED and all(map(is_held, values))
    if not listed or not only_arrays:
        return False, [{"maxItems": most}]
    lists = [
        list(each)
        for size in range(int(schema.get("minItems", 0)), most + 1)
        for each in permutations(values, size)
    ]
    return True, [{"enum": lists} if lists else False]
