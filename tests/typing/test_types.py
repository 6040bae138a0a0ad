"""Type checkers see what users may rely on: right uses pass, each wrong use is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("programs.py", "language.py", "structured.py")
ROOT = HERE.parents[1]


def outcome(*command: str) -> tuple[int, str]:
    """Exit code and output of a checker that is a Python module."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_mypy_agrees() -> None:
    pytest.importorskip("mypy", reason="mypy is in the extra `dev`")

    code, output = outcome("mypy", *(str(HERE / name) for name in FILES))

    assert code == 0, output


def test_pyright_agrees() -> None:
    pytest.importorskip("pyright", reason="pyright is in the extra `dev`")
    if outcome("pyright", "--version")[0] != 0:
        pytest.skip("pyright cannot start here: it needs Node.js")

    code, output = outcome("pyright", "--pythonpath", sys.executable, "-p", str(HERE))

    assert code == 0, output
