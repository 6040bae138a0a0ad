"""The command as a process: start, exit codes, signals, pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import structgen

ROOT = Path(__file__).parents[2]
# A shell that runs the tests in the background has them, and their children, ignore SIGINT.
HEED_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
START = "import sys; from structgen.cli import main; "
HELP = (
    "import time; start = time.process_time(); "
    f"{START} main(['--help']); "
    "print(time.process_time() - start, 'torch' in sys.modules, file=sys.stderr)"
)
SCRIPTED = (
    f"{START} from tests.cli.scripted import ScriptedEngine; "
    "engine = ScriptedEngine('a reply', chat=None); "
    "sys.exit(main(sys.argv[1:], open_engine=engine.open))"
)
ENDLESS = """
import asyncio, sys
from structgen import State, program

@program
async def endless(s: State) -> None:
    print("started", flush=True)
    await asyncio.Event().wait()
"""


def python(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment
    )


class TestHelp:
    def test_answers_at_once_and_without_torch(self, installed: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(installed)}

        # The least of some: the machine may be busy.
        answers = [python("-c", HELP, environment=environment).stderr.split() for _ in range(4)]

        assert min(float(seconds) for seconds, _ in answers) < 0.5
        assert {torch for _, torch in answers} == {"False"}

    def test_is_what_the_bare_command_shows(self) -> None:
        assert python("-m", "structgen").stdout == python("-m", "structgen", "--help").stdout


class TestTheVersion:
    def test_is_printed(self) -> None:
        assert python("-m", "structgen", "--version").stdout == (
            f"structgen {structgen.__version__}\n"
        )


class TestAnInterruption:
    def test_ends_quietly_with_its_own_exit_code(self, tmp_path: Path) -> None:
        file = tmp_path / "endless.py"
        file.write_text(ENDLESS)
        command = [sys.executable, "-c", HEED_SIGINT + SCRIPTED, "run", str(file)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stderr is not None
            started = process.stderr.readline()

            process.send_signal(signal.SIGINT)

            assert (started, process.stderr.read()) == ("started\n", "")
        assert process.returncode == 130


class TestAReaderThatLeaves:
    def test_ends_the_command_quietly(self) -> None:
        command = [sys.executable, "-c", SCRIPTED, "generate", "a prompt"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()

            assert process.stderr.read() == b""
        assert process.returncode == 1


class TestAMissingModel:
    def test_is_named_in_one_line_and_without_traceback(self) -> None:
        done = python("-m", "structgen", "generate", "x", "--model", "/no/such/model")

        assert done.returncode == 2
        assert done.stderr.startswith("structgen: ")
        assert "/no/such/model" in done.stderr
        assert len(done.stderr.splitlines()) == 1
