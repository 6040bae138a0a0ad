"""Messages of a chat, as OpenAI's clients send them, to the turns that a chat template renders.

Holds  what a user wrote is ordinary text, whatever it spells. Parts of a content are joined
       without anything between them. Templates show no ids of calls, so that results stand in the
       order of their calls.
Used   by the chat route and by `/tokenize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import msgspec

from structgen.chat import Chat, Turn
from structgen.errors import TemplateError
from structgen.request import Prompt, Text
from structgen.server.errors import ApiError
from structgen.server.openai.wire import (
    PARTS_OF_OTHER_TYPES,
    CalledTool,
    ChatMessage,
    ContentPart,
    check_count,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"tool": "tool"}


class _Object(msgspec.Struct):
    """A JSON object, whose fields are looked through and not kept."""


CallsText = Callable[[str, Sequence[CalledTool]], str]
"""How tool calls stand behind the text of an answer; see `tools.ToolForm.written`."""


def size_of(messages: Sequence[ChatMessage]) -> int:
    """How much there is to write: messages, their parts and calls.

    Raises `OptionError` for more than a chat may have.
    """
    check_count("messages", len(messages))
    size = len(messages)
    for message in messages:
        size += len(message.content) if isinstance(message.content, list) else 0
        size += len(message.tool_calls or ())
    check_count("messages", size)
    return size


def turns_of(messages: Sequence[ChatMessage], written: CallsText) -> list[Turn]:
    """The turns of a chat; `written` says how the tool calls of an earlier answer were written.

    Raises `ApiError` naming the message that cannot be read.
    """
    if not messages:
        raise ApiError(400, "messages: expected at least one message", param="messages")
    turns = [_turn(message, f"messages[{n}]", written) for n, message in enumerate(messages)]
    return [turns[n] for n in _ordered(messages)]


def rendered(
    chat: Chat | None,
    turns: Sequence[Turn],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    extend: bool = False,
    closed: bool = False,
) -> Prompt:
    """The prompt of a chat whose next turn, or with `extend` whose last one, is to be written.

    closed   nothing is to be written: the turns alone

    Raises `TemplateError` where there is no template, or where it refuses the turns.
    """
    if chat is None:
        raise TemplateError(
            "the model has no chat template; give the server one with --chat-template FILE, or "
            "send text to /v1/completions"
        )
    if tools:
        with _blaming("tools"):
            chat = chat.with_tools(tools)
    shown = turns if closed else _open(turns, extend=extend)
    if not variables:
        return chat.render(shown).parts
    with _blaming("chat_template_kwargs"):
        other = chat.with_variables(variables)
    try:
        return other.render(shown).parts
    except TemplateError:
        chat.render(shown)  # if it fails, too, the messages are to blame
        with _blaming("chat_template_kwargs"):
            raise


def _open(turns: Sequence[Turn], *, extend: bool) -> list[Turn]:
    """The turns, of which the last is to be written: one more, or with `extend` the last itself."""
    if not extend:
        return [*turns, Turn("assistant", (), open=True)]
    *before, last = turns
    if last.role != "assistant":
        raise ApiError(
            400,
            "continue_final_message: the last message is not the assistant's",
            param="continue_final_message",
        )
    return [*before, Turn("assistant", last.content, open=True)]


@contextmanager
def _blaming(field: str) -> Iterator[None]:
    """What the template refuses is this field of the body, and not the messages."""
    try:
        yield
    except TemplateError as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None


def _turn(message: ChatMessage, place: str, written: CallsText) -> Turn:
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise ApiError(
            400,
            f"{place}.role: unknown role {message.role!r}; the roles are {known}",
            param=f"{place}.role",
        )
    for field in ("audio", "function_call"):
        if getattr(message, field) is not None:
            raise ApiError(400, f"{place}.{field}: not supported", param=f"{place}.{field}")
    text = _text(message.content, f"{place}.content")
    calls: list[CalledTool] = message.tool_calls or []
    if calls and role != "assistant":
        raise ApiError(
            400,
            f"{place}.tool_calls: only a message of the assistant has them",
            param=f"{place}.tool_calls",
        )
    if message.content is None and not calls and message.refusal is None:
        raise ApiError(400, f"{place}.content: it is missing", param=f"{place}.content")
    if calls:
        for number, call in enumerate(calls):
            _check_call(call, f"{place}.tool_calls[{number}]")
        text += written(text, calls)
    return Turn(role, (Text(text),) if text else ())


def _check_call(call: CalledTool, place: str) -> None:
    """Refuse a call that no answer of this server can have had."""
    if call.type != "function":
        raise ApiError(
            400, f"{place}.type: expected function, got {call.type!r:.80}", param=f"{place}.type"
        )
    place = f"{place}.function.arguments"
    try:
        msgspec.json.decode(call.function.arguments, type=_Object)
    except msgspec.ValidationError:
        message = f"{place}: expected the JSON text of an object"
        raise ApiError(400, message, param=place) from None
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise ApiError(400, f"{place}: they are no JSON: {error}", param=place) from None


def _ordered(messages: Sequence[ChatMessage]) -> list[int]:
    """The messages by their index, results in the order of the calls before them."""
    found: list[int] = []
    calls: dict[str | None, int] = {}
    for results, each in groupby(enumerate(messages), lambda pair: pair[1].role == "tool"):
        run = list(each)
        if not results:
            last = run[-1][1].tool_calls or ()
            calls = {call.id: number for number, call in enumerate(last) if call.id is not None}
        elif calls:
            for number, message in run:
                _check_result(message, calls, f"messages[{number}].tool_call_id")
            run.sort(key=lambda pair: calls.get(pair[1].tool_call_id, 0))
        found += [number for number, _ in run]
    return found


def _check_result(message: ChatMessage, calls: Mapping[str | None, int], place: str) -> None:
    """Refuse a result that answers none of the calls, whose ids are known."""
    if message.tool_call_id not in calls:
        said = "it is missing" if message.tool_call_id is None else "no call before it has this id"
        known = ", ".join(map(str, calls))
        raise ApiError(400, f"{place}: {said}; the calls are {known:.200}", param=place)


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    if not isinstance(content, list):
        return content or ""
    return "".join(_part(part, f"{place}[{n}]") for n, part in enumerate(content))


def _part(part: ContentPart, place: str) -> str:
    if part.type not in {"text", "input_text", "output_text", "refusal"}:
        raise ApiError(
            400,
            f"{place}: a part of type {part.type!r}; this model reads text only",
            param=f"{place}.type",
            code="unsupported",
        )
    own, other = ("refusal", "text") if part.type == "refusal" else ("text", "refusal")
    for field in (other, *PARTS_OF_OTHER_TYPES):
        if getattr(part, field) is not None:
            said = f"{place}.{field}: a part of type {part.type} has none; leave it out"
            raise ApiError(400, said, param=f"{place}.{field}")
    text: str | None = getattr(part, own)
    if text is None:
        raise ApiError(400, f"{place}.text: it is missing", param=f"{place}.text")
    return text
