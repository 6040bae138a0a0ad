"""Weakening a schema further, where the masks' backend refuses it: the least part that helps.

Owns   the reading of the backend's errors.
Holds  what comes out compiles, and accepts no less than what went in.
Used   by `relaxing`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from structgen.grammar.schema.keywords import PREFIX, Json, inner, without
from structgen.grammar.schema.numbers import remainders, too_many
from structgen.grammar.schema.reading import pointer, refusal

MOST_TRIED = 1_500_000  # characters of all schemas that are tried
MOST_ROUNDS = 24
# What is given up first, and with what else: a keyword is not right without those that it looks at.
_DROPPED = (
    ("pattern",),
    ("format",),
    ("multipleOf",),
    ("minProperties", "maxProperties"),
    ("patternProperties", "additionalProperties"),
    ("minItems", "maxItems"),
    ("minLength", "maxLength"),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ("allOf",),
    ("anyOf",),
    ("enum",),
    ("$ref",),
)
_OTHERS = (
    ("prefixItems", "items"),
    ("properties", "patternProperties", "additionalProperties", "required"),
    ("const",),
)


class Settled:
    """A weakened schema with its definitions, until it compiles."""

    def __init__(
        self, root: Json, defs: dict[str, Json], paths: dict[str, str], options: dict[str, Any]
    ) -> None:
        self.root, self.defs, self.notes = root, dict(defs), dict[str, None]()
        self._paths, self._options = paths, options
        self._tried = 0

    def settle(self) -> str:
        """Weaken what is refused. Returns what stands behind `%json`; raises `ConstraintError`."""
        self._bound_steps()
        error = ""
        for _ in range(MOST_ROUNDS):
            error = self._without_empty()
            if not error:
                return self._text(self.root, self.defs)
            self._weaken(error)
        raise refusal("", f"the masks' backend refuses it: {_reason(error)}; a simpler one may do")

    def _bound_steps(self) -> None:
        """Give up steps of which the backend would take long to make a mask; it does not refuse."""
        places = [place for each in (self.root, *self.defs.values()) for place in _steps(each)]
        if dropped := too_many(places):
            self.root = self._stepless(self.root, dropped, "")
            for name, schema in self.defs.items():
                self.defs[name] = self._stepless(schema, dropped, self._paths[name])

    def _stepless(self, schema: Json, dropped: set[int], path: str) -> Json:
        found = schema
        for steps, each in inner(schema):
            less = self._stepless(each, dropped, path + pointer(list(steps)))
            found = _with(found, steps, less)
        if isinstance(found, dict) and remainders(found.get("multipleOf", 1)) in dropped:
            rest = {key: value for key, value in found.items() if key != "multipleOf"}
            return self._noted(found, rest, path)
        return found

    def _without_empty(self) -> str:
        """Make definitions that nothing satisfies false. Returns what is refused besides.

        One after the other: the backend names the one that is empty by itself, and whether those
        that refer to it are is not known before it is false. Raises `ConstraintError` if the whole
        is empty.
        """
        while _is_empty(error := self._error(self._text(self.root, self.defs))):
            name = _culprit(error)
            if name not in self.defs:
                raise refusal("", f"nothing satisfies it: {_reason(error)}")
            if self._tried > MOST_TRIED:
                break
            self.defs[name] = False
            self.root = without(self.root, {name})
            self.defs = {each: without(schema, {name}) for each, schema in self.defs.items()}
        return error

    def _weaken(self, error: str) -> None:
        """Give something up in the smallest part that is refused by itself."""
        if self._tried > MOST_TRIED:
            self.root, self.defs = self._bare({**self.root}, ""), {}
            return
        open_defs = dict.fromkeys(self.defs, True)
        for name in self.defs:
            if self._fails(self.defs[name], open_defs):
                self.defs[name] = self._weakened(self.defs[name], open_defs, self._paths[name])
                return
        for defs in (open_defs, self.defs):
            if self._fails(self.root, defs):
                self.root = self._weakened(self.root, defs, "")
                return
        named = _culprit(error)
        name = named if named in self.defs else next(iter(self.defs))
        self.defs[name] = self._weakened(self.defs[name], self.defs, self._paths[name])

    def _weakened(self, schema: Json, defs: dict[str, Json], path: str) -> Json:
        if not isinstance(schema, dict):
            return schema
        if self._tried > MOST_TRIED:
            return self._bare(schema, path)
        for steps, each in inner(schema):
            if self._fails(each, defs):
                weaker = self._weakened(each, defs, path + pointer(list(steps)))
                return _with(schema, steps, weaker)
        if (shorter := self._shortened(schema, defs, path)) is not None:
            return shorter
        for keywords in (*_DROPPED, *_OTHERS):
            rest = {key: value for key, value in schema.items() if key not in keywords}
            if len(rest) < len(schema) and not self._fails(rest, defs):
                return self._noted(schema, rest, path)
        return self._bare(schema, path)

    def _shortened(
        self, schema: dict[str, Json], defs: dict[str, Json], path: str
    ) -> dict[str, Json] | None:
        """The schema with fewer of what has to hold at once, if that helps."""
        parts = schema.get("allOf", ())
        length = len(parts) // 2
        while length:
            rest = {**schema, "allOf": parts[:length]}
            if not self._fails(rest, defs):
                self.notes[f"#{path}: allOf"] = None
                return rest
            length //= 2
        return None

    def _bare(self, schema: dict[str, Json], path: str) -> Json:
        return self._noted(schema, {k: v for k, v in schema.items() if k == "type"}, path)

    def _noted(self, schema: dict[str, Json], rest: dict[str, Json], path: str) -> Json:
        for keyword in schema:
            if keyword not in rest:
                self.notes[f"#{path}: {keyword}"] = None
        return rest

    def _fails(self, schema: Json, defs: dict[str, Json]) -> bool:
        error = self._error(self._text(schema, defs))
        return bool(error) and not _is_empty(error)

    def _error(self, text: str) -> str:
        """What the backend has against a schema; "" if nothing."""
        self._tried += len(text)
        found: str = LLMatcher.validate_grammar(f"start: %json {text}")
        return found

    def _text(self, schema: Json, defs: dict[str, Json]) -> str:
        whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
        framed = {**whole, **({"$defs": defs} if defs else {}), "x-guidance": self._options}
        return json.dumps(framed, ensure_ascii=False)


def _steps(schema: Json, name: str | None = None) -> Iterator[tuple[str | None, int]]:
    """The steps inside of a schema, as `remainders`, each with the nearest property around it."""
    for (keyword, *rest), each in inner(schema):
        if keyword == "properties":
            around: str | None = rest[0]
        else:  # what a pattern is for may have any name
            around = None if keyword in {"patternProperties", "additionalProperties"} else name
        yield from _steps(each, around)
    if isinstance(schema, dict) and "multipleOf" in schema:
        yield name, remainders(schema["multipleOf"])


def _is_empty(error: str) -> bool:
    return "Unsatisfiable schema" in error


def _culprit(error: str) -> str:
    """The definition that an error is about; "" if it is the whole."""
    return error.partition(f"processing json-schema:///{PREFIX}")[2].split("\n")[0].strip()


def _reason(error: str) -> str:
    first = error.strip().partition("\n")[0]
    return first.rpartition("JSON schema: ")[2][:200]


def _with(schema: dict[str, Json], steps: tuple[str, ...], weaker: Json) -> dict[str, Json]:
    """A schema with another one where the steps lead."""
    first, *rest = steps
    value = schema[first]
    if not rest:
        return {**schema, first: weaker}
    if isinstance(value, list):
        return {**schema, first: [weaker if str(n) == rest[0] else v for n, v in enumerate(value)]}
    return {**schema, first: {**value, rest[0]: weaker}}
