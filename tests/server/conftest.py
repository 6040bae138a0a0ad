"""Fixtures of the server's tests: a tiny model that chats, and servers of it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.engine.tiny import write_tiny_model
from tests.server.served import Serve, serving


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory of a tiny random model with a chat template and a long context."""
    return write_tiny_model(tmp_path_factory.mktemp("tinychat"), max_context=4096)


@pytest.fixture
def serve(tiny_chat_model: Path) -> Serve:
    """Serves the tiny model: `async with serve(config=ServerConfig(...), slots=500) as served`.

    Programs, the server's config and options of the engine are keywords.
    """
    return functools.partial(serving, tiny_chat_model)
