"""Generating: the requests of one `gen`, their retries, and what becomes of the answers.

Owns   nothing; `generated` is the work of one operation.
Holds  the state changes when all of it has succeeded, and not before.
Used   by `operations`; `Pieces` and `tools` take parts of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

import msgspec

from structgen.errors import IncompleteOutputError, InvalidOutputError, OptionError
from structgen.output.captures import Captured, captured, names_of
from structgen.program.cursor import Cursor, Question
from structgen.program.expression import Gen
from structgen.program.generation import Generation
from structgen.program.run import derived_seed
from structgen.program.tasks import cut, result_of, start
from structgen.program.variables import Meta, Value
from structgen.request import Completion, Prompt, Request, Text

T = TypeVar("T")
REASONING = "_reasoning_content"  # what SGLang appends to the variable's name
RETRY_TEMPERATURE = 0.7  # of the retry of a greedy call, which would say the same again


class Answer(msgspec.Struct, frozen=True):
    """A generation that was read to its end, the value of it, and the attempts that it took."""

    live: Generation
    value: Value
    attempts: int


async def generated(cursor: Cursor, call: Gen) -> Value:
    """Generate, append, set the variables: the text, the value of its type, or n of them."""
    question = cursor.ask(call)
    if call.name is not None and call.name in names_of(question.requests[0].constraint):
        raise OptionError(
            "name", f"the term captures {call.name!r} itself; give the whole text another name"
        )
    answers = await answers_to(cursor, call, question)
    values = [answer.value for answer in answers]
    picked = _picked(call, values)
    completions = tuple(answer.live.completion() for answer in answers)
    chosen = completions[picked]
    cursor.commit(kept_parts(chosen))
    meta = meta_of(
        chosen,
        prefix_lost=question.prefix_lost,
        samples=completions if call.samples is not None else (),
        attempts=answers[picked].attempts,
    )
    several = call.samples is not None
    for name, found in _captures(answers, several=several).items():
        cursor.write(name, found, meta)
    if call.reasoning is not None and call.name is not None:
        thoughts = [answer.live.channels["reasoning"] for answer in answers]
        cursor.write(call.name + REASONING, thoughts if several else thoughts[0], meta)
    value = values if several else values[0]
    cursor.write(call.name, value, meta)
    return value


def captures_of(answer: Generation) -> Mapping[str, Captured]:
    """What a finished generation captured, by name."""
    return captured(answer.request.constraint, answer.completion().finish.captures)


def value_of(call: Gen, answer: Generation) -> Value:
    """The value of a finished generation.

    Raises `IncompleteOutputError` for one that was cut off, `InvalidOutputError` for one that is
    no value of the type.
    """
    text = answer.channels["answer"]
    if call.form is None:
        return text
    finish = answer.completion().finish
    if finish.complete or call.form.constraint is None:
        return call.form.read(text)
    why = f"the stop {finish.matched!r}"
    if finish.reason == "length":
        why = f"max_tokens after {finish.usage.completion_tokens} tokens"
    raise IncompleteOutputError(
        f"{call!s} was cut off by {why} before it was a whole {call.form.name}; it ends "
        f"{text[-80:]!r}",
        text,
    )


async def together(works: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Do some works at once. When one fails, the others are cancelled, and its error raised."""
    tasks = [start(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                result_of(task)
        return [task.result() for task in tasks]
    finally:
        await cut(tasks)


# ---------------------------------------------------------------- attempts


async def answers_to(cursor: Cursor, call: Gen, question: Question) -> list[Answer]:
    """The answers to a question, all sent before one is read: they share a prefill."""
    async with AsyncExitStack() as stack:
        live = [
            await stack.enter_async_context(Generation(cursor.run, request, question.caller))
            for request in question.requests
        ]
        if len(live) == 1:
            return [await _answer(cursor, call, question, live[0])]
        return await together([partial(_answer, cursor, call, question, each) for each in live])


async def _answer(cursor: Cursor, call: Gen, question: Question, first: Generation) -> Answer:
    """The answer that a generation comes to, or one of its retries."""
    try:
        await first.finish()
        return Answer(first, value_of(call, first), 1)
    except InvalidOutputError as error:
        if not call.retries:
            raise
        await first.__aexit__(type(error), error, error.__traceback__)
        reason = error
    for attempt in range(2, call.retries + 2):
        request = _again(first.request, attempt, cursor.run.left())
        try:
            async with Generation(cursor.run, request, question.caller) as live:
                await live.finish()
                return Answer(live, value_of(call, live), attempt)
        except InvalidOutputError as error:
            reason = error
    raise reason


def _again(request: Request, attempt: int, left: int | None) -> Request:
    """The request of another attempt: the same, with other noise."""
    sampling = request.sampling
    changed: dict[str, Any] = {}
    if greedy := sampling.temperature == 0:
        changed["temperature"] = RETRY_TEMPERATURE
    if greedy or sampling.seed is not None:
        changed["seed"] = derived_seed(sampling.seed or 0, (attempt,))
    if left is not None and sampling.max_tokens is not None:
        changed["max_tokens"] = max(1, min(sampling.max_tokens, left))
        changed["min_tokens"] = min(sampling.min_tokens, changed["max_tokens"])
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, **changed))


# ---------------------------------------------------------------- what becomes of an answer


def _captures(answers: Sequence[Answer], *, several: bool) -> Mapping[str, Value]:
    """The variables that a term sets: one value each, or a list of one for each sample."""
    found = [captures_of(answer.live) for answer in answers]
    return {name: [each[name] for each in found] for name in found[0]} if several else found[0]


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
