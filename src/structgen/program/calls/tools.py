"""The model calls functions: its turn, the functions, and the turns of their results.

Owns   nothing; `called` is the work of one operation.
Holds  the state changes when the model has written its turn and every result stands behind it, and
       not before: after an error or a cancellation it is as it was, though a tool may have run.
Used   by `State.call`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import msgspec

from structgen.chat import Role
from structgen.errors import (
    BudgetError,
    EngineError,
    OptionError,
    RoleError,
    StateError,
    TemplateError,
)
from structgen.output.tools import Asked, Called, Toolbox, ToolCall, result_text
from structgen.output.values import readable
from structgen.program.calls.generating import answers_to, kept_parts, meta_of, together
from structgen.program.cursor import Cursor
from structgen.program.expression import Gen
from structgen.program.tasks import named
from structgen.request import prompt_text

OnError = Literal["tell", "raise"]
# Nothing that a model could do better at the next time: these end the call, whatever `on_error`.
_FATAL = (BudgetError, EngineError, StateError)


class Calling(msgspec.Struct, frozen=True):
    """What is asked for: the generation, the tools, and how results are told.

    role       of the turns of results
    on_error   "tell": what a tool raises is told to the model; "raise": it ends the call
    """

    gen: Gen
    box: Toolbox
    role: Role = "tool"
    on_error: OnError = "tell"


async def called(cursor: Cursor, calling: Calling) -> Called:
    """Have the model call tools, run them, append the calls and their results."""
    role = cursor.transcript.role
    if role is not None:
        raise RoleError(
            f"call() inside the role {role!r}: the model's call and each result are turns of their "
            "own; leave the block first"
        )
    with cursor.attempt():
        if cursor.chat is not None:
            cursor.chat = cursor.chat.with_tools(calling.box.specs)
        _require_role(cursor, calling.role)
        cursor.transcript.open("assistant")
        question = cursor.ask(calling.gen)
        [answer] = await answers_to(cursor, calling.gen, question)
        completion = answer.live.completion()
        cursor.commit(kept_parts(completion))
        cursor.transcript.close()
        found = Called(completion.text, tuple(await _run_all(calling, answer.value)))
        for call in found.calls:
            cursor.transcript.open(calling.role)
            cursor.transcript.append(call.text)
            cursor.transcript.close()
    meta = meta_of(completion, prefix_lost=question.prefix_lost, attempts=answer.attempts)
    cursor.write(calling.gen.name, found, meta)
    return found


def checked_role(role: object, on_error: object) -> None:
    """Check how results are told."""
    if role not in {"tool", "user"}:
        raise OptionError("role", f"results are told as 'tool' or 'user', not as {role!r}")
    if on_error not in {"tell", "raise"}:
        raise OptionError("on_error", f"expected 'tell' or 'raise', got {on_error!r}")


def _require_role(cursor: Cursor, role: Role) -> None:
    """Raise `TemplateError` where the template would show nothing of a result.

    It is asked about the turns that there will be, since templates refuse some orders of turns;
    and before anything is generated.
    """
    advice = (
        "tell results as the user's turns with call(..., role='user')"
        if role == "tool"
        else "generate the call with gen(type=...) and write its result as the model expects it"
    )
    if cursor.chat is None:
        raise TemplateError(
            "the model has no chat template, so calls and results have no turns; generate a call "
            "with gen(type=...) in plain text instead"
        )
    try:
        shown = [_after(cursor, role, result) for result in ("1", "2")]
    except TemplateError as error:
        raise TemplateError(
            f"the chat template refuses turns of the role {role!r} after a call: {error}; {advice}"
        ) from None
    if shown[0] == shown[1]:
        raise TemplateError(
            f"the chat template shows nothing of turns of the role {role!r}; {advice}"
        )


def _after(cursor: Cursor, role: Role, result: str) -> str:
    """The prompt after a call and its result."""
    probe = cursor.transcript.fork()
    for each, text in (("assistant", "{}"), (role, result)):
        probe.open(each)
        probe.append(text)
        probe.close()
    return prompt_text(cursor.prompt_of(probe, "call()").parts)


async def _run_all(calling: Calling, asked: tuple[Asked, ...]) -> list[ToolCall]:
    if len(asked) < 2:
        return [await _run(calling, each) for each in asked]
    return await together([partial(_run, calling, each) for each in asked])


async def _run(calling: Calling, asked: Asked) -> ToolCall:
    """Run one tool; what it raises is its result, unless that is to end the call."""
    arguments: Mapping[str, object] = asked.arguments
    try:
        result = await calling.box.tools[asked.name].function(**arguments)
        text = result_text(result)
    except _FATAL:
        raise
    except Exception as error:
        if calling.on_error == "raise":
            raise
        told = readable(named(error))
        return ToolCall(asked.name, arguments, None, error, told)
    return ToolCall(asked.name, arguments, result, None, text)
