"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory of a tiny random model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for prompts that take long to encode."""
    return write_tiny_model(tmp_path_factory.mktemp("long"), max_context=262_144)
