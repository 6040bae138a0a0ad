"""What `import structgen` offers."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import version

import pytest

import structgen


def modules() -> list[str]:
    """Every module of the package that only defines things when it is imported."""
    found = [module.name for module in pkgutil.walk_packages(structgen.__path__, "structgen.")]
    return [name for name in found if name != "structgen.__main__"]


def errors_of(script: str) -> str:
    """What a Python process of its own writes to stderr."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


class TestThePublicNames:
    @pytest.mark.parametrize("name", structgen.__all__)
    def test_exist(self, name: str) -> None:
        assert getattr(structgen, name) is not None

    @pytest.mark.parametrize("name", sorted(set(structgen.__all__) - {"__version__", "Prompt"}))
    def test_say_what_they_are(self, name: str) -> None:
        assert getattr(structgen, name).__doc__

    def test_are_listed_by_dir(self) -> None:
        assert set(structgen.__all__) <= set(dir(structgen))

    def test_do_not_include_what_does_not_exist(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Motor'"):
            structgen.Motor  # noqa: B018 - to look it up is the test


class TestTheDecorator:
    def test_stays_callable_when_every_module_was_imported(self) -> None:
        # In a process of its own: here, other tests may have imported some of them already.
        script = "\n".join(
            ["import importlib, structgen"]
            + [f"importlib.import_module({name!r})" for name in modules()]
            + ["assert callable(structgen.program), structgen.program"]
            + ["from structgen import program", "assert callable(program)"]
        )

        assert errors_of(script) == ""

    def test_can_be_imported_after_a_submodule(self) -> None:
        script = "import structgen.program.state, structgen; assert callable(structgen.program)"

        assert errors_of(script) == ""

    @pytest.mark.parametrize("name", modules())
    def test_lives_beside_modules_that_can_all_be_imported(self, name: str) -> None:
        assert importlib.import_module(name).__name__ == name


class TestTheVersion:
    def test_is_the_one_of_the_distribution(self) -> None:
        assert structgen.__version__ == version("structgen-lm")
