"""How tokens are chosen and what is reported of them, as frozen data with checked values.

Used by `request`, which carries it, and by every backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import msgspec

from structgen.errors import OptionError

DEFAULT_MAX_TOKENS = 128
INT32_MAX = 2**31 - 1  # options that steps carry in int32 and float32 must fit there
FLOAT32_MAX = 3.4e38
# A logit of 100 divided by this is 10,000, of which float32 still tells thousandths apart: other
# penalties and biases keep their effect. A smaller factor would choose no other token.
LEAST_REPETITION = 0.01
# Options of several values: what each is, and how one of them is written.
_SEVERAL = (
    ("stop", "strings", '("END",)'),
    ("stop_regex", "regular expressions", '("[0-9]+",)'),
    ("stop_token_ids", "token ids", "(50,)"),
)


# ---------------------------------------------------------------- checks


def check_whole(
    name: str, value: object, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    """Raise `OptionError` for what is no whole number from `low` to `high`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(name, f"expected a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise OptionError(name, f"must be {bound}, got {_shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Raise `OptionError` for what is neither True nor False."""
    if not isinstance(value, bool):
        raise OptionError(name, f"expected True or False, got {value!r:.80}")


def check_text(name: str, value: object) -> None:
    """Raise `OptionError` for what is no string."""
    if not isinstance(value, str):
        raise OptionError(name, f"expected a string, got {value!r}")


def check_range(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    optional: bool = False,
) -> None:
    """Raise `OptionError` for what is no number from `low` (excluded if open) to `high`."""
    if value is None and optional:
        return
    if not _is_number(value):
        raise OptionError(name, f"expected a number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        raise OptionError(name, f"must be {_bounds(low, high, open_low)}, got {_shown(value)}")
    if value > FLOAT32_MAX:
        raise OptionError(
            name, f"must be a finite number that float32 can hold, got {_shown(value)}"
        )


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _bounds(low: float, high: float, open_low: bool) -> str:
    if math.isinf(high):
        return f"above {low:g}" if open_low else f"at least {low:g}"
    return f"above {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"


def _shown(value: float) -> str:
    # An integer may be too long to be written out; one of so many digits is as good as infinite.
    if isinstance(value, int) and value.bit_length() > 1024:
        return "a number of more than 300 digits"
    return str(value).removesuffix(".0")


def check_several(name: str, value: object, what: str, *, instead: str) -> tuple[Any, ...]:
    """The values of an option that takes several, as a tuple.

    Raises `OptionError` for what is no sequence: a string is one of characters, which nobody means
    here; a set has no order.

    instead   how one of them is written
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise OptionError(
            name, f"expected a sequence of {what}, got {value!r:.80}; write {instead}"
        )
    return tuple(value)


def _are_ids(values: Sequence[Any]) -> bool:
    """Whether all are token ids, as far as that can be said fast."""
    return set(map(type, values)) <= {int} and (not values or min(values) >= 0)


def _are_biases(pairs: Sequence[Any]) -> bool:
    """Whether all are pairs of a token id and its bias, as far as that can be said fast."""
    if not set(map(type, pairs)) <= {tuple} or set(map(len, pairs)) - {2}:
        return False
    biases = [bias for _, bias in pairs]
    known = set(map(type, biases)) <= {int, float} and all(-100 <= bias <= 100 for bias in biases)
    return known and _are_ids([token for token, _ in pairs])


# ---------------------------------------------------------------- sampling


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. `None` means: the model's own default (see `ModelDefaults`).

    max_tokens           most tokens of the output; with 0 the prompt is only read, for its
                         log-probabilities
    temperature          >= 0; 0 is greedy
    top_p, min_p         probabilities in (0, 1] and [0, 1]
    top_k                0 or None for no limit, else >= 1
    frequency_penalty    subtracted per earlier occurrence in the output, in [-2, 2]
    presence_penalty     subtracted once for any earlier occurrence in the output, in [-2, 2]
    repetition_penalty   >= 0.01; divides positive and multiplies negative logits of every token
                         that stands in the prompt or the output (Keskar et al., CTRL, 2019)
    logit_bias           (token id, added to its logit) pairs
    min_tokens           end tokens and stop strings cannot end the output before that many
    stop                 strings; the output ends before the first that appears
    stop_regex           regular expressions; the output ends before the first match of one, and
                         a match ends where it first can: `\n+` is one newline
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
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check_flag("ignore_eos", self.ignore_eos)
        check_whole("max_tokens", self.max_tokens, low=0, optional=True)
        check_whole("top_k", self.top_k, low=0, high=INT32_MAX, optional=True)
        check_whole("min_tokens", self.min_tokens, low=0)
        check_whole("seed", self.seed, low=0, high=2**63 - 1, optional=True)
        check_range("temperature", self.temperature, 0.0, math.inf, optional=True)
        check_range("top_p", self.top_p, 0.0, 1.0, open_low=True, optional=True)
        check_range("min_p", self.min_p, 0.0, 1.0, optional=True)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        penalty = self.repetition_penalty
        check_range("repetition_penalty", penalty, LEAST_REPETITION, math.inf, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError("min_tokens", f"{self.min_tokens} is more than max_tokens")
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        for name, what, instead in _SEVERAL:
            several = check_several(name, getattr(self, name), what, instead=instead)
            msgspec.structs.force_setattr(self, name, several)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise OptionError("stop", "a stop must be a string that is not empty")
        if any(not isinstance(text, str) or not text for text in self.stop_regex):
            raise OptionError("stop_regex", "a pattern must be a string that is not empty")
        if not _are_ids(self.stop_token_ids):
            for token in self.stop_token_ids:
                check_whole("stop_token_ids", token, low=0)

    def _check_bias(self) -> None:
        instead = "((50, -1.5),), or tuple(bias.items()) of a dict"
        what = "(token id, bias) pairs"
        pairs = check_several("logit_bias", self.logit_bias, what, instead=instead)
        for pair in () if _are_biases(pairs) else pairs:
            if len(check_several("logit_bias", pair, what, instead=instead)) != 2:
                raise OptionError("logit_bias", f"expected {what}, got {pair!r:.80}")
            token, bias = pair
            check_whole("logit_bias", token, low=0)
            check_range("logit_bias", bias, -100.0, 100.0)
        msgspec.structs.force_setattr(self, "logit_bias", tuple(map(tuple, pairs)))


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
        check_flag("logprobs", self.logprobs)
        check_whole("top_logprobs", self.top_logprobs, low=0, high=20)
        check_whole("prompt_logprobs", self.prompt_logprobs, low=0, optional=True)
