"""The operations that need a model: generate, select, settle, prime.

Owns   nothing; each takes the cursor for as long as it runs, and changes it only at its end.
Used   by `State`, at once or for expressions that were appended before.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import anyio
import msgspec

from structgen.errors import (
    DeadlineError,
    IncompleteOutputError,
    InvalidOutputError,
    OptionError,
    UnsupportedError,
)
from structgen.events import CallEnded, CallKind, CallStarted
from structgen.output.choices import ChoiceScore, best, draw, weigh
from structgen.program.cursor import Cursor, Question
from structgen.program.expression import Gen, Select
from structgen.program.generation import Generation
from structgen.program.tasks import cut
from structgen.program.variables import Meta, Value
from structgen.request import (
    Completion,
    Finish,
    Prompt,
    Scores,
    Text,
    TokenLogprob,
    Tokens,
    Usage,
)

T = TypeVar("T")
REASONING = "_reasoning_content"  # what SGLang appends to the variable's name


async def operate(
    cursor: Cursor,
    action: str,
    work: Callable[[], Awaitable[T]],
    *,
    call: Gen | Select | None = None,
    ahead: bool = False,
) -> T:
    """Run one operation on a cursor, after what was appended before it.

    call    the call that this is, whose timeout binds all of it
    ahead   see `settle`
    """
    await cursor.begin(action)
    try:
        with nullcontext() if call is None else _limits(cursor, call):
            await _settle(cursor, ahead=ahead)
            return await work()
    finally:
        cursor.end()


async def generate(cursor: Cursor, call: Gen) -> Value:
    """Generate here: the text, the value of its type, or the list of n of them."""
    return await operate(cursor, str(call), lambda: _generate(cursor, call), call=call)


async def select(cursor: Cursor, call: Select) -> str:
    """Choose here."""
    return await operate(cursor, str(call), lambda: _select(cursor, call), call=call)


async def settle(cursor: Cursor, *, ahead: bool = True) -> None:
    """Run what was appended and not run yet, in order.

    What fails stays the first thing that is pending: awaiting the state again tries it again.

    ahead   text that follows the last call is computed at once, for whatever comes next
    """
    if cursor.pending:
        await operate(cursor, f"`await s` of {cursor.waiting()}", _nothing, ahead=ahead)
    else:
        cursor.require_idle("`await s`")


async def prime(cursor: Cursor) -> Usage:
    """Have the backend compute all that was said, so that what follows finds it cached."""

    async def work() -> Usage:
        parts = cursor.prompt("prime()").parts
        usage = await cursor.run.waiting("prime()", cursor.place, lambda: _primed(cursor, parts))
        cursor.sent(parts)
        return usage

    return await operate(cursor, "prime()", work)


async def encode(cursor: Cursor) -> tuple[int, ...]:
    """The token ids of all that was said."""

    async def work() -> tuple[int, ...]:
        backend = cursor.run.backend
        if not backend.capabilities.tokens:
            raise UnsupportedError("this backend tells no token ids; read s.text() instead")
        parts = cursor.prompt("tokens()").parts
        cursor.transcript.seal()  # what is told here stays the beginning of what follows
        return await cursor.run.waiting("tokens()", cursor.place, lambda: backend.encode(parts))

    return await operate(cursor, "tokens()", work)


async def _primed(cursor: Cursor, parts: Prompt) -> Usage:
    """Have the backend compute a prompt; no usage of the run, whose requests will find it."""
    backend, lineage = cursor.run.backend, cursor.lineage(None)

    async def work() -> tuple[Usage, Usage]:
        usage = await backend.prime(parts, lineage=lineage)
        return usage, usage

    return (await _reported(cursor, "prime", None, work))[0]


async def _reported(
    cursor: Cursor,
    kind: CallKind,
    name: str | None,
    work: Callable[[], Awaitable[tuple[T, Usage]]],
) -> tuple[T, Usage]:
    """Await a call of the backend that generates nothing, and report its beginning and its end."""
    run, name = cursor.run, name or ""
    where = {"call": next(run.calls), "state": cursor.number, "name": name}
    run.tell(CallStarted, kind=kind, **where)
    try:
        value, usage = await work()
    except BaseException as error:
        run.tell(CallEnded, error=f"{type(error).__name__}: {error}", **where)
        raise
    run.tell(CallEnded, reason="stop", usage=usage, **where)
    return value, usage


# ---------------------------------------------------------------- settling


async def _nothing() -> None:
    """What `await s` does after settling."""


async def _settle(cursor: Cursor, *, ahead: bool) -> None:
    followed = False  # literal text came after the last call
    while cursor.pending:
        atom = cursor.pending[0]
        match atom:
            case Gen():
                with _limits(cursor, atom):
                    await _generate(cursor, atom)
                followed = False
            case Select():
                with _limits(cursor, atom):
                    await _select(cursor, atom)
                followed = False
            case _:
                cursor.apply(atom)
                followed = True
        cursor.done(atom)
    if followed and ahead and cursor.run.backend.capabilities.primes:
        # It is known to follow what was just generated: computed in the very next step, it is
        # there when whatever the program does now, such as a tool, is done.
        parts = cursor.prompt("await s").parts
        cursor.sent(parts)
        cursor.run.aside(lambda: _primed(cursor, parts))


# ---------------------------------------------------------------- generating


async def _generate(cursor: Cursor, call: Gen) -> Value:
    question = cursor.ask(call)
    answers = await _answers(cursor, question)
    values = [_value(call, answer) for answer in answers]
    picked = _picked(call, values)
    completions = tuple(answer.completion() for answer in answers)
    chosen = completions[picked]
    cursor.commit(kept_parts(chosen))
    meta = meta_of(
        chosen,
        prefix_lost=question.prefix_lost,
        samples=completions if call.samples is not None else (),
    )
    several = call.samples is not None
    if call.reasoning is not None and call.name is not None:
        thoughts = [answer.channels["reasoning"] for answer in answers]
        cursor.write(call.name + REASONING, thoughts if several else thoughts[0], meta)
    value = values if several else values[0]
    cursor.write(call.name, value, meta)
    return value


async def _answers(cursor: Cursor, question: Question) -> list[Generation]:
    """The finished generations of a question, all sent before one is read: they share a prefill."""
    async with AsyncExitStack() as stack:
        live = [
            await stack.enter_async_context(Generation(cursor.run, request, question.caller))
            for request in question.requests
        ]
        if len(live) == 1:
            await live[0].finish()
        else:
            await _finish_all(live)
    return live


async def _finish_all(live: Sequence[Generation]) -> None:
    """Read some generations at once. When one fails, the others are cancelled."""
    tasks = [asyncio.create_task(each.finish()) for each in live]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await cut(tasks)


def _value(call: Gen, answer: Generation) -> Value:
    text = answer.channels["answer"]
    if call.form is None:
        return text
    try:
        return call.form.read(text)
    except InvalidOutputError as error:
        finish = answer.completion().finish
        if finish.reason == "stop" and not isinstance(finish.matched, str):
            raise
        why = "max_tokens" if finish.reason == "length" else f"the stop {finish.matched!r}"
        raise IncompleteOutputError(
            f"{call!s} was cut off by {why} before it was a whole value: {error}", text
        ) from None


def _picked(call: Gen, values: list[Any]) -> int:
    if not callable(call.pick):
        return call.pick
    picked = call.pick(list(values))
    if isinstance(picked, bool) or not isinstance(picked, int) or not 0 <= picked < len(values):
        raise OptionError(
            "pick", f"the function returned {picked!r}, not an index below {len(values)}"
        )
    return picked


def kept_parts(completion: Completion) -> Prompt:
    """What of a completion goes into the transcript."""
    if completion.text and not completion.tokens:
        return (Text(completion.text),)  # the stop began in the first token, or no tokens
    return completion.parts


def meta_of(completion: Completion, **more: Any) -> Meta:
    """A completion as the meta of a variable."""
    fields = {field: getattr(completion, field) for field in completion.__struct_fields__}
    return Meta(**fields, **more)


@contextmanager
def _limits(cursor: Cursor, call: Gen | Select) -> Iterator[None]:
    """The timeout of a call; what it fails by is noted for its variable."""
    with cursor.noting(call.name), time_limit(call.timeout, str(call)):
        yield


@contextmanager
def time_limit(seconds: float | None, action: str, *, since: float | None = None) -> Iterator[None]:
    """Raise `DeadlineError` when the block takes longer, counted from its start or `since`."""
    if seconds is None:
        yield
        return
    deadline = (anyio.current_time() if since is None else since) + seconds
    with anyio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineError(f"{action} was not finished within its timeout of {seconds:g} s")


# ---------------------------------------------------------------- selecting


class Scored(msgspec.Struct, frozen=True):
    """What a backend said of the choices, and the prompt that it said it of."""

    choices: tuple[ChoiceScore, ...]
    usage: Usage
    healed: bool
    parts: Prompt


async def _select(cursor: Cursor, call: Select) -> str:
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

    choices, usage = await _reported(cursor, "select", call.name, work)
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
