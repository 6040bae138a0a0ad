"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory of a tiny random model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
