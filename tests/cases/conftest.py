"""Fixtures of the cases: they run the real model, so on one kind of event loop only."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
