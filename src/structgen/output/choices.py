"""Choosing one of several strings by how likely a model finds them.

Owns   the methods of choosing, and drawing from the exact distribution.
Holds  the chosen string never depends on the order of the list: sums are rounded once, draws go
       by the texts in order, and of equals the smallest text is chosen.
Used   by `program`, for `select`.

Of a choice with tokens t1 .. tn after the prompt:

    token_length_normalized                mean of log P(ti); the default
    greedy_token_selection                 token by token: those with the likeliest first token,
                                           of these those with the likeliest second one, and so
                                           on; a choice that has ended goes on with its mean
    unconditional_likelihood_normalized    mean of log P(ti) - log P(ti without the prompt)
    sum                                    log P of the whole choice

The first three, and their names, are SGLang's (Zheng et al., 2024). Setting a choice against its
likelihood without the prompt was proposed by Brown et al., "Language models are few-shot
learners", 2020, and as domain-conditional PMI by Holtzman et al., "Surface form competition",
2021. No method is right everywhere: the mean favours long choices whose ends are certain once
they have begun, the sum short ones, greedy selection those with an attractive first token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Literal, get_args

import msgspec

from structgen.errors import OptionError, UnsupportedError
from structgen.request import Score
from structgen.sampling import check_range

Method = Literal[
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "sum",
]
METHODS: tuple[Method, ...] = get_args(Method)


class ChoiceScore(msgspec.Struct, frozen=True, kw_only=True):
    """What a model thinks of one choice.

    tokens        ids of the choice after the prompt
    logprobs      their log-probabilities
    total         log P(choice | prompt), the sum of them
    score         what the method compares; of greedy_token_selection the first token's
    probability   e^total among all choices: exactly what `draw` draws from at temperature 1
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float
    score: float
    probability: float


# ---------------------------------------------------------------- what can be chosen


def checked_choices(choices: Iterable[str]) -> tuple[str, ...]:
    """The choices as a tuple. Raises `OptionError` for what is no list of different strings."""
    # Neither has an order, so the list of scores would have another one in each process.
    unordered = isinstance(choices, Mapping | AbstractSet)
    if unordered or isinstance(choices, str | bytes) or not isinstance(choices, Iterable):
        raise OptionError("choices", f"expected a list of strings, got {choices!r:.80}")
    found = tuple(choices)
    if not found:
        raise OptionError("choices", "there must be at least one to choose from")
    seen: set[str] = set()
    for choice in found:
        if not isinstance(choice, str):
            raise OptionError("choices", f"expected strings, got {choice!r:.80}; write str(...)")
        if not choice:
            raise OptionError("choices", "a choice must not be empty: it has no tokens to score")
        if choice in seen:
            raise OptionError("choices", f"{choice!r:.80} stands there twice")
        seen.add(choice)
    return found


def check_method(method: str) -> None:
    """Raise `OptionError` for a method that does not exist."""
    if method not in METHODS:
        raise OptionError("by", f"unknown {method!r}; the methods are {', '.join(METHODS)}")


# ---------------------------------------------------------------- weighing


def weigh(
    scores: Iterable[Score],
    method: Method = "token_length_normalized",
    unconditional: Iterable[Score] | None = None,
) -> tuple[ChoiceScore, ...]:
    """Weigh choices by a method, in the order in which they are given.

    unconditional   the same choices without the prompt; read by
                    unconditional_likelihood_normalized only, which cannot do without

    Raises `OptionError` for an unknown method or a missing `unconditional`, and
    `UnsupportedError` where a choice has other tokens without the prompt.
    """
    check_method(method)
    scores = tuple(scores)
    assert scores, "nothing to weigh"
    assert all(len(score.tokens) == len(score.logprobs) > 0 for score in scores), "token by token"
    if method == "unconditional_likelihood_normalized":
        values = _against(scores, unconditional)
    elif method == "greedy_token_selection":
        values = [score.logprobs[0] for score in scores]
    elif method == "sum":
        values = [score.total for score in scores]
    else:
        values = [_mean(score.logprobs) for score in scores]
    totals = [score.total for score in scores]
    return tuple(
        ChoiceScore(
            text=score.text,
            tokens=score.tokens,
            logprobs=score.logprobs,
            total=total,
            score=value,
            probability=probability,
        )
        for score, total, value, probability in zip(
            scores, totals, values, _softmax(totals, 1.0), strict=True
        )
    )


def _against(scores: Sequence[Score], unconditional: Iterable[Score] | None) -> list[float]:
    name = "unconditional_likelihood_normalized"
    if unconditional is None:
        raise OptionError("by", f"{name} needs the choices' scores without the prompt as well")
    values = []
    for score, bare in zip(scores, unconditional, strict=True):
        if score.text != bare.text or len(score.logprobs) != len(bare.logprobs):
            raise UnsupportedError(
                f"{name}: {score.text!r:.80} was scored as {len(score.logprobs)} tokens, and "
                f"{bare.text!r:.80} without the prompt as {len(bare.logprobs)}; "
                "choose by another method"
            )
        if -math.inf in score.logprobs:
            values.append(-math.inf)  # impossible, and it would be inf - inf where both are
        else:
            pairs = zip(score.logprobs, bare.logprobs, strict=True)
            values.append(_mean([given - alone for given, alone in pairs]))
    return values


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# ---------------------------------------------------------------- choosing


def best(choices: Sequence[ChoiceScore], method: Method) -> int:
    """Index of the choice that the method prefers; of equals, the one with the smallest text.

    `choices` were weighed by the same method.
    """
    assert choices, "nothing to choose from"
    if method == "greedy_token_selection":
        left = _greedy(choices)
    else:
        top = max(choice.score for choice in choices)
        left = [index for index, choice in enumerate(choices) if choice.score == top]
    return min(left, key=lambda index: choices[index].text)


def _greedy(choices: Sequence[ChoiceScore]) -> list[int]:
    left = sorted(range(len(choices)), key=lambda index: choices[index].text)
    means = [_mean(choice.logprobs) for choice in choices]
    for column in range(max(len(choice.logprobs) for choice in choices)):
        # Choices with the same tokens so far share one value: computed in different rows of a
        # batch, it could differ in its last bits, and they would decide.
        shared: dict[tuple[int, ...], float] = {}
        at: dict[int, float] = {}
        for index in left:
            row, tokens = choices[index].logprobs, choices[index].tokens[: column + 1]
            ended = column >= len(row)
            at[index] = means[index] if ended else shared.setdefault(tokens, row[column])
        top = max(at.values())
        left = [index for index in left if at[index] == top]
        if len(left) == 1:
            break
    return left


def draw(choices: Sequence[ChoiceScore], temperature: float, seed: int) -> int:
    """Index of a choice drawn from softmax(total / temperature), whatever the method.

    A function of the choices' texts and totals, the temperature and the seed alone.
    Raises `OptionError` unless the temperature is above 0; at 0 there is nothing to draw.
    """
    check_range("temperature", temperature, 0.0, math.inf, open_low=True)
    assert choices, "nothing to choose from"
    order = sorted(range(len(choices)), key=lambda index: choices[index].text)
    weights = _softmax([choices[index].total for index in order], temperature)
    threshold = _uniform(seed) * math.fsum(weights)
    reached = 0.0
    for index, weight in zip(order, weights, strict=True):
        reached += weight
        if threshold < reached:
            return index
    # Rounded sums can end just below the threshold: the last choice that is possible at all.
    return next(index for index, weight in zip(order[::-1], weights[::-1], strict=True) if weight)


def _uniform(seed: int) -> float:
    """A number from [0, 1) that is a function of the seed, 0 .. 2**63 - 1, on any platform."""
    # Named, so that it has nothing in common with other noise that the same seed makes.
    digest = blake2b(seed.to_bytes(8), digest_size=8, person=b"select").digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53


def _softmax(totals: Sequence[float], temperature: float) -> list[float]:
    top = max(totals)
    if top == -math.inf:  # none is possible, and none less so than another
        return [1 / len(totals)] * len(totals)
    # Relative to the largest, no power is above 1: what overflows is a quotient, to -inf, whose
    # power is 0.
    weights = [math.exp((total - top) / temperature) for total in totals]
    whole = math.fsum(weights)
    return [weight / whole for weight in weights]
