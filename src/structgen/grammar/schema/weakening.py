"""A schema in normal form, made as weak as the masks' backend is, and not weaker.

Holds  what satisfies the schema satisfies the result, in a spelling that JSON writers use, but for
       numbers that the backend does not hold: bounds of more digits are taken a little narrower.
       Where the converse does not hold, the keyword is noted with its path. What no mask comes near
       to, as at least a million items, is refused.
Used   by `relaxing`.
"""

from __future__ import annotations

from itertools import combinations

from structgen.grammar.schema import objects, patterns
from structgen.grammar.schema.algebra import Algebra, disjoint
from structgen.grammar.schema.bundling import Bundle
from structgen.grammar.schema.keywords import PREFIX, Json
from structgen.grammar.schema.numbers import (
    HIGHEST,
    LOWEST,
    MOST,
    VacuousError,
    held_bound,
    is_held,
    missed,
    plain,
    steps_of,
)
from structgen.grammar.schema.reading import pointer, refusal
from structgen.grammar.schema.shapes import (
    allowed_names,
    excluded,
    has_loose_names,
    types_of,
    unique,
    width,
    within,
)

MOST_PAIRS = 1_000  # branches of a oneOf that are compared with each other
MOST_OTHERS = 8  # branches that are taken out of another
MOST_WIDTH = 32  # ways through all of them at once
MOST_DEPENDENT = 6  # properties that others depend on: each doubles what is to be matched
MOST_ITEMS = 1_000  # as a bound, each is a rule of the mask
MOST_LENGTH = 20_000

FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        "uri",
    )
)
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# In this order: the keys that a schema declares itself come before those of what applies to it.
_ORDER = ("type", "const", "enum", "properties", "patternProperties", "additionalProperties")

Object = dict[str, Json]


class Weakening:
    """One walk over a bundle."""

    def __init__(self, bundle: Bundle, *, subtracting: bool = True) -> None:
        """`subtracting`: whether to take branches of a oneOf out of each other, which is long."""
        self.subtracting = subtracting
        self.notes: dict[str, None] = {}  # in order, as "path: keyword"
        self._defs = bundle.defs
        self._algebra = Algebra(bundle.defs, certain=not bundle.dynamic)
        self._negating = 0

    def schema(self, schema: Json, path: str, around: Object | None = None) -> Json:
        """Weaken a schema.

        path     its place as a JSON pointer
        around   a schema that is satisfied, too, by what this one is about
        """
        if isinstance(schema, bool):
            return schema
        return _Node(self, schema, path, around or {}).weakened()

    def note(self, path: str, keyword: str) -> None:
        """Note that only the final check enforces a keyword."""
        self.notes[f"#{path}: {keyword}"] = None

    def complement(self, schema: Json, path: str, keyword: str, around: Object) -> Json | None:
        """What does not satisfy a schema, weakened; None if nothing is known of it."""
        found = self._algebra.complement(schema)
        return None if found is None else self.negated(within(found, around), path, keyword)

    def negated(self, found: Json, path: str, keyword: str) -> Json | None:
        """Weaken what came of a negation, whose own negations are final."""
        if self._negating > 1:
            self.note(path, keyword)
            return None
        self._negating += 1
        before = dict(self.notes)
        weak = self.schema(found, path)
        if self.notes != before:
            self.notes = before
            self.note(path, keyword)
        self._negating -= 1
        return weak

    @property
    def algebra(self) -> Algebra:
        """Of the bundle's schemas."""
        return self._algebra

    @property
    def negating(self) -> bool:
        """Whether what is weakened came of a negation."""
        return self._negating > 0

    @property
    def defs(self) -> dict[str, Json]:
        """What references lead to."""
        return self._defs


class _Node:
    """One schema on its way."""

    def __init__(self, walk: Weakening, schema: Object, path: str, around: Object) -> None:
        self._walk, self._schema, self._path = walk, schema, path
        self._around: Object = {}
        self._around |= {key: schema[key] for key in ("type", "properties") if key in schema}
        if "properties" in around:
            self._around["properties"] = around["properties"] | schema.get("properties", {})
        if "type" in around:
            self._around.setdefault("type", around["type"])
        self._found: Object = {}
        self._more: list[Json] = []  # schemas that have to be satisfied, too
        self._types = types_of(self._around)

    def weakened(self) -> Json:
        """The schema, weakened."""
        schema = self._schema
        for keyword in (*_ORDER, *(key for key in schema if key not in _ORDER)):
            if keyword in schema:
                self._keyword(keyword, schema[keyword])
        self._bounds()
        more = [each for each in self._more if each not in (True, {})]
        if False in more:
            return False
        if more:
            self._found["allOf"] = [*self._found.get("allOf", ()), *more]
        return self._found

    def _keyword(self, keyword: str, value: Json) -> None:
        if keyword in {"type", "required", "$ref"}:
            self._found[keyword] = value
        elif keyword in {"properties", "allOf", "anyOf", "prefixItems", "items"}:
            self._found[keyword] = self._inside(keyword, value)
        elif keyword in _COUNTS:
            self._count(keyword, int(value))
        elif keyword in _BOUNDS:
            self._bound(keyword, value)
        elif keyword == "multipleOf":
            self._step(value)
        else:
            self._single(keyword, value)

    def _single(self, keyword: str, value: Json) -> None:
        """Keywords of which a mask knows a part."""
        match keyword:
            case "const" | "enum":
                self._values(keyword, [value] if keyword == "const" else value)
            case "pattern":
                self._pattern(value)
            case "format":
                if isinstance(value, str) and value in FORMATS:
                    self._found[keyword] = value
            case "patternProperties":
                self._name_patterns(value)
            case "additionalProperties":
                if not has_loose_names(self._schema):
                    self._found[keyword] = self._inside(keyword, value)
            case "propertyNames":
                self._property_names(value)
            case "oneOf":
                self._one_of(value)
            case _:
                self._whole(keyword, value)

    def _whole(self, keyword: str, value: Json) -> None:
        """Keywords that a mask does not know."""
        match keyword:
            case "not":
                self._not(value)
            case "if":
                self._if(value)
            case "dependentRequired" | "dependentSchemas":
                self._dependent(keyword, value)
            case "minProperties" | "maxProperties":
                self._counted(keyword)
            case "contains":
                self._contains(value)
            case "uniqueItems":
                self._unique(value=value)
            case "unevaluatedProperties" | "unevaluatedItems":
                self._unevaluated(keyword, value)
            case "then" | "else" | "minContains" | "maxContains":
                pass  # with `if` and `contains`
            case _:
                self._note(keyword)

    def _note(self, keyword: str) -> None:
        self._walk.note(self._path, keyword)

    def _inside(self, keyword: str, value: Json) -> Json:
        place = f"{self._path}/{keyword}"
        if isinstance(value, list):
            around = None if keyword == "prefixItems" else self._around
            return [self._walk.schema(each, f"{place}/{n}", around) for n, each in enumerate(value)]
        if keyword in {"properties", "patternProperties"}:
            return {
                name: self._walk.schema(each, f"{place}{pointer([name])}")
                for name, each in value.items()
            }
        return self._walk.schema(value, place)

    def _add(self, schema: Json) -> None:
        """Add a schema of our own making."""
        self._more.append(self._walk.schema(schema, self._path, self._around))

    # ------------------------------------------------------------ values

    def _values(self, keyword: str, values: list[Json]) -> None:
        held = [plain(value) for value in values if is_held(value)]
        if len(held) < len(values):
            unheld = next(value for value in values if not is_held(value))
            why = "no mask can tell this number from those beside it; write it as a string, or with"
            self._out_of_reach(keyword, f"{unheld!r:.80}: {why} fewer digits")
        if held:
            self._found[keyword] = held[0] if keyword == "const" else held

    def _out_of_reach(self, keyword: str, why: str, *types: str) -> None:
        """Refuse a keyword that no mask keeps; of a negation, leave out what has these `types`."""
        if not self._walk.negating:
            raise refusal(f"{self._path}/{keyword}", why)
        if types:
            self._more.append({"type": [each for each in _TYPES if each not in types]})
        elif keyword == "const" or not any(map(is_held, self._schema[keyword])):
            self._more.append(False)

    def _count(self, keyword: str, value: int) -> None:
        length = keyword.endswith("Length")
        most = MOST_LENGTH if length else MOST_ITEMS
        if value <= most:
            self._found[keyword] = value
        elif keyword.startswith("max"):
            self._note(keyword)
        else:
            self._out_of_reach(
                keyword,
                f"{value:,} {'characters' if length else 'items'}: a mask counts to {most:,}; ask "
                "for fewer, or generate it in several steps",
                "string" if length else "array",
            )

    def _bound(self, keyword: str, value: float) -> None:
        whole = self._types == {"integer"}
        try:
            found = held_bound(keyword, value, whole=whole)
        except VacuousError:
            return
        if found is None:
            most = f"{value!r:.80}: a mask holds numbers to {HIGHEST if whole else MOST}"
            why = f"{most}, of which none is beyond this; ask for others, or for a string"
            self._out_of_reach(keyword, why, "number")
            return
        keyword, value = found
        tighter = max if keyword.endswith("inimum") else min
        self._found[keyword] = tighter(value, self._found.get(keyword, value))

    def _step(self, value: float) -> None:
        match steps_of(value):
            case ():
                self._note("multipleOf")
            case (step,):
                self._found["multipleOf"] = step
            case steps:
                self._more.append({"anyOf": [{"multipleOf": each} for each in steps]})

    def _bounds(self) -> None:
        """What the backend takes to be beyond a bound, though it is not, is let through."""
        if self._found.get("minimum", 0) >= MOST:  # so large a one the backend takes only in pairs
            self._found.setdefault("maximum", HIGHEST)
        if self._found.get("maximum", 0) <= -MOST:
            self._found.setdefault("minimum", LOWEST)
        bounds = {each: self._found[each] for each in _BOUNDS if each in self._found}
        if others := missed(bounds):
            self._more.append({"anyOf": [bounds, {"enum": others}]})
            for each in bounds:
                del self._found[each]

    def _pattern(self, value: str) -> None:
        found = patterns.translated(value)
        if found is None or not found.exact:
            self._note("pattern")
        if found is not None:
            self._found["pattern"] = f"^(?:{found.source})$"

    # ------------------------------------------------------------ combinations

    def _one_of(self, branches: list[Json]) -> None:
        weak = self._inside("oneOf", branches)
        if len(branches) * (len(branches) - 1) // 2 > MOST_PAIRS:
            self._note("oneOf")
            self._more.append({"anyOf": weak})
            return
        algebra = self._walk.algebra
        forms = [algebra.of({"allOf": [self._around, each]}) for each in branches]
        against: list[list[Json]] = [[] for _ in branches]
        for left, right in combinations(range(len(branches)), 2):
            if not disjoint(forms[left], forms[right]):
                against[left].append(branches[right])
                against[right].append(branches[left])
        self._more.append(
            {
                "anyOf": [
                    self._without(each, others) for each, others in zip(weak, against, strict=True)
                ]
            }
        )

    def _without(self, weak: Json, others: list[Json]) -> Json:
        """A weakened schema, save what satisfies others."""
        if not others:
            return weak
        if len(others) > MOST_OTHERS or not self._walk.subtracting:
            self._note("oneOf")
            return weak
        found: list[Json] = []
        ways = 1
        for each in others:
            left = self._walk.complement(each, self._path, "oneOf", self._around)
            ways *= 1 if left is None else width(left)
            if left is None or ways > MOST_WIDTH:
                self._note("oneOf")
                break
            found.append(left)
        return {"allOf": [weak, *found]}

    def _not(self, value: Json) -> None:
        if value in (True, {}, False):
            self._more.append(value is False)
            return
        words = excluded(value, self._types)
        if words is not None:
            self._more.append({"pattern": f"^(?:{words})$"})
            return
        if self._walk.algebra.is_empty({"allOf": [value, self._beside("not")]}):
            return
        found = self._walk.complement(value, self._path, "not", self._around)
        if found is None:
            self._note("not")
        else:
            self._more.append(found)

    def _if(self, condition: Json) -> None:
        branches = []
        then, other = self._schema.get("then", True), self._schema.get("else", True)
        if then is other is True:
            return
        if isinstance(condition, bool):
            place = f"{self._path}/{'then' if condition is True else 'else'}"
            branch = then if condition is True else other
            self._more.append(self._walk.schema(branch, place, self._around))
            return
        place = self._path
        met = [
            self._walk.schema(condition, f"{place}/if", self._around),
            self._walk.schema(then, f"{place}/then", self._around),
        ]
        branches.append({"allOf": met})
        unmet = self._walk.complement(condition, place, "if", self._around)
        if unmet is None:
            self._note("if")
        rest = [] if unmet is None else [unmet]
        branches.append({"allOf": [*rest, self._walk.schema(other, f"{place}/else", self._around)]})
        self._more.append({"anyOf": branches})

    def _beside(self, keyword: str) -> Object:
        rest = {key: each for key, each in self._schema.items() if key != keyword}
        return {"allOf": [self._around, rest]}

    # ------------------------------------------------------------ objects

    def _name_patterns(self, value: dict[str, Json]) -> None:
        if has_loose_names(self._schema):
            self._note("patternProperties")
            return
        found: Object = {}
        for name, each in value.items():
            translated = patterns.translated(name)
            if translated is not None:
                if not translated.exact:
                    self._note("patternProperties")
                place = f"{self._path}{pointer(['patternProperties', name])}"
                found[f"^(?:{translated.source})$"] = self._walk.schema(each, place)
        self._found["patternProperties"] = found

    def _property_names(self, value: Json) -> None:
        if value is True:
            return
        names = {"allOf": [value, {"type": "string"}]}
        if value is False or self._walk.algebra.is_empty(names):
            self._more.append({"maxProperties": 0})
            return
        allowed = allowed_names(value)
        properties = self._schema.get("properties", {})
        other = self._schema.get("additionalProperties", True)
        # A pattern is for declared names, too, and what others may be is not.
        mixed = "patternProperties" in self._schema or (properties and other not in (True, {}))
        if allowed is None or mixed:
            self._note("propertyNames")
            return
        place = f"{self._path}/additionalProperties"
        self._found["patternProperties"] = {allowed: self._walk.schema(other, place)}
        self._found["additionalProperties"] = False
        for name in properties:
            if self._walk.algebra.is_empty({"allOf": [value, {"const": name}]}):
                self._found["properties"][name] = False

    def _dependent(self, keyword: str, value: dict[str, Json]) -> None:
        only = self._types == {"object"}
        most = MOST_DEPENDENT if only else MOST_DEPENDENT // 2
        for count, (name, needed) in enumerate(value.items()):
            if needed in ([], True):
                continue
            if count >= most:
                self._note(keyword)
                return
            self._add(objects.dependent(name, needed, only_objects=only))

    def _counted(self, keyword: str) -> None:
        first = "minProperties" if "minProperties" in self._schema else "maxProperties"
        if keyword != first:
            return
        schema = self._schema
        properties = {n for n, each in schema.get("properties", {}).items() if each is not False}
        applied = {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"} & schema.keys()
        keywords = [k for k in ("minProperties", "maxProperties") if k in schema]
        if properties <= set(schema.get("required", ())) and not applied:
            self._found |= {each: int(schema[each]) for each in keywords}
            return
        found = None if applied else objects.counted(schema, only_objects=self._types == {"object"})
        if found is None:
            for each in keywords:
                self._note(each)
        else:
            # Bounds are right where they stand here: all that there may be is listed beside them.
            self._more.append(found)

    # ------------------------------------------------------------ arrays

    def _contains(self, value: Json) -> None:
        least = int(self._schema.get("minContains", 1))
        most = self._schema.get("maxContains")
        if least > MOST_ITEMS:
            why = f"{least:,} items: a mask counts to {MOST_ITEMS:,}; ask for fewer"
            self._out_of_reach("minContains", why, "array")
        if value is True and most is None:
            self._more.append({"minItems": least})
            return
        if least or most is not None:
            self._note("contains")
            self._more.append({"minItems": least})

    def _unique(self, *, value: bool) -> None:
        if value:
            exactly, found = unique(self._schema, only_arrays=self._types == {"array"})
            self._more += found
            if not exactly:
                self._note("uniqueItems")

    def _unevaluated(self, keyword: str, value: Json) -> None:
        if value is True:
            return
        found = objects.Evaluated(self._walk.defs, PREFIX)
        found.add({key: each for key, each in self._schema.items() if key != keyword})
        if not found.exact:
            self._note(keyword)
        if keyword == "unevaluatedItems":
            if not found.all_items and not found.contains:
                self._add({"prefixItems": [True] * found.items, "items": value})
            return
        if not found.all_names:
            self._add(
                {
                    "properties": dict.fromkeys(found.names, True),
                    "patternProperties": dict.fromkeys(found.patterns, True),
                    "additionalProperties": value,
                }
            )
