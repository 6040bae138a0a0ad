"""Programs by file: `FILE` or `FILE:PROGRAM` to a `Program`; for a server, by module, too.

A file is imported the way Python runs a script: its folder stands first on the module path. A
module is imported as `python -m` does: the working directory stands first.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from structgen.cli.failure import CommandError
from structgen.program.program import Program

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


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


def programs(target: str) -> list[Program[..., Any]]:
    """The programs of `FILE` or `MODULE`, or the one that `:PROGRAM` names.

    Raises `CommandError` when it is not there, or has no programs of its own.
    """
    path, name = split(target)
    if path.is_file() or path.suffix == ".py" or not _MODULE.fullmatch(str(path)):
        if name is not None:
            return [program_in(path, name)]
        if not path.is_file():
            raise CommandError(f"{path} does not exist; expected a Python file or a module")
        module = _imported(path)
    else:
        module = _module(str(path))
    found = {key: value for key, value in vars(module).items() if isinstance(value, Program)}
    if name is not None:
        if name not in found:
            raise CommandError(f"{path} has no program {name!r}; {_listed(found)}")
        return [found[name]]
    own = {id(value): value for value in found.values() if value.__module__ == module.__name__}
    if not own:
        raise CommandError(f"{path} has no program; decorate a coroutine with @structgen.program")
    return list(own.values())


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise CommandError(
                f"{name}: there is no such module, and no such file; a file ends in .py"
            ) from None
        raise


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
