"""Options as keywords, the request that is made of them, and the words for what is refused.

Used by programs, the engine and the command line, which all take the same keywords.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, assert_never, runtime_checkable

import msgspec

from structgen.errors import OptionError
from structgen.request import (
    Choice,
    Constraint,
    Ebnf,
    JsonSchema,
    Prompt,
    Regex,
    Request,
    Structure,
)
from structgen.sampling import Sampling, Want, check_text
from structgen.schemas import SchemaLike, schema_text
from structgen.terms import Term


@runtime_checkable
class Precompiled(Protocol):
    """What an engine made of a constraint, `Compiled`; anything that knows its constraint."""

    @property
    def constraint(self) -> Constraint:
        """What it was made of."""
        ...


ConstraintLike = Constraint | Term | Precompiled
"""A constraint, a term (the output has its form), or what an engine compiled of either."""


class GenOptions(TypedDict, total=False):
    """Keywords of every generating call; the fields of `Sampling` and `Want`, typed loosely.

    What the whole output must be is said by one of these at most:

    regex         a pattern that matches it
    json_schema   it is a JSON value that is valid under this schema: JSON text, a dict, a type that
                  msgspec or pydantic can describe, True for any JSON value. With `separators`,
                  such as `(", ", ": ")`, its layout is fixed
    ebnf          a grammar that derives it from its rule `root`
    constraint    `Regex`, `JsonSchema`, `Ebnf`, `Choice`, `Structure`; a term; or what
                  `engine.compile` made of one
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    min_tokens: int
    stop: str | Sequence[str]
    stop_regex: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int | None
    regex: str | None
    json_schema: SchemaLike | None
    separators: tuple[str, str] | None
    ebnf: str | None
    constraint: ConstraintLike | None
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int | None
    priority: int
    deadline: float | None


_SAMPLING = frozenset(Sampling.__struct_fields__)
_WANT = frozenset(Want.__struct_fields__)
_REQUEST = frozenset({"priority", "deadline"})
_CONSTRAINING = ("regex", "json_schema", "ebnf", "constraint")
_BINDING = frozenset({*_CONSTRAINING, "separators"})
_QUOTED = 80  # characters of a constraint that a message shows
_LONG = 8  # letters of a word of which few may be wrong


def request_from(prompt: Prompt, options: Mapping[str, Any], **fields: Any) -> Request:
    """Build a request from keyword options; an option that is None has its default.

    `fields` are further fields of `Request` (lineage, namespace, constraint, ...).
    Raises `OptionError` for an unknown option or a value out of range, and for two constraints;
    `ConstraintError` for a schema that cannot be written as JSON.
    """
    known = _SAMPLING | _WANT | _REQUEST | _BINDING
    if unknown := sorted(set(options) - known):
        raise unknown_option(unknown[0], known)
    options = {name: value for name, value in options.items() if value is not None}
    sampling = {name: value for name, value in options.items() if name in _SAMPLING}
    fields["constraint"] = _constraint(options, fields.get("constraint"))
    return Request(
        prompt=prompt,
        sampling=_sampling(sampling),
        want=Want(**{name: options[name] for name in _WANT & options.keys()}),
        **{name: options[name] for name in _REQUEST & options.keys()},
        **fields,
    )


def merged(
    defaults: Mapping[str, Any], options: Mapping[str, Any], *, bound: bool = False
) -> dict[str, Any]:
    """A call's options over the defaults around it: its constraint takes the place of theirs.

    bound   the call has a constraint of its own, which is none of its options
    """
    if bound or constraining(options) is not None:
        defaults = {name: value for name, value in defaults.items() if name not in _BINDING}
    return {**defaults, **options}


def constraining(options: Mapping[str, Any]) -> str | None:
    """The name of the option that constrains the output, None if none does."""
    for name in _CONSTRAINING:
        if options.get(name) is not None:
            return name
    return None


def constraint_of(value: object) -> Constraint:
    """The constraint of what may be given for one: itself, a term, something compiled.

    Raises `OptionError` for anything else.
    """
    if isinstance(value, Regex | JsonSchema | Ebnf | Choice | Structure):
        return value
    if isinstance(value, Term):
        return Structure(value)
    if isinstance(value, Precompiled):
        return constraint_of(value.constraint)
    raise OptionError(
        "constraint",
        f"expected Regex, JsonSchema, Ebnf, Choice, Structure, a term or what engine.compile made, "
        f"got {_cut(repr(value))}; a pattern goes to regex=, a schema or type to json_schema=",
    )


def check_bound(request: Request) -> None:
    """Refuse options that contradict the request's constraint, if it has one.

    Raises `OptionError`, naming the option. Every backend that takes constraints asks here.
    """
    if request.constraint is None:
        return
    if request.sampling.max_tokens == 0:
        raise OptionError(
            "max_tokens", "it is 0, and an output that meets a constraint has tokens; give it more"
        )
    if request.sampling.ignore_eos:
        raise OptionError(
            "ignore_eos",
            "with a constraint the end tokens end the output where it is complete, and stand "
            "nowhere else; drop ignore_eos, or let the pattern have no end and use max_tokens",
        )


def frozen(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options, with nothing in them that can be used up or changed by others.

    Raises `ConstraintError` for a `json_schema` that cannot be written as JSON.
    """
    made = dict(options)
    _check_places(made)
    if (schema := made.get("json_schema")) is not None:
        made["json_schema"] = schema_text(schema)
    if isinstance(separators := made.get("separators"), list):
        made["separators"] = tuple(separators)
    for name in ("stop", "stop_regex", "stop_token_ids"):
        value = made.get(name)
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            made[name] = tuple(value)
    if isinstance(bias := made.get("logit_bias"), Mapping):
        made["logit_bias"] = dict(bias)
    return made


def _constraint(options: Mapping[str, Any], bound: Constraint | None) -> Constraint | None:
    """The one constraint of a request; `bound` is one that is none of its options."""
    _check_places(options)
    given = [name for name in _CONSTRAINING if name in options]
    if len(given) > 1:
        raise OptionError(
            given[0], f"it cannot be combined with {' and '.join(given[1:])}; give one of them"
        )
    if given and bound is not None:
        raise OptionError(given[0], f"the call has the {in_words(bound)} already; drop one of them")
    separators = options.get("separators")
    match given:
        case ["regex"]:
            check_text("regex", options["regex"])
            bound = Regex(options["regex"])
        case ["ebnf"]:
            check_text("ebnf", options["ebnf"])
            bound = Ebnf(options["ebnf"])
        case ["json_schema"]:
            return JsonSchema(options["json_schema"], _checked(separators))
        case ["constraint"]:
            bound = constraint_of(options["constraint"])
    if separators is None:
        return bound
    if isinstance(bound, JsonSchema) and bound.separators is None:
        return msgspec.structs.replace(bound, separators=_checked(separators))
    raise OptionError(
        "separators",
        "they lay out the JSON of json_schema or of a type, once; give one of these, or drop them",
    )


def _check_places(options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for a constraint given to an option that takes its text."""
    for name in ("regex", "json_schema", "ebnf"):
        value = options.get(name)
        if isinstance(value, re.Pattern):
            raise OptionError(name, "expected a string; give pattern.pattern, flags as in (?i)")
        if isinstance(value, Constraint | Term | Precompiled):
            raise OptionError(name, f"a {type(value).__name__} is given as constraint=")


def _checked(separators: object) -> tuple[str, str] | None:
    """What stands between items and after keys. Which layouts there are is for the engine."""
    match separators:
        case None:
            return None
        case [str(between), str(after)]:
            return between, after
        case _:
            raise OptionError(
                "separators", f'expected two strings such as (", ", ": "), got {separators!r:.80}'
            )


def _sampling(options: dict[str, Any]) -> Sampling:
    stop = options.get("stop", ())
    options["stop"] = (stop,) if isinstance(stop, str) else _several("stop", stop, "strings")
    patterns = options.get("stop_regex", ())
    options["stop_regex"] = (
        (patterns,)
        if isinstance(patterns, str)
        else _several("stop_regex", patterns, "regular expressions")
    )
    ids = options.get("stop_token_ids", ())
    options["stop_token_ids"] = _several("stop_token_ids", ids, "token ids")
    bias = options.get("logit_bias", {})
    if not isinstance(bias, Mapping):
        raise OptionError("logit_bias", "expected a mapping of token id to bias")
    options["logit_bias"] = tuple(bias.items())
    return Sampling(**options)


def _several(name: str, values: object, what: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise OptionError(name, f"expected a list of {what}, got {values!r}")
    return tuple(values)


# ---------------------------------------------------------------- words for messages


def unknown_option(name: str, known: Iterable[str], of: str = "") -> OptionError:
    """The error for an option that does not exist: it names the nearest, and all, that do.

    `of` says whose options these are, where that is not plain: "select".
    """
    known = sorted(known)
    said = f"unknown option of {of}" if of else "unknown option"
    hint = did_you_mean(name, known)
    return OptionError(name, f"{said}{hint}; the options are {', '.join(known)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean max_tokens?)`, to be put into a message; "" where nothing known is near."""
    near = nearest(word, known)
    return "" if near is None else f" (did you mean {near}?)"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, None if none is near."""
    lower, word = {each.lower(): each for each in sorted(known)}, word.lower()
    # A slip in a short word is much of it; length_penalty is no slip of presence_penalty.
    cutoff = 0.6 if len(word) < _LONG else 0.75
    near = difflib.get_close_matches(word, lower, n=1, cutoff=cutoff)
    # A beginning will do as well, but two letters begin too much to mean one of them.
    near += [each for each in lower if each.startswith(word)] if len(word) > 2 else []
    return lower[near[0]] if near else None


def in_words(constraint: Constraint) -> str:
    """A constraint as a message names it, `regex 'a+'`; what is long is cut."""
    match constraint:
        case Regex(pattern):
            return f"regex {_quoted(pattern)}"
        case JsonSchema(schema, _):
            return f"JSON schema {_quoted(schema)}"
        case Ebnf(grammar):
            return f"EBNF grammar {_quoted(grammar)}"
        case Choice(options):
            return f"choice of {_cut(', '.join(map(repr, options)))}"
        case Structure(term):
            return f"structure {_shown(term)}"
        case _:
            assert_never(constraint)


def _shown(term: Term) -> str:
    try:
        return _cut(repr(term))
    except RecursionError:
        return f"of a {type(term).__name__} that is nested very deeply"


def _quoted(text: str) -> str:
    return repr(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 3]}..."
