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
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


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


def links(page: Path) -> list[tuple[Path, str]]:
    """File and anchor of each link that leads to a page or a file of ours."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    return [(page.parent / file if file else page, anchor) for file, anchor in LINK.findall(prose)]


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a page make."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose)]
    return {heading.strip().replace(" ", "-") for heading in plain}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def needs_model(page: Path) -> bool:
    """Whether its Python opens an engine; other pages run on scripted backends."""
    return any("Engine(" in block for block, _ in blocks(page))


def run_page(page: Path, names: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Run the blocks of a page in one namespace; what they claim to print, and what they print."""
    claimed, printed = [], []
    for number, (block, output) in enumerate(blocks(page)):
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            code = compile(block, f"{page.name} block {number}", "exec", dont_inherit=True)
            exec(code, names)
        claimed.append(output)
        printed.append(stdout.getvalue() if output else "")
    return claimed, printed


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if needs_model(page) else [])
        for page in PAGES
        if blocks(page)
    ],
    ids=name_of,
)
class TestThePythonOfAPage:
    def test_runs_from_top_to_bottom_and_prints_what_it_claims(
        self, page: Path, request: pytest.FixtureRequest
    ) -> None:
        if needs_model(page):
            request.getfixturevalue("default_model")

        claimed, printed = run_page(page, {"__name__": "__page__"})

        assert printed == claimed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
class TestAPage:
    def test_links_to_files_that_exist(self, page: Path) -> None:
        assert [str(file) for file, _ in links(page) if not file.exists()] == []

    def test_links_to_headings_that_exist(self, page: Path) -> None:
        found = [(file, anchor) for file, anchor in links(page) if anchor]

        assert [anchor for file, anchor in found if anchor not in anchors(file)] == []


class TestTheTablesOfDefaults:
    def test_list_every_option_of_a_generation(self) -> None:
        listed = set(rows("defaults.md", "Generation"))

        assert listed == set(GenOptions.__annotations__)

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
