"""Reading a JSON Schema: its limits, its draft, whether it is one; and making its validator.

Holds  nothing is fetched from anywhere; what is not a schema of its draft is refused with its path.
Used   by `relaxing`.

A schema that names no draft is of 2020-12, or of 2019-09 where only that has its forms; what older
drafts wrote otherwise (`dependencies`, `exclusiveMinimum: true`, `id`) is understood in it, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import jsonschema_rs
import msgspec
from jsonschema_rs import canonical

from structgen.errors import ConstraintError
from structgen.grammar.schema import strict
from structgen.grammar.schema.keywords import NAMED, SCHEMA, SCHEMAS, Draft, Json, inner
from structgen.grammar.schema.numbers import exact

MOST_CHARACTERS = 512_000  # of a schema
MOST_DEPTH = 125  # of values inside each other
MOST_PROPERTIES = 1_000  # of one object
MOST_VALUES = 25_000  # of one enum
MOST_PARTS = 5_000  # objects and lists in all; some 100 us each
MOST_PATTERNS = 500  # in all; the validator is built under the interpreter lock, 400 us for each
# For the final check, whose patterns nobody vetted: what the engine of the validator may spend.
_PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000, size_limit=10_000_000)

_ADDRESS = re.compile(
    r"https?://json-schema\.org/(?:draft-0(?P<number>\d)|draft/(?P<year>\d{4})-\d\d)/schema#?"
)
ADDRESSES = MappingProxyType(
    {
        Draft.DRAFT_4: "http://json-schema.org/draft-04/schema#",
        Draft.DRAFT_6: "http://json-schema.org/draft-06/schema#",
        Draft.DRAFT_7: "http://json-schema.org/draft-07/schema#",
        Draft.DRAFT_2019_09: "https://json-schema.org/draft/2019-09/schema",
        Draft.DRAFT_2020_12: "https://json-schema.org/draft/2020-12/schema",
    }
)
_VALIDATORS: MappingProxyType[Draft, Callable[..., jsonschema_rs.Validator]] = MappingProxyType(
    {
        Draft.DRAFT_4: jsonschema_rs.Draft4Validator,
        Draft.DRAFT_6: jsonschema_rs.Draft6Validator,
        Draft.DRAFT_7: jsonschema_rs.Draft7Validator,
        Draft.DRAFT_2019_09: jsonschema_rs.Draft201909Validator,
        Draft.DRAFT_2020_12: jsonschema_rs.Draft202012Validator,
    }
)


# What a value that the schema language does not allow should have been, where it says that badly.
_WANTED = MappingProxyType(
    {
        "type": "no type; there are string, number, integer, boolean, null, object and array, and "
        "lists of these",
        "pattern": "no regular expression",
    }
)


_DATA = frozenset(("enum", "const", "default", "examples"))
_CLOSING = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties"),
        *("additionalItems", "unevaluatedItems", "items"),
    )
)


class Document(msgspec.Struct, frozen=True):
    """A schema that is one of its draft."""

    root: Json
    draft: Draft


def read(schema: str) -> Document:
    """Read a schema, given as JSON text. Raises `ConstraintError`, naming path and keyword."""
    if len(schema) > MOST_CHARACTERS:
        raise ConstraintError(
            f"JSON schema: {len(schema):,} characters, more than {MOST_CHARACTERS:,}; leave out "
            "what is not needed, or generate in several steps"
        )
    try:
        root = strict.loads(schema)
        schema.encode()
        json.dumps(root, ensure_ascii=False, allow_nan=False).encode()
    except strict.DuplicateKeyError as error:
        raise refusal("", f"the key {error.args[0]!r:.80} is there twice; keep one") from None
    except UnicodeEncodeError:
        raise refusal("", "half of a surrogate pair is no text; leave it out") from None
    except (ValueError, RecursionError) as error:
        advice = "" if schema.lstrip().startswith("{") else "; a pattern is given as regex="
        raise ConstraintError(
            f"JSON schema {schema!r:.200}: it is no JSON: {error!s:.200}{advice}"
        ) from None
    if not isinstance(root, dict | bool):
        raise ConstraintError(
            f"JSON schema {schema!r:.200}: expected an object, true or false, got {root!r:.80}"
        )
    _check_limits(root)
    if root is False:
        raise refusal("", "it accepts nothing; write what is to be generated")
    if isinstance(root, dict) and not _declared(root):
        root = _without_old_forms(root)
    return Document(root, _draft_of(root))


def refusal(path: str, reason: str) -> ConstraintError:
    """The error for a schema; `path` as in a JSON pointer, "" for the whole."""
    return ConstraintError(f"JSON schema, at #{path}: {reason}")


def pointer(steps: Iterator[Any] | list[Any]) -> str:
    """Steps as a JSON pointer."""
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in steps)


def check_satisfiable(document: Document) -> None:
    """Refuse what certainly accepts nothing, by its innermost cause.

    Raises `ConstraintError`. May take long for schemas with many ways to satisfy them.
    """
    if isinstance(document.root, bool):
        return
    schema = {**document.root, "$schema": ADDRESSES[document.draft]}
    try:
        empty = canonical.find_unsatisfiable(schema, validate_formats=False, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return  # the validator has the same to say, and where
    if "" not in empty:
        return
    # What closes an object or a list is false on purpose.
    faulty = [where for where in empty if where.rpartition("/")[2] not in _CLOSING]
    place = max(faulty, key=lambda each: each.count("/"))
    causes = [
        f"#{cause.pointer}: {', '.join(cause.keywords) or 'this schema'}"
        for cause in _causes(empty[place])
    ]
    raise refusal(
        place,
        f"nothing satisfies it ({' with '.join(causes) or 'false'}); correct it, or leave it out",
    )


def _causes(reason: object) -> list[canonical.Cause]:
    found = [getattr(reason, name) for name in getattr(reason, "__match_args__", ())]
    flat = [each for one in found for each in (one if isinstance(one, list | tuple) else [one])]
    return [each for each in flat if isinstance(each, canonical.Cause)]


# ---------------------------------------------------------------- parsing


def _check_limits(root: Json) -> None:
    todo: list[tuple[Json, int]] = [(root, 1)]
    parts = 0
    while todo:
        value, depth = todo.pop()
        parts += isinstance(value, dict | list)
        if parts > MOST_PARTS:
            raise refusal(
                "", f"more than {MOST_PARTS:,} objects and lists in all; generate in several steps"
            )
        if depth > MOST_DEPTH:
            raise refusal("", f"nested more than {MOST_DEPTH} deep; name parts of it in $defs")
        if isinstance(value, dict):
            todo += ((inner, depth + 1) for inner in value.values())
        elif isinstance(value, list):
            todo += ((inner, depth + 1) for inner in value if isinstance(inner, dict | list))
    patterns = 0
    for schema in _schemas(root):
        _check_count(schema.get("properties"), MOST_PROPERTIES, "properties")
        _check_count(schema.get("enum"), MOST_VALUES, "values in an enum")
        named = schema.get("patternProperties")
        patterns += isinstance(schema.get("pattern"), str)
        patterns += len(named) if isinstance(named, dict) else 0
    if patterns > MOST_PATTERNS:
        raise refusal("", f"more than {MOST_PATTERNS:,} patterns in all; generate in several steps")


def _schemas(root: Json) -> Iterator[dict[str, Json]]:
    """All that is a schema, or could be one to a reference: not the values of an `enum`, say."""
    todo: list[tuple[Json, bool]] = [(root, True)]
    while todo:
        value, placed = todo.pop()
        if isinstance(value, list):
            todo += ((each, placed) for each in value)
        if not isinstance(value, dict):
            continue
        yield value
        for keyword, inside in value.items():
            if not placed or keyword not in (*NAMED, *_DATA):
                # What an unknown keyword holds may be anything, and referred to.
                todo.append((inside, placed and keyword in (*SCHEMA, *SCHEMAS, "items")))
            elif keyword in NAMED and isinstance(inside, dict):
                todo += ((each, True) for each in inside.values())


def _check_count(value: object, most: int, name: str) -> None:
    if isinstance(value, dict | list) and len(value) > most:
        raise refusal("", f"{len(value):,} {name}, more than {most:,}; choose in two steps")


# ---------------------------------------------------------------- drafts


def _draft_of(root: Json) -> Draft:
    """The draft of a schema that is valid in it."""
    if isinstance(root, bool):
        return Draft.DRAFT_2020_12
    if match := _declared(root):
        number = int(match["number"] or match["year"])
        if number not in Draft.__members__.values():
            raise refusal(
                "/$schema", f"{match[0]!r} is a draft that is not known; write it for 2020-12"
            )
        _check_draft(root, Draft(number))
        return Draft(number)
    try:
        _check_draft(root, Draft.DRAFT_2020_12)
    except ConstraintError:
        if not jsonschema_rs.meta.is_valid({**root, "$schema": ADDRESSES[Draft.DRAFT_2019_09]}):
            raise
        return Draft.DRAFT_2019_09
    return Draft.DRAFT_2020_12


def _without_old_forms(root: Json) -> Json:
    """A schema that names no draft, with what only draft 4 to 7 have in the words of later ones."""
    root = json.loads(json.dumps(root))
    todo = [root]
    while todo:
        schema = todo.pop()
        todo += (each for _, each in inner(schema))
        if not isinstance(schema, dict):
            continue
        for bound, exclusive in (
            ("minimum", "exclusiveMinimum"),
            ("maximum", "exclusiveMaximum"),
        ):
            if isinstance(flag := schema.get(exclusive), bool):
                del schema[exclusive]
                if flag and bound in schema:
                    schema[exclusive] = schema[bound]
    return root


def _check_draft(root: dict[str, Any], draft: Draft) -> None:
    """Whether a schema is one of this draft."""
    try:
        jsonschema_rs.meta.validate({**root, "$schema": ADDRESSES[draft]})
    except jsonschema_rs.ValidationError as error:
        raise _faulty(error) from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise refusal("", f"{error!s:.200}") from None


def _faulty(error: jsonschema_rs.ValidationError) -> ConstraintError:
    """The refusal of a schema that is none."""
    *_, around, keyword = "", "", *error.instance_path
    wanted = _WANTED.get(str(keyword)) if around not in NAMED else None
    if wanted is not None and isinstance(error.instance, str):
        reason = f"{error.instance!r:.80} is {wanted}"
    else:
        reason = f"{error.message.partition(chr(10))[0]:.200}, which the schema language asks for"
    return refusal(pointer(list(error.instance_path)), reason)


def _declared(root: dict[str, Any]) -> re.Match[str] | None:
    declared = root.get("$schema")
    return _ADDRESS.fullmatch(declared) if isinstance(declared, str) else None


def validator_of(document: Document) -> jsonschema_rs.Validator:
    """The validator of a schema. Raises `ConstraintError` for patterns that it does not know.

    Takes time without end for some schemas; see `effort`.
    """
    root, draft = exact(document.root), document.draft
    schema = root if isinstance(root, bool) else {**root, "$schema": ADDRESSES[draft]}
    try:
        return _VALIDATORS[draft](
            schema, validate_formats=False, offline=True, pattern_options=_PATTERNS
        )
    except jsonschema_rs.ValidationError as error:
        raise _faulty(error) from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise refusal("", f"{error!s:.200}") from None
