"""Options as keywords, and the request that is made of them.

Used by programs, the engine and the command line, which all take the same keywords.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from structgen.errors import OptionError
from structgen.request import Prompt, Regex, Request
from structgen.sampling import Sampling, Want


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


def request_from(prompt: Prompt, options: Mapping[str, Any], **fields: Any) -> Request:
    """Build a request from keyword options; an option that is None has its default.

    `fields` are further fields of `Request` (lineage, namespace, constraint, ...).
    Raises `OptionError` for an unknown option or a value out of range.
    """
    known = _SAMPLING | _WANT | _REQUEST | {"regex"}
    if unknown := sorted(set(options) - known):
        raise OptionError(unknown[0], f"unknown option; the options are {', '.join(sorted(known))}")
    options = {name: value for name, value in options.items() if value is not None}
    sampling = {name: value for name, value in options.items() if name in _SAMPLING}
    if (regex := options.get("regex")) is not None:
        fields["constraint"] = Regex(regex)
    return Request(
        prompt=prompt,
        sampling=_sampling(sampling),
        want=Want(**{name: options[name] for name in _WANT & options.keys()}),
        **{name: options[name] for name in _REQUEST & options.keys()},
        **fields,
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
