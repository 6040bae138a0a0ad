"""The official client, aimed at a server of the tests.

It validates strictly: an answer without a field, or with one of another type, is an error, where
the package by default takes whatever came.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

import anyio
import httpx2
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from structgen import Engine
from structgen.server.config import ServerConfig
from tests.server.served import Served

MODEL = "tiny"
CONFIG = ServerConfig(names=(MODEL,))
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
LETTERS = {"regex": "[a-z]{24}"}
"""Field that makes the tiny model, which knows nothing, write readable text of one length."""
ENDLESS = {"ignore_eos": True}


def client_of(served: Served, *, strict: bool = True, **options: Any) -> AsyncOpenAI:
    """A client that sends each request once, unless told otherwise."""
    given = {
        "base_url": f"{served.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        # Nothing here is encrypted, and to read the machine's certificates takes a while.
        "http_client": httpx2.AsyncClient(verify=False),
        **options,
    }
    return AsyncOpenAI(_strict_response_validation=strict, **given)


async def content_of(chunks: AsyncIterable[ChatCompletionChunk], index: int = 0) -> str:
    """The text of one choice of a stream, which is read to its end."""
    found = ""
    async for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                found += choice.delta.content or ""
    return found


async def idle(engine: Engine) -> None:
    """Wait until nothing runs and nothing waits; a second at the most."""
    with anyio.fail_after(1):
        while engine.statistics().running or engine.statistics().waiting:  # noqa: ASYNC110 - polls
            await anyio.sleep(0.005)
