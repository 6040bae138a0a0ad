"""The outcome of a command, as one JSON object or as text and tables for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from structgen.cli.failure import CommandError
from structgen.cli.outcome.ledger import Call
from structgen.errors import IncompleteOutputError
from structgen.output.values import json_of, readable
from structgen.request import Usage

if TYPE_CHECKING:
    from rich.table import Table

    from structgen.engine.engine import Engine
    from structgen.engine.observe import Statistics


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Wall seconds: until the model was ready, then until the first token and the end."""

    load: float
    first_token: float | None
    run: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a command gave and what it cost; `statistics` are of an engine that did only this."""

    value: Any
    text: str
    usage: Usage
    calls: tuple[Call, ...]
    statistics: Any
    seconds: Seconds


def to_json(outcome: Outcome, **more: object) -> str:
    """One JSON object: value, text and usage, and what else there is to say.

    `seconds` are those of the run, loading left out.

    Raises `CommandError` for a value that JSON cannot hold.
    """
    usage = outcome.usage
    found = {
        "value": _value(outcome.value),
        "text": readable(outcome.text),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "steps": outcome.statistics.steps,
            "seconds": round(outcome.seconds.run, 3),
        },
        **more,
    }
    return msgspec.json.encode(found).decode()


def _value(value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(json_of(value, exact=True))
    except TypeError as error:
        raise CommandError(f"the program's value cannot be written as JSON: {error}") from None


def is_complete(outcome: Outcome) -> bool:
    """Whether no output was cut off."""
    return all(call.finish.complete for call in outcome.calls)


def check_complete(outcome: Outcome) -> None:
    """Raise `IncompleteOutputError` for an output that was cut off before it had its form."""
    if not is_complete(outcome):
        raise IncompleteOutputError(
            "the output was cut off before it was complete; raise --max-tokens", outcome.text
        )


def show(outcome: Outcome) -> None:
    """Write the text, the value and the cost to stdout."""
    text = outcome.text.rstrip("\n")
    sys.stdout.write(f"{text}\n")
    # A program that returns what it wrote last would only be told twice.
    if not isinstance(outcome.value, str) or outcome.value not in outcome.text:
        sys.stdout.write(f"\nvalue: {outcome.value!r}\n")
    sys.stdout.write("\n")
    show_cost(outcome, sys.stdout)


def show_cost(outcome: Outcome, file: TextIO) -> None:
    """Write the table of calls and the engine's figures."""
    from rich.console import Console

    console = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(_calls_table(outcome.calls, outcome.usage))
    for line in _figures(outcome.statistics, outcome.seconds):
        console.print(line)


def _calls_table(calls: Sequence[Call], total: Usage) -> Table:
    from rich.table import Table

    table = Table("call", box=None, pad_edge=False, show_footer=True)
    table.columns[0].footer = "all"
    columns = {
        "prompt tokens": total.prompt_tokens,
        "of them cached": total.cached_tokens,
        "new tokens": total.completion_tokens,
    }
    for title, sum_ in columns.items():
        table.add_column(title, footer=str(sum_), justify="right")
    table.add_column("ended by")
    for call in calls:
        usage = call.finish.usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        table.add_row(_place(call), *map(str, counts), call.finish.reason)
    return table


def _place(call: Call) -> str:
    branch = "".join(f" {index}" for index in call.lineage.branch)
    place = f"branch{branch}" if branch else "root"
    return f"{place}: {call.lineage.parent}" if call.lineage.parent else place


def _figures(statistics: Statistics, seconds: Seconds) -> list[str]:
    batch_max = statistics.batch_size_max
    first = "no token" if seconds.first_token is None else f"{seconds.first_token:.2f} s"
    lines = (
        ("prefilled", f"{statistics.prefilled_tokens} tokens"),
        ("from the radix cache", f"{statistics.cached_tokens} tokens, {statistics.hit_rate:.0%}"),
        ("generated", f"{statistics.generated_tokens} tokens in {statistics.steps} steps"),
        ("requests in a step", f"{statistics.batch_size_mean:.1f}, {batch_max} at most"),
        ("model ready after", f"{seconds.load:.2f} s"),
        ("first token after", first),
        ("run", f"{seconds.run:.2f} s"),
    )
    return [f"{name:>22}  {figure}" for name, figure in lines]


def write_defaults(engine: Engine, sampling: Mapping[str, Any]) -> None:
    """Write the defaults that are in force to stderr, as `name: value` lines."""
    for name, value in effective_defaults(engine, sampling).items():
        sys.stderr.write(f"{name}: {value}\n")


def effective_defaults(engine: Engine, sampling: Mapping[str, Any]) -> dict[str, str]:
    """What holds for a generation that says nothing else."""
    loaded, model = engine.loaded, engine.defaults
    chosen = {**msgspec.structs.asdict(model), **sampling}
    return {
        "model": loaded.checkpoint.name,
        "temperature": f"{chosen['temperature']:g}",
        "top_p": f"{chosen['top_p']:g}",
        "top_k": f"{chosen['top_k'] or 'no limit'}",
        "min_p": f"{chosen['min_p']:g}",
        "repetition_penalty": f"{chosen['repetition_penalty']:g}",
        "max_tokens": f"{chosen['max_tokens']}",
        "stop ids": ", ".join(map(str, model.end_ids)) or "none",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "page size": "1 token",
        "slots": f"{loaded.slots}",
        "max_context": f"{loaded.max_context}",
        "rope theta": f"{loaded.runner.decoder.config.rope.theta:g}",
    }
