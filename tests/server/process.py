"""A server as a process of its own, on a port that the system chose."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "structgen", "serve")
START_SECONDS = 60.0


class ServerProcess:
    """A server process: where it listens, what it wrote, and its end."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process, self._errors = process, errors
        self.lines: list[str] = []
        self.listening, self.ready = threading.Event(), threading.Event()
        # It ends when the process does, which whoever started it sees to.
        self._reader = threading.Thread(target=self._read, name="output of a server")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return self._errors.read_text()

    @property
    def url(self) -> str:
        """Where it listens, as its first line says."""
        return self.lines[0].removeprefix("listening on ").partition(",")[0]

    @property
    def port(self) -> int:
        """The port of that."""
        return int(self.url.rpartition(":")[2])

    def wait_listening(self) -> None:
        """Wait until it has its port; fail where it ends instead."""
        assert self.listening.wait(START_SECONDS), self.errors
        assert self.lines, self.errors

    def wait_ready(self) -> None:
        """Wait until it serves; fail where it ends instead."""
        assert self.ready.wait(START_SECONDS), self.errors
        assert self.lines[-1].startswith("ready: "), self.errors

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Its exit code, within some seconds."""
        return self._process.wait(seconds)

    def end(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))
                self.listening.set()
                if line.startswith("ready: "):
                    self.ready.set()
        self.listening.set()
        self.ready.set()


@contextmanager
def server_process(
    model: Path,
    folder: Path,
    *flags: str,
    early: Callable[[ServerProcess], None] = lambda _: None,
) -> Iterator[ServerProcess]:
    """Start a server and wait until it serves; its stderr goes to a file in the folder.

    early   called when it has its port, and still loads
    """
    errors = folder / f"stderr-{time.monotonic_ns()}"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, str(model), "--port", "0", "--served-model-name", "tiny", *flags],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    server = ServerProcess(process, errors)
    try:
        server.wait_listening()
        early(server)
        server.wait_ready()
        yield server
    finally:
        server.end()


def refused(*arguments: str) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of a server that does not come to serve."""
    before = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    return done.returncode, done.stderr, time.perf_counter() - before
