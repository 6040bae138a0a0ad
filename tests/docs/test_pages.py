"""The pages: their Python runs, their links lead somewhere, their tables agree with the code."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from structgen.engine.config import EngineConfig
from structgen.options import GenOptions

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# A block of Python, and what it prints, if a block of text follows at once.
FENCE = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Pairs of Python and the output that the page claims for it, "" if it claims none."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def rows(page: str, heading: str) -> dict[str, str]:
    """First and second column of the table under a heading; the first may name several options."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, default = line.split(" | ")[:2]
            found |= dict.fromkeys(re.findall(r"`(\w+)`", names), default)
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name_of)
class TestThePythonOfAPage:
    def test_runs_from_top_to_bottom_and_prints_what_it_claims(self, page: Path) -> None:
        names: dict[str, Any] = {"__name__": "__page__"}
        claimed, printed = [], []
        for number, (block, output) in enumerate(blocks(page)):
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout):
                exec(compile(block, f"{page.name} block {number}", "exec"), names)
            claimed.append(output)
            printed.append(stdout.getvalue() if output else "")

        assert printed == claimed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
class TestAPage:
    def test_links_to_files_that_exist(self, page: Path) -> None:
        targets = LINK.findall(page.read_text(encoding="utf-8"))

        assert [target for target in targets if not (page.parent / target).exists()] == []


class TestTheTablesOfDefaults:
    def test_list_every_option_of_a_generation(self) -> None:
        listed = set(rows("defaults.md", "Generation"))

        assert listed == set(GenOptions.__annotations__) - {"regex"}

    def test_list_every_option_of_an_engine(self) -> None:
        assert set(rows("defaults.md", "Engine")) == set(EngineConfig.__struct_fields__)

    def test_give_the_defaults_of_an_engine(self) -> None:
        written = rows("defaults.md", "Engine")
        plain = {
            field.name: str(field.default)
            for field in msgspec.structs.fields(EngineConfig)
            if isinstance(field.default, int | float)
        }

        assert {name: written[name] for name in plain} == plain
