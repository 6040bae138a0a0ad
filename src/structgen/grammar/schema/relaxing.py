"""A JSON Schema as what the mask enforces exactly, and a final check for the rest.

Holds  the mask lets through every text that is valid, laid out as asked for and with its keys in
       the schema's order; what it lets through besides, the final check refuses.
Used   by `compiler`, and by `structure` for JSON inside of larger forms.
"""

from __future__ import annotations

import json
import math

import msgspec

from structgen.grammar.gate import closed
from structgen.grammar.schema.algebra import is_canonical
from structgen.grammar.schema.bundling import Bundle, bundle
from structgen.grammar.schema.effort import Effort, Unrolled
from structgen.grammar.schema.judging import MOST_VISITS, JsonJudge
from structgen.grammar.schema.keywords import Json
from structgen.grammar.schema.layout import layout
from structgen.grammar.schema.reading import check_satisfiable, read, refusal, validator_of
from structgen.grammar.schema.settling import Settled
from structgen.grammar.schema.weakening import Weakening
from structgen.grammar.source import Judge, Source
from structgen.request import JsonSchema

MOST_GROWTH = 3.0  # by what says it more exactly
SMALL = 3_000  # characters, whatever it was before
MOST_STEPS = 1_000  # of a validator that is built: some 100 us each, under the interpreter lock


class Relaxed(msgspec.Struct, frozen=True):
    """A schema in the words of the mask's backend; see `Source`.

    json       what stands behind `%json` in a Lark grammar, one line
    judge      checks the whole text of the value
    unmasked   what only the judge enforces, as "path: keyword"
    closed     a schema of which xgrammar's mask is exact; None where only llguidance's is
    """

    json: str
    judge: Judge
    unmasked: tuple[str, ...] = ()
    closed: str | None = None


def relaxed(schema: str, separators: tuple[str, str] | None = None) -> Relaxed:
    """Relax a schema, given as JSON text; `separators` as in `JsonSchema`.

    Raises `ConstraintError`, naming path and keyword, for a schema that is malformed, accepts
    nothing, can never end, can never be checked, refers to what is elsewhere, or exceeds a limit.
    """
    options = layout(separators)
    document = read(schema)
    bundled = bundle(document)
    if not Unrolled(bundled, MOST_STEPS).is_short():
        raise refusal(
            "",
            f"unevaluatedProperties or unevaluatedItems over more than {MOST_STEPS:,} ways through "
            "references; close the objects themselves with additionalProperties",
        )
    effort = Effort(bundled)
    if not effort.within(MOST_VISITS, None, 1):
        raise refusal(
            "",
            f"no value can be checked: it applies to one in more than {MOST_VISITS:,} ways; refer "
            "to itself below properties or items only, and to the same schema in fewer places",
        )
    validator = validator_of(document)
    if not bundled.dynamic and is_canonical(bundled.root, bundled.defs):
        check_satisfiable(document)
    if not bundled.ends:
        raise refusal(
            "", "no finite value satisfies it: it needs itself, or is false; make a part optional"
        )
    walk, root, defs = _weakened(bundled, MOST_GROWTH)
    settled = Settled(root, defs, bundled.paths, options)
    text = settled.settle()
    unmasked = tuple(walk.notes | settled.notes)
    judge = JsonJudge(validator, effort)
    return Relaxed(text, judge, unmasked, closed(document.root))


def _weakened(bundled: Bundle, growth: float) -> tuple[Weakening, Json, dict[str, Json]]:
    """The walk, and what it made of the schema and its definitions.

    Without subtraction if that makes it `growth` times as long.
    """
    subtracting = growth < math.inf
    walk = Weakening(bundled, subtracting=subtracting)
    root = walk.schema(bundled.root, "")
    defs = {name: walk.schema(each, bundled.paths[name]) for name, each in bundled.defs.items()}
    if subtracting and _length(root, defs) > growth * _length(bundled.root, bundled.defs) + SMALL:
        return _weakened(bundled, math.inf)
    return walk, root, defs


def _length(*values: Json) -> int:
    return len(json.dumps(values, ensure_ascii=False))


def source_of(constraint: JsonSchema) -> Source:
    """The source of a schema. Raises `ConstraintError`, as `relaxed` does."""
    found = relaxed(constraint.schema, constraint.separators)
    return Source(
        name=f"JSON schema {constraint.schema!r:.200}",
        lark=f"start: %json {found.json}",
        closed=found.closed,
        separators=constraint.separators,
        judge=found.judge,
        unmasked=found.unmasked,
    )
