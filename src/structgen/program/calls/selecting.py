"""Choosing one of several texts by its exact log-probability.

Owns   nothing; `selected` is the work of one operation. Used by `operations`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from structgen.errors import UnsupportedError
from structgen.output.choices import ChoiceScore, best, draw, weigh
from structgen.program.calls.reporting import reported
from structgen.program.cursor import Cursor
from structgen.program.expression import Select
from structgen.program.variables import Meta
from structgen.request import Finish, Prompt, Scores, Text, TokenLogprob, Tokens, Usage


class Scored(msgspec.Struct, frozen=True):
    """What a backend said of the choices, and the prompt that it said it of."""

    choices: tuple[ChoiceScore, ...]
    usage: Usage
    healed: bool
    parts: Prompt


async def selected(cursor: Cursor, call: Select) -> str:
    """Choose, append the choice, set the variable."""
    if not cursor.run.backend.capabilities.score:
        raise UnsupportedError(
            "this backend cannot score choices; generate with gen(type=Literal[...]) instead"
        )
    seed = cursor.call_seed(call.seed)
    found = await _scored(cursor, call)
    if call.temperature:
        index = draw(
            found.choices, call.temperature, secrets.randbits(63) if seed is None else seed
        )
    else:
        index = best(found.choices, call.by)
    return _commit_choice(cursor, call, found, index)


async def _scored(cursor: Cursor, call: Select) -> Scored:
    """Score the choices after what was said, by the requests that the method needs."""
    run = cursor.run
    spaced = any(choice[0].isspace() for choice in call.choices)
    healed = call.heal and not spaced and cursor.transcript.ends_with_one_space()
    texts = [f" {choice}" for choice in call.choices] if healed else list(call.choices)
    transcript = cursor.transcript.without_last_space() if healed else cursor.transcript
    parts = cursor.prompt_of(transcript, str(call)).parts
    lineage = cursor.lineage(call.name)

    async def ask(prompt: Prompt) -> Scores:
        return await run.waiting(
            str(call), cursor.place, lambda: run.backend.score(prompt, texts, lineage=lineage)
        )

    async def work() -> tuple[tuple[ChoiceScore, ...], Usage]:
        scores, usage, unconditional = await ask(parts), Usage(), None
        if call.by == "unconditional_likelihood_normalized":
            unconditional = await ask(())
            usage += unconditional.usage
        return weigh(scores.each, call.by, _each(unconditional)), usage + scores.usage

    choices, usage = await reported(cursor, "select", call.name, work)
    run.usage += usage
    return Scored(choices, usage, healed, parts)


def _each(scores: Scores | None) -> Sequence[Any] | None:
    return None if scores is None else scores.each


def _commit_choice(cursor: Cursor, call: Select, found: Scored, index: int) -> str:
    choice, value = found.choices[index], call.choices[index]
    if found.healed:
        cursor.transcript.drop_last_space()
    cursor.sent(found.parts)
    fingerprint = cursor.run.backend.capabilities.tokenizer
    exact = bool(choice.tokens) and cursor.run.backend.capabilities.tokens
    cursor.commit((Tokens(choice.tokens, choice.text, fingerprint),) if exact else (Text(value),))
    meta = Meta(
        text=value,
        tokens=choice.tokens,
        tail="",
        finish=Finish(reason="stop", usage=found.usage),
        logprobs=tuple(map(TokenLogprob, choice.tokens, choice.logprobs)),
        tokenizer=fingerprint,
        choices=tuple(
            msgspec.structs.replace(each, text=text)
            for each, text in zip(found.choices, call.choices, strict=True)
        ),
        by="sample" if call.temperature else call.by,
    )
    cursor.write(call.name, value, meta)
    return value
