"""What the OpenAI routes answer, field by field. A field that is UNSET is not there at all."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from structgen import request

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(msgspec.Struct):
    """Tokens of prompts whose keys and values were in the cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts and choices; a prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, usage: request.Usage) -> Usage:
        """The same as the engine counts it."""
        return cls(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens + usage.completion_tokens,
            CachedTokens(usage.cached_tokens),
        )


class TopLogprob(msgspec.Struct):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A token that was drawn, and the likeliest that could have been, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of a choice, or of a part of it."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """A function, and its arguments as JSON text; in a stream, the next piece of either."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A tool call of an answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct):
    """The next piece of a tool call; the first one of each has id, type and name."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Message(msgspec.Struct):
    """An answer. `content` is null where there are only tool calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of `n` answers."""

    index: int
    message: Message
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class MessageDelta(msgspec.Struct):
    """What an event adds to an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoiceDelta(msgspec.Struct):
    """What an event adds to one of `n` answers."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """An event of a streamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChoiceDelta]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the form of `/v1/completions`: one entry a token in each list.

    tokens            as text; `bytes:\\xf0\\x9f` where a token is no whole character
    token_logprobs    null for the first token of a prompt, as nothing stands before it
    top_logprobs      the likeliest tokens, best first, and the token itself
    text_offset       where the token begins, in characters of the choice's text

    A token that ended the text comes last, though it is no part of the text: with `echo`, there is
    one token behind those of the prompt for each token that was drawn.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One of `n` texts of a prompt, or in an event what is added to it.

    index   of all texts: those of the first prompt come before those of the second
    """

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer of `/v1/completions`, or an event of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class Tokenized(msgspec.Struct):
    """The answer of `/tokenize`.

    max_model_len   tokens of prompt and output together that the model takes
    token_strs      the text of each token, where it was asked for
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct):
    """The answer of `/detokenize`."""

    prompt: str


class Model(msgspec.Struct):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "structgen"


class Models(msgspec.Struct):
    """The answer of `/v1/models`."""

    data: list[Model]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct):
    """What went wrong; `param` is the field that is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """The answer of every route where it fails, and the last event of a stream that fails."""

    error: ErrorDetail
