"""The suite of `llm-comply` for chat completions, against a server of the default model.

It is green but for what needs a model that sees images, which is refused, and for reasoning, which
the suite itself skips for models of other names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ServerProcess, server_process

# Seconds of it are the model's, and a busy machine makes them minutes.
pytestmark = [pytest.mark.slow, pytest.mark.served, pytest.mark.timeout(300)]

NEEDS_IMAGES = {"chat-image-input"}
SKIPPED_BY_THE_SUITE = {"chat-reasoning-summary"}
PASSES = {
    *("chat-basic-response", "chat-system-prompt", "chat-multi-turn", "chat-tool-calling"),
    *("chat-streaming-response", "chat-streaming-usage", "chat-error-handling"),
}


@pytest.fixture(scope="module")
def server(
    default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    # The suite sets no limit and no temperature, and a small model may go on and on: with this seed
    # all its answers are short, in whatever order they are asked for.
    flags = (
        *("--served-model-name", "smol", "--dtype", "float32", "--max-model-len", "512"),
        *("--seed", "1"),
    )
    with server_process(default_model, folder, *flags) as process:
        yield process


@pytest.fixture(scope="module")
def results(server: ServerProcess) -> dict[str, Any]:
    """What became of each test of the suite."""
    command = (
        *(sys.executable, "-m", "llm_comply.cli", "--base-url", f"{server.url}/v1", "--json"),
        *("--api-key", "none", "--model", "smol", "--format", "openai-chat", "--verbose"),
    )
    environment = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env=environment
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        pytest.fail(f"llm-comply wrote no JSON: {done.stdout}{done.stderr}")
    return {result["id"]: result for result in found["results"]}


class TestTheSuite:
    def test_has_no_test_that_is_not_named_here(self, results: dict[str, Any]) -> None:
        assert set(results) == PASSES | NEEDS_IMAGES | SKIPPED_BY_THE_SUITE

    @pytest.mark.parametrize("name", sorted(PASSES))
    def test_is_green(self, results: dict[str, Any], name: str) -> None:
        result = results[name]

        assert result["status"] == "passed", result

    def test_is_told_that_the_model_sees_no_images(self, results: dict[str, Any]) -> None:
        [name] = NEEDS_IMAGES
        result = results[name]

        assert result["status"] == "failed"
        assert any("HTTP 400" in error for error in result["errors"]), result
