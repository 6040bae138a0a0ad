"""The command line: `structgen run | demo | generate | serve | pull`.

Owns   what the commands are called, what they print and their exit codes. Torch is imported when
       an engine is opened, so that help and mistakes answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from structgen.cli import failure
from structgen.cli.app import app
from structgen.cli.engine import OpenEngine, open_engine

__all__ = ("main",)


def main(arguments: Sequence[str] | None = None, *, open_engine: OpenEngine = open_engine) -> int:
    """Run one command and return its exit code; `arguments` are those of the process if None.

    `open_engine(model, **options)` makes the engine that the command runs on.
    """
    try:
        code = app(
            args=None if arguments is None else list(arguments),
            prog_name="structgen",
            standalone_mode=False,
            obj=open_engine,
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone. Python flushes stdout once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failure.FAILED
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last place to report it
        return failure.report(error)
    return code if isinstance(code, int) else 0
