"""What the command line does with a trace: a file, or a tree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from structgen.cli.failure import CommandError
from structgen.cli.outcome.tracing import check_trace_path, print_tree, write_trace
from structgen.trace.record import Trace
from tests.trace.stories import Story


@pytest.fixture
def trace() -> Trace:
    trace = Trace()
    story = Story(trace.listen)
    story.start(0)
    story.call(1, 2, 1, "haiku")
    story.finish(3)
    return trace


class TestATraceFile:
    def test_is_written(self, trace: Trace, tmp_path: Path) -> None:
        write_trace(trace, tmp_path / "out.json")

        assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "nowhere/out.json",
                r"--trace .*nowhere.out\.json: the folder .*nowhere does not exist",
            ),
            ("out.html", r"--trace: .*out\.html ends in '\.html'; a trace is saved as \.json"),
            ("folder.json", r"--trace .*folder\.json: is a folder"),
        ],
        ids=repr,
    )
    def test_that_cannot_be_is_refused_before_the_run(
        self, trace: Trace, tmp_path: Path, name: str, message: str
    ) -> None:
        (tmp_path / "folder.json").mkdir()

        with pytest.raises(CommandError, match=message):
            check_trace_path(tmp_path / name)
        with pytest.raises(CommandError, match=message):
            write_trace(trace, tmp_path / name)

    def test_that_must_not_be_written_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere

        with pytest.raises(CommandError, match="not allowed to write there"):
            check_trace_path(tmp_path / "out.json")

    def test_that_fails_while_it_is_written_is_one_line(
        self, trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Trace, "save", full)

        with pytest.raises(CommandError, match=r"--trace .*out\.json: No space left on device"):
            write_trace(trace, tmp_path / "out.json")


class TestATree:
    @pytest.mark.parametrize("json", [False, True])
    def test_goes_where_the_json_does_not(
        self, trace: Trace, capsys: pytest.CaptureFixture[str], json: bool
    ) -> None:
        print_tree(trace, json=json)

        output = capsys.readouterr()
        assert ("gen haiku" in output.out, "gen haiku" in output.err) == (not json, json)
