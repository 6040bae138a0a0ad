"""Whether a scripted reply is what the request's constraint asks for.

Owns   nothing. It judges whole texts, as the tests of an engine do: there is no mask here.
Used   by the scripted backend.
"""

from __future__ import annotations

import json
import re

from structgen.errors import ConstraintError, UnsupportedError
from structgen.grammar.automaton import automaton_of
from structgen.grammar.schema import relaxed
from structgen.request import Choice, Constraint, JsonSchema, Regex, Request, Structure
from structgen.testing import forms

CHECKED = frozenset({"regex", "choice", "json_schema", "structure"})


def require_checkable(request: Request) -> None:
    """Raise what an engine would raise for a request that cannot be served."""
    match request.constraint:
        case None:
            pass
        case Regex(pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConstraintError(f"regex {pattern!r}: {error}") from None
        case JsonSchema(schema, separators):
            relaxed(schema, separators)
        case Structure(term):
            forms.require_checkable(term)
        case Choice():
            pass
        case other:
            raise UnsupportedError(f"the scripted backend cannot check {type(other).__name__}")
    if request.sampling.stop_regex:
        automaton_of(request.sampling.stop_regex)
    if request.want.prompt_logprobs is not None:
        raise UnsupportedError("the scripted backend has no log-probabilities of prompts")


def mismatch(constraint: Constraint, text: str) -> str | None:
    """Why a mask would not let the whole text through; None where it would."""
    match constraint:
        case Regex(pattern):
            return None if re.fullmatch(pattern, text) else f"is not of regex {pattern!r}"
        case Choice(options):
            return None if text in options else f"is none of the choices {options}"
        case JsonSchema():
            return None if _is_json(text) else "is no JSON"
        case Structure(term):
            found = forms.match_of(term, text)
            return None if found is not None else f"has not the form of {term!r:.200}"
        case other:
            raise AssertionError(other)


def fault(constraint: Constraint, text: str) -> str | None:
    """What a final check finds wrong with a text that a mask would let through."""
    if isinstance(constraint, JsonSchema):
        return relaxed(constraint.schema, constraint.separators).judge.fault(text)
    if isinstance(constraint, Structure):
        found = forms.match_of(constraint.term, text)
        return None if found is None else forms.fault_of(found)
    return None


def captures(constraint: Constraint, text: str) -> tuple[tuple[str, str], ...]:
    """What the text captures by name, in order; nothing where it has not the form."""
    found = forms.match_of(constraint.term, text) if isinstance(constraint, Structure) else None
    return () if found is None else found.captures


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
