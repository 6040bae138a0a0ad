"""Fixtures of all tests: the event loops they run on, and the default model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from structgen.errors import ModelError
from structgen.models.resolve import resolve

LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
]


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The loop that an asynchronous test runs on; each runs on all."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; fetched if need be."""
    try:
        return resolve("default")
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")
