"""Every route: where it is, who may call it, what it takes and what it answers.

Used   by `app`, which serves them, and by `openapi`, which describes them.
"""

from __future__ import annotations

from typing import Any

import anyio.to_thread
from aiohttp import web

from structgen.server import programs
from structgen.server.call import Call
from structgen.server.observe import health
from structgen.server.openai import replies, wire
from structgen.server.openai.chat import chat_completions
from structgen.server.openai.completions import completions
from structgen.server.openai.models import describe_model, list_models
from structgen.server.openai.tokens import detokenize, tokenize
from structgen.server.openapi import Described, document

_DOCUMENT = "/openapi.json"


async def show_document(call: Call) -> web.StreamResponse:
    """The OpenAPI document of all that is here."""
    service, url = call.service, call.request.path.removesuffix(_DOCUMENT)
    if service.document is None:
        service.document = await anyio.to_thread.run_sync(document, ROUTES, service)
    return call.answer({**service.document, "servers": [{"url": url or "/"}]})


ROUTES: tuple[Described, ...] = (
    Described(
        method="POST",
        path="/v1/chat/completions",
        handle=chat_completions,
        access="user",
        summary="Answer a chat",
        takes=wire.ChatBody,
        answers=replies.ChatCompletion,
        events=replies.ChatChunk,
    ),
    Described(
        method="POST",
        path="/v1/completions",
        handle=completions,
        access="user",
        summary="Go on from a prompt",
        takes=wire.CompletionBody,
        answers=replies.Completion,
        events=replies.Completion,
    ),
    Described(
        method="GET",
        path="/v1/models",
        handle=list_models,
        access="user",
        summary="The names of the model",
        answers=replies.Models,
    ),
    Described(
        method="GET",
        path="/v1/models/{id:.+}",
        handle=describe_model,
        access="user",
        summary="The model by one of its names",
        answers=replies.Model,
    ),
    *(
        Described(
            method="POST",
            path=f"{prefix}/tokenize",
            handle=tokenize,
            access="user",
            summary="The token ids of a prompt",
            takes=wire.TokenizeBody,
            answers=replies.Tokenized,
        )
        for prefix in ("", "/v1")
    ),
    *(
        Described(
            method="POST",
            path=f"{prefix}/detokenize",
            handle=detokenize,
            access="user",
            summary="The text of token ids",
            takes=wire.DetokenizeBody,
            answers=replies.Detokenized,
        )
        for prefix in ("", "/v1")
    ),
    Described(
        method="GET",
        path="/v1/programs",
        handle=programs.list_programs,
        access="user",
        summary="List the programs",
        answers=programs.Programs,
    ),
    Described(
        method="GET",
        path="/v1/programs/{name}",
        handle=programs.show_program,
        access="user",
        summary="Describe a program",
        answers=programs.ProgramCard,
    ),
    Described(
        method="POST",
        path="/v1/programs/{name}",
        handle=programs.run_program,
        access="user",
        summary="Run a program",
        takes=programs.ProgramBody,
        answers=programs.ProgramResult,
        events=programs.ProgramEvent,
    ),
    Described(
        method="GET",
        path=_DOCUMENT,
        handle=show_document,
        access="user",
        summary="This document",
        answers=dict[str, Any],
    ),
    Described(
        method="GET",
        path="/live",
        handle=health.live,
        access="open",
        summary="Whether the server answers",
        answers=health.Alive,
    ),
    Described(
        method="GET",
        path="/health",
        handle=health.health,
        access="open",
        summary="Whether the model is loaded and works",
        answers=health.Alive,
    ),
    Described(
        method="GET",
        path="/ready",
        handle=health.ready,
        access="open",
        summary="Whether the server takes work",
        answers=health.Alive,
    ),
    Described(
        method="GET",
        path="/version",
        handle=health.version,
        access="open",
        summary="The release of the server",
        answers=health.Version,
    ),
    Described(
        method="GET",
        path="/load",
        handle=health.load,
        access="open",
        summary="How much work there is",
        answers=health.Load,
    ),
    Described(
        method="GET",
        path="/metrics",
        handle=health.metrics,
        access="open",
        summary="Figures for Prometheus, as text",
    ),
    *(
        Described(
            method="POST",
            path=path,
            handle=health.flush_cache,
            access="admin",
            summary="Drop every cached prefix that nobody uses",
            answers=health.Flushed,
        )
        for path in ("/flush_cache", "/reset_prefix_cache")
    ),
)
