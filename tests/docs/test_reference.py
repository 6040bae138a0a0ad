"""The reference: it says what the docstrings say, and there is a docstring to say it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of the script that writes the page."""
    return runpy.run_path(str(DOCS / "make_reference.py"))


class TestTheReference:
    def test_is_up_to_date(self, script: dict[str, Any]) -> None:
        written = (DOCS / "reference.md").read_text(encoding="utf-8")

        assert script["reference"]() == written, "run: python docs/make_reference.py"

    def test_has_no_name_method_or_property_without_docstring(self, script: dict[str, Any]) -> None:
        assert script["undocumented"]() == []

    def test_describes_every_public_name(self, script: dict[str, Any]) -> None:
        import structgen

        described = {name for section in script["SECTIONS"] for name in section.names}

        assert set(structgen.__all__) - described == {"__version__"}


class TestAName:
    def test_without_docstring_is_found(self, script: dict[str, Any]) -> None:
        class Undocumented:
            def method(self) -> None: ...

            @property
            def value(self) -> int:
                """It has one."""
                return 0

        Undocumented.__module__ = "structgen.undocumented"
        members = list(script["members_of"](Undocumented))

        assert [(name, bool(script["_doc"](each))) for name, each in members] == [
            ("method", False),
            ("value", True),
        ]


class TestADocstring:
    @pytest.mark.parametrize(
        ("doc", "markdown"),
        [
            ("One line.", "One line."),
            ("name   what it\n       is\nother  more", "- `name`: what it is\n- `other`: more"),
            ("Text:\n\n    code\n\n    more", "Text:\n\n```\ncode\n\nmore\n```"),
        ],
    )
    def test_becomes_markdown(self, script: dict[str, Any], doc: str, markdown: str) -> None:
        assert script["markdown"](doc) == markdown
