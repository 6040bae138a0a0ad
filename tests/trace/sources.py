"""Programs made of a text in a file: they have a source, and what they name need not exist."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from types import ModuleType

HEAD = "import asyncio\nimport structgen\nfrom structgen import State, program\n"


def load(folder: Path, text: str, name: str = "sample") -> ModuleType:
    """A module with this text, imported from a file in the folder."""
    file = folder / f"{name}.py"
    file.write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"trace_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
