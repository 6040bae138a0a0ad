"""`structgen run` and `structgen demo`: what they print, and what reaches the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from structgen.chat import CHATML
from tests.cli.scripted import CommandLine, options_of


def json_of(text: str) -> dict[str, object]:
    return msgspec.json.decode(text, type=dict[str, object])


class TestRunningAProgram:
    def test_prints_its_text_its_value_and_what_each_call_cost(
        self, structgen: CommandLine, echo: Path
    ) -> None:
        output = structgen("run", echo, "--arg", "times=2")

        lines = output.out.splitlines()
        assert lines[0] == "say helloa replya reply"
        assert "value: ['a reply', 'a reply']" in lines
        assert [line.split()[-4:] for line in lines if "reply 0" in line] == [
            ["9", "0", "8", "stop"]
        ]

    def test_succeeds(self, structgen: CommandLine, echo: Path) -> None:
        assert structgen("run", echo).code == 0

    def test_sends_what_the_program_prints_to_stderr(
        self, structgen: CommandLine, echo: Path
    ) -> None:
        output = structgen("run", echo)

        assert output.err == "printed by the program\n"

    def test_makes_sampling_options_the_defaults(self, structgen: CommandLine, echo: Path) -> None:
        structgen("run", echo, "--temperature", "0.5", "--top-k", "7", "--seed", "3")

        options = options_of(structgen.engine)
        assert (options["temperature"], options["top_k"]) == (0.5, 7)
        assert options["max_tokens"] == 20, "an option of the call comes before the default"

    def test_hands_the_engine_its_options(self, structgen: CommandLine, echo: Path) -> None:
        structgen("run", echo, "--model", "some/model", "--slots", "512", "--no-radix")

        assert structgen.engine.opened == [("some/model", {"slots": 512, "radix": False})]

    def test_takes_the_default_model(self, structgen: CommandLine, echo: Path) -> None:
        structgen("run", echo)

        assert structgen.engine.opened == [("smollm2-135m", {})]

    def test_finds_modules_beside_the_file(self, structgen: CommandLine, tmp_path: Path) -> None:
        (tmp_path / "words_of_this_test.py").write_text("WORD = 'beside'\n")
        file = tmp_path / "program.py"
        file.write_text(
            "from words_of_this_test import WORD\n"
            "from structgen import State, program\n"
            "@program\n"
            "async def speak(s: State) -> str:\n"
            "    s += WORD\n"
            "    return await s.gen()\n"
        )
        path = list(sys.path)

        output = structgen("run", file)

        sys.path[:] = path
        assert output.out.splitlines()[0] == "besidea reply"

    def test_runs_the_program_that_was_named(self, structgen: CommandLine, tmp_path: Path) -> None:
        file = tmp_path / "two.py"
        file.write_text(
            "from structgen import State, program\n"
            "@program\nasync def one(s: State) -> int: return 1\n"
            "@program\nasync def two(s: State) -> int: return 2\n"
        )

        assert "value: 2" in structgen("run", f"{file}:two").out


class TestJson:
    def test_is_the_only_thing_on_stdout(self, structgen: CommandLine, echo: Path) -> None:
        output = structgen("run", echo, "--json")

        found = json_of(output.out)
        assert found["value"] == ["a reply"]
        assert found["text"] == "say helloa reply"
        assert set(found) == {"value", "text", "usage"}

    def test_counts_tokens_steps_and_seconds(self, structgen: CommandLine, echo: Path) -> None:
        usage = json_of(structgen("run", echo, "--json").out)["usage"]

        assert isinstance(usage, dict)
        assert 0 <= usage.pop("seconds") < 5
        assert usage == {
            "prompt_tokens": 9,
            "cached_tokens": 0,
            "completion_tokens": 8,
            "steps": 1,
        }

    def test_refuses_a_value_that_it_cannot_hold(
        self, structgen: CommandLine, tmp_path: Path
    ) -> None:
        file = tmp_path / "odd.py"
        file.write_text(
            "from structgen import State, program\n"
            "@program\nasync def odd(s: State) -> object: return object()\n"
        )

        output = structgen("run", file, "--json")

        assert output.code != 0
        assert output.out == ""
        assert "cannot be written as JSON" in output.err

    def test_writes_a_value_as_the_server_does(
        self, structgen: CommandLine, tmp_path: Path
    ) -> None:
        file = tmp_path / "spot.py"
        file.write_text(
            "import pydantic\n"
            "from structgen import State, program\n"
            "class Spot(pydantic.BaseModel):\n    x: float\n"
            "@program\nasync def spot(s: State, x: float) -> list[Spot]: return [Spot(x=x)]\n"
        )

        whole = structgen("run", file, "--json", "--arg", "x=1")
        lost = structgen("run", file, "--json", "--arg", "x=nan")

        assert json_of(whole.out)["value"] == [{"x": 1.0}]
        assert (lost.code, lost.out) == (2, "")
        assert "`[0].x` is nan, and JSON has no such number" in lost.err


class TestTheTableOfCalls:
    def test_shows_a_select_like_a_gen(self, structgen: CommandLine, tmp_path: Path) -> None:
        file = tmp_path / "choosing.py"
        file.write_text(
            "from structgen import State, program\n"
            "@program\n"
            "async def choosing(s: State) -> str:\n"
            "    s += 'Tea is '\n"
            "    await s.select('opinion', ['good', 'bad'])\n"
            "    s += ', because'\n"
            "    return await s.gen('reason', max_tokens=3)\n"
        )

        output = structgen("run", file)

        rows = [
            line.split() for line in output.out.splitlines() if line.startswith(("root", "all"))
        ]
        assert rows == [
            ["root:", "opinion", "6", "0", "0", "stop"],
            ["root:", "reason", "19", "0", "3", "length"],
            ["all", "25", "0", "3"],
        ]


class TestABoundProgram:
    def test_has_its_arguments(self, structgen: CommandLine, tmp_path: Path) -> None:
        file = tmp_path / "bound.py"
        file.write_text(
            "from structgen import State, program\n"
            "@program\nasync def add(s: State, a: int, b: int) -> int: return a + b\n"
            "three_more = add.bind(a=3)\n"
        )

        assert "value: 7" in structgen("run", f"{file}:three_more", "--arg", "b=4").out


DEMO_REPLIES = {"opening": "It pays.", "reason": "Because.", "summary": " live."}


class TestTheDemo:
    def test_forks_into_branches_and_joins_again(self, structgen: CommandLine) -> None:
        engine = structgen.script(DEMO_REPLIES, chat=CHATML)

        output = structgen("demo")

        assert output.code == 0
        assert [request.lineage.branch for request in engine.requests] == [
            (),
            *((index,) for index in range(4)),
            (),
        ]

    def test_shows_a_row_for_each_branch(self, structgen: CommandLine) -> None:
        structgen.script(DEMO_REPLIES, chat=CHATML)

        output = structgen("demo", "--arg", "count=3")

        rows = [line.split()[:3] for line in output.out.splitlines() if line.startswith("branch")]
        assert sorted(rows) == [["branch", f"{index}:", "reason"] for index in range(3)]

    def test_asks_greedily(self, structgen: CommandLine) -> None:
        engine = structgen.script(DEMO_REPLIES, chat=CHATML)

        structgen("demo")

        assert {request.sampling.temperature for request in engine.requests} == {0}
