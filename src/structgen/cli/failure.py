"""What goes wrong on the command line, as one line on stderr and an exit code.

Exit codes: 0 done · 1 the model, the program or the engine failed · 2 the command line is wrong ·
130 interrupted. With `STRUCTGEN_TRACEBACK=1` in the environment the traceback is shown as well.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from structgen.errors import (
    ConstraintError,
    ModelNotFoundError,
    OptionError,
    StructgenError,
    leaves,
)
from structgen.options import nearest

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
TRACEBACK_VARIABLE = "STRUCTGEN_TRACEBACK"


class CommandError(Exception):
    """The command line asks for something that is not there or cannot be; the message says what."""


class ProgramError(Exception):
    """What a user's file raised, as the cause; `file` is where to look for the line."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self.file = file


@contextmanager
def blaming(file: Path) -> Iterator[None]:
    """Errors that pass are reported with their line in the user's file."""
    try:
        yield
    except Exception as error:
        raise ProgramError(file) from error


def exit_code(error: BaseException) -> int:
    """The exit code that tells a script what kind of failure this was."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED
        case typer.TyperException():
            return int(error.exit_code)
        case CommandError() | OptionError() | ConstraintError() | ModelNotFoundError():
            return MISUSED
        case _:
            return FAILED


def report(error: BaseException) -> int:
    """Write `structgen: ...` for the error on stderr and return its exit code."""
    if os.environ.get(TRACEBACK_VARIABLE, "") not in {"", "0"}:
        traceback.print_exception(error)
    place, code = "", exit_code(error)
    if isinstance(error, ProgramError) and error.__cause__ is not None:
        file, error = error.file, next(leaves(error.__cause__))
        # What the user's own code does wrong is no mistake of the command line.
        place = _place(error, file)
        code = FAILED if place else exit_code(error)
    if not isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"structgen: {place}{one_line(error)}\n")
    return code


def one_line(error: BaseException) -> str:
    """What happened, in one line."""
    leaf = next(leaves(error))
    if isinstance(leaf, typer.TyperException):
        text = _misuse(leaf)
    elif isinstance(leaf, StructgenError | CommandError):
        text = str(leaf)
    else:
        text = f"{type(leaf).__name__}: {leaf}" if str(leaf) else type(leaf).__name__
    return " ".join(text.split())


def _misuse(error: typer.TyperException) -> str:
    # The class for an option that does not exist is not public in typer: told by what it has.
    unknown, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if not hasattr(error, "possibilities") or context is None:
        return error.format_message()
    options = [name for each in context.command.params for name in each.opts]
    # Without their dashes, which would make any two options alike.
    bare = {name.lstrip("-"): name for name in options}
    near = nearest(unknown.lstrip("-"), bare)
    return error.message if near is None else f"{error.message} (did you mean {bare[near]}?)"


def _place(error: BaseException, file: Path) -> str:
    """`file:line in function: ` of the innermost frame in the user's file, "" if there is none."""
    # Python names files by their whole path, the user as it was typed.
    whole = str(file.resolve())
    if isinstance(error, SyntaxError) and error.filename in {whole, str(file)}:
        return f"{file}:{error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename in {whole, str(file)}]
    if not inside:
        return ""
    function = "" if inside[-1].name == "<module>" else f" in {inside[-1].name}"
    return f"{file}:{inside[-1].lineno}{function}: "
