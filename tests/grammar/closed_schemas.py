"""JSON Schemas of the forms that `gate` knows, at random, and values for them, right and wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ("a", "b", "ab", "Größe", 'q"', "\\", "", "/x", "名前")
TEXTS = ("", "a", "ab", 'say "hi"', "back\\slash", "Größe 😀", "x/y", "tab\tnewline\n", "\x7f")
PATTERNS = (
    ("^[a-z]+$", ("a", "zz"), ("", "A", "a1")),
    ("^[A-Z]{2}-[0-9]{1,3}$", ("AB-1", "XY-123"), ("AB-", "AB-1234", "ABC-1")),
    ("^a?b*[0-9_ -]$", ("ab ", "bb-", "7"), ("a", "aab_", "")),
)
UUIDS = ("123e4567-e89b-12d3-a456-426614174000", "F" * 8 + "-0000-1111-2222-" + "a" * 12)
SEPARATORS = (None, (",", ":"), (", ", ": "), ("  , ", " :   "))

_NUMBERS = st.integers(-30, 30) | st.sampled_from([-(2**52), 2**52, 10**6, -999])


@st.composite
def _whole(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "integer"}
    low, high = sorted([draw(_NUMBERS), draw(_NUMBERS)])
    if draw(st.booleans()):
        schema["minimum"] = low
    elif draw(st.booleans()):
        schema["exclusiveMinimum"] = low - 1
    if draw(st.booleans()):
        schema["maximum"] = high
    elif draw(st.booleans()):
        schema["exclusiveMaximum"] = high + 1
    return schema


_SCALARS = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("string", "number", "boolean", "null")]),
    _whole(),
    st.sampled_from([{"type": "string", "pattern": pattern} for pattern, _, _ in PATTERNS]),
    st.just({"type": "string", "format": "uuid"}),
    st.lists(st.sampled_from([*TEXTS[:7], 0, 7, 77, -5, True, None]), min_size=1, max_size=5).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["yes", 12, False, None]).map(lambda value: {"const": value}),
    st.just({"type": ["string", "null"]}),
)


@st.composite
def _object(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    return {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": [name for name in names if draw(st.booleans())],
        "additionalProperties": False,
    }


@st.composite
def _array(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    if draw(st.booleans()):
        items = draw(st.lists(inner, max_size=3))
        bounds = {"minItems": len(items), "maxItems": len(items)}
        return {"type": "array", "prefixItems": items, "items": False} | bounds
    low = draw(st.integers(0, 2))
    schema = {"type": "array", "items": draw(inner), "minItems": low}
    if draw(st.booleans()):
        schema["maxItems"] = low + draw(st.integers(0, 2))
    return schema


MOST_PATTERNS = 3  # with more, their repeats together can be beyond what the gate takes


def _has_few_patterns(schema: Schema) -> bool:
    return json.dumps(schema).count('"pattern"') <= MOST_PATTERNS


SCHEMAS = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        _object(inner),
        _array(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda forms: {"anyOf": forms}),
    ),
    max_leaves=6,
).filter(_has_few_patterns)


def value_of(schema: Schema, draw: random.Random) -> Any:
    """A value that is valid, its keys in the schema's order."""
    if "anyOf" in schema:
        return value_of(draw.choice(schema["anyOf"]), draw)
    if "const" in schema or "enum" in schema:
        return draw.choice(schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    return _VALUES[draw.choice(kind) if isinstance(kind, list) else kind](schema, draw)


def _record(schema: Schema, draw: random.Random) -> dict[str, Any]:
    return {
        name: value_of(each, draw)
        for name, each in schema["properties"].items()
        if name in schema["required"] or draw.random() < 0.5
    }


def _list(schema: Schema, draw: random.Random) -> list[Any]:
    if "prefixItems" in schema:
        return [value_of(each, draw) for each in schema["prefixItems"]]
    low = schema["minItems"]
    count = draw.randint(low, schema.get("maxItems", low + 2))
    return [value_of(schema["items"], draw) for _ in range(count)]


def _string(schema: Schema, draw: random.Random) -> str:
    for pattern, good, _ in PATTERNS:
        if schema.get("pattern") == pattern:
            return draw.choice(good)
    return draw.choice(UUIDS if "format" in schema else TEXTS)


def _integer(schema: Schema, draw: random.Random) -> int:
    low = max(schema.get("minimum", -(2**60)), schema.get("exclusiveMinimum", -(2**60)) + 1)
    high = min(schema.get("maximum", 2**60), schema.get("exclusiveMaximum", 2**60) - 1)
    found: int = draw.choice([low, high, draw.randint(low, high), min(max(low, 7), high)])
    return found


_VALUES: dict[str, Callable[[Schema, random.Random], Any]] = {
    "object": _record,
    "array": _list,
    "string": _string,
    "integer": _integer,
    "number": lambda _, draw: draw.choice([0, -3, 2.5, 1e30, -1.25e-7, 10**20]),
    "boolean": lambda _, draw: draw.random() < 0.5,
    "null": lambda _, __: None,
}


def spoiled(value: Any, draw: random.Random) -> Any:
    """A value with a change somewhere: it may be valid all the same."""
    if value and isinstance(value, dict) and draw.random() < 0.7:
        name = draw.choice(list(value))
        rest = {each: inner for each, inner in value.items() if each != name}
        return draw.choice([rest, {**value, "else": 1}, _changed(value, name, draw)])
    if value and isinstance(value, list) and draw.random() < 0.7:
        place = draw.randrange(len(value))
        less = value[:place] + value[place + 1 :]
        return draw.choice([less, [*value, value[place]], _changed(value, place, draw)])
    if type(value) is int and draw.random() < 0.6:
        return value + draw.choice([-1, 1, 10, -1000, 2**54])
    return draw.choice(_OTHERS)


_OTHERS = [None, True, 0, 5, -7, 2.5, "", "a", {}, [], [1], {"a": 1}, UUIDS[0][:-1]]
_OTHERS += [text for _, good, bad in PATTERNS for text in (*good, *bad)]


def _changed(value: Any, place: Any, draw: random.Random) -> Any:
    """A dict or a list with a change inside."""
    new = value.copy()
    new[place] = spoiled(value[place], draw)
    return new


def text_of(value: Any, separators: tuple[str, str] | None) -> str:
    """JSON text, laid out like that."""
    return json.dumps(value, ensure_ascii=False, separators=separators or (", ", ": "))
