"""`POST /v1/chat/completions`: a chat, answered at once or as a stream.

Used by `app`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from uuid import uuid4

import anyio.to_thread
import msgspec
from aiohttp import web
from msgspec import UNSET

from structgen.errors import OptionError
from structgen.request import Constraint, Prompt, Request, Structure, Tokens
from structgen.sampling import check_whole
from structgen.server.call import Call
from structgen.server.openai.choices import attempted, read_all, streamed
from structgen.server.openai.formats import behind, constraint_of_body
from structgen.server.openai.logprobs import chat_logprobs, written_logprobs
from structgen.server.openai.pieces import ChoiceReader, Piece, ToolPiece
from structgen.server.openai.prompts import rendered, size_of, turns_of
from structgen.server.openai.replies import (
    CalledFunction,
    ChatChoice,
    ChatChoiceDelta,
    ChatChunk,
    ChatCompletion,
    FinishReason,
    Message,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from structgen.server.openai.requests import (
    beside,
    check_common,
    encoded,
    model_of,
    request_of,
    requests_of,
    room,
)
from structgen.server.openai.tools import Tooling, form_of, tooling_of
from structgen.server.openai.wire import CalledTool, ChatBody
from structgen.server.service import Service

MOST_TOP_LOGPROBS = 20
SLOW_ENTRIES = 1_000  # of log-probabilities, which take some 10 ms: more are written in a thread
SLOW_CHAT = 100  # messages, parts and calls, which take some 5 ms: more are written in a thread


class _Chat:
    """One call of the route: what was asked for, and what every part of the answer repeats."""

    def __init__(self, call: Call, body: ChatBody) -> None:
        self.call, self.body = call, body
        self.engine = call.service.engine
        self.id = f"chatcmpl-{uuid4().hex}"
        self.created = int(time.time())
        self.model = model_of(call, body.model)
        self.form = form_of(
            call.service.config.tool_form,
            self.engine.chat,
            parallel=body.parallel_tool_calls is not False,
            family=call.service.config.reasoning,
        )
        self.tooling: Tooling | None = None
        self.requests: list[Request] = []
        self.speller = call.service.speller
        self.prompt_ids: tuple[int, ...] = ()
        self.readers: list[ChoiceReader] = []
        self._begun: set[int] = set()  # choices of which an event told

    async def prepare(self) -> None:
        """Make the requests. Raises for all that cannot be served."""
        call, body = self.call, self.body
        call.names.update(prompt="messages", top_logprobs="top_logprobs")
        n = check_common(call, body, 1)
        logprobs, top = self._logprobs()
        constraint = await beside(call, self._constraint)
        if body.modalities is not None and body.modalities != ["text"]:
            raise OptionError("modalities", 'this model writes text only; leave it out or ["text"]')
        if body.add_generation_prompt is False and not body.continue_final_message:
            raise OptionError(
                "add_generation_prompt", "false leaves nobody to write an answer; leave it out"
            )
        prompt = await prompt_of_chat(call, body, self.form.written, self.tooling)
        prompt = await encoded(self.engine, prompt)
        self.prompt_ids = tuple(i for part in prompt if isinstance(part, Tokens) for i in part.ids)
        most = self._max_tokens() or room(self.engine, prompt)
        self.requests = await requests_of(
            n,
            lambda index: request_of(
                call,
                body,
                prompt,
                choice=index,
                max_tokens=most,
                constraint=constraint,
                logprobs=logprobs,
                top_logprobs=top,
            ),
        )

    def _logprobs(self) -> tuple[bool, int]:
        body = self.body
        check_whole("top_logprobs", body.top_logprobs, low=0, high=MOST_TOP_LOGPROBS, optional=True)
        if body.top_logprobs and not body.logprobs:
            raise OptionError("top_logprobs", "it needs logprobs to be true")
        return bool(body.logprobs), body.top_logprobs or 0

    def _constraint(self) -> Constraint | None:
        """What the answer must be; a choice of tools is one way to say it."""
        call, body = self.call, self.body
        asked = constraint_of_body(body)
        if asked is not None:
            call.names["constraint"] = asked.field
        self.tooling = tooling_of(body, self.form, asked)
        if self.tooling is None:
            return (
                None if asked is None else behind(call.service.config.reasoning, asked.constraint)
            )
        call.names["constraint"] = "tools"
        return Structure(self.tooling.term)

    def _max_tokens(self) -> int | None:
        body = self.body
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        if None not in {body.max_tokens, body.max_completion_tokens} and (
            body.max_tokens != body.max_completion_tokens
        ):
            raise OptionError(field, "it contradicts max_tokens; give one of them")
        self.call.names["max_tokens"] = field
        given = getattr(body, field)
        check_whole(field, given, low=1, optional=True)
        return int(given) if given is not None else None

    def reader(self) -> ChoiceReader:
        """A reader of one choice."""
        tools = None if self.tooling is None else self.tooling.reader()
        keep = bool(self.body.include_stop_str_in_output or self.body.no_stop_trim)
        return ChoiceReader(self.call.service.config.reasoning, tools, keep_stop=keep)

    def token_ids(self, tokens: Sequence[int]) -> list[int] | msgspec.UnsetType:
        """Token ids, where they were asked for."""
        return list(tokens) if self.body.return_token_ids else UNSET

    async def events(self, index: int, piece: Piece) -> Sequence[ChatChunk]:
        """What a piece of a choice adds to a stream."""
        if not piece and not self.body.return_token_ids:
            return ()
        prompt = UNSET if self._begun else self.token_ids(self.prompt_ids)
        delta = _choice_delta(self, index, piece, first=index not in self._begun)
        self._begun.add(index)
        return (ChatChunk(self.id, self.created, self.model, [delta], prompt_token_ids=prompt),)

    def end(self, usage: Usage) -> ChatChunk:
        """The event that says what a stream took."""
        return ChatChunk(self.id, self.created, self.model, [], usage=usage)


async def prompt_of_chat(
    call: Call,
    body: ChatBody,
    written: Callable[[str, Sequence[CalledTool]], str],
    tooling: Tooling | None,
) -> Prompt:
    """The chat as the model's template writes it, and its tools where they have their place.

    written   how the tool calls of an earlier answer are written behind its text

    Raises `ApiError` or `TemplateError` for what cannot be written.
    """

    def prompt() -> Prompt:
        return _prompt_of(call.service, body, written, tooling)

    if size_of(body.messages) > SLOW_CHAT:
        return await anyio.to_thread.run_sync(prompt)
    return await beside(call, prompt)


def _prompt_of(
    service: Service,
    body: ChatBody,
    written: Callable[[str, Sequence[CalledTool]], str],
    tooling: Tooling | None,
) -> Prompt:
    turns = turns_of(body.messages, written)
    if tooling is not None:
        turns = tooling.told(turns)
    extends = bool(body.continue_final_message)
    if extends and body.add_generation_prompt:
        raise OptionError("add_generation_prompt", "it must be false with continue_final_message")
    return rendered(
        service.engine.chat,
        turns,
        tools=tooling.specs if tooling else (),
        extend=extends,
        closed=body.add_generation_prompt is False and not extends,
        variables=body.chat_template_kwargs,
    )


async def chat_completions(call: Call) -> web.StreamResponse:
    """Answer a chat."""
    chat = _Chat(call, await call.body(ChatBody))
    await chat.prepare()
    if chat.body.stream:
        chat.readers = [chat.reader() for _ in chat.requests]
        return await streamed(call, chat.body, chat.requests, chat.readers, chat)

    async def once(requests: Sequence[Request]) -> ChatCompletion:
        return await _whole(chat, requests)

    return call.answer(await attempted(call, chat.requests, once))


# ---------------------------------------------------------------- at once


async def _whole(chat: _Chat, requests: Sequence[Request]) -> ChatCompletion:
    readers = [chat.reader() for _ in requests]
    pieces, usage = await read_all(chat.call, requests, readers, len(requests))

    def choices() -> list[ChatChoice]:
        return [
            _choice(chat, index, each, reader)
            for index, (each, reader) in enumerate(zip(pieces, readers, strict=True))
        ]

    entries = usage.completion_tokens * (1 + (chat.body.top_logprobs or 0))
    slow = bool(chat.body.logprobs) and entries > SLOW_ENTRIES
    return ChatCompletion(
        chat.id,
        chat.created,
        chat.model,
        await anyio.to_thread.run_sync(choices) if slow else choices(),
        Usage.of(usage),
        prompt_token_ids=chat.token_ids(chat.prompt_ids),
    )


def _choice(chat: _Chat, index: int, pieces: Sequence[Piece], reader: ChoiceReader) -> ChatChoice:
    content = "".join(piece.content for piece in pieces)
    reasoning = "".join(piece.reasoning for piece in pieces)
    entries = [entry for piece in pieces for entry in piece.logprobs]
    calls = _joined_calls([tool for piece in pieces for tool in piece.tools])
    message = Message(
        content=None if calls and not content else content,
        reasoning_content=reasoning if chat.call.service.config.reasoning else UNSET,
        tool_calls=calls or UNSET,
    )
    return ChatChoice(
        index,
        message,
        _finish_reason(pieces[-1], reader),
        written_logprobs(chat.speller, entries) if chat.body.logprobs else None,
        chat.token_ids([token for piece in pieces for token in piece.tokens]),
    )


def _joined_calls(pieces: Sequence[ToolPiece]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for piece in pieces:
        if piece.id:
            calls.append(ToolCall(piece.id, CalledFunction(piece.name)))
        calls[piece.index].function.arguments += piece.arguments
    return calls


def _finish_reason(last: Piece, reader: ChoiceReader) -> FinishReason:
    assert last.finish is not None
    if last.finish.reason == "length":
        return "length"
    return "tool_calls" if reader.called else "stop"


# ---------------------------------------------------------------- as a stream


def _choice_delta(chat: _Chat, index: int, piece: Piece, *, first: bool) -> ChatChoiceDelta:
    delta = MessageDelta(
        role="assistant" if first else UNSET,
        content=piece.content if piece.content or (first and not piece.tools) else UNSET,
        reasoning_content=piece.reasoning or UNSET,
        tool_calls=[_tool_delta(tool) for tool in piece.tools] or UNSET,
    )
    return ChatChoiceDelta(
        index,
        delta,
        chat_logprobs(chat.speller, piece.logprobs) if piece.logprobs else None,
        None if piece.finish is None else _finish_reason(piece, chat.readers[index]),
        chat.token_ids(piece.tokens),
    )


def _tool_delta(tool: ToolPiece) -> ToolCallDelta:
    if not tool.id:
        return ToolCallDelta(tool.index, CalledFunction(arguments=tool.arguments))
    function = CalledFunction(tool.name, tool.arguments)
    return ToolCallDelta(tool.index, function, tool.id, "function")
