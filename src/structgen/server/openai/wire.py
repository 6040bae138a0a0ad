"""What clients send to the OpenAI routes: every field that is read, and those that are ignored.

Holds  a field that is named here is heeded, refused with its reason, or stands under "without a
       meaning here"; any other is refused by its name. `null` is as good as nothing, and 16.0 as
       good as 16. A list or a map has a limit, which is looked at before what is in it.
Used   by the routes in this folder, and by the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from structgen.errors import OptionError

T = TypeVar("T")
Json = dict[str, Any]
if TYPE_CHECKING:
    Whole = int
else:
    # JSON knows one kind of number, and Lua, R and some others write all of theirs as 16.0.
    Whole = int | float

MOST: Mapping[str, int] = MappingProxyType(
    {
        "chat_template_kwargs": 256,
        "choice": 30_000,
        "logit_bias": 4_096,
        "messages": 10_000,  # with their parts and calls
        "stop": 1_024,
        "stop_regex": 256,
        "stop_token_ids": 4_096,
        "structures": 512,
        "tokens": 500_000,
        "tools": 512,
        "triggers": 256,
    }
)
"""How many values a field may have: each of them costs time in every request."""
_WHOLE = frozenset(
    {"best_of", "logprobs", "max_completion_tokens", "max_tokens", "min_tokens", "n", "priority"}
    | {"seed", "stop_token_ids", "tokens", "top_k", "top_logprobs"}
)


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all bodies: unknown fields are refused."""


class Bounded(Body, kw_only=True):
    """Base of those that have whole numbers, or fields with a limit.

    Raises `OptionError` for a number that is not whole, and for more values than the limit.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in MOST and isinstance(value, list | dict):
                check_count(name, len(value))
            if name in _WHOLE and isinstance(value, float | list):
                setattr(self, name, whole(name, value))


class StreamOptions(Body, kw_only=True):
    """`include_usage`: one more event at the end, which has the usage and no choice."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Bounded, kw_only=True):
    """vLLM's way to say what an output must be; one of these."""

    json: str | Json | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Json | None = None


class ResponseFormat(Bounded, kw_only=True):
    """OpenAI's way: `type` is text, json_object, json_schema or structural_tag.

    json_schema   `{"name": ..., "schema": {...}, "strict": true}`
    format        of a structural tag; `structures` and `triggers` are its older form
    """

    type: str
    json_schema: Json | None = None
    format: Json | None = None
    structures: list[Json] | None = None
    triggers: list[str] | None = None


class Generating(Bounded, kw_only=True):
    """Fields of both generating routes. `model` is required, as it is everywhere else."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = None
    max_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None

    # As vLLM and SGLang have them.
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Whole | None = None
    stop_token_ids: list[Whole] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: Whole | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | Json | None = None

    # Without a meaning here: accepted, so that clients which always send them are served.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class FunctionCall(Body, kw_only=True):
    """The function of a tool call in a message of the assistant; `arguments` is JSON text.

    parsed_arguments   what a client made of them: ignored
    """

    name: str
    arguments: str = "{}"
    parsed_arguments: Any = None


class CalledTool(Body, kw_only=True):
    """A tool call in a message of the assistant; its place in a stream, `index`, is ignored."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"
    index: Whole | None = None


class ContentPart(Body, kw_only=True):
    """A part of a message; text is the only one that is read.

    annotations, logprobs                      of an earlier answer: ignored
    cache_control, prompt_cache_breakpoint     where a cache may begin anew: ignored, it finds that
    image_url and what follows it              of parts that are refused, by their type
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    image_url: Any = None
    detail: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None


PARTS_OF_OTHER_TYPES = ContentPart.__struct_fields__[
    ContentPart.__struct_fields__.index("image_url") :
]


class ChatMessage(Body, kw_only=True):
    """A message of a chat.

    name                          of whoever wrote it: templates have no place for it, so ignored
    parsed                        what a client made of an earlier answer: ignored
    reasoning_content, reasoning  of an earlier answer: not shown to the model again, so ignored
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Any = None
    parsed: Any = None
    audio: Any = None
    function_call: Any = None


class Function(Body, kw_only=True):
    """A function that the model may call; `parameters` is the JSON Schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ToolSpec(Body, kw_only=True):
    """A tool; `type` is function."""

    type: str
    function: Function | None = None


class NamedFunction(Body, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(Body, kw_only=True):
    """A tool that must be called."""

    type: str = "function"
    function: NamedFunction | None = None


class ChatBody(Generating, kw_only=True):
    """The body of `POST /v1/chat/completions`.

    continue_final_message   the last message is the assistant's, and is written on
    add_generation_prompt    true, unless the message is continued; false is refused
    chat_template_kwargs     variables of the model's chat template, such as enable_thinking
    """

    messages: list[ChatMessage]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Json | None = None
    modalities: list[str] | None = None


class CompletionBody(Generating, kw_only=True):
    """The body of `POST /v1/completions`.

    prompt       text, token ids, or a list of either. Text is ordinary text, whatever it spells:
                 who wants control tokens sends their ids
    max_tokens   16, as OpenAI has it, if the context has so much room; 0, for log-probabilities of
                 the prompt, only with `echo` or `logprobs`
    logprobs     the so many likeliest tokens beside each token, 0 to 20
    echo         the answer begins with the prompt; with `logprobs`, those of its tokens, too
    best_of      1 or `n`: no text is left out
    suffix       refused: the model writes on, it fills no gaps
    """

    prompt: str | list[str | Whole | list[Whole]]
    logprobs: Whole | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Whole | None = None


class TokenizeBody(Bounded, kw_only=True):
    """The body of `POST /tokenize`: a prompt, or the messages of a chat.

    prompt                text, as `/v1/completions` takes it
    messages, tools       as `/v1/chat/completions` takes them, with the fields that go with them
    add_special_tokens    false leaves out the token that the tokenizer puts before a prompt. In a
                          chat the template says which there are: true is refused
    add_generation_prompt   false leaves out the beginning of an answer
    return_token_strs     the text of each token, too
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolSpec] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Bounded, kw_only=True):
    """The body of `POST /detokenize`. Special tokens have no text."""

    tokens: list[Whole]
    model: str | None = None


def check_count(name: str, count: int) -> None:
    """Refuse a field with so many values. Raises `OptionError`."""
    if count > MOST[name]:
        raise OptionError(name, f"{count:,} values are more than {MOST[name]:,}; send fewer")


def whole(name: str, value: T) -> T:
    """A number, or a list of them, of which each may be written as 16.0.

    Raises `OptionError` for one that is not whole. Whatever is no number stays as it is.
    """
    if isinstance(value, float):
        if not value.is_integer():
            raise OptionError(name, f"expected a whole number, got {value}")
        return cast("T", int(value))
    if isinstance(value, list) and float in set(map(type, value)):
        return cast("T", [whole(name, each) for each in value])
    return value


def top_k_of(given: int | None) -> int | None:
    """A `top_k` as the engine has it: vLLM and SGLang write -1 for no limit."""
    return 0 if given == -1 else given


def refuse(field: str, value: object, message: str) -> None:
    """Raise `OptionError` for a field that has a value, where none can be served."""
    if value is not None and value is not False and value != []:
        raise OptionError(field, message)
