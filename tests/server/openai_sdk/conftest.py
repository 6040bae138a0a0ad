"""Fixtures of the tests that talk to a server through the official `openai` package."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from tests.server.openai_sdk.sdk import CONFIG, client_of
from tests.server.served import Serve, Served


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """A server of the tiny model, which it calls `tiny`."""
    async with serve(config=CONFIG) as served:
        yield served


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    """A client of it that takes no answer which is not as the API says."""
    async with client_of(served) as client:
        yield client
