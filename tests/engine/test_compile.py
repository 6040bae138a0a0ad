"""Compiling ahead: what is compiled is compiled once, can be asked, and is taken by every call."""

from __future__ import annotations

import asyncio
import gc
import re
from pathlib import Path
from typing import Any

import pytest

import structgen
from structgen.engine.compiled import Compiled
from structgen.engine.engine import Engine
from structgen.errors import ConstraintError, EngineClosedError, EngineError, OptionError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Vocabulary
from structgen.program.program import program
from structgen.program.state import State
from structgen.request import Choice, Constraint, Ebnf, JsonSchema, Regex, Structure
from structgen.terms import literal, regex

PROMPT = "the quick brown fox"
NUMBER = r"[-+]?[0-9]{1,3}\.[0-9]{2}"


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 2000, "threads": 1, **options})


class Counting:
    """Compiles, and counts."""

    def __init__(self, engine: Engine) -> None:
        self.calls: list[Constraint] = []
        engine._constraints._compile = self

    def __call__(self, constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
        self.calls.append(constraint)
        return compile_constraint(constraint, vocabulary)


class TestACompiledConstraint:
    async def test_can_be_used_by_every_call_and_is_compiled_once(self, tiny_model: Path) -> None:
        @program
        async def two(s: State, form: Compiled) -> None:
            s += PROMPT
            await s.gen("a", constraint=form, seed=1)
            with s.using(constraint=form):
                await s.gen("b", seed=2)

        async with new_engine(tiny_model) as engine:
            counting = Counting(engine)
            form = await engine.compile(Regex(NUMBER))
            found = await asyncio.gather(
                *(engine.generate(PROMPT, constraint=form, seed=seed) for seed in range(4))
            )
            async with engine.stream(PROMPT, constraint=form) as deltas:
                streamed = "".join([delta.text async for delta in deltas])
            result = await two.run(engine, form)
            await engine.generate(PROMPT, regex=NUMBER)

        texts = [*(done.text for done in found), streamed, result["a"], result["b"]]
        assert [text for text in texts if not re.fullmatch(NUMBER, text)] == []
        assert counting.calls == [Regex(NUMBER)]

    async def test_says_what_it_accepts(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            form = await engine.compile(Choice(("cat", "category")))

            assert form.accepts("cat")
            assert form.accepts("category")
            assert not form.accepts("categor")
            assert not form.accepts("cat ")
            assert not form.accepts("")

    @pytest.mark.parametrize(
        ("given", "constraint", "accepted", "refused"),
        [
            (int, JsonSchema(int), "12", "1.5"),
            (list[int], JsonSchema(list[int]), "[1, 2]", '["1"]'),
            ({"enum": ["a"]}, JsonSchema({"enum": ["a"]}), '"a"', '"b"'),
            ('{"const": 1}', JsonSchema('{"const": 1}'), "1", "2"),
            (True, JsonSchema(True), '{"a": [null]}', "{"),
            (literal("a") + regex("b+"), Structure(literal("a") + regex("b+")), "abb", "a"),
            (Ebnf('root ::= "a" | "b" root'), Ebnf('root ::= "a" | "b" root'), "bba", "bb"),
        ],
    )
    async def test_may_be_made_of_a_schema_a_type_or_a_term(
        self, tiny_model: Path, given: Any, constraint: Constraint, accepted: str, refused: str
    ) -> None:
        async with new_engine(tiny_model) as engine:
            form = await engine.compile(given)

            assert form.constraint == constraint
            assert form.accepts(accepted)
            assert not form.accepts(refused)

    async def test_says_what_it_is_and_what_enforces_it(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            form = await engine.compile(Regex("a+"))
            done = await engine.generate(PROMPT, constraint=form, max_tokens=4)
            free = await engine.generate(PROMPT, max_tokens=4)

        assert (form.constraint, form.path, form.unmasked) == (Regex("a+"), "llguidance", ())
        assert repr(form) == "<compiled regex 'a+', by llguidance>"
        assert done.finish.enforced == "llguidance"
        assert free.finish.enforced == ""

    async def test_says_that_a_check_follows_and_of_what(self, tiny_model: Path) -> None:
        distinct = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
        async with new_engine(tiny_model) as engine:
            form = await engine.compile(distinct)
            backend = form.path.removesuffix(", final check")
            done = await engine.generate(PROMPT, constraint=await engine.compile({"const": 1}))

        assert backend in ("llguidance", "xgrammar")
        assert form.path == form._grammar.path == f"{backend}, final check"
        assert form.unmasked == ("#: uniqueItems",)
        assert repr(form).endswith(f", by {form.path}>")
        assert done.finish.enforced.endswith(", final check")
        # What the mask lets through and the check does not is no reply either.
        assert form._grammar.matches((), "[1, 1]")
        assert [form.accepts(text) for text in ("[1, 2]", "[1, 1]", "[a]")] == [True, False, False]

    async def test_shows_a_program_what_enforced_it(self, tiny_model: Path) -> None:
        @program
        async def one(s: State) -> str:
            s += PROMPT
            await s.gen("x", regex="[ab]{3}")
            meta = s.meta("x")
            assert meta is not None
            return meta.finish.enforced

        async with new_engine(tiny_model) as engine:
            assert (await one.run(engine)).value == "llguidance"

    async def test_is_there_as_long_as_somebody_has_it(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            counting = Counting(engine)
            form = await engine.compile(Regex(NUMBER))
            engine._constraints._kept.clear()  # as if others had taken its place
            await engine.generate(PROMPT, constraint=form)
            kept = list(counting.calls)
            del form
            gc.collect()
            await engine.generate(PROMPT, regex=NUMBER)

        assert kept == [Regex(NUMBER)]
        assert counting.calls == [Regex(NUMBER)] * 2

    async def test_of_another_engine_counts_as_its_constraint(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine, new_engine(tiny_model) as other:
            form = await engine.compile(Regex(NUMBER))
            counting = Counting(other)
            done = await other.generate(PROMPT, constraint=form)
            again = await other.compile(form)

        assert re.fullmatch(NUMBER, done.text)
        assert counting.calls == [Regex(NUMBER)]
        assert again.constraint == form.constraint

    def test_is_a_public_name(self) -> None:
        assert structgen.Compiled is Compiled


class TestWhatCannotBeCompiled:
    @pytest.mark.parametrize(
        ("constraint", "error", "message"),
        [
            (Regex("(abc"), ConstraintError, r"regex '\(abc': missing \)"),
            (Choice(()), ConstraintError, "nothing to choose from"),
            (5, OptionError, r"^constraint: expected Regex, .* got 5"),
            (None, OptionError, "^constraint: expected Regex"),
            (complex, ConstraintError, "complex.* has no JSON schema"),
        ],
    )
    async def test_is_refused(
        self, tiny_model: Path, constraint: Any, error: type[Exception], message: str
    ) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(error, match=message):
                await engine.compile(constraint)

            assert not engine._constraints._under_way

    async def test_is_anything_on_an_engine_that_is_not_open(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            pass
        with pytest.raises(EngineClosedError):
            await engine.compile(Regex("a"))

    async def test_is_anything_on_a_foreign_loop(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            elsewhere = asyncio.to_thread(lambda: asyncio.run(engine.compile(Regex("a"))))
            with pytest.raises(EngineError, match="another event loop"):
                await elsewhere
