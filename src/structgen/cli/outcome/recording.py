"""`--trace FILE` and `--tree`: what happened in a command's runs, kept however they end.

Owns   when a trace is asked for, written and shown; `tracing` knows how.
Used   by `run` and `demo`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from structgen.cli import failure
from structgen.cli.failure import CommandError
from structgen.cli.outcome.tracing import check_trace_path, print_tree, write_trace
from structgen.trace.record import Trace, record


class Recording:
    """What a command was told to record.

    file   where the trace is written, None for nowhere
    tree   whether it is shown as a tree
    json   whether stdout has one JSON object and nothing else

    Raises `CommandError` for a file that cannot be written.
    """

    def __init__(self, file: Path | None, *, tree: bool, json: bool) -> None:
        if file is not None:
            check_trace_path(file)
        self.file, self.tree, self.json = file, tree, json

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Record what runs in this block; write and show it when the block ends, or fails."""
        if self.file is None and not self.tree:
            yield
            return
        with record() as trace:
            try:
                yield
            except BaseException:
                self._keep_of_failure(trace)
                raise
        if self.tree and not self.json:
            sys.stdout.write("\n")  # below the report
        self._keep(trace)

    def _keep(self, trace: Trace) -> None:
        if self.file is not None:
            write_trace(trace, self.file)
        if self.tree:
            print_tree(trace, json=self.json)

    def _keep_of_failure(self, trace: Trace) -> None:
        if not trace.runs:
            return  # it failed before the program began: a file of an earlier run stays
        try:
            self._keep(trace)
        except CommandError as error:
            # The program's own error comes after it, and decides the exit code.
            failure.report(error)
