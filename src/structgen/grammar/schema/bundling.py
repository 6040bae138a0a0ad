"""A schema of any draft as one of 2020-12 without annotations, whose references all lead to $defs.

Holds  the bundle accepts what the document accepts. Parts that no finite value satisfies are false.
Used   by `relaxing`.
"""

from __future__ import annotations

import msgspec

from structgen.grammar.schema.keywords import (
    NAMED,
    PREFIX,
    SCHEMA,
    SCHEMAS,
    Draft,
    Json,
    known,
    without,
)
from structgen.grammar.schema.reading import Document, pointer, refusal
from structgen.grammar.schema.references import References


class Bundle(msgspec.Struct, frozen=True):
    """A schema in normal form.

    root      of 2020-12; no annotations
    defs      what its references lead to, by name
    paths     where each of these was, as a JSON pointer
    ends      whether a finite value may satisfy it
    dynamic   of each `$dynamicRef`, which only the validator follows and which stands where the
              schema has it, the names of all that it may lead to
    """

    root: Json
    defs: dict[str, Json]
    paths: dict[str, str]
    dynamic: dict[str, set[str]]
    ends: bool = True


def bundle(document: Document) -> Bundle:
    """Bring a document to its normal form. Raises `ConstraintError`, naming the path."""
    walk = _Walk(document)
    root = walk.schema(document.root, "")
    while walk.todo:
        name, schema, path = walk.todo.pop()
        walk.defs[name] = walk.schema(schema, path)
    endless = _endless(walk.defs)
    root = without(root, endless)
    defs = {name: without(schema, endless) for name, schema in walk.defs.items()}
    ends = _ends(root, {name: name not in endless for name in defs})
    return Bundle(root, defs, walk.paths, walk.dynamic, ends)


class _Walk:
    """One walk over a document."""

    def __init__(self, document: Document) -> None:
        self.defs: dict[str, Json] = {}
        self.paths: dict[str, str] = {}
        self.todo: list[tuple[str, Json, str]] = []
        self.dynamic: dict[str, set[str]] = {}
        self._draft = document.draft
        self._references = References(document.root, document.draft)
        self._names: dict[int, str] = {}

    def schema(self, schema: Json, path: str) -> Json:
        """A schema in normal form; `path` is its place."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refusal(path, f"expected an object, true or false, got {schema!r:.80}")
        if self._draft <= Draft.DRAFT_7 and isinstance(schema.get("$ref"), str):
            # Nothing beside a reference counts there.
            return {"$ref": self._reference(schema["$ref"], schema, f"{path}/$ref")}
        return self._keywords(schema, path)

    def _keywords(self, schema: dict[str, Json], path: str) -> dict[str, Json]:
        found: dict[str, Json] = {}
        more: list[Json] = []
        for keyword, value in schema.items():
            if not known(keyword, self._draft):
                continue
            match keyword:
                case "$ref":
                    found["$ref"] = self._reference(value, schema, f"{path}/$ref")
                case "items" | "additionalItems" | "prefixItems":
                    found |= self._items(keyword, value, schema, path)
                case "exclusiveMinimum" | "exclusiveMaximum" if isinstance(value, bool):
                    bound = keyword.removeprefix("exclusive").lower()
                    if value and bound in schema:
                        found[keyword] = schema[bound]
                case "dependencies":
                    more.append(self._dependencies(value, path))
                case "$dynamicRef" | "$recursiveRef":
                    found["$dynamicRef"] = value
                    self._follow(value, schema, f"{path}/{keyword}")
                case _:
                    found[keyword] = self._value(keyword, value, path)
        if more:
            found["allOf"] = [*found.get("allOf", ()), *more]
        return found

    def _value(self, keyword: str, value: Json, path: str) -> Json:
        if keyword in SCHEMA:
            return self.schema(value, f"{path}/{keyword}")
        if keyword in SCHEMAS:
            return [self.schema(v, f"{path}/{keyword}/{n}") for n, v in enumerate(value)]
        if keyword in NAMED:
            return {
                name: self.schema(v, f"{path}{pointer([keyword, name])}")
                for name, v in value.items()
            }
        return value

    def _items(
        self, keyword: str, value: Json, schema: dict[str, Json], path: str
    ) -> dict[str, Json]:
        listed = isinstance(schema.get("items"), list)
        if keyword == "prefixItems" or (keyword == "items" and listed):
            inner = [self.schema(v, f"{path}/{keyword}/{n}") for n, v in enumerate(value)]
            return {"prefixItems": inner} if inner else {}
        if keyword == "items" or listed:
            return {"items": self.schema(value, f"{path}/{keyword}")}
        return {}

    def _dependencies(self, value: dict[str, Json], path: str) -> dict[str, Json]:
        lists = {name: needed for name, needed in value.items() if isinstance(needed, list)}
        schemas = {
            name: self.schema(needed, f"{path}{pointer(['dependencies', name])}")
            for name, needed in value.items()
            if not isinstance(needed, list)
        }
        return {"dependentRequired": lists, "dependentSchemas": schemas}

    def _follow(self, reference: str, schema: Json, path: str) -> None:
        """Note all that a dynamic reference may lead to."""
        names = self.dynamic.setdefault(reference, set())
        for target in self._references.targets(reference, schema, path):
            names.add(self._name(target, path))

    def _reference(self, reference: str, schema: Json, path: str) -> str:
        target = self._references.target(reference, schema, path)
        place = reference[1:] if reference.startswith("#/") else path
        return PREFIX + self._name(target, place)

    def _name(self, target: Json, place: str) -> str:
        """The name in `$defs` of what a reference leads to; `place` is where to say it is."""
        key = id(target)
        if isinstance(target, bool):
            key = -1 - target
        if key not in self._names:
            self._names[key] = name = f"d{len(self._names)}"
            self.paths[name] = place
            self.todo.append((name, target, place))
        return self._names[key]


# ---------------------------------------------------------------- what never ends


def _endless(defs: dict[str, Json]) -> set[str]:
    """The names that no finite value satisfies: each such value would have to be inside itself."""
    ending = dict.fromkeys(defs, False)
    changed = True
    while changed:
        changed = False
        for name, schema in defs.items():
            if not ending[name] and _ends(schema, ending):
                ending[name] = changed = True
    return {name for name, ends in ending.items() if not ends}


def _ends(schema: Json, ending: dict[str, bool]) -> bool:
    """Whether a finite value may satisfy a schema, where that is known of the names."""
    if isinstance(schema, bool):
        return schema
    reference = schema.get("$ref")
    return (
        (reference is None or ending[reference.removeprefix(PREFIX)])
        and all(_ends(each, ending) for each in schema.get("allOf", ()))
        and all(
            any(_ends(each, ending) for each in schema[keyword])
            for keyword in ("anyOf", "oneOf")
            if keyword in schema
        )
        and all(_ends(each, ending) for each in _needed(schema))
    )


def _needed(schema: dict[str, Json]) -> list[Json]:
    """The schemas of what is inside of every value, as far as the type says."""
    types = schema.get("type")
    if types == "object":
        properties = schema.get("properties", {})
        return [properties.get(name, True) for name in schema.get("required", ())]
    if types == "array":
        first = schema.get("prefixItems", [])
        needed = int(schema.get("minItems", 0))
        more = [schema.get("items", True)] if needed > len(first) else []
        return [*first[:needed], *more]
    return []
