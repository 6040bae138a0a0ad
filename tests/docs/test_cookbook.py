"""The programs of the cookbook on the real model, all of them at once on one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from structgen import Program
from structgen.backend import Backend
from tests.cases.probes import opened
from tests.docs.capped import capped
from tests.docs.test_pages import ROOT, run_page

pytestmark = pytest.mark.slow

Names = dict[str, Any]
PROBLEM = "Ada has 3 apples and buys 5. How many has she?"

# What each program is called with, and what holds of its value.
PROGRAMS: dict[str, tuple[Callable[[Names], tuple[Any, ...]], Callable[[Any], bool]]] = {
    "judge": (lambda _: ("Tea is hot. I like it.",), lambda grade: grade in {1, 2, 3, 4, 5}),
    "tree_of_thought": (lambda _: (PROBLEM, 2, 2), lambda answer: isinstance(answer, str)),
    "skeleton": (lambda _: ("How do I stay healthy?",), bool),
    "self_consistent": (lambda _: (PROBLEM, 3), lambda answer: isinstance(answer, int)),
    "react": (lambda _: ("Where does tea come from?", 2), lambda answer: isinstance(answer, str)),
    "chat": (lambda names: (names["typed"]("Hi", "Good night"),), lambda turns: turns == 2),
    "summarise": (lambda _: ("Tea is hot. I like it.",), lambda text: "\n" not in text),
    "merge": (lambda _: (["Tea is hot.", "Ice is cold."],), lambda text: "\n" not in text),
    "inventor": (lambda _: ("tea",), lambda year: year is None or 0 < year < 2100),
    "classify": (lambda _: ("I love this tea.",), lambda p: abs(sum(p.values()) - 1) < 1e-9),
}
# Coroutine functions of the page that run programs.
RUNNERS: dict[str, Callable[[Names, Backend], Any]] = {
    "talk": lambda names, backend: names["talk"](backend, "Hi", "Good night"),
    "map_reduce": lambda names, backend: names["map_reduce"](backend, ["Tea is hot.", "Ice."]),
    "running_summary": lambda names, backend: names["running_summary"](
        backend, names["typed"]("Tea is hot.", "Tea is green.", "Ice is cold.")
    ),
}


@pytest.fixture(scope="module")
def names() -> Names:
    """What the page defines."""
    found: Names = {"__name__": "__page__"}
    run_page(ROOT / "docs" / "cookbook.md", found)
    return found


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class TestTheCookbook:
    def test_has_no_program_that_is_not_run(self, names: Names) -> None:
        programs = {each.__name__ for each in names.values() if isinstance(each, Program)}

        assert programs == set(PROGRAMS)

    async def test_runs_on_the_real_model(self, names: Names, default_model: Path) -> None:
        async with opened(default_model) as engine:
            backend = capped(engine, 6)
            runs = [
                names[name].using(seed=1).run(backend, *arguments(names))
                for name, (arguments, _) in PROGRAMS.items()
            ]
            results = await asyncio.gather(*runs)
            texts = await asyncio.gather(*(run(names, backend) for run in RUNNERS.values()))
            after = engine.statistics()

        values = {name: result.value for name, result in zip(PROGRAMS, results, strict=True)}
        holds = {name: PROGRAMS[name][1](value) for name, value in values.items()}
        assert all(holds.values()), values
        assert all(isinstance(text, str) for text in texts)
        assert (after.running, after.waiting, after.slots_held, after.scopes) == (0, 0, 0, 0)
