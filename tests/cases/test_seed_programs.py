"""SGLang's programs, ported: the page's two forms of each say the same on the real model.

Outcomes are greedy, in float32, with few tokens for each generation.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from structgen import Result
from tests.cases.probes import opened
from tests.docs.capped import capped
from tests.docs.test_pages import ROOT, run_page

pytestmark = pytest.mark.slow

Names = dict[str, Any]
Holds = Callable[[Names, Result[Any], Result[Any]], None]
CONTEXTS = ["Ada lives in Rome.", "Bea lives in Oslo.", "Cid lives in Lima."]
NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+")


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two forms of one program: by the rules, and native.

    arguments   what both are called with
    tokens      most new tokens of each generation
    holds       asserts what is true of both outcomes besides
    """

    mechanical: str
    native: str
    arguments: tuple[Any, ...] = ()
    tokens: int = 16
    holds: Holds


def the_score_is_a_number(_: Names, mechanical: Result[Any], native: Result[Any]) -> None:
    assert NUMBER.fullmatch(mechanical["score"])
    assert native.value == native["score"] == float(mechanical["score"])


def the_summary_is_the_value(_: Names, mechanical: Result[Any], native: Result[Any]) -> None:
    assert native.value == native["summary"] == mechanical["summary"]
    assert "Tip 1:" in native.text()


def the_answer_is_the_value(_: Names, mechanical: Result[Any], native: Result[Any]) -> None:
    assert native.value == native["answer"] == mechanical["answer"]
    assert mechanical.meta("answer").tokens == native.meta("answer").tokens


def the_answer_is_the_tool_s(names: Names, mechanical: Result[Any], native: Result[Any]) -> None:
    assert native.value == names["calculate"](native["expression"]) == mechanical["answer"]
    assert native.text().endswith(f") = {native.value}")


def actions_are_tools_and_inputs_objects(
    names: Names, mechanical: Result[Any], native: Result[Any]
) -> None:
    the_answer_is_the_value(names, mechanical, native)
    actions = re.findall(r"\nAction: (search|calculator|finish)", native.text())
    inputs = re.findall(r"\nInput: (.*)", native.text())

    assert len(actions) == native.text().count("\nAction: ") > 0
    assert native["action"] == actions[-1]
    assert len(inputs) == len(actions) - (actions[-1] == "finish")
    assert all(text.startswith("{") for text in inputs)
    if "input" in native and native.meta("input").finish.reason == "stop":
        assert native["input"].endswith("}")


PAIRS = [
    Pair(
        mechanical="multi_dimension_judge",
        native="judge",
        arguments=("Grade from 1 to 10: tea is hot, and I like it.",),
        tokens=12,  # below the 20 digits at which a float comes to an end, and the regex does not
        holds=the_score_is_a_number,
    ),
    Pair(mechanical="tip_suggestion", native="tips", holds=the_summary_is_the_value),
    Pair(
        mechanical="parallel_encoding",
        native="recall",
        arguments=("Where does Bea live?", CONTEXTS),
        holds=the_answer_is_the_value,
    ),
    Pair(
        mechanical="tool_use",
        native="product",
        arguments=(123, 456),
        holds=the_answer_is_the_tool_s,
    ),
    Pair(
        mechanical="agent_with_tools",
        native="agent",
        arguments=("What is 123 times 456?",),
        tokens=6,  # it may generate eleven times
        holds=actions_are_tools_and_inputs_objects,
    ),
]


@pytest.fixture(scope="module")
def names() -> Names:
    """What the page defines."""
    found: Names = {"__name__": "__page__"}
    run_page(ROOT / "docs" / "porting-from-sglang.md", found)
    return found


class TestBothFormsOfASeedProgram:
    @pytest.mark.parametrize("pair", PAIRS, ids=[pair.mechanical for pair in PAIRS])
    async def test_say_the_same(self, names: Names, default_model: Path, pair: Pair) -> None:
        async with opened(default_model) as engine:
            backend = capped(engine, pair.tokens)
            mechanical, native = await asyncio.gather(
                *(
                    names[form].using(temperature=0).run(backend, *pair.arguments)
                    for form in (pair.mechanical, pair.native)
                )
            )

        assert native.text() == mechanical.text()
        assert native.usage.completion_tokens == mechanical.usage.completion_tokens > 0
        pair.holds(names, mechanical, native)
