"""A run's trace on the command line: into a file, or as a tree for people."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from structgen.cli.failure import CommandError
from structgen.errors import OptionError
from structgen.trace.record import Trace, require_known_ending
from structgen.trace.tree import LEAST_WIDTH, WIDTH, text_tree


def check_trace_path(path: Path) -> None:
    """Raise `CommandError` where no trace could be written: ask before a long run, not after."""
    try:
        require_known_ending(path)
    except OptionError as error:
        raise CommandError(f"--trace: {str(error).removeprefix('path: ')}") from None
    if path.is_dir():
        raise CommandError(f"--trace {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise CommandError(f"--trace {path}: the folder {path.parent} does not exist; make it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CommandError(f"--trace {path}: not allowed to write there")


def write_trace(trace: Trace, path: Path) -> None:
    """Write the trace to a .json file. Raises `CommandError` where that fails."""
    check_trace_path(path)
    try:
        trace.save(path)
    except OSError as error:
        raise CommandError(f"--trace {path}: {error.strerror or error}") from None


def print_tree(trace: Trace, *, json: bool = False) -> None:
    """Write the tree to stdout; to stderr where stdout is JSON.

    As wide as the terminal, or 100 columns where there is none.
    """
    file = sys.stderr if json else sys.stdout
    width = shutil.get_terminal_size((WIDTH, 24)).columns if file.isatty() else WIDTH
    file.write(f"{text_tree(trace, max(width, LEAST_WIDTH))}\n")
