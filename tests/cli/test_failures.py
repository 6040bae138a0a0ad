"""What goes wrong: one line on stderr, nothing on stdout, the right exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.scripted import CommandLine, Output

HEAD = "import asyncio\nfrom structgen import State, program\n"
PROGRAM_A = "@program\nasync def a(s: State) -> None: ...\n"


def is_one_line(output: Output) -> bool:
    lines = output.err.splitlines()
    return len(lines) == 1 and lines[0].startswith("structgen: ") and output.out == ""


@pytest.fixture
def program_file(tmp_path: Path) -> Path:
    return tmp_path / "faulty.py"


class TestAWrongCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["walk"], "No such command 'walk'"),
            (["run"], "Missing argument 'FILE"),
            (["generate", "x", "--walk"], "No such option: --walk\n"),
            (["generate", "x", "--max-token", "3"], "--max-token (did you mean --max-tokens?)"),
            (["generate", "x", "--temp", "1"], "--temp (did you mean --temperature?)"),
            (["run", "x.py", "--trase", "x.json"], "--trase (did you mean --trace?)"),
            (["run", "x.py", "-q"], "No such option: -q\n"),
            (["rum", "x.py"], "No such command 'rum'. Did you mean 'run'?"),
            (["generate", "x", "--temperature", "warm"], "Invalid value for '--temperature'"),
            (["generate", "x", "--temperature", "-1"], "temperature: must be at least 0, got -1\n"),
            (["generate", "x", "--max-tokens", "0"], "max_tokens: must be at least 1"),
            (["run", "nowhere.py"], "nowhere.py does not exist"),
            (["run", "."], ". is a folder"),
            (["run", "nowhere.py:main"], "nowhere.py does not exist"),
            (["generate", ""], "the prompt is empty"),
            (["generate", "", "--raw"], "the prompt is empty"),
        ],
        ids=repr,
    )
    def test_is_named_in_one_line(
        self, structgen: CommandLine, arguments: list[str], message: str
    ) -> None:
        output = structgen(*arguments)

        assert is_one_line(output)
        assert message in output.err
        assert output.code == 2

    @pytest.mark.parametrize(
        ("pairs", "message"),
        [
            (["volume=3"], "--arg volume: unknown argument; the program takes word='hello'"),
            (["times=many"], "--arg times=many: Expected `int`"),
            (["times"], "write --arg name=value"),
            (["word=a", "word=b"], "--arg word: given twice"),
        ],
        ids=repr,
    )
    def test_names_the_argument_of_the_program(
        self, structgen: CommandLine, echo: Path, pairs: list[str], message: str
    ) -> None:
        options = [part for pair in pairs for part in ("--arg", pair)]

        output = structgen("run", echo, *options)

        assert is_one_line(output)
        assert message in output.err
        assert output.code == 2

    def test_names_a_missing_argument(self, structgen: CommandLine, program_file: Path) -> None:
        program_file.write_text(
            f"{HEAD}@program\nasync def add(s: State, a: int, b: int) -> int: return a + b\n"
        )

        output = structgen("run", program_file, "--arg", "a=1")

        assert "missing argument: add --arg b=...; the program takes a, b" in output.err

    @pytest.mark.parametrize(
        ("text", "target", "message"),
        [
            ("x = 1\n", "", "has no program; decorate"),
            (
                PROGRAM_A + PROGRAM_A.replace("def a", "def b"),
                "",
                "has several programs; write",
            ),
            (PROGRAM_A, ":b", "no program 'b'; it has a"),
        ],
        ids=["none", "several", "another"],
    )
    def test_lists_the_programs_of_the_file(
        self, structgen: CommandLine, program_file: Path, text: str, target: str, message: str
    ) -> None:
        program_file.write_text(HEAD + text)

        output = structgen("run", f"{program_file}{target}")

        assert is_one_line(output)
        assert message in output.err
        assert output.code == 2


class TestAFailure:
    def test_of_the_model_is_one_line(self, structgen: CommandLine, echo: Path) -> None:
        output = structgen("run", echo, "--model", "missing")

        assert (output.out, output.err) == ("", "structgen: there is no model 'missing'\n")
        assert output.code == 2

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("def f(:\n", ":3: SyntaxError: invalid syntax"),
            ("import nothing_of_that_name\n", ":3: ModuleNotFoundError: No module named"),
            ("raise SystemExit(3)\n", "exits while it is imported, with 3"),
        ],
        ids=["syntax", "import", "exit"],
    )
    def test_of_the_file_is_one_line_with_its_place(
        self, structgen: CommandLine, program_file: Path, text: str, message: str
    ) -> None:
        program_file.write_text(HEAD + text)

        output = structgen("run", program_file)

        assert is_one_line(output)
        assert message in output.err
        assert output.code != 0

    @pytest.mark.parametrize("text", ["def f(:\n", "raise ValueError\n"])
    def test_has_its_place_in_a_file_that_is_named_relatively(
        self,
        structgen: CommandLine,
        program_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        text: str,
    ) -> None:
        program_file.write_text(HEAD + text)
        monkeypatch.chdir(program_file.parent)

        output = structgen("run", program_file.name)

        assert f"structgen: {program_file.name}:3: " in output.err
        assert output.code == 1

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("return 1 // 0", "ZeroDivisionError"),
            ("return s['x']", "no variable 'x'"),
            ("s.user('hi'); return await s.gen()", "the model has no chat template"),
            ("s += 'x'; return await s.gen(warmth=1)", "warmth: unknown option"),
            ("s += 'x'; return await s.gen(temp=1)", "temp: unknown option (did you mean temper"),
        ],
        ids=["arithmetic", "variable", "roles", "option", "like an option"],
    )
    def test_of_the_program_is_one_line_with_its_place(
        self, structgen: CommandLine, program_file: Path, body: str, message: str
    ) -> None:
        program_file.write_text(
            f"{HEAD}@program\nasync def fail(s: State) -> object:\n    {body}\n"
        )

        output = structgen("run", program_file)

        assert is_one_line(output)
        assert f"{program_file}:5 in fail: " in output.err
        assert message in output.err
        assert output.code == 1

    def test_in_a_branch_is_found_in_its_group(
        self, structgen: CommandLine, program_file: Path
    ) -> None:
        program_file.write_text(
            f"{HEAD}"
            "@program\n"
            "async def fail(s: State) -> None:\n"
            "    s += 'x'\n"
            "    async def work(branch: State, index: int) -> None:\n"
            "        raise ValueError('in a branch')\n"
            "    await s.fork(2).map(work)\n"
        )

        output = structgen("run", program_file)

        assert is_one_line(output)
        assert f"{program_file}:7 in work: ValueError: in a branch" in output.err

    def test_shows_the_traceback_where_that_is_asked_for(
        self, structgen: CommandLine, echo: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STRUCTGEN_TRACEBACK", "1")

        output = structgen("run", echo, "--model", "missing")

        assert output.err.startswith("Traceback")
