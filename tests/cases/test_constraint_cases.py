"""Faults that structured output of this class was reported for, on the real engine.

Each class is one kind of fault. Outcomes are greedy, in float32, on the default model; a bias on
tokens makes the model want what it must not have.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from structgen import Choice, Completion, Engine, JsonSchema
from structgen.errors import ConstraintError
from structgen.options import request_from
from structgen.request import Text
from tests.cases.probes import COUNT, opened

pytestmark = pytest.mark.slow

LETTERS = 81  # the token of a letter, pushed below
NEWLINE, SPACE, TAB = 198, 216, 197
BLANKS = {NEWLINE: 100.0, SPACE: 100.0, TAB: 100.0}
END, CAT, CATEGORY = 2, 9786, 15833
FLAG = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def is_idle(engine: Engine) -> bool:
    now = engine.statistics()
    return (now.running, now.waiting, now.slots_held) == (0, 0, 0)


def is_valid(text: str, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


async def refused(engine: Engine, options: dict[str, Any]) -> tuple[ConstraintError, float]:
    """What is said of a constraint that is none, and the seconds that it took."""
    began = time.monotonic()
    with pytest.raises(ConstraintError) as caught:
        await engine.generate(COUNT.prompt, **options)
    return caught.value, time.monotonic() - began


class TestAnInvalidConstraint:
    BROKEN: tuple[dict[str, Any], ...] = (
        {"regex": "(abc"},
        {"regex": "*a"},
        {"regex": ""},
        {"json_schema": {"type": "strng"}},
        {"json_schema": "{not json"},
        {"json_schema": {"enum": []}},
        {"ebnf": "root ::= foo"},
        {"ebnf": 'start ::= "a"'},
        {"ebnf": ""},
    )
    NAMED = (
        r"regex '\(abc'.*\)",
        r"regex '\*a'.*nothing to repeat",
        "regex ''.*empty",
        "strng",
        "not json",
        "enum",
        "foo",
        "root",
        "none at all",
    )

    async def test_is_refused_at_once_and_nobody_else_notices(self, default_model: Path) -> None:
        async with opened(default_model) as engine:
            alone = await engine.generate(COUNT.prompt, max_tokens=10, temperature=0)
            running = asyncio.create_task(
                engine.generate(COUNT.prompt, max_tokens=10, temperature=0)
            )
            await asyncio.sleep(0)
            refusals = await asyncio.gather(*(refused(engine, broken) for broken in self.BROKEN))
            now = engine.statistics()
            begun = now.running + now.waiting + now.requests_finished + now.requests_aborted
            done = await running
            admitted = engine.statistics().prompt_tokens
            kept = len(engine._constraints._kept) + len(engine._constraints._under_way)

            assert is_idle(engine)
        for (error, took), named in zip(refusals, self.NAMED, strict=True):
            assert re.search(named, str(error)), (named, str(error))
            assert took < 2.0, named
        assert done.tokens == alone.tokens
        assert kept == 0
        assert begun == 2  # the one that ran alone and the one that runs
        assert admitted == 2 * COUNT.tokens  # nothing of the others was computed


class TestAKeyword:
    CASES: tuple[tuple[Any, int], ...] = (
        (
            {
                "type": "object",
                "properties": {"k": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}},
                "required": ["k"],
                "additionalProperties": False,
            },
            64,
        ),
        ({"type": "string", "minLength": 2, "maxLength": 3}, 64),
        ({"type": "integer", "minimum": 10, "maximum": 12}, 64),
    )

    async def test_is_enforced_whatever_the_model_wants(
        self, default_model: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        async with opened(default_model) as engine:
            found = await asyncio.gather(
                *(
                    engine.generate(
                        COUNT.prompt,
                        json_schema=schema,
                        max_tokens=most,
                        logit_bias={LETTERS: 50.0},
                        temperature=temperature,
                        seed=1,
                    )
                    for schema, most in self.CASES
                    for temperature in (0.0, 1.0)
                )
            )

        schemas = [schema for schema, _ in self.CASES for _ in range(2)]
        assert [done.finish.complete for done in found] == [True] * len(found)
        assert [is_valid(d.text, s) for d, s in zip(found, schemas, strict=True)] == [True] * 6
        assert capfd.readouterr().err == ""


class TestAReply:
    async def test_ends_and_parses_although_the_model_wants_blanks(
        self, default_model: Path
    ) -> None:
        options: dict[str, Any] = {"logit_bias": BLANKS, "temperature": 0}
        async with opened(default_model) as engine:
            closed, *open_ones = await asyncio.gather(
                engine.generate(COUNT.prompt, json_schema=FLAG, max_tokens=64, **options),
                *(
                    engine.generate(COUNT.prompt, json_schema=schema, max_tokens=64, **options)
                    for schema in ({"type": "object"}, True)
                ),
            )

        assert (closed.finish.reason, closed.finish.complete) == ("stop", True)
        assert json.loads(closed.text) in ({"a": True}, {"a": False})
        assert re.search(r"\s{9}", closed.text) is None
        assert closed.text == closed.text.strip()
        assert [done.finish.complete for done in open_ones] == [True, True]
        values = [json.loads(done.text) for done in open_ones]
        assert isinstance(values[0], dict)
        outside = [re.sub(r'"(?:[^"\\]|\\.)*"', "", done.text) for done in open_ones]
        assert [re.search(r"\s{3}", text) for text in outside] == [None, None]

    async def test_that_is_cut_off_says_so(self, default_model: Path) -> None:
        async with opened(default_model) as engine:
            done = await engine.generate(
                COUNT.prompt, json_schema=FLAG, max_tokens=3, temperature=0, logit_bias=BLANKS
            )

        assert (done.finish.reason, done.finish.complete) == ("length", False)


class TestOtherAlphabets:
    async def test_come_out_as_they_were_asked_for(self, default_model: Path) -> None:
        keyed = {
            "type": "object",
            "properties": {"名": {"enum": ["Zürich", "😀"]}},
            "required": ["名"],
            "additionalProperties": False,
        }
        async with opened(default_model) as engine:
            raw, escaped, key = await asyncio.gather(
                *(
                    engine.generate(COUNT.prompt, json_schema=schema, temperature=0, max_tokens=40)
                    for schema in (
                        '{"enum": ["在线", "离线"]}',
                        '{"enum": ["\\u5728\\u7ebf", "\\u79bb\\u7ebf"]}',
                        keyed,
                    )
                )
            )
            async with engine.stream(
                COUNT.prompt, regex="(😀|🚀){3}", temperature=0, max_tokens=30
            ) as deltas:
                pieces = [delta.text async for delta in deltas]
            whole = await engine.generate(
                COUNT.prompt, regex="(😀|🚀){3}", temperature=0, max_tokens=30
            )

        assert json.loads(raw.text) == json.loads(escaped.text)
        assert json.loads(raw.text) in {"在线", "离线"}
        assert json.loads(key.text)["名"] in {"Zürich", "😀"}
        assert re.fullmatch("(😀|🚀){3}", whole.text)
        assert "".join(pieces) == whole.text
        assert not any("\ufffd" in piece for piece in pieces)


class TestAChoice:
    @pytest.mark.parametrize("jump", [True, False])
    async def test_may_begin_another_one(self, default_model: Path, jump: bool) -> None:
        wanted = {
            "cat": {CAT: 100.0, END: 100.0},
            "category": {CAT: 100.0, END: -100.0},
            "category at once": {CATEGORY: 100.0},
        }
        choice = Choice(("cat", "category"))
        async with opened(default_model, jump_forward=jump) as engine:
            found = [
                await engine.generate(
                    "Word: ", constraint=choice, logit_bias=bias, temperature=0, max_tokens=10
                )
                for bias in wanted.values()
            ]
            free = await engine.generate("Word: ", constraint=choice, temperature=0)
            cut = await engine.generate(
                "Word: ", constraint=Choice(("category theory",)), max_tokens=1, temperature=0
            )

        assert [done.text for done in found] == ["cat", "category", "category"]
        assert {done.finish.reason for done in found} == {"stop"}
        assert free.text in {"cat", "category"}
        assert (cut.finish.reason, cut.finish.complete) == ("length", False)
        assert "category theory".startswith(cut.text)


class TestAHeavySchema:
    SCHEMA = json.dumps({"enum": [f"item_{number:06d}" for number in range(20_000)]})

    async def test_stalls_neither_the_loop_nor_a_stream(self, default_model: Path) -> None:
        async with opened(default_model) as engine:
            running = asyncio.Event()
            stream = asyncio.create_task(largest_gap(engine, running))
            await running.wait()
            polls = asyncio.create_task(slowest_poll(engine, stream))
            began = time.monotonic()
            found = await asyncio.gather(
                *(
                    engine.generate(COUNT.prompt, json_schema=self.SCHEMA, temperature=0)
                    for _ in range(2)
                ),
                return_exceptions=True,
            )
            took = time.monotonic() - began
            gap, slowest = await stream, await polls

        for done in found:
            if isinstance(done, Completion):
                assert re.fullmatch('"item_[01][0-9]{5}"', done.text)
            else:
                assert isinstance(done, ConstraintError)
        assert took < 10
        assert gap < 1.0
        assert slowest < 0.5

    async def test_is_compiled_once_and_forgotten_with_the_one_who_left(
        self, default_model: Path
    ) -> None:
        async with opened(default_model) as engine:
            compiling, calls = engine._constraints._compile, itertools.count()

            def counted(*arguments: Any) -> Any:
                next(calls)
                return compiling(*arguments)

            engine._constraints._compile = counted
            leaving = asyncio.create_task(
                engine._constraints.grammar(
                    request_from((Text("a"),), {}, constraint=JsonSchema(self.SCHEMA))
                )
            )
            await asyncio.sleep(0.01)
            leaving.cancel()
            async with asyncio.timeout(10):
                while engine._constraints._under_way:  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.01)
            kept = len(engine._constraints._kept)
            await asyncio.gather(*(engine.compile(JsonSchema(self.SCHEMA)) for _ in range(3)))

        assert kept == 0
        assert next(calls) == 2  # the one that was left, and one for all three


async def largest_gap(engine: Engine, running: asyncio.Event) -> float:
    """Seconds between two deltas of a stream, at most."""
    worst, last = 0.0, None
    async with engine.stream(COUNT.prompt, max_tokens=80, temperature=0) as deltas:
        async for _ in deltas:
            now = time.monotonic()
            worst = max(worst, now - last if last is not None else 0.0)
            last = now
            running.set()
    return worst


async def slowest_poll(engine: Engine, until: asyncio.Task[float]) -> float:
    """Seconds that it took to be told of the engine's state, at worst."""
    worst = 0.0
    while not until.done():
        began = time.monotonic()
        await asyncio.sleep(0.05)
        engine.statistics()
        worst = max(worst, time.monotonic() - began - 0.05)
    return worst
