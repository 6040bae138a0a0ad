"""What the commands do once their options are understood: load an engine, run, measure."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec

from structgen.cli.engine import Opening
from structgen.cli.failure import CommandError
from structgen.cli.options import Options
from structgen.cli.outcome.ledger import Ledger
from structgen.cli.outcome.report import Outcome, Seconds, write_defaults
from structgen.options import GenOptions
from structgen.program.program import Program
from structgen.request import Lineage

if TYPE_CHECKING:
    from structgen.engine.engine import Engine

NOTHING = (
    "the prompt is empty: there is nothing to answer or continue; write some text, "
    "or - to read it from stdin"
)


async def run(
    program: Program[..., Any],
    arguments: Mapping[str, Any],
    options: Options,
    opening: Opening,
) -> Outcome:
    """Run a program; what it prints goes to stderr, because stdout is the report's."""
    sampling = options.sampling()
    with contextlib.redirect_stdout(sys.stderr):
        async with _opened(options, sampling, opening) as (engine, load):
            ledger = Ledger(engine)
            result = await program.using(**sampling).run(ledger, **arguments)
            found = _outcome(engine, ledger, load, value=result.value, text=result.text())
            # Of requests that the program left unfinished, too, the tokens that were read.
            return msgspec.structs.replace(found, usage=result.usage)


async def generate(
    text: str,
    options: Options,
    opening: Opening,
    *,
    chat: bool | None,
    form: GenOptions | None = None,
) -> Outcome:
    """Continue a text, or answer it as a chat; None chats if the model has a template for it.

    The output is written to stdout as it comes, unless the options ask for JSON. `form` has the
    option that constrains it, if one does.
    Raises `CommandError` when a chat is asked of a model that has no template, or begins with
    nothing but space.
    """
    sampling = options.sampling()
    async with _opened(options, sampling, opening) as (engine, load):
        if chat and engine.chat is None:
            raise CommandError(
                f"{options.model} has no chat template; add --raw or --chat-template"
            )
        chats = engine.chat is not None if chat is None else chat
        if chats and not text.strip():
            raise CommandError(NOTHING)
        ledger = Ledger(engine)
        pieces: list[str] = []
        prompt = [{"role": "user", "content": text}] if chats else text
        asked = cast("GenOptions", {**sampling, **(form or {})})
        async with engine.stream(prompt, **asked) as deltas:
            async for delta in ledger.watch(Lineage(), deltas):
                pieces.append(delta.text)
                if not options.json:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        answer = "".join(pieces)
        return _outcome(engine, ledger, load, value=answer, text=answer)


def _outcome(engine: Engine, ledger: Ledger, load: float, *, value: object, text: str) -> Outcome:
    return Outcome(
        value=value,
        text=text,
        usage=ledger.usage,
        calls=tuple(ledger.calls),
        statistics=engine.statistics(),
        seconds=Seconds(load=load, first_token=ledger.first_token, run=ledger.seconds),
    )


@asynccontextmanager
async def _opened(
    options: Options, sampling: GenOptions, opening: Opening
) -> AsyncIterator[tuple[Engine, float]]:
    """An open engine, and the seconds that opening it took."""
    async with opening.engine as engine:
        load = time.perf_counter() - opening.started
        if options.verbose:
            write_defaults(engine, sampling)
        yield engine, load
