"""Programs by file: `FILE` or `FILE:PROGRAM` to a `Program`.

The file is imported the way Python runs a script: its folder stands first on the module path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from structgen.cli.failure import CommandError
from structgen.program.program import Program


def split(target: str) -> tuple[Path, str | None]:
    """`FILE:PROGRAM` to its halves; a file may have colons in its name."""
    if Path(target).is_file():
        return Path(target), None
    file, colon, name = target.rpartition(":")
    return (Path(file), name) if colon else (Path(target), None)


def program_in(file: Path, name: str | None) -> Program[..., Any]:
    """The program of that name in the file, or its only one.

    Raises `CommandError` when the file or program is not there or the choice is open, and whatever
    the file itself raises while it is imported.
    """
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise CommandError(f"{file} {what}; expected a Python file with a @structgen.program")
    module = _imported(file)
    programs = {key: value for key, value in vars(module).items() if isinstance(value, Program)}
    if name is not None:
        if name in programs:
            return programs[name]
        raise CommandError(f"{file} has no program {name!r}; {_listed(programs)}")
    own = {id(value): value for value in programs.values() if value.__module__ == module.__name__}
    if len(own) == 1:
        return next(iter(own.values()))
    if not own:
        raise CommandError(f"{file} has no program; decorate a coroutine with @structgen.program")
    raise CommandError(f"{file} has several programs; write {file}:NAME; {_listed(programs)}")


def _listed(programs: dict[str, Program[..., Any]]) -> str:
    return f"it has {', '.join(sorted(programs))}" if programs else "it has none"


def _imported(file: Path) -> ModuleType:
    # A name of its own: a file called json.py must not take the place of a module.
    name = f"structgen_program_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise CommandError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Types that the file defines are looked up by their module's name.
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise CommandError(f"{file} exits while it is imported, with {error.code!r}") from None
    return module
