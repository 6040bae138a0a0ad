"""A constraint that is heavy, hostile or broken is the affair of the request that brought it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from structgen.engine.constraints import BRISK, Constraints
from structgen.engine.engine import Engine
from structgen.errors import (
    ConstraintError,
    DeadlineError,
    GenerationError,
    InvalidOutputError,
    OptionError,
    OverloadedError,
)
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Vocabulary
from structgen.request import (
    Choice,
    Completion,
    Constraint,
    Ebnf,
    JsonSchema,
    Regex,
    Structure,
)
from structgen.terms import Fixed, Pattern, Repeat, Term, capture, ebnf, regex
from tests.grammar.derivatives import vocabulary_of

BYTES = vocabulary_of([bytes([byte]) for byte in range(256)])
PROMPT = "the quick brown fox"


class Heavy:
    """Takes until it is let go for patterns that begin with `x`, and no time for others."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls: list[Constraint] = []
        self.intervals: list[float] = []

    def __call__(self, constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
        self.calls.append(constraint)
        self.intervals.append(sys.getswitchinterval())
        if isinstance(constraint, Regex) and constraint.pattern.startswith("x"):
            assert self.go.wait(20)
        return compile_constraint(constraint, vocabulary)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come to be within seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is a number, not an event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def compiling(seconds: float) -> AsyncIterator[tuple[Constraints, Heavy]]:
    heavy = Heavy()
    constraints = Constraints(BYTES, heavy, seconds)
    try:
        yield constraints, heavy
    finally:
        heavy.go.set()
        await constraints.close()
        await until(lambda: not constraints._stuck)


class TestACompileThatTakesTooLong:
    async def test_is_given_up_and_said_to_be(self) -> None:
        async with compiling(0.05) as (constraints, _):
            began = time.monotonic()
            with pytest.raises(
                ConstraintError,
                match=r"regex 'x' takes longer to compile than 0\.05 s \(the engine's compile_",
            ):
                await constraints.compiled(Regex("x"))

            assert time.monotonic() - began < 5
            assert not constraints._under_way
            assert constraints._stuck == 1

    async def test_leaves_its_place_to_others(self) -> None:
        async with compiling(0.2) as (constraints, heavy):
            late = asyncio.create_task(constraints.compiled(Regex("x")))
            found = [await constraints.compiled(Regex(pattern)) for pattern in "abc"]
            with pytest.raises(ConstraintError):
                await late
            found.append(await constraints.compiled(Regex("d")))

        assert [grammar.accepts(text) for grammar, text in zip(found, "abcd", strict=True)] == [
            True
        ] * 4
        assert len(heavy.calls) == 5

    async def test_stops_new_ones_while_two_of_its_kind_go_on(self) -> None:
        async with compiling(0.05) as (constraints, heavy):
            kept = await constraints.compiled(Regex("a"))
            found = await asyncio.gather(
                constraints.compiled(Regex("x1")),
                constraints.compiled(Regex("x2")),
                return_exceptions=True,
            )
            with pytest.raises(
                OverloadedError, match=r"regex 'b': nothing new is compiled.* 2 constraints.*later"
            ):
                await constraints.compiled(Regex("b"))
            again = await constraints.compiled(Regex("a"))
            threads = len(heavy.calls)
            heavy.go.set()
            await until(lambda: not constraints._stuck)
            after = await constraints.compiled(Regex("b"))

        assert [type(error) for error in found] == [ConstraintError] * 2
        assert again is kept
        assert threads == 3
        assert after.accepts("b")

    async def test_is_not_kept_when_it_comes_after_all(self) -> None:
        async with compiling(0.05) as (constraints, heavy):
            with pytest.raises(ConstraintError):
                await constraints.compiled(Regex("x"))
            heavy.go.set()
            await until(lambda: not constraints._stuck)

            assert not constraints._kept
            assert not constraints._alive

    async def test_lets_those_in_the_queue_know_that_it_was_not_they(self) -> None:
        async with compiling(0.05) as (constraints, heavy):
            constraints._places = asyncio.Semaphore(0)  # as if others had them all the time
            with pytest.raises(
                OverloadedError,
                match=r"regex 'a' was not compiled within 0\.05 s .*, because others were; try",
            ):
                await constraints.compiled(Regex("a"))

        assert heavy.calls == []

    async def test_is_begun_once_however_often_it_is_sent(self) -> None:
        async with compiling(0.05) as (constraints, heavy):
            for _ in range(3):
                with pytest.raises(ConstraintError, match="regex 'x' takes longer to compile"):
                    await constraints.compiled(Regex("x"))
            other = await constraints.compiled(Regex("a"))

            assert constraints._stuck == 1
            assert heavy.calls == [Regex("x"), Regex("a")]
            assert other.accepts("a")

    async def test_is_kept_where_it_was_the_fault_of_others(self) -> None:
        async with compiling(0.2) as (constraints, heavy):
            await constraints._places.acquire()
            await constraints._places.acquire()  # as if others had them most of the time
            asyncio.get_running_loop().call_later(0.15, constraints._places.release)
            for _ in range(2):  # the second time, it goes on still
                with pytest.raises(OverloadedError, match=r"regex 'x' was not compiled within"):
                    await constraints.compiled(Regex("x"))
            heavy.go.set()
            await until(lambda: not constraints._stuck)
            found = await constraints.compiled(Regex("x"))
            constraints._places.release()

        assert found.accepts("x")
        assert heavy.calls == [Regex("x")]

    async def test_and_another_leave_no_place_to_the_queue(self) -> None:
        async with compiling(0.05) as (constraints, _):
            found = await asyncio.gather(
                *(constraints.compiled(Regex(pattern)) for pattern in ("x1", "x2", "x3")),
                return_exceptions=True,
            )
            assert constraints._stuck >= 2

        # Whether it had a moment left depends on the clock.
        assert re.search("nothing new is compiled|because others were; try again", str(found[2]))

    async def test_does_not_keep_the_engine_from_closing(self, tiny_model: Path) -> None:
        heavy = Heavy()
        async with Engine(tiny_model, slots=500, threads=1, compile_timeout=0.05) as engine:
            engine._constraints._compile = heavy
            with pytest.raises(ConstraintError, match="takes longer"):
                await engine.generate(PROMPT, regex="x")
            closing = time.monotonic()
        took = time.monotonic() - closing
        heavy.go.set()
        constraints = engine._constraints
        await until(lambda: not constraints._stuck)

        assert took < 5

    @pytest.mark.parametrize("seconds", [0, -1.0, "soon", None])
    def test_has_a_limit_that_is_a_time(self, seconds: Any) -> None:
        with pytest.raises(OptionError, match=r"^compile_timeout: "):
            Engine("anything", compile_timeout=seconds)

    async def test_ends_with_the_deadline_of_its_request(self, tiny_model: Path) -> None:
        heavy = Heavy()
        async with Engine(tiny_model, slots=500, threads=1) as engine:
            engine._constraints._compile = heavy
            with pytest.raises(DeadlineError, match=r"within its deadline of 0\.05 s"):
                await engine.generate(PROMPT, regex="x", deadline=0.05)
            now = engine.statistics()
            heavy.go.set()

        assert (now.running, now.waiting, now.steps) == (0, 0, 0)


class TestACompilerThatBreaks:
    @pytest.mark.parametrize(
        "raised", [ZeroDivisionError("of ours"), MemoryError(), BaseException("a panic")], ids=repr
    )
    async def test_fails_the_requests_that_brought_the_constraint(
        self, tiny_model: Path, raised: BaseException
    ) -> None:
        def broken(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
            if constraint == Regex("x"):
                raise raised
            return compile_constraint(constraint, vocabulary)

        async with Engine(tiny_model, slots=500, threads=1) as engine:
            engine._constraints._compile = broken
            found = await asyncio.gather(
                engine.generate(PROMPT, regex="x"),
                engine.generate(PROMPT, regex="x"),
                engine.generate(PROMPT, regex="abc"),
                return_exceptions=True,
            )

        for error in found[:2]:
            assert isinstance(error, ConstraintError)
            assert "regex 'x' broke the compiler" in str(error)
            assert error.__cause__ is not None
        assert getattr(found[2], "text", None) == "abc"


class TestLeaving:
    async def test_drops_what_was_compiled_for_nobody(self) -> None:
        async with compiling(10) as (constraints, heavy):
            made: list[weakref.ref[Grammar]] = []
            compile_it = heavy.__call__

            def watched(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
                grammar = compile_it(constraint, vocabulary)
                made.append(weakref.ref(grammar))
                return grammar

            constraints._compile = watched
            asking = asyncio.create_task(constraints.compiled(Regex("x")))
            await until(lambda: bool(heavy.calls))
            asking.cancel()
            heavy.go.set()
            await until(lambda: bool(made) and not constraints._under_way)
            await asyncio.sleep(0)
            gc.collect()

            assert [reference() for reference in made] == [None]
            assert not constraints._kept


class TestTheInterpreterLock:
    async def test_is_handed_on_sooner_while_something_compiles(self) -> None:
        usual = sys.getswitchinterval()
        async with compiling(10) as (constraints, heavy):
            asking = [
                asyncio.create_task(constraints.compiled(Regex(pattern))) for pattern in ("x", "a")
            ]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            during = sys.getswitchinterval()
            heavy.go.set()
            await asyncio.gather(*asking)
            await asyncio.sleep(0)

            assert during == pytest.approx(BRISK)
            assert sys.getswitchinterval() == pytest.approx(usual)

    async def test_is_as_before_when_the_engine_has_closed(self) -> None:
        usual = sys.getswitchinterval()
        async with compiling(0.05) as (constraints, _):
            with pytest.raises(ConstraintError):
                await constraints.compiled(Regex("x"))
            await constraints.close()

            assert sys.getswitchinterval() == pytest.approx(usual)


# ---------------------------------------------------------------- constraints that are bombs


def nested(times: int, begin: str, end: str, leaf: str) -> str:
    return begin * times + leaf + end * times


def enum(size: int) -> str:
    texts = ", ".join(f'"item_{number:06d}"' for number in range(size))
    return f'{{"enum": [{texts}]}}'


def optional(size: int) -> str:
    names = ", ".join(f'"p{number}": {{"type": "integer"}}' for number in range(size))
    return f'{{"type": "object", "properties": {{{names}}}}}'


def reference(number: int) -> str:
    return f'{{"$ref": "#/$defs/d{number}"}}'


def shared(levels: int, keyword: str, fan: int) -> str:
    """A definition that stands `fan ** levels` times in the whole, written once a level."""
    steps = [
        f'"d{n}": {{"{keyword}": [{", ".join([reference(n + 1)] * fan)}]}}' for n in range(levels)
    ]
    leaf = f'"d{levels}": {{"type": "integer"}}'
    return f'{{"$ref": "#/$defs/d0", "$defs": {{{", ".join([*steps, leaf])}}}}}'


def deep(times: int) -> Term:
    term: Term = Fixed("a")
    for _ in range(times):
        term = Repeat(term, 0, 1)
    return term


LOOSE = ", ".join(f'"x{n}.*y{n}": {{"minLength": {n}}}' for n in range(60))
ALTERNATIVES = "|".join(f"({c * 9}|{c * 8})" for c in "abcdefghijklmnopqrstuvwxyz" * 7)
BOMBS: dict[str, Constraint] = {
    "repeats in repeats": Regex("(a{1,60}){1,60}"),
    "repeats in repeats, more": Regex("(a{1,100}){1,100}"),
    "catastrophic": Regex("(a+)+b"),
    "catastrophic in a schema": JsonSchema('{"type": "string", "pattern": "^(a+)+b$"}'),
    "repeats in a schema": JsonSchema('{"type": "string", "pattern": "^(a{1,90}){1,90}$"}'),
    "a far look back": Regex("[ab]*a[ab]{400}"),
    "nested alternatives": Regex(ALTERNATIVES),
    "alternatives inside each other": Regex(nested(500, "(", "|a)", "a")),
    "optional letters": Regex("a?" * 1000 + "a" * 1000),
    "wide classes": Regex(r"\w" * 400),
    "wide classes, no case": Regex(r"(?i)\w{4000}"),
    "groups in groups": Regex(nested(2000, "(", ")", "a")),
    "20,000 choices": Choice(tuple(f"item_{number:06d}" for number in range(20_000))),
    "a long choice": Choice(("a" * 5_000_000,)),
    "20,000 values": JsonSchema(enum(20_000)),
    "2,000 optional keys": JsonSchema(optional(2000)),
    "five megabytes": JsonSchema(optional(170_000)),
    "anyOf in anyOf": JsonSchema(nested(2000, '{"anyOf": [', "]}", '{"type": "null"}')),
    "arrays in arrays": JsonSchema(nested(20_000, '{"type": "array", "items": ', "}", "{}")),
    "brackets": JsonSchema("[" * 300_000),
    "anyOf, 4 to the 40": JsonSchema(shared(40, "anyOf", 4)),
    "allOf, 2 to the 30": JsonSchema(shared(30, "allOf", 2)),
    "tuples, 4 to the 40": JsonSchema(shared(40, "prefixItems", 4)),
    "a large divisor": JsonSchema('{"type": "integer", "multipleOf": 999999937}'),
    "many divisors": JsonSchema(
        {"properties": {f"k{n}": {"type": "integer", "multipleOf": 9967 - n} for n in range(12)}}
    ),
    "oneOf of wide objects": JsonSchema(
        {
            "oneOf": [
                {
                    "properties": {f"k{n}_{m}": {"type": "integer"} for m in range(30)},
                    "required": [f"k{n}_0"],
                }
                for n in range(44)
            ]
        }
    ),
    "values that are objects": JsonSchema({"enum": [{"a": n, "b": [n]} for n in range(9000)]}),
    "alternatives that are objects": JsonSchema(
        {"anyOf": [{"properties": {"k": {"const": n}}, "required": ["k"]} for n in range(4500)]}
    ),
    "conditions": JsonSchema(
        {
            "allOf": [
                {"if": {"properties": {"k": {"const": n}}}, "then": {"required": [f"r{n}"]}}
                for n in range(40)
            ]
        }
    ),
    "rules, 4 to the 40": Ebnf(
        "root ::= r0\n"
        + "\n".join(f"r{n} ::= r{n + 1} r{n + 1} r{n + 1} r{n + 1}" for n in range(40))
        + '\nr40 ::= "a"'
    ),
    "an ambiguous grammar": Ebnf('root ::= root root root | "a" | root root'),
    "repeats in a grammar": Ebnf('root ::= (("a"{1,60}){1,60})'),
    "repeats in terms": Structure(Repeat(Repeat(Repeat(Pattern("a|b"), 1, 60), 1, 60), 1, 60)),
    "terms in terms": Structure(deep(5000)),
    "480 patterns": JsonSchema(
        {"properties": {f"k{n}": {"pattern": f"^(x{n}|y+){{1,9}}$"} for n in range(480)}}
    ),
    "many loose patterns": JsonSchema(f'{{"type": "object", "patternProperties": {{{LOOSE}}}}}'),
}


@pytest.mark.parametrize("name", BOMBS)
class TestABomb:
    async def test_is_served_or_refused_in_time_and_nobody_else_waits(
        self, tiny_model: Path, name: str
    ) -> None:
        (outcome,) = await beside_a_stream(tiny_model, BOMBS[name], max_tokens=30)

        assert isinstance(outcome, Completion | ConstraintError | InvalidOutputError)
        assert len(str(outcome)) < 2000


AMBIGUOUS: dict[str, Constraint] = {
    "two and two": Ebnf("root ::= root root | [a-z]"),
    "two, three and one": Ebnf('root ::= root root root | "a" | root root'),
    "nothing, too": Ebnf('root ::= "" | root root | "a" root "b" | "a" | "b"'),
    "captured": Structure(
        capture("e", ebnf('root ::= root root | "a"')) + capture("f", regex("a*"))
    ),
}


class TestATextThatCanBeReadInManyWays:
    """Each character costs more than the one before, so it is the long text that tells."""

    @pytest.mark.parametrize("name", AMBIGUOUS)
    async def test_ends_its_own_request_when_it_costs_too_much(
        self, tiny_model: Path, name: str
    ) -> None:
        lengths = {"min_tokens": 300, "max_tokens": 300}
        (outcome,) = await beside_a_stream(tiny_model, AMBIGUOUS[name], **lengths)

        assert type(outcome) is GenerationError
        assert "the constraint could not be followed any further" in str(outcome)

    async def test_has_its_captures_found_while_others_are_served(self, tiny_model: Path) -> None:
        lengths = {"min_tokens": 80, "max_tokens": 80}
        terms = AMBIGUOUS["captured"]
        outcomes = await beside_a_stream(tiny_model, *[terms] * 4, **lengths)

        for outcome in outcomes:
            assert isinstance(outcome, Completion)
            assert outcome.finish.captures == (("e", outcome.text), ("f", ""))
            assert set(outcome.text) == {"a"}

    def test_costs_no_more_than_its_limits_wherever_it_is_read(self) -> None:
        grammar = compile_constraint(AMBIGUOUS["captured"], BYTES)
        costs: list[float] = []
        for asked in (grammar.captures, grammar.accepts):
            began = time.thread_time()
            with pytest.raises(GenerationError, match="could not be followed any further"):
                asked("a" * 1000)
            costs.append(time.thread_time() - began)

        assert max(costs) < 3


async def beside_a_stream(
    model: Path, *constraints: Constraint, **lengths: Any
) -> list[Completion | BaseException]:
    """What became of requests with these constraints, while another was to notice nothing."""
    began = time.monotonic()
    options: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
    async with Engine(model, slots=8000, threads=1) as engine:
        stopped = asyncio.Event()
        streaming = asyncio.create_task(largest_gap(engine, stopped, options))
        hurt = asyncio.create_task(most_late(stopped))
        outcomes = await asyncio.gather(
            *(
                engine.generate(PROMPT, constraint=each, temperature=1.0, seed=seed, **lengths)
                for seed, each in enumerate(constraints, start=1)
            ),
            return_exceptions=True,
        )
        took = time.monotonic() - began
        stopped.set()
        gap, late = await streaming, await hurt

        assert engine._constraints._stuck == 0
    assert took < 10
    assert gap < 1.0
    assert late < 0.5
    return outcomes


async def largest_gap(engine: Engine, stopped: asyncio.Event, options: dict[str, Any]) -> float:
    """Of streams that run one after the other until they are stopped, in seconds."""
    worst = 0.0
    for number in itertools.count():
        async with engine.stream(f"{number} and {PROMPT}", **options) as deltas:
            last = time.monotonic()
            async for _ in deltas:
                now = time.monotonic()
                worst, last = max(worst, now - last), now
                if stopped.is_set():
                    return worst
    return worst


async def most_late(stopped: asyncio.Event) -> float:
    """How late a task that wakes every 5 ms was at worst: what a health check would see."""
    worst = 0.0
    while not stopped.is_set():
        due = time.monotonic() + 0.005
        await asyncio.sleep(0.005)
        worst = max(worst, time.monotonic() - due)
    return worst
