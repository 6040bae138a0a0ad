"""`--trace FILE` and `--tree`: what happened, in a file and on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from structgen.chat import CHATML
from tests.cli.scripted import CommandLine

FAILING = """
from structgen import State, program

@program
async def failing(s: State) -> None:
    s += "say"
    await s.gen("last words", max_tokens=20)
    raise ValueError("on purpose")
"""


def spans(file: Path) -> list[str]:
    """The names of the spans in a trace file, in the order of their beginning."""
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return [event["name"] for event in events if event["ph"] == "X"]


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A program that generates "last words" and raises in its line 8."""
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    return file


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Where a trace may go."""
    return tmp_path / "trace.json"


class TestATrace:
    def test_has_the_calls_of_the_run(
        self, structgen: CommandLine, echo: Path, trace: Path
    ) -> None:
        output = structgen("run", echo, "--arg", "times=2", "--trace", trace)

        assert output.code == 0
        calls = [name for name in spans(trace) if "reply" in name]
        assert len(calls) == 2
        assert "reply 0" in calls[0]

    def test_changes_nothing_of_what_is_printed(
        self, structgen: CommandLine, echo: Path, trace: Path
    ) -> None:
        plain = json.loads(structgen("run", echo, "--json").out)

        recorded = json.loads(structgen("run", echo, "--json", "--trace", trace).out)

        assert recorded["text"] == plain["text"]

    def test_can_be_had_of_the_demo(self, structgen: CommandLine, trace: Path) -> None:
        structgen.script("It pays.", chat=CHATML)

        structgen("demo", "--arg", "count=2", "--trace", trace)

        assert len([name for name in spans(trace) if "reason" in name]) == 2

    def test_is_written_when_the_program_fails(
        self, structgen: CommandLine, failing: Path, trace: Path
    ) -> None:
        output = structgen("run", failing, "--trace", trace)

        assert (output.code, output.out) == (1, "")
        assert output.err == f"structgen: {failing}:8 in failing: ValueError: on purpose\n"
        assert any("last words" in name for name in spans(trace))

    def test_is_written_when_the_run_is_interrupted(
        self, structgen: CommandLine, failing: Path, trace: Path
    ) -> None:
        failing.write_text(FAILING.replace('ValueError("on purpose")', "KeyboardInterrupt"))

        output = structgen("run", failing, "--trace", trace)

        assert (output.code, output.out, output.err) == (130, "", "")
        assert any("last words" in name for name in spans(trace))

    def test_is_written_when_the_value_cannot_be(
        self, structgen: CommandLine, tmp_path: Path, trace: Path
    ) -> None:
        file = tmp_path / "odd.py"
        file.write_text(
            "from structgen import State, program\n"
            "@program\nasync def odd(s: State) -> object: return object()\n"
        )

        output = structgen("run", file, "--json", "--trace", trace)

        assert output.code == 2
        assert trace.exists()

    def test_of_a_run_that_never_began_leaves_the_file_alone(
        self, structgen: CommandLine, echo: Path, trace: Path
    ) -> None:
        trace.write_text("of yesterday")

        structgen("run", echo, "--trace", trace, "--model", "missing")

        assert trace.read_text() == "of yesterday"

    def test_that_cannot_be_written_any_more_hides_no_error(
        self, structgen: CommandLine, tmp_path: Path
    ) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        file = tmp_path / "rude.py"
        file.write_text(
            f"import os\n{FAILING}".replace(
                "    raise", f"    os.rmdir({str(folder)!r})\n    raise"
            )
        )

        output = structgen("run", file, "--trace", folder / "trace.json")

        first, second = output.err.splitlines()
        assert "folder" in first
        assert "ValueError: on purpose" in second
        assert output.code == 1


class TestAPathThatCannotBeWritten:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nowhere/trace.json", "nowhere does not exist"),
            ("trace.txt", ".json"),
            ("folder.json", "is a folder"),
        ],
    )
    def test_is_found_before_anything_is_loaded(
        self, structgen: CommandLine, tmp_path: Path, name: str, message: str
    ) -> None:
        (tmp_path / "folder.json").mkdir()
        file = tmp_path / "loud.py"
        file.write_text("raise RuntimeError('imported')\n")

        output = structgen("run", file, "--trace", tmp_path / name)

        assert (output.code, output.out) == (2, "")
        assert output.err.startswith("structgen: --trace")
        assert message in output.err
        assert len(output.err.splitlines()) == 1
        assert structgen.engine.opened == []


class TestATree:
    def test_follows_the_table(self, structgen: CommandLine, echo: Path) -> None:
        output = structgen("run", echo, "--arg", "times=2", "--tree")

        table, tree = output.out.split("run  0", 1)
        assert "reply 1" in table
        assert [line for line in tree.splitlines() if "reply" in line]
        assert tree.splitlines()[-1].startswith("1 run, 2 calls")

    def test_leaves_stdout_to_json(self, structgen: CommandLine, echo: Path) -> None:
        output = structgen("run", echo, "--json", "--tree")

        assert json.loads(output.out)["value"] == ["a reply"]
        assert "1 run, 1 call" in output.err

    def test_of_a_failure_comes_before_its_line(
        self, structgen: CommandLine, failing: Path
    ) -> None:
        output = structgen("run", failing, "--tree")

        assert "ValueError: on purpose" in output.out
        assert "last words" in output.out
        assert output.err.splitlines() == [
            f"structgen: {failing}:8 in failing: ValueError: on purpose"
        ]

    def test_is_not_there_unless_asked_for(self, structgen: CommandLine, echo: Path) -> None:
        assert "1 run" not in structgen("run", echo).out
