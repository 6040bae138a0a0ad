"""A model's name on the command line: what is said of one that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from structgen.cli import main


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with one model in it, and one that is none."""
    (tmp_path / "SmolLM2").mkdir()
    (tmp_path / "SmolLM2" / "config.json").touch()
    (tmp_path / "smollm-notes").mkdir()
    return tmp_path


class TestAMistypedModel:
    @pytest.mark.parametrize("command", [["generate", "x", "--model"], ["pull"]], ids=repr)
    def test_is_answered_with_the_nearest_name(
        self, capsys: pytest.CaptureFixture[str], command: list[str]
    ) -> None:
        code = main([*command, "smolm2-135"])

        captured = capsys.readouterr()
        assert code == 2
        assert captured.out == ""
        assert captured.err.endswith("; did you mean smollm2-135m?\n")
        assert len(captured.err.splitlines()) == 1

    def test_path_is_answered_with_the_model_beside_it(
        self, capsys: pytest.CaptureFixture[str], models: Path
    ) -> None:
        code = main(["generate", "x", "--model", str(models / "smollm")])

        assert code == 2
        assert capsys.readouterr().err.endswith(f"; did you mean {models / 'SmolLM2'}?\n")

    @pytest.mark.parametrize("name", ["elephant", "/no/such/folder/smollm2"])
    def test_that_is_like_no_other_stays_without(
        self, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        code = main(["generate", "x", "--model", name])

        assert code == 2
        assert "did you mean" not in capsys.readouterr().err
