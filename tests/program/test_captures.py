"""Captures of a term become variables, whichever way the term was given."""

from __future__ import annotations

from typing import Any

import pytest

from structgen import gen
from structgen.errors import InvalidOutputError, OptionError
from structgen.program.state import State
from structgen.request import Structure
from structgen.terms import Capture, Either, Fixed, Json, Pattern, Repeat, Sequence
from structgen.testing import ScriptedBackend
from tests.program.bodies import run

NAME = Capture("name", Pattern("[A-Z][a-z]+"))
TERM = Sequence((Fixed("Name: "), NAME, Fixed(", age: "), Capture("age", Pattern("[0-9]+"))))
TEXT = "Name: Ada, age: 36"


def asking(*args: Any, **options: Any) -> Any:
    async def body(s: State) -> Any:
        s += "A "
        return await s.gen(*args, **options)

    return body


class TestCaptures:
    @pytest.mark.parametrize("constraint", [TERM, Structure(TERM)], ids=["term", "structure"])
    async def test_are_variables_beside_the_calls_own(self, constraint: Any) -> None:
        result = await run(asking("all", constraint=constraint), ScriptedBackend(TEXT))

        assert result.value == TEXT
        assert (result["all"], result["name"], result["age"]) == (TEXT, "Ada", "36")
        assert result.meta("name").text == TEXT

    async def test_are_those_of_a_term_in_place_of_the_name(self) -> None:
        result = await run(asking(TERM), ScriptedBackend(TEXT))

        assert (result.value, result["name"], result["age"]) == (TEXT, "Ada", "36")

    async def test_leave_no_name_for_the_whole_text_that_is_one_of_theirs(self) -> None:
        backend = ScriptedBackend(TEXT)

        with pytest.raises(OptionError, match="name: the term captures 'age' itself"):
            await run(asking("age", constraint=TERM), backend)
        assert backend.requests == []

    async def test_are_set_where_a_term_was_appended(self) -> None:
        async def body(s: State) -> Any:
            s += "A " + gen(TERM) + "."
            await s
            return s["name"], s.text()

        assert (await run(body, ScriptedBackend(TEXT))).value == ("Ada", f"A {TEXT}.")

    async def test_are_set_by_a_stream(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            async with s.stream("all", constraint=TERM) as pieces:
                text = "".join([piece async for piece in pieces])
            return text, s["name"], s["all"]

        assert (await run(body, ScriptedBackend(TEXT))).value == (TEXT, "Ada", TEXT)

    async def test_are_none_of_a_stream_that_was_left(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            async with s.stream("all", constraint=TERM) as pieces:
                async for _ in pieces:
                    break
            return s["all"], s["name"]

        assert (await run(body, ScriptedBackend(TEXT, chunk=9))).value == (TEXT[:9], None)

    async def test_are_none_of_an_output_that_was_cut_off(self) -> None:
        result = await run(asking("all", constraint=TERM, max_tokens=9), ScriptedBackend(TEXT))

        assert (result["all"], result["name"]) == (TEXT[:9], None)
        assert not result.meta("all").finish.complete

    async def test_are_lists_where_there_may_be_several(self) -> None:
        term = Repeat(Sequence((NAME, Fixed("\n"))))

        assert (await run(asking(term), ScriptedBackend("Ada\nEva\n")))["name"] == ["Ada", "Eva"]

    async def test_are_lists_of_samples(self) -> None:
        backend = ScriptedBackend(["Ada", "Eva"])

        assert (await run(asking(NAME, n=2), backend))["name"] == ["Ada", "Eva"]

    async def test_of_the_way_not_taken_are_none(self) -> None:
        term = Either((NAME, Capture("number", Pattern("[0-9]+"))))
        result = await run(asking(term), ScriptedBackend("7"))

        assert (result["name"], result["number"]) == (None, "7")

    async def test_come_from_an_attempt_whose_json_is_valid(self) -> None:
        term = Sequence((Fixed("x="), Capture("x", Json('{"type":"array","uniqueItems":true}'))))

        backend = ScriptedBackend(["x=[1,1]", "x=[1,2]"])

        assert (await run(asking(term, retries=1), backend))["x"] == "[1,2]"
        with pytest.raises(InvalidOutputError):
            await run(asking(term), ScriptedBackend("x=[1,1]"))

    @pytest.mark.parametrize("options", [{"regex": "a"}, {"constraint": NAME}], ids=str)
    async def test_are_of_one_constraint(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match="the term is a constraint already"):
            await run(asking(TERM, **options))

    async def test_need_a_form_that_the_output_has(self) -> None:
        with pytest.raises(AssertionError, match="has not the form of"):
            await run(asking(TERM), ScriptedBackend("Name: ada"))

    async def test_are_not_for_other_types(self) -> None:
        with pytest.raises(OptionError, match=r"^constraint: type= has a form of its own"):
            await run(asking(TERM, type=int))
