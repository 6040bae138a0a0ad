"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.scripted import CommandLine

ECHO = '''
"""A program to run."""
from structgen import State, program

@program
async def echo(s: State, word: str = "hello", times: int = 1) -> list[str]:
    print("printed by the program")
    s += "say " + word
    return [await s.gen(f"reply {n}", max_tokens=20) for n in range(times)]
'''


@pytest.fixture
def structgen(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line, on a scripted engine."""
    return CommandLine(capsys)


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A file with one program: `echo(word="hello", times=1)`."""
    file = tmp_path / "echo.py"
    file.write_text(ECHO)
    return file
