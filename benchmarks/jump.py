"""Jump-forward on against off, and what masks cost: structured output on the default model.

    python -m benchmarks.jump [--repeats 20] [--json OUT] [--only jump|mask] [--batch 16]

Jump-forward: requests for records of ten fields, all at once, on an engine that takes forced tokens
without drawing them and on one that does not. Masks: the same number of tokens with a constraint
that leaves every choice and without, nothing forced; the extra seconds of a step. Each repeat runs
both sides, one after the other and in turns first; ratios are medians of those within a repeat.
Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch

from structgen import Engine, Regex
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.models.tokenizer import Tokenizer
from structgen.request import Completion

# As `json.dumps` writes it.
RECORD = (
    r'\{"first_name": "[A-Z][a-z]{1,11}", "last_name": "[A-Z][a-z]{1,11}", '
    r'"date_of_birth": "(19[0-9]{2}|20[01][0-9])-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])", '
    r'"country_of_residence": "[A-Z][a-z]{2,14}", "profession": "[a-z]{3,14}", '
    r'"years_of_experience": [1-4][0-9], "is_married": (true|false), '
    r'"number_of_children": [0-9], "favourite_language": "(English|French|German|Spanish)", '
    r'"subscribed_to_newsletter": (true|false)\}'
)
PROMPT = "Customer no. {number} of our shop in {town}. The record in the database is, as JSON:\n"
TOWNS = ("Lyon", "Cologne", "Leeds", "Seville")
RECORD_TOKENS = 200
# Every text of this many characters at most: what it allows is nearly everything, always.
ANYTHING = r"[^\x00]{1,4000}"
MASK_TOKENS = 32


class Run(msgspec.Struct, frozen=True):
    """What one side of a repeat brought."""

    seconds: float
    steps: int
    done: list[Completion]

    @property
    def tokens(self) -> int:
        """Of all outputs."""
        return sum(each.usage.completion_tokens for each in self.done)

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps


async def timed(engine: Engine, batch: int, repeat: int, **options: Any) -> Run:
    """All requests of one side at once; other prompts and seeds in each repeat, the same on both
    sides."""
    prompts = [
        PROMPT.format(number=1000 * repeat + number, town=TOWNS[number % len(TOWNS)])
        for number in range(batch)
    ]
    before, started = engine.statistics().steps, time.perf_counter()
    done = await asyncio.gather(
        *(
            engine.generate(prompt, seed=1000 * repeat + number, **options)
            for number, prompt in enumerate(prompts)
        )
    )
    seconds = time.perf_counter() - started
    engine.flush_cache()
    return Run(seconds, engine.statistics().steps - before, done)


async def pair(
    sides: dict[str, tuple[Engine, dict[str, Any]]], batch: int, repeat: int
) -> dict[str, Run]:
    """One repeat: every side once, in turns first."""
    names = list(sides) if repeat % 2 else list(reversed(sides))
    return {name: await timed(sides[name][0], batch, repeat, **sides[name][1]) for name in names}


def placed(ids: Sequence[int], token_bytes: Sequence[bytes]) -> list[tuple[int, int]]:
    """Tokens of a text, each with the byte at which it begins."""
    begins = accumulate((len(token_bytes[token]) for token in ids), initial=0)
    return list(zip(begins, ids, strict=False))


def forced_in(grammar: Grammar, ids: Sequence[int]) -> tuple[list[bool], int]:
    """Which tokens of an output are forced, where the others are drawn as they stand there; and
    at how many places something else would be forced than what stands there."""
    matcher, found, others = grammar.matcher(), [False] * len(ids), 0
    for place, token in enumerate(ids):
        if not found[place]:
            certain = tuple(matcher.forced(len(ids) - place))
            same = certain == tuple(ids[place : place + len(certain)])
            found[place : place + len(certain) * same] = [True] * len(certain) * same
            others += not same
        matcher.accept(token)
    return found, others


def spelling(grammar: Grammar, tokenizer: Tokenizer, done: Sequence[Completion]) -> dict[str, Any]:
    """How many tokens are the tokenizer's for the whole text: of all, and of those that are forced.

    And the same for a model that draws the tokenizer's for these texts: how many are forced then,
    and at how many places it would be forced to write otherwise.
    """
    total = canonical = forced = forced_canonical = would = others = 0
    for each in done:
        ids = tokenizer.encode(each.text, start=False)
        own = set(placed(ids, tokenizer.token_bytes))
        flags, _ = forced_in(grammar, each.tokens)
        for place, flag in zip(placed(each.tokens, tokenizer.token_bytes), flags, strict=True):
            canonical += place in own
            forced += flag
            forced_canonical += flag and place in own
        total += len(each.tokens)
        flags, different = forced_in(grammar, ids)
        would, others = would + sum(flags) / len(ids), others + different
    return {
        "canonical tokens": canonical / total,
        "canonical forced tokens": forced_canonical / max(1, forced),
        "drawn canonically: forced": would / len(done),
        "drawn canonically: forced otherwise": others,
    }


def quality(grammar: Grammar, tokenizer: Tokenizer, run: Run) -> dict[str, Any]:
    """Of the outputs of a run: what is valid, forced, spelled canonically; how likely they are."""
    length = sum(len(done.text.encode()) for done in run.done)
    likely = [entry.logprob for done in run.done for entry in done.logprobs if entry.logprob]
    texts = [done.text for done in run.done]
    return {
        "valid": sum(bool(re.fullmatch(RECORD, text)) for text in texts) / len(texts),
        "complete": sum(done.finish.complete for done in run.done) / len(run.done),
        "forced": sum(done.finish.forced for done in run.done) / run.tokens,
        "log-probability per byte": sum(likely) / length,
        **spelling(grammar, tokenizer, run.done),
    }


async def jumping(
    on: Engine, off: Engine, batch: int, repeats: int, temperature: float
) -> dict[str, object]:
    """Output tokens per second with jump-forward and without, and what the outputs are like."""
    options = {"regex": RECORD, "max_tokens": RECORD_TOKENS, "temperature": temperature}
    sides = {"on": (on, options), "off": (off, options)}
    await pair(sides, batch, 999)  # warm up
    runs = [await pair(sides, batch, repeat) for repeat in range(repeats)]
    rates = [run["on"].rate / run["off"].rate for run in runs]
    whole = [run["off"].seconds / run["on"].seconds for run in runs]
    row: dict[str, object] = {
        "tokens/s ratio": statistics.median(rates),
        "tokens/s range": [min(rates), max(rates)],
        "seconds ratio": statistics.median(whole),
    }
    scored = {
        name: (engine, {**given, "logprobs": True}) for name, (engine, given) in sides.items()
    }
    looked_at = await pair(scored, batch, 0)
    tokenizer = on.loaded.checkpoint.tokenizer
    grammar = compile_constraint(Regex(RECORD), on.loaded.vocabulary)
    for name in sides:
        row[f"{name}: tokens/s"] = statistics.median(run[name].rate for run in runs)
        row[f"{name}: seconds"] = statistics.median(run[name].seconds for run in runs)
        row[f"{name}: ms/step"] = 1000 * statistics.median(run[name].step for run in runs)
        row[f"{name}: steps"] = statistics.median(run[name].steps for run in runs)
        found = quality(grammar, tokenizer, looked_at[name])
        row |= {f"{name}: {what}": value for what, value in found.items()}
    return row


async def masking(engine: Engine, batch: int, repeats: int) -> dict[str, object]:
    """The time of a step with masks over that of one without, at equal numbers of tokens."""
    ends = [(token, -100.0) for token in engine.defaults.end_ids]
    free = {"max_tokens": MASK_TOKENS, "temperature": 0.7, "logit_bias": dict(ends)}
    sides = {"masked": (engine, {**free, "regex": ANYTHING}), "free": (engine, free)}
    await pair(sides, batch, 999)  # warm up
    runs = [await pair(sides, batch, repeat) for repeat in range(repeats)]
    ratios = [run["masked"].seconds / run["free"].seconds for run in runs]
    return {
        "step ratio": statistics.median(ratios),
        "step range": [min(ratios), max(ratios)],
        "masked: ms/step": 1000 * statistics.median(run["masked"].step for run in runs),
        "free: ms/step": 1000 * statistics.median(run["free"].step for run in runs),
        "equal tokens": all(run["masked"].tokens == run["free"].tokens for run in runs),
    }


async def main(batch: int, repeats: int, only: str) -> dict[str, object]:
    """Run everything; prints a block per measurement."""
    report: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "batch": batch,
    }
    options: dict[str, Any] = {"dtype": "float32", "slots": 20_000}
    async with Engine(**options) as on, Engine(**options, jump_forward=False) as off:
        if only != "mask":
            for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
                row = await jumping(on, off, batch, repeats, temperature)
                _show(report, f"jump, {name}", row)
        if only != "jump":
            _show(report, "mask", await masking(off, batch, repeats))
    return report


def _show(report: dict[str, object], name: str, row: dict[str, object]) -> None:
    report[name] = row
    print(f"{name}: {json.dumps(row, indent=2)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", choices=("", "jump", "mask"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outcome = asyncio.run(main(arguments.batch, arguments.repeats, arguments.only))
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=2) + "\n")
