"""What an output must be, in each of the dialects that clients write it in.

    response_format     OpenAI: json_object, json_schema; structural_tag as vLLM and SGLang have it
    structured_outputs  vLLM: json, regex, choice, grammar, json_object, structural_tag
    regex, ebnf, json_schema   SGLang, at the top of the body

Holds  one of them at most; two are refused, and so is what cannot be enforced. It binds the
       answer; what a reasoning model thinks before that is free.
Used   by both generating routes.
"""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any, NamedTuple, assert_never

from structgen.errors import OptionError
from structgen.output.reasoning import Family, reasoned, tags_of
from structgen.request import Choice, Constraint, Ebnf, JsonSchema, Regex, Structure
from structgen.server.openai.structural_tags import structural_tag
from structgen.server.openai.wire import Generating, ResponseFormat, StructuredOutputs
from structgen.terms import Json, Pattern, Rules, Term, choice

OBJECT = '{"type":"object"}'
_TYPES = ("text", "json_object", "json_schema", "structural_tag")
# The fields of a response_format, and the types that they belong to.
_BELONGS = MappingProxyType(
    {
        "json_schema": "json_schema",
        "format": "structural_tag",
        "structures": "structural_tag",
        "triggers": "structural_tag",
    }
)


class Asked(NamedTuple):
    """A constraint, and the field of the body that asks for it."""

    field: str
    constraint: Constraint


def constraint_of_body(body: Generating) -> Asked | None:
    """The constraint that a body asks for, None for free text.

    Raises `OptionError` for two, and for one that is no constraint; `ConstraintError` for a schema
    that is no JSON.
    """
    found: list[Asked] = []
    if body.response_format is not None:
        found += _response_format(body.response_format)
    if body.structured_outputs is not None:
        found += _structured(body.structured_outputs)
    if body.regex is not None:
        found.append(Asked("regex", Regex(body.regex)))
    if body.ebnf is not None:
        found.append(Asked("ebnf", Ebnf(body.ebnf)))
    if body.json_schema is not None:
        found.append(Asked("json_schema", JsonSchema(body.json_schema)))
    if len(found) > 1:
        fields = ", ".join(asked.field for asked in found[1:])
        raise OptionError(found[0].field, f"it cannot be combined with {fields}; give one of them")
    return found[0] if found else None


def behind(family: Family | None, constraint: Constraint) -> Constraint:
    """The constraint of an output that is reasoning and then an answer with this constraint."""
    if tags_of(family) is None:
        return constraint
    return Structure(reasoned(family, _term(constraint)))


def _term(constraint: Constraint) -> Term:
    match constraint:
        case Structure(term):
            return term
        case JsonSchema(schema, separators):
            return Json(schema, separators)
        case Regex(pattern):
            return Pattern(pattern)
        case Ebnf(grammar):
            return Rules(grammar)
        case Choice(options):
            return choice(options)
        case _:
            assert_never(constraint)


def _response_format(given: ResponseFormat) -> list[Asked]:
    field = "response_format"
    if given.type not in _TYPES:
        known = ", ".join(_TYPES)
        raise OptionError(f"{field}.type", f"unknown {given.type!r:.80}; expected one of {known}")
    for name, type_ in _BELONGS.items():
        if given.type != type_ and getattr(given, name) is not None:
            raise OptionError(f"{field}.{name}", f"it belongs to the type {type_}; leave it out")
    match given.type:
        case "text":
            return []
        case "json_object":
            return [Asked(field, JsonSchema(OBJECT))]
        case "json_schema":
            named = given.json_schema
            schema = None if named is None else named.get("schema", named.get("json_schema"))
            if not isinstance(schema, dict | bool):
                raise OptionError(
                    f"{field}.json_schema.schema", "expected a JSON Schema, an object or a boolean"
                )
            return [Asked(f"{field}.json_schema.schema", JsonSchema(schema))]
        case _:
            parts = ("format", "structures", "triggers")
            whole = {name: getattr(given, name) for name in parts}
            return [Asked(field, Structure(structural_tag(whole, field)))]


def _structured(given: StructuredOutputs) -> list[Asked]:
    base, found = "structured_outputs", list[Asked]()
    if given.json is not None:
        found.append(Asked(f"{base}.json", JsonSchema(given.json)))
    if given.regex is not None:
        found.append(Asked(f"{base}.regex", Regex(given.regex)))
    if given.choice is not None:
        found.append(Asked(f"{base}.choice", Choice(given.choice)))
    if given.grammar is not None:
        found.append(Asked(f"{base}.grammar", Ebnf(given.grammar)))
    if given.json_object:
        found.append(Asked(f"{base}.json_object", JsonSchema(OBJECT)))
    if given.structural_tag is not None:
        field = f"{base}.structural_tag"
        term = structural_tag(_object(given.structural_tag, field), field)
        found.append(Asked(field, Structure(term)))
    if not found:
        fields = ", ".join(StructuredOutputs.__struct_fields__)
        raise OptionError(base, f"it says nothing; give one of {fields}, or leave it out")
    return found


def _object(given: str | dict[str, Any], field: str) -> dict[str, Any]:
    """An object, which may be given as JSON text."""
    if isinstance(given, dict):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise OptionError(field, f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(field, "expected an object")
    return found
