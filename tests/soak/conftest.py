"""Fixtures of the long runs: one kind of event loop is enough, the other tests run on all."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
