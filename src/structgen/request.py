"""What travels between the rooms: prompt parts, requests, deltas, completions.

Everything here is frozen, plain and serialisable by msgspec: a request can cross a thread, a
process or a socket unchanged. Nothing here knows a tokenizer, an engine or a program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from structgen.errors import OptionError, PromptError

DEFAULT_MAX_TOKENS = 128
INT32_MAX = 2**31 - 1  # options that steps carry in int32 and float32 must fit there
FLOAT32_MAX = 3.4e38


# ---------------------------------------------------------------- checks


def _check_whole(
    name: str, value: object, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(name, f"expected a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise OptionError(name, f"must be {bound}, got {value}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise OptionError(name, f"expected a string, got {value!r}")


def _check_range(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    optional: bool = False,
) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise OptionError(name, f"expected a number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        left = "(" if open_low else "["
        raise OptionError(name, f"must be in {left}{low:g}, {high:g}], got {value:g}")
    if value > FLOAT32_MAX:
        raise OptionError(name, f"must be a finite number that float32 can hold, got {value:g}")


# ---------------------------------------------------------------- prompt parts


class Text(msgspec.Struct, frozen=True, tag="text", gc=False):
    """Text of a user or a program. It is encoded as ordinary text, whatever it spells."""

    text: str


class Control(msgspec.Struct, frozen=True, tag="control", gc=False):
    """Markup of the chat template: the only part in which control tokens are recognised."""

    text: str


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids as the model wrote or the caller gave them; never encoded again.

    `tokenizer` is the fingerprint of the tokenizer that they belong to; "" means: trust me.
    """

    ids: tuple[int, ...]
    text: str
    tokenizer: str = ""


class Image(msgspec.Struct, frozen=True, tag="image"):
    """An image; `sha256` names its bytes in cache keys. No model here sees images yet."""

    data: bytes
    sha256: str
    media_type: str = "image/png"


Part = Text | Control | Tokens | Image
Prompt = tuple[Part, ...]


def prompt_text(parts: Sequence[Part]) -> str:
    """The text of a prompt as a person would read it, markup included, images left out."""
    return "".join(part.text for part in parts if not isinstance(part, Image))


# ---------------------------------------------------------------- constraints, as specified


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole output matches this regular expression."""

    pattern: str


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """The output is one JSON value that is valid under this schema (itself JSON text)."""

    schema: str


class Ebnf(msgspec.Struct, frozen=True, tag="ebnf"):
    """The output is derived by this EBNF grammar, starting at its rule `root`."""

    grammar: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """The output is one of these strings."""

    options: tuple[str, ...]


Constraint = Regex | JsonSchema | Ebnf | Choice


# ---------------------------------------------------------------- sampling


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. `None` means: the model's own default (see `ModelDefaults`).

    temperature          >= 0; 0 is greedy
    top_p, min_p         probabilities in (0, 1] and [0, 1]
    top_k                0 or None for no limit, else >= 1
    frequency_penalty    subtracted per earlier occurrence in the output, in [-2, 2]
    presence_penalty     subtracted once for any earlier occurrence in the output, in [-2, 2]
    repetition_penalty   > 0; divides positive and multiplies negative logits of every token
                         that stands in the prompt or the output (Keskar et al., CTRL, 2019)
    logit_bias           (token id, added to its logit) pairs
    min_tokens           end tokens and stop strings cannot end the output before that many
    stop                 strings; the output ends before the first that appears
    stop_token_ids       ids that end the output, besides the model's own end tokens
    ignore_eos           the model's own end tokens are sampled like any other
    seed                 noise is a function of (seed, position, token) alone

    Raises `OptionError`, naming the field, for values out of range.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, low=1, optional=True)
        _check_whole("top_k", self.top_k, low=0, high=INT32_MAX, optional=True)
        _check_whole("min_tokens", self.min_tokens, low=0)
        _check_whole("seed", self.seed, low=0, high=2**63 - 1, optional=True)
        _check_range("temperature", self.temperature, 0.0, math.inf, optional=True)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True, optional=True)
        _check_range("min_p", self.min_p, 0.0, 1.0, optional=True)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        penalty = self.repetition_penalty
        _check_range("repetition_penalty", penalty, 0.0, math.inf, open_low=True, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError("min_tokens", f"{self.min_tokens} is more than max_tokens")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise OptionError("stop", "a stop must be a string that is not empty")
        for token in self.stop_token_ids:
            _check_whole("stop_token_ids", token, low=0)
        for token, bias in self.logit_bias:
            _check_whole("logit_bias", token, low=0)
            _check_range("logit_bias", bias, -100.0, 100.0)


class ModelDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults and end tokens of one model, from its generation config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = DEFAULT_MAX_TOKENS
    end_ids: tuple[int, ...] = ()

    def fill(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with every `None` (but the seed) replaced by the model's default."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        missing = {name: getattr(self, name) for name in names if getattr(sampling, name) is None}
        if "max_tokens" in missing:
            missing["max_tokens"] = max(missing["max_tokens"], sampling.min_tokens)
        return msgspec.structs.replace(sampling, **missing) if missing else sampling


class Want(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to report besides text.

    logprobs          log-probability of each output token (of the model's own distribution:
                      before temperature, filters and penalties)
    top_logprobs      the k likeliest tokens beside each, 0..20; implies `logprobs`
    prompt_logprobs   report log-probabilities of prompt tokens from this index on; index 0 has
                      none, because nothing comes before it
    """

    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_whole("top_logprobs", self.top_logprobs, low=0, high=20)
        _check_whole("prompt_logprobs", self.prompt_logprobs, low=0, optional=True)


# ---------------------------------------------------------------- requests and replies


class Namespace(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Whose keys and values may be shared: two requests share a prefix only inside one.

    Raises `OptionError` for a field of another type: it would be a key that finds nothing.
    """

    epoch: int = 0
    adapter: str = ""
    tenant: str = ""
    spliced: bool = False

    def __post_init__(self) -> None:
        _check_whole("epoch", self.epoch, low=0)
        _check_text("adapter", self.adapter)
        _check_text("tenant", self.tenant)


class Lineage(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Where in which program a request was made.

    run      the program run
    scope    id of the innermost open fork scope of the backend, 0 for none
    branch   index path of forks, from the root state
    parent   name or position of the call that led here, for people
    """

    run: str = ""
    scope: int = 0
    branch: tuple[int, ...] = ()
    parent: str = ""

    def __post_init__(self) -> None:
        _check_whole("scope", self.scope, low=0)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation, complete in itself.

    priority   higher ones are computed first
    deadline   seconds from submission

    Raises `OptionError` and `PromptError` for values that no backend could serve.
    """

    prompt: Prompt
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    want: Want = Want()
    lineage: Lineage = Lineage()
    namespace: Namespace = Namespace()
    priority: int = 0
    deadline: float | None = None
    model: str = ""

    def __post_init__(self) -> None:
        for part in self.prompt:
            if not isinstance(part, Text | Control | Tokens | Image):
                raise PromptError(
                    f"a prompt is made of parts (Text, Control, Tokens, Image), got {part!r:.80}"
                )
            if not isinstance(part, Image) and not isinstance(part.text, str):
                raise PromptError(f"the text of a prompt part is a str, got {part.text!r:.80}")
        _check_whole("priority", self.priority, low=-INT32_MAX, high=INT32_MAX)
        _check_range("deadline", self.deadline, 0.0, math.inf, open_low=True, optional=True)


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token, its log-probability, and the likeliest alternatives (best first).

    `logprob` is None for prompt token 0 only.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of one request or, summed, of a run.

    prompt_tokens       tokens of the prompt
    cached_tokens       those of them whose keys and values another request had computed
    completion_tokens   tokens sampled, end token included
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


FinishReason = Literal["stop", "length", "abort"]


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended. `matched` is the stop string or token id, if one ended it."""

    reason: FinishReason
    matched: str | int | None = None
    usage: Usage = Usage()


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to a request.

    `tokens` and `text` describe the output that is kept: what a stop string cut off appears in
    neither. Tokens may arrive one delta earlier than their text (a character may need several),
    and after the last delta the joined text may be longer than the decoded tokens by a `tail`:
    the part of a token that stands before a stop string that begins inside it.

    `partial`: the text so far and the tokens so far do not end at the same place, because one of
    them waits for the rest of a character or of a stop string. Who stops reading here can keep the
    tokens up to the last delta that is not partial, and the text after it as text.
    """

    request: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    tail: str = ""
    partial: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of a request, joined. `prompt` joined with `parts` continues the text exactly."""

    text: str
    tokens: tuple[int, ...]
    tail: str
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tokenizer: str = ""

    @property
    def usage(self) -> Usage:
        """Token counts of the request."""
        return self.finish.usage

    @property
    def parts(self) -> Prompt:
        """The output as prompt parts: exact ids, then the tail (if any) as text."""
        whole = self.text[: len(self.text) - len(self.tail)]
        tokens: Prompt = (Tokens(self.tokens, whole, self.tokenizer),) if self.tokens else ()
        return (*tokens, Text(self.tail)) if self.tail else tokens


def join_deltas(deltas: Sequence[Delta], tokenizer: str = "") -> Completion:
    """Join the deltas of one finished request."""
    finish = deltas[-1].finish if deltas else None
    assert finish is not None, "the request has not finished"
    return Completion(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        tail=deltas[-1].tail,
        finish=finish,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        tokenizer=tokenizer,
    )


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of one continuation of a prompt, token by token."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities: log P(continuation | prompt)."""
        return math.fsum(self.logprobs)


# ---------------------------------------------------------------- options as keywords


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
