"""What can be read off a schema by looking at it: its types, its values, its ways, its names.

Used   by `weakening`.
"""

from __future__ import annotations

from math import prod

from structgen.grammar.schema import patterns
from structgen.grammar.schema.keywords import Json

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
    """All values that satisfy a schema, if it lists them."""
    if not isinstance(schema, dict):
        return None
    if schema.get("type") == "boolean":
        return [False, True]
    if schema.keys() <= {"enum", "type"} and "enum" in schema:
        types = types_of(schema)
        if types is None or (
            types == {"string"} and all(isinstance(v, str) for v in schema["enum"])
        ):
            return list({str(type(v)) + str(v): v for v in schema["enum"]}.values())
    return None


def excluded(value: Json, types: set[str] | None) -> str | None:
    """A pattern for all strings but some, where there are only strings."""
    if types != {"string"} or not isinstance(value, dict):
        return None
    words = value.get("enum", [value["const"]] if "const" in value else None)
    if words is None or value.keys() - {"enum", "const", "type"}:
        return None
    return patterns.other_than(word for word in words if isinstance(word, str))


def allowed_names(value: Object) -> str | None:
    """A pattern for the names that a schema allows; noted if it allows others, too."""
    rest = value.keys() - {"type", "format"}
    if rest == {"not"} and isinstance(value["not"], dict):
        words = excluded(value["not"], {"string"})
        return words and f"^(?:{words})$"
    if rest == {"pattern"}:
        found = patterns.translated(value["pattern"])
        return f"^(?:{found.source})$" if found is not None and found.exact else None
    if rest in ({"enum"}, {"const"}):
        words = value.get("enum", [value.get("const")])
        names = [word for word in words if isinstance(word, str)]
        return f"^(?:{patterns.one_of(names)})$" if names else None
    if rest and rest <= {"minLength", "maxLength"}:
        most = value.get("maxLength")
        length = patterns.of_length(int(value.get("minLength", 0)), most and int(most))
        return f"^(?:{length})$"
    return None


def has_loose_names(schema: Object) -> bool:
    """Whether which keys have a pattern is more than the mask knows."""
    found = [patterns.translated(each) for each in schema.get("patternProperties", ())]
    if all(each is not None and each.exact for each in found):
        return False
    closed = schema.get("additionalProperties") is False and len(found) == 1
    return not (closed and None not in found)
