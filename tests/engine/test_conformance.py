"""The engine keeps the contract of a backend, whatever the scheduler has to do for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from structgen.backend import Backend
from structgen.engine.engine import Engine
from tests.conformance import BackendConformance, MakeBackend

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "in the loop's thread": {"worker": False},
    "tight and in small chunks": {"slots": 300, "chunk_size": 3, "max_running": 2},
    "without a cache": {"radix": False, "slots": 250},
}


class TestTheContract(BackendConformance):
    @pytest.fixture(params=list(SETTINGS.values()), ids=list(SETTINGS))
    def make_backend(self, tiny_model: Path, request: pytest.FixtureRequest) -> MakeBackend:
        options = {"slots": 2000, "threads": 1, **request.param}

        @asynccontextmanager
        async def make() -> AsyncIterator[Backend]:
            async with Engine(tiny_model, **options) as engine:
                yield engine

                after = engine.statistics()
            assert (after.running, after.waiting, after.scopes, after.slots_held) == (0, 0, 0, 0)

        return make
