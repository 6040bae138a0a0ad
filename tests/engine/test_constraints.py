"""Constraints on the engine: outputs keep what they promise, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgen.core.batch import Batch, Picked
from structgen.core.core import Core
from structgen.engine.constraints import MOST_KEPT, Constraints
from structgen.engine.engine import Engine
from structgen.engine.loop import Loop
from structgen.engine.stream import Mailbox
from structgen.errors import (
    ConstraintError,
    EngineClosedError,
    GenerationError,
    OptionError,
    StepFailedError,
    StructgenError,
)
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import GuidanceMatcher, Mask, Vocabulary
from structgen.options import request_from
from structgen.request import Choice, Completion, Constraint, Ebnf, JsonSchema, Regex, Request, Text
from tests.core.fakes import FakeComputer, job
from tests.grammar.derivatives import vocabulary_of

PROMPT = "the quick brown fox"
END = 258  # of the tiny model
NUMBER = r"[-+]?[0-9]+\.[0-9]{2}"
PATTERNS = (NUMBER, "(?i)yes|no", r"\{.*?\}", "[a-c]{3,12}x", "(😀|🚀){3}", "[\u4e00-\u9fff]{2,4}")
BYTES = vocabulary_of([bytes([byte]) for byte in range(256)])


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 2000, "threads": 1, **options})


async def bound(engine: Engine, constraint: Constraint, **options: Any) -> Completion:
    request = request_from((Text(PROMPT),), options, constraint=constraint)
    return await engine._complete(request)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come to be within seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is a number, not an event
            await asyncio.sleep(0.002)


def is_idle(engine: Engine) -> bool:
    now = engine.statistics()
    return now.running == now.waiting == now.slots_held == 0


class TestAnOutput:
    @pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
    async def test_matches_its_regex(self, tiny_model: Path, temperature: float) -> None:
        async with new_engine(tiny_model) as engine:
            found = await asyncio.gather(
                *(
                    engine.generate(
                        PROMPT, regex=pattern, temperature=temperature, seed=seed, max_tokens=80
                    )
                    for pattern in PATTERNS
                    for seed in range(4)
                )
            )
            assert is_idle(engine)

        ended = [
            (pattern, done.text)
            for pattern, done in zip([p for p in PATTERNS for _ in range(4)], found, strict=True)
            if done.finish.reason == "stop"
        ]
        assert len(ended) >= 18  # a number may be longer than its tokens, and braces too
        assert [each for each in ended if not re.fullmatch(*each)] == []

    async def test_is_one_of_the_choices(self, tiny_model: Path) -> None:
        options = ("cat", "category", "在线", "a\nb")
        async with new_engine(tiny_model) as engine:
            found = [
                await bound(engine, Choice(options), seed=seed, temperature=2.0, max_tokens=20)
                for seed in range(20)
            ]

        assert {done.text for done in found} <= set(options)
        assert {done.finish.reason for done in found} == {"stop"}
        assert len({done.text for done in found}) > 1

    @pytest.mark.parametrize(
        ("bias", "text"),
        [({END: 100.0}, "cat"), ({END: -100.0}, "category")],
        ids=["ends early", "goes on"],
    )
    async def test_may_be_a_choice_that_begins_another(
        self, tiny_model: Path, bias: dict[int, float], text: str
    ) -> None:
        async with new_engine(tiny_model) as engine:
            done = await bound(
                engine, Choice(("cat", "category")), logit_bias=bias, temperature=0, max_tokens=20
            )

        assert done.text == text
        assert done.finish.reason == "stop"

    async def test_that_is_cut_off_says_so(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await bound(engine, Choice(("category",)), max_tokens=3)

        assert (done.text, done.finish.reason) == ("cat", "length")

    async def test_ends_without_a_step_where_nothing_can_follow(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await bound(engine, Choice(("category",)), max_tokens=8)

        assert (done.text, done.finish.reason, done.finish.matched) == ("category", "stop", None)
        assert done.usage.completion_tokens == 8

    async def test_has_no_control_token_and_ends_only_where_it_is_complete(
        self, tiny_model: Path
    ) -> None:
        pushed = {256: 100.0, 257: 100.0, END: 100.0}
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(
                PROMPT, regex=r"(?s).{4,9}", logit_bias=pushed, temperature=0, max_tokens=40
            )

        assert (len(done.text), done.finish.reason, done.finish.matched) == (4, "stop", END)
        assert all(token < 256 for token in done.tokens)

    async def test_streams_whole_characters(self, tiny_model: Path) -> None:
        async with (
            new_engine(tiny_model) as engine,
            engine.stream(PROMPT, regex="(😀|🚀){3}", max_tokens=20) as deltas,
        ):
            pieces = [delta.text async for delta in deltas]

        assert re.fullmatch("(😀|🚀){3}", "".join(pieces))
        assert set("".join(pieces)) <= {"😀", "🚀"}
        assert len([piece for piece in pieces if piece]) == 3

    async def test_has_the_log_probabilities_of_the_model(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await bound(engine, Choice(("zq",)), logprobs=True, top_logprobs=2)
            (score,) = await engine.score(PROMPT, ["zq"])

        assert [e.logprob for e in done.logprobs] == pytest.approx(score.logprobs, abs=1e-4)

    @pytest.mark.parametrize("worker", [True, False])
    async def test_is_the_same_however_it_is_computed(self, tiny_model: Path, worker: bool) -> None:
        options: dict[str, Any] = {"regex": r"\w+ \w+\.", "seed": 7, "max_tokens": 60}
        async with new_engine(tiny_model) as engine:
            alone = await engine.generate(PROMPT, **options)
        async with new_engine(tiny_model, worker=worker, radix=not worker, chunk_size=4) as engine:
            again = await asyncio.gather(*(engine.generate(PROMPT, **options) for _ in range(3)))

        assert {done.tokens for done in again} == {alone.tokens}


class TestNeighbours:
    async def test_are_not_touched(self, tiny_model: Path) -> None:
        free: list[dict[str, Any]] = [
            {"seed": seed, "temperature": float(seed % 2), "max_tokens": 30} for seed in range(6)
        ]
        prompts = [PROMPT + str(n) for n in range(6)]
        async with new_engine(tiny_model) as engine:
            alone = [
                await engine.generate(prompt, **options)
                for prompt, options in zip(prompts, free, strict=True)
            ]
            mixed = [
                each
                for prompt, options in zip(prompts, free, strict=True)
                for each in (
                    engine.generate(prompt, **options),
                    engine.generate(prompt, regex=NUMBER, **options),
                )
            ]
            found = await asyncio.gather(*mixed)

        assert [done.tokens for done in found[::2]] == [done.tokens for done in alone]
        assert all(re.fullmatch(r"[-+]?[0-9]*(\.[0-9]*)?", done.text) for done in found[1::2])

    async def test_do_not_notice_a_constraint_that_is_refused(self, tiny_model: Path) -> None:
        options: dict[str, Any] = {"max_tokens": 40, "seed": 1}
        async with new_engine(tiny_model) as engine:
            alone = await engine.generate(PROMPT, **options)
            found = await asyncio.gather(
                engine.generate(PROMPT, **options),
                *(engine.generate(PROMPT, regex=bad) for bad in ("(abc", "*a", "", r"a\b")),
                return_exceptions=True,
            )

            assert is_idle(engine)
            assert not engine._constraints._kept
            assert not engine._constraints._under_way
        assert isinstance(found[0], Completion)
        assert found[0].tokens == alone.tokens
        assert [type(error) for error in found[1:]] == [ConstraintError] * 4

    async def test_outlive_a_matcher_that_gives_up(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill, accept = GuidanceMatcher.fill, GuidanceMatcher.accept
        broken: list[GuidanceMatcher] = []

        def fill_or_fail(matcher: GuidanceMatcher, row: Mask) -> None:
            if broken and matcher is broken[0]:
                raise GenerationError("out of fuel")
            fill(matcher, row)

        def accept_and_tell(matcher: GuidanceMatcher, token: int) -> None:
            accept(matcher, token)
            broken.append(matcher)

        async with new_engine(tiny_model) as engine:
            alone = await engine.generate(PROMPT, seed=3, max_tokens=20)
            monkeypatch.setattr(GuidanceMatcher, "fill", fill_or_fail)
            monkeypatch.setattr(GuidanceMatcher, "accept", accept_and_tell)
            found = await asyncio.gather(
                engine.generate(PROMPT, regex="[ab]{30}", max_tokens=40),
                engine.generate(PROMPT, regex="[cd]{30}", max_tokens=40),
                engine.generate(PROMPT, seed=3, max_tokens=20),
                return_exceptions=True,
            )
            assert is_idle(engine)

        failed = [each for each in found if isinstance(each, BaseException)]
        assert [str(error) for error in failed] == ["out of fuel"]
        done = [each for each in found if isinstance(each, Completion)]
        assert alone.text in {each.text for each in done}
        assert sum(bool(re.fullmatch("[ab]{30}|[cd]{30}", each.text)) for each in done) == 1


class TestMemoryPressure:
    async def test_does_not_change_what_comes_out(self, tiny_model: Path) -> None:
        pattern = "[a-f]{10,60}(?:, [0-9]{3,9}){2}"
        options: list[dict[str, Any]] = [{"seed": n, "max_tokens": 80} for n in range(6)]
        async with new_engine(tiny_model) as engine:
            roomy = [await engine.generate(PROMPT, regex=pattern, **each) for each in options]
        async with new_engine(tiny_model, slots=110) as engine:
            # As after a long time without retraction, so that there is one soon.
            engine._core.schedule._expected = 0.1
            found = await asyncio.gather(
                *(engine.generate(PROMPT, regex=pattern, **each) for each in options)
            )
            retractions = engine.statistics().retractions

        assert [done.tokens for done in found] == [done.tokens for done in roomy]
        assert all(re.fullmatch(pattern, d.text) for d in found if d.finish.reason == "stop")
        assert retractions > 0


class TestOtherOptions:
    async def test_min_tokens_hold_while_anything_else_can_follow(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            longer = await engine.generate(
                PROMPT, regex="[ab]+", min_tokens=9, logit_bias={END: 100.0}, max_tokens=20
            )
            short = await bound(engine, Choice(("ab",)), min_tokens=9, max_tokens=20)

        assert (len(longer.text), longer.finish.reason) == (9, "stop")
        assert (short.text, short.finish.reason) == ("ab", "stop")

    async def test_a_stop_ends_what_is_complete_before_it(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(
                PROMPT, regex=r"a\.b(\.c)*", stop=".", logit_bias={END: -100.0}, max_tokens=20
            )
            ids = await engine.encode("a.b")

        # The first full stop is passed over: "a" is no match.
        assert (done.text, done.finish.reason, done.finish.matched) == ("a.b", "stop", ".")
        assert done.tokens == ids

    async def test_a_stop_pattern_is_held_to_the_same(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(
                PROMPT, regex=r"a\.b(\.c)*", stop_regex=r"\W", logit_bias={END: -100.0}
            )

        assert (done.text, done.finish.matched) == ("a.b", ".")

    async def test_a_stop_token_ends_what_is_complete_and_is_text_elsewhere(
        self, tiny_model: Path
    ) -> None:
        async with new_engine(tiny_model) as engine:
            (point,) = await engine.encode(".")
            done = await engine.generate(
                PROMPT,
                regex=r"a\.b(\.c)*",
                stop_token_ids=[point],
                logit_bias={END: -100.0, point: 100.0},
                max_tokens=20,
            )

        assert (done.text, done.finish.reason, done.finish.matched) == ("a.b", "stop", point)

    async def test_min_tokens_give_way_where_only_an_end_is_left(self, tiny_model: Path) -> None:
        # Behind a 0 the backend allows nothing, and does not say that it has stopped.
        schema = JsonSchema({"type": "number", "multipleOf": 3})
        async with new_engine(tiny_model) as engine:
            (zero,) = await engine.encode("0")
            done = await bound(
                engine, schema, min_tokens=9, max_tokens=20, logit_bias={zero: 100.0}
            )

        assert (done.text, done.finish.reason) == ("0", "stop")

    async def test_a_stop_within_min_tokens_is_passed_over(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(
                PROMPT, regex=r"(?:ab)+", stop="a", min_tokens=4, logit_bias={END: -100.0}
            )

        assert (done.text, done.finish.matched) == ("abab", "a")

    @pytest.mark.parametrize(
        ("constraint", "complete"),
        [
            (Regex("[0-9]+"), True),
            (JsonSchema('{"type": "integer", "multipleOf": 99991}'), False),
        ],
        ids=["a number", "one to be judged"],
    )
    async def test_a_number_that_is_cut_off_is_whole_if_it_would_do(
        self, tiny_model: Path, constraint: Constraint, complete: bool
    ) -> None:
        async with new_engine(tiny_model) as engine:
            done = await bound(
                engine, constraint, max_tokens=3, temperature=0, logit_bias={END: -100.0}
            )

        assert (done.finish.reason, done.finish.complete) == ("length", complete)
        assert len(done.tokens) == 3

    async def test_ignore_eos_contradicts_a_constraint(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(OptionError, match="ignore_eos: with a constraint the end tokens"):
                await engine.generate(PROMPT, regex="a+", ignore_eos=True)

            assert engine.statistics().steps == 0

    async def test_a_bias_on_what_is_not_allowed_changes_nothing(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            b, z = await engine.encode("bz")
            done = await engine.generate(
                PROMPT, regex="[ab]{5}", logit_bias={z: 100.0, b: 90.0}, temperature=0
            )

        assert done.text == "bbbbb"

    async def test_penalties_choose_among_what_is_allowed(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            plain = await engine.generate(PROMPT, regex="[a-z]{40}", temperature=0)
            spread = await engine.generate(
                PROMPT, regex="[a-z]{40}", temperature=0, repetition_penalty=3.0, max_tokens=40
            )

        assert re.fullmatch("[a-z]{40}", spread.text)
        assert len(set(spread.text)) > len(set(plain.text))

    async def test_a_filter_of_one_is_the_likeliest_that_is_allowed(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            greedy = await engine.generate(PROMPT, regex="[a-z]{9}", temperature=0)
            filters: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
            found = [
                await engine.generate(PROMPT, regex="[a-z]{9}", seed=1, **only) for only in filters
            ]

        assert {done.tokens for done in found} == {greedy.tokens}


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("constraint", "message"),
        [
            (JsonSchema('{"type": "strng"}'), "strng"),
            (Ebnf("root ::= b"), r"root ::= b.*there is no rule b"),
            (Regex("(abc"), r"regex '\(abc': missing \), unterminated"),
            (Regex(""), "empty pattern"),
            (Regex(r"(?<=a)b"), r"\(\?<=a\)b.*look-behind"),
            (Regex(5), "expected a pattern as a string, got 5"),  # type: ignore[arg-type]  # what is tested
            (Regex(["a"]), r"\['a'\].* is not made of strings"),  # type: ignore[arg-type]  # what is tested
            (Choice(()), "nothing to choose from"),
        ],
    )
    async def test_is_refused_before_any_work(
        self, tiny_model: Path, constraint: Constraint, message: str
    ) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(ConstraintError, match=message):
                await bound(engine, constraint)

            assert engine.statistics().steps == 0
            assert is_idle(engine)

    async def test_is_not_among_the_capabilities(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            assert engine.capabilities.constraints >= {"regex", "choice", "json_schema"}

    async def test_is_no_list_of_choices(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await bound(engine, Choice(["ab", "ac"]))  # as many write it

        assert done.text in {"ab", "ac"}


class TestLeaving:
    async def test_early_ends_the_request(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            async with engine.stream(PROMPT, regex="[a-z]{300}", max_tokens=310) as deltas:
                async for _ in deltas:
                    break
            await until(lambda: is_idle(engine))
            done = await engine.generate(PROMPT, regex="[a-z]{5}")

        assert re.fullmatch("[a-z]{5}", done.text)


class Compiler:
    """Compiles when it is told to, and counts."""

    def __init__(self) -> None:
        self.calls: list[Constraint] = []
        self.threads: set[str] = set()
        self.go = threading.Event()

    def __call__(self, constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
        self.calls.append(constraint)
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(10)
        return compile_constraint(constraint, vocabulary)


def asking(constraint: Constraint) -> Request:
    return Request(prompt=(Text(PROMPT),), constraint=constraint)


class TestCompiling:
    async def test_is_shared_by_all_who_want_the_same(self) -> None:
        compiler = Compiler()
        constraints = Constraints(BYTES, compiler)
        waiting = [asyncio.create_task(constraints.grammar(asking(Regex("a+")))) for _ in range(5)]
        await until(lambda: bool(compiler.calls))
        compiler.go.set()
        found = await asyncio.gather(*waiting)
        again = await constraints.grammar(asking(Regex("a+")))

        assert compiler.calls == [Regex("a+")]
        assert {id(grammar) for grammar in (*found, again)} == {id(found[0])}
        assert compiler.threads.isdisjoint({threading.current_thread().name})

    async def test_is_not_needed_without_a_constraint(self) -> None:
        assert await Constraints(BYTES).grammar(Request(prompt=(Text("a"),))) is None

    async def test_goes_on_for_those_who_stay(self) -> None:
        compiler = Compiler()
        constraints = Constraints(BYTES, compiler)
        leaving, staying = (
            asyncio.create_task(constraints.grammar(asking(Regex("a+")))) for _ in range(2)
        )
        await until(lambda: bool(compiler.calls))
        leaving.cancel()
        compiler.go.set()
        grammar = await staying

        assert leaving.cancelled()
        assert grammar is not None
        assert len(compiler.calls) == 1

    async def test_leaves_nothing_behind_when_everybody_has_left(self) -> None:
        compiler = Compiler()
        constraints = Constraints(BYTES, compiler)
        only = asyncio.create_task(constraints.grammar(asking(Regex("a+"))))
        await until(lambda: bool(compiler.calls))
        only.cancel()
        compiler.go.set()
        await until(lambda: not constraints._under_way)

        assert only.cancelled()
        assert not constraints._kept

    async def test_does_not_begin_when_everybody_has_left(self) -> None:
        compiler = Compiler()
        constraints = Constraints(BYTES, compiler)
        busy = [
            asyncio.create_task(constraints.grammar(asking(Regex(pattern)))) for pattern in "ab"
        ]
        await until(lambda: len(compiler.calls) == 2)
        queued = asyncio.create_task(constraints.grammar(asking(Regex("c"))))
        await asyncio.sleep(0)
        queued.cancel()
        compiler.go.set()
        await asyncio.gather(*busy)
        await until(lambda: not constraints._under_way)

        assert Regex("c") not in compiler.calls

    async def test_runs_in_two_threads_at_most(self) -> None:
        compiler = Compiler()
        constraints = Constraints(BYTES, compiler)
        tasks = [
            asyncio.create_task(constraints.grammar(asking(Regex(pattern)))) for pattern in "abcdef"
        ]
        await until(lambda: len(compiler.calls) == 2)
        for _ in range(50):
            await asyncio.sleep(0)
        begun = len(compiler.calls)
        compiler.go.set()
        await asyncio.gather(*tasks)

        assert begun == 2
        assert len(compiler.calls) == 6

    async def test_tells_everybody_who_waits_why_it_was_refused(self) -> None:
        compiler = Compiler()
        compiler.go.set()
        constraints = Constraints(BYTES, compiler)
        found = await asyncio.gather(
            *(constraints.grammar(asking(Regex("(a"))) for _ in range(3)), return_exceptions=True
        )

        assert [type(error) for error in found] == [ConstraintError] * 3
        assert len({id(error) for error in found}) == 3
        assert len(compiler.calls) == 1
        assert not constraints._kept

    async def test_is_remembered_within_bounds(self) -> None:
        constraints = Constraints(BYTES)
        patterns = [letter + r"\w" * 12 for letter in "abcdefghijklmnopqrstuvwxyz"]
        for pattern in patterns:
            await constraints.grammar(asking(Regex(pattern)))
            await constraints.grammar(asking(Regex(patterns[0])))
        kept = constraints._kept

        assert sum(grammar.size for grammar in kept.values()) == constraints._size <= MOST_KEPT
        assert 10 < len(kept) < len(patterns)
        assert Regex(patterns[0]) in kept  # used all the time
        assert Regex(patterns[1]) not in kept

    async def test_leaves_no_grammar_alive_when_the_engine_has_closed(self) -> None:
        constraints = Constraints(BYTES)
        made = weakref.ref(await constraints.compiled(Regex("[ab]{4}")))
        await constraints.close()
        await until(lambda: gc.collect() >= 0 and made() is None)  # its thread may be at its end

        assert not constraints._alive

    async def test_ends_before_the_engine_does(self) -> None:
        compiler = Compiler()
        constraints = Constraints(BYTES, compiler)
        waiting = [
            asyncio.create_task(constraints.grammar(asking(Regex(pattern)))) for pattern in "abc"
        ]
        await until(lambda: len(compiler.calls) == 2)
        closing = asyncio.create_task(constraints.close())
        await asyncio.sleep(0)
        compiler.go.set()
        await closing

        assert not constraints._under_way
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found[2], EngineClosedError)
        assert len(compiler.calls) == 2

    async def test_ends_before_the_engine_does_although_that_is_cancelled(self) -> None:
        compiler = Compiler()
        constraints = Constraints(BYTES, compiler)
        waiting = asyncio.create_task(constraints.grammar(asking(Regex("a"))))
        await until(lambda: bool(compiler.calls))
        closing = asyncio.create_task(constraints.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        still = not closing.done()
        compiler.go.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

        assert still
        assert await waiting is not None

    async def test_leaves_the_engine_usable_for_others(self, tiny_model: Path) -> None:
        compiler = Compiler()
        async with new_engine(tiny_model) as engine:
            engine._constraints._compile = compiler
            slow = asyncio.create_task(engine.generate(PROMPT, regex="[ab]{4}"))
            await until(lambda: bool(compiler.calls))
            free = await engine.generate(PROMPT, max_tokens=5)
            compiler.go.set()

            assert free.tokens
            assert re.fullmatch("[ab]{4}", (await slow).text)


class MaskedComputer(FakeComputer):
    """Tells of the masks that it was given, and from which thread the core made them."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.masks: list[int] = []

    def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
        self.masks.append(0 if mask is None else len(mask))
        return super().pick(logits_rv, batch, mask)


class ForwardUnderWay(MaskedComputer):
    """A computer whose forwards go on until a mask has been made meanwhile."""

    def __init__(self) -> None:
        super().__init__(64)
        self.begun, self.filled = threading.Event(), threading.Event()

    def forward(self, batch: Batch) -> Tensor:
        self.begun.set()
        assert self.filled.wait(10), "the masks are made after the forward"
        self.filled.clear()
        return super().forward(batch)


class Rig:
    """A core and a loop, over the tokens a to e."""

    def __init__(self, *, worker: bool, computer: MaskedComputer | None = None) -> None:
        self.core = Core(64)
        self.computer = computer or MaskedComputer(64)
        self.mailboxes: dict[int, Mailbox] = {}
        self.loop = Loop(self.core, self.computer, self._deliver, threads=1, worker=worker)
        self.task = asyncio.create_task(self.loop.run())

    async def text(self, pattern: str, max_tokens: int = 8) -> str:
        number = len(self.mailboxes) + 1
        mailbox = self.mailboxes[number] = Mailbox()
        self.core.submit(job(number, [0, 1, number % 5], max_tokens=max_tokens, pattern=pattern))
        self.loop.wake()
        text = ""
        while (delta := await mailbox.take()) is not None:
            text += delta.text
        return text

    def _deliver(self, outcomes: list[Any]) -> None:
        for outcome in outcomes:
            if isinstance(error := getattr(outcome, "error", None), StructgenError):
                self.mailboxes[outcome.request].fail(error)
            else:
                self.mailboxes[outcome.request].push(outcome)


@pytest.mark.parametrize("worker", [True, False], ids=["in a worker", "inline"])
class TestTheHandOver:
    async def test_gives_the_step_one_mask_for_each_row_that_is_bound(self, worker: bool) -> None:
        rig = Rig(worker=worker)
        texts = await asyncio.gather(*(rig.text(each) for each in ("[ab]{4}", "", "[cd]{2}")))
        await rig.loop.stop(rig.task)

        assert re.fullmatch("[ab]{4}", texts[0])
        assert re.fullmatch("[cd]{2}", texts[2])
        assert len(texts[1]) == 8
        assert rig.computer.masks == [2, 2, 1, 1, 0, 0, 0, 0]

    async def test_of_a_mask_that_cannot_be_made_fails_the_step_and_not_the_loop(
        self, worker: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = Rig(worker=worker)

        def broken(_: object) -> None:
            raise ZeroDivisionError("a fault of ours")

        with monkeypatch.context() as patch:
            patch.setattr(rig.core, "mask", broken)
            with pytest.raises(StepFailedError, match="a fault of ours"):
                await rig.text("[ab]c{3}")
        again = await rig.text("[ab]c{3}")
        await rig.loop.stop(rig.task)

        assert again[1:] == "ccc"


class TestMasks:
    async def test_are_made_while_the_forward_runs_and_first_of_all(self) -> None:
        """No other task has a turn between the hand-over of a step and its masks."""
        computer = ForwardUnderWay()
        rig = Rig(worker=True, computer=computer)
        happened: list[str] = []
        plan, mask = rig.core.plan, rig.core.mask

        def planned() -> Batch | None:
            happened.append("plan")
            asyncio.get_running_loop().call_soon(happened.append, "others")
            return plan()

        def filled(batch: Batch) -> Mask | None:
            assert computer.begun.wait(10), "the forward begins after the masks"
            computer.begun.clear()
            found = mask(batch)
            happened.append("masks")
            computer.filled.set()
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rig.core, "plan", planned)
            patch.setattr(rig.core, "mask", filled)
            text = await rig.text("[ab]{3}")
            await rig.loop.stop(rig.task)

        assert re.fullmatch("[ab]{3}", text)
        assert happened[:9] == ["plan", "masks", "others"] * 3


class TestManyConstraintsAtOnce:
    def test_masks_of_random_models_keep_the_promise(self) -> None:
        """Sampling straight from masks: the model's logits are noise."""
        torch.manual_seed(0)
        grammar = compile_constraint(Regex(NUMBER), BYTES)
        for _ in range(50):
            matcher, text = grammar.matcher(), ""
            while not matcher.finished:
                row = np.zeros(matcher.words, np.int32)
                matcher.fill(row)
                bits = torch.from_numpy(np.unpackbits(row.view(np.uint8), bitorder="little"))
                token = int((torch.rand(256) + bits[:256]).argmax())
                matcher.accept(token)
                text += chr(token)

            assert re.fullmatch(NUMBER, text)


@pytest.mark.slow
class TestTheDefaultModel:
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    async def test_keeps_the_promise_greedy_and_sampled(self, default_model: Path) -> None:
        patterns = {
            r"[-+]?[0-9]{1,3}(?:\.[0-9]{2})?": "The price in dollars is ",
            "(?:Paris|London|Rome)": "The capital of France is ",
            r"\{.*?\}": "JSON: ",
            r"(😀|🚀){3}": "Three emoji: ",
            "[\u4e00-\u9fff]{2,6}": "你好，",
            r"\d{4}-\d\d-\d\d": "Today is ",
            r"(?:[A-Z][a-z]+ ){2}[A-Z][a-z]+\.": "My full name is ",
        }
        async with Engine(default_model, dtype="float32", slots=4000) as engine:
            found = await asyncio.gather(
                *(
                    engine.generate(
                        prompt, regex=pattern, temperature=temperature, seed=seed, max_tokens=60
                    )
                    for pattern, prompt in patterns.items()
                    for temperature, seed in ((0.0, 0), (1.5, 2))
                )
            )

        asked = [pattern for pattern in patterns for _ in range(2)]
        ended = [
            (pattern, done.text)
            for pattern, done in zip(asked, found, strict=True)
            if done.finish.reason == "stop"
        ]
        assert [each for each in ended if not re.fullmatch(*each)] == []
        assert {pattern for pattern, _ in ended} == set(patterns)

    @pytest.mark.parametrize(
        ("bias", "text"),
        [
            ({9786: 100.0, 2: 100.0}, "cat"),
            ({9786: 100.0, 2: -100.0}, "category"),
            ({15833: 100.0}, "category"),
        ],
    )
    async def test_chooses_what_begins_another_choice(
        self, default_model: Path, bias: dict[int, float], text: str
    ) -> None:
        async with Engine(default_model, dtype="float32", slots=500) as engine:
            done = await engine._complete(
                request_from(
                    (Text("Word: "),),
                    {"logit_bias": bias, "temperature": 0, "max_tokens": 12},
                    constraint=Choice(("cat", "category")),
                )
            )

        assert (done.text, done.finish.reason) == (text, "stop")

    async def test_leaves_its_neighbours_alone(self, default_model: Path) -> None:
        count = "1, 2, 3, 4, 5, 6, 7, 8,"
        async with Engine(default_model, dtype="float32", slots=4000) as engine:
            alone = await engine.generate(count, temperature=0, max_tokens=24)
            found = await asyncio.gather(
                engine.generate(count, temperature=0, max_tokens=24),
                engine.generate(count, regex="(?: [a-z]+,){6}", max_tokens=24),
                engine.generate(count, temperature=0, max_tokens=24),
                engine.generate(count, regex=r"[\u4e00-\u9fff]{9}", seed=1, max_tokens=24),
            )

        assert found[0].tokens == found[2].tokens == alone.tokens
        assert re.fullmatch(r"(?: [a-z]+,){6}|[ a-z,]+", found[1].text)
