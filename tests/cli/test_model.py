"""The commands on the default model, in this process."""

from __future__ import annotations

import pytest

from structgen.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_model")]


@pytest.mark.served
class TestTheDemo:
    def test_shows_that_branches_took_their_prefix_from_the_cache_and_says_the_same_thing_twice(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["demo", "--arg", "count=2", "--max-tokens", "4", "--dtype", "float32"]
        codes, outputs = [], []
        for _ in range(2):
            codes.append(main(arguments))
            outputs.append(capsys.readouterr().out.partition("\ncall "))
        (first, _, table), (second, _, _) = outputs

        branches = [line.split() for line in table.splitlines() if line.startswith("branch")]
        assert codes == [0, 0]
        assert len(branches) == 2
        assert min(int(cells[4]) for cells in branches) > 0
        assert first == second != ""


class TestTheDefaultsInForce:
    def test_are_written_where_that_is_asked_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        main(["generate", "1, 2, 3,", "--max-tokens", "1", "--slots", "64", "--top-k", "3", "-v"])

        lines = capsys.readouterr().err.splitlines()
        written = dict(line.split(": ", 1) for line in lines if ": " in line)
        assert (
            written.items()
            >= {
                "temperature": "1",
                "top_p": "1",
                "top_k": "3",
                "max_tokens": "1",
                "stop ids": "2",
                "page size": "1 token",
                "slots": "64",
                "rope theta": "100000",
            }.items()
        )


class TestPull:
    def test_writes_where_the_model_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        main(["pull", "smollm2-135m"])

        assert capsys.readouterr().out.endswith("SmolLM2-135M-Instruct.Q4_1.gguf\n")


class TestAFileThatIsNoModel:
    def test_is_refused_in_one_line(
        self, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        file = tmp_path_factory.mktemp("broken") / "broken.gguf"
        file.write_bytes(b"GGUF, or so it says")

        code = main(["generate", "x", "--model", str(file)])

        captured = capsys.readouterr()
        assert (code, captured.out, len(captured.err.splitlines())) == (1, "", 1)
        assert str(file) in captured.err
