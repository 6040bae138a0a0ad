"""`POST /tokenize` and `/detokenize`: text to token ids as the model is sent them, and back.

Holds  what takes long runs in a thread.
Used   by `app`.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread
from aiohttp import web

from structgen.errors import OptionError
from structgen.request import Prompt, Text
from structgen.server.call import Call
from structgen.server.openai.chat import prompt_of_chat
from structgen.server.openai.logprobs import Speller
from structgen.server.openai.replies import Detokenized, Tokenized
from structgen.server.openai.requests import beside, model_of
from structgen.server.openai.tools import form_of, tooling_of
from structgen.server.openai.wire import ChatBody, DetokenizeBody, TokenizeBody

SLOW_TOKENS = 10_000  # whose texts take some 5 ms to be looked up: more are read in a thread
# What only the messages of a chat have.
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


async def tokenize(call: Call) -> web.StreamResponse:
    """The token ids of a prompt."""
    body = await call.body(TokenizeBody)
    model_of(call, body.model)
    call.names["prompt"] = "prompt" if body.messages is None else "messages"
    engine = call.service.engine
    ids = await engine.encode(await _prompt(call, body))
    bos = engine.loaded.checkpoint.tokenizer.bos_id
    if body.messages is None and body.add_special_tokens is False and ids[:1] == (bos,):
        ids = ids[1:]  # the tokenizer's own: no text is read as one
    found = Tokenized(len(ids), engine.loaded.max_context, list(ids))
    if body.return_token_strs:
        found.token_strs = await _texts(call.service.speller, ids)
    return call.answer(found)


async def detokenize(call: Call) -> web.StreamResponse:
    """The text of token ids."""
    body = await call.body(DetokenizeBody)
    model_of(call, body.model)
    call.names["prompt"] = "tokens"
    engine = call.service.engine
    if len(body.tokens) > SLOW_TOKENS:
        return call.answer(Detokenized(await anyio.to_thread.run_sync(engine.decode, body.tokens)))
    return call.answer(Detokenized(engine.decode(body.tokens)))


async def _prompt(call: Call, body: TokenizeBody) -> Prompt:
    """What is asked about. Raises `OptionError` for nothing, and for two things."""
    if body.messages is None:
        if body.prompt is None:
            raise OptionError("prompt", "it is missing; send text, or the messages of a chat")
        for name in _OF_CHATS:
            if getattr(body, name) is not None:
                raise OptionError(name, "only the messages of a chat have it; leave it out")
        return (Text(body.prompt),) if body.prompt else ()
    if body.prompt is not None:
        raise OptionError("messages", "they cannot be combined with a prompt; give one of them")
    if body.add_special_tokens:
        raise OptionError(
            "add_special_tokens", "the chat template says which there are; leave it out"
        )
    said = {name: getattr(body, name) for name in _OF_CHATS}
    chat = ChatBody(model=model_of(call, body.model), messages=body.messages, **said)
    form = form_of(call.service.config.tool_form, call.service.engine.chat)
    tooling = await beside(call, tooling_of, chat, form, None)
    return await prompt_of_chat(call, chat, form.written, tooling)


async def _texts(speller: Speller, ids: Sequence[int]) -> list[str]:
    def spelled() -> list[str]:
        return [speller.text_of(token) for token in ids]

    return await anyio.to_thread.run_sync(spelled) if len(ids) > SLOW_TOKENS else spelled()
