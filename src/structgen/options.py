"""Options as keywords, the request that is made of them, and the words for what is refused.

Used by programs, the engine and the command line, which all take the same keywords.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, assert_never

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


class GenOptions(TypedDict, total=False):
    """Keywords of every generating call; the fields of `Sampling` and `Want`, typed loosely."""

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
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int | None
    priority: int
    deadline: float | None


_SAMPLING = frozenset(Sampling.__struct_fields__)
_WANT = frozenset(Want.__struct_fields__)
_REQUEST = frozenset({"priority", "deadline"})
_QUOTED = 80  # characters of a constraint that a message shows


def request_from(prompt: Prompt, options: Mapping[str, Any], **fields: Any) -> Request:
    """Build a request from keyword options; an option that is None has its default.

    `fields` are further fields of `Request` (lineage, namespace, constraint, ...).
    Raises `OptionError` for an unknown option or a value out of range.
    """
    known = _SAMPLING | _WANT | _REQUEST | {"regex"}
    if unknown := sorted(set(options) - known):
        raise unknown_option(unknown[0], known)
    options = {name: value for name, value in options.items() if value is not None}
    sampling = {name: value for name, value in options.items() if name in _SAMPLING}
    if (regex := options.get("regex")) is not None:
        check_text("regex", regex)
        fields["constraint"] = Regex(regex)
    return Request(
        prompt=prompt,
        sampling=_sampling(sampling),
        want=Want(**{name: options[name] for name in _WANT & options.keys()}),
        **{name: options[name] for name in _REQUEST & options.keys()},
        **fields,
    )


def frozen(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options, with nothing in them that can be used up or changed by others."""
    made = dict(options)
    for name in ("stop", "stop_regex", "stop_token_ids"):
        value = made.get(name)
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            made[name] = tuple(value)
    if isinstance(bias := made.get("logit_bias"), Mapping):
        made["logit_bias"] = dict(bias)
    return made


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
    near = difflib.get_close_matches(word, lower, n=1)
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
            return f"structure {_cut(repr(term))}"
        case _:
            assert_never(constraint)


def _quoted(text: str) -> str:
    return repr(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 3]}..."
