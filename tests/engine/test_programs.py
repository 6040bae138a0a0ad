"""Programs on the engine: whatever is cancelled, closed, dropped or raised, nothing hangs or stays.

The engine computes on the loop's own thread where a test counts rounds of the loop, so that each
round does a known part of the work.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from structgen.engine.engine import Engine
from structgen.errors import EngineClosedError, PromptError
from structgen.program.program import program
from structgen.program.state import State

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# Rounds of the loop until the program `everything` has ended, and some more.
ROUNDS = 140


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 3000, "threads": 1, "worker": False, **options})


async def loop_rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until_idle(engine: Engine) -> None:
    """Wait until no request is left, and check that nothing else is."""
    async with asyncio.timeout(5):
        while (now := engine.statistics()).running or now.waiting:  # noqa: ASYNC110 - polls
            await asyncio.sleep(0)
    assert (now.slots_held, now.slots_limbo, now.scopes) == (0, 0, 0)
    assert now.slots_free + now.slots_cached == now.slots_total
    assert (engine._mailboxes, engine._timers, engine._core._sequences) == ({}, {}, {})


@program
async def everything(s: State) -> str:
    """Generate, fork in a scope, stream and join."""
    s.user("abc")
    with s.assistant():
        await s.gen("x", max_tokens=5, deadline=60, **GREEDY)
    async with s.fork(3) as branches:
        for index, branch in enumerate(branches):
            branch.append(f"branch {index}")
        await branches.map(lambda branch, _: branch.gen("y", max_tokens=4, **GREEDY))
        await branches.join()
    async with s.stream("z", max_tokens=6, **GREEDY) as pieces:
        async for _ in pieces:
            pass
    return s.text()


async def grow(s: State, depth: int) -> None:
    s += f"depth {depth}, "
    await s.gen(max_tokens=3, **GREEDY)
    if depth:
        async with s.fork(2) as branches:
            await branches.map(lambda branch, _: grow(branch, depth - 1))
            await branches.join("append")


@program
async def tree(s: State, depth: int) -> str:
    s += "root, "
    await grow(s, depth)
    return s.text()


class TestCancellation:
    @pytest.mark.parametrize("radix", [True, False])
    async def test_at_any_moment_leaves_nothing(
        self, tiny_model: Path, radix: bool, anyio_backend: tuple[str, dict[str, bool]]
    ) -> None:
        # The even moments on one event loop, the odd ones on the other.
        first = int(anyio_backend[1]["use_uvloop"])
        ended, moments = 0, range(first, ROUNDS, 2 if radix else 8)
        async with new_engine(tiny_model, radix=radix, chunk_size=4) as engine:
            wanted = (await everything.run(engine)).value
            engine.flush_cache()
            before = asyncio.all_tasks()
            for rounds in moments:
                task = asyncio.create_task(everything.run(engine))
                await loop_rounds(rounds)
                task.cancel()
                await asyncio.wait([task])
                ended += not task.cancelled()
                await until_idle(engine)
                assert asyncio.all_tasks() <= before
                engine.flush_cache()
            after = (await everything.run(engine)).value

        assert after == wanted
        assert 0 < ended < len(moments) * 3 // 4

    async def test_by_a_scope_leaves_nothing(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, chunk_size=4) as engine:
            for rounds in range(0, ROUNDS, 3):
                async with anyio.create_task_group() as group:
                    group.start_soon(everything.run, engine)
                    await loop_rounds(rounds)
                    group.cancel_scope.cancel()
                await until_idle(engine)

    async def test_of_many_at_once_hurts_no_other(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, chunk_size=16, slots=400, max_running=6) as engine:
            wanted = (await everything.run(engine)).value
            tasks = [asyncio.create_task(everything.run(engine)) for _ in range(24)]
            for number, task in enumerate(tasks):
                await loop_rounds(number % 7)
                if number % 4:
                    task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            await until_idle(engine)

        kept = [each.value for each in found if not isinstance(each, BaseException)]
        assert set(kept) == {wanted}
        assert len(kept) >= 6

    async def test_twice_ends_all_the_same(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            for rounds in range(0, ROUNDS, 5):
                task = asyncio.create_task(everything.run(engine))
                await loop_rounds(rounds)
                task.cancel()
                await loop_rounds(1)
                task.cancel()
                await asyncio.wait([task])
                await until_idle(engine)


class TestAnEngineThatCloses:
    @pytest.mark.parametrize("worker", [True, False])
    async def test_ends_the_programs_that_run_on_it(self, tiny_model: Path, worker: bool) -> None:
        for rounds in range(0, ROUNDS, 6):
            async with new_engine(tiny_model, worker=worker) as engine:
                running = [
                    asyncio.create_task(everything.run(engine)),
                    asyncio.create_task(tree.run(engine, 3)),
                ]
                await loop_rounds(rounds)
            async with asyncio.timeout(5):
                found = await asyncio.gather(*running, return_exceptions=True)

            errors = [leaf for each in found for leaf in leaves(each)]
            assert {type(each) for each in errors} <= {EngineClosedError}
            assert errors or rounds > 20

    async def test_takes_nothing_from_a_program_that_has_seen_it(self, tiny_model: Path) -> None:
        @program
        async def patient(s: State) -> str:
            s.user("abc")
            with s.assistant():
                await s.gen("x", max_tokens=4, **GREEDY)
            s.user("more")
            try:
                with s.assistant():
                    await s.gen("y", max_tokens=400, **GREEDY)
            except EngineClosedError:
                return s.text()
            return "was not closed"

        async with new_engine(tiny_model) as engine:
            task = asyncio.create_task(patient.run(engine))
            await loop_rounds(40)
        result = await task

        assert result.value == result.text()
        assert result["x"] in result.text()
        assert [message.role for message in result.messages()] == ["user", "assistant"] * 2
        assert result.usage.completion_tokens > 4


def leaves(error: object) -> list[BaseException]:
    """The errors in a group, or the error itself; nothing for what is no error."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error] if isinstance(error, BaseException) else []


class TestNestedForks:
    async def test_five_deep_are_what_they_are_without_a_cache(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            cached = await tree.run(engine, 5)
            await until_idle(engine)
            prefilled = engine.statistics().prefilled_tokens
        async with new_engine(tiny_model, radix=False, chunk_size=100) as engine:
            uncached = await tree.run(engine, 5)
        async with new_engine(tiny_model, slots=600, max_running=5) as engine:
            tight = await tree.run(engine, 5)
            await until_idle(engine)

        assert cached.value == uncached.value == tight.value
        assert cached.usage.prompt_tokens == uncached.usage.prompt_tokens
        # Twin branches say the same here, so each depth is computed once.
        assert prefilled < cached.usage.prompt_tokens / 10
        assert uncached.usage.cached_tokens == 0


class TestAStream:
    async def test_that_its_reader_breaks_by_an_error_keeps_nothing(self, tiny_model: Path) -> None:
        @program
        async def careless(s: State) -> bool:
            s += "abc"
            try:
                async with s.stream("x", max_tokens=300, **GREEDY) as pieces:
                    async for _ in pieces:
                        raise ZeroDivisionError  # noqa: TRY301 - the fault of a user
            except ZeroDivisionError:
                return "x" in s or s.text() != "abc"
            return True

        async with new_engine(tiny_model) as engine:
            assert not (await careless.run(engine)).value
            await until_idle(engine)
            assert engine.statistics().requests_aborted == 1

    async def test_in_a_generator_that_is_dropped_ends_with_its_program(
        self, tiny_model: Path
    ) -> None:
        async def pieces_of(s: State) -> AsyncIterator[str]:
            async with s.stream("x", max_tokens=300, **GREEDY) as pieces:
                async for piece in pieces:
                    yield piece

        @program
        async def forgetful(s: State) -> str:
            s += "abc"
            async for piece in pieces_of(s):
                return piece
            return ""

        async with new_engine(tiny_model) as engine:
            async with asyncio.timeout(5):
                piece = (await forgetful.run(engine)).value
            gc.collect()
            await loop_rounds(3)
            await until_idle(engine)

            assert piece
            assert engine.statistics().requests_aborted == 1

    async def test_that_is_dropped_ends_with_the_collector(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            for _ in range(3):
                stream = engine.stream("abc", max_tokens=300, **GREEDY)
                await stream.__aenter__()
                await anext(stream)
                del stream
                gc.collect()
                await loop_rounds(3)
                await until_idle(engine)

            assert engine.statistics().requests_aborted == 3


class TestTwoEngines:
    async def test_run_the_same_program_side_by_side(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as one, new_engine(tiny_model, radix=False) as two:
            alone = (await everything.run(one)).value
            found = await asyncio.gather(*(everything.run(engine) for engine in (one, two) * 3))
            await until_idle(one)
            await until_idle(two)

        assert {each.value for each in found} == {alone}

    async def test_serve_a_program_inside_a_program(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as one, new_engine(tiny_model) as two:

            @program
            async def outer(s: State) -> str:
                s += (await everything.run(two)).value
                async with s.fork(2) as branches:
                    texts = await branches.map(lambda _, __: everything.run(two))
                s += texts[0].value
                said: str = await s.gen("x", max_tokens=3, **GREEDY)
                return said

            text = (await outer.run(one)).value
            await until_idle(one)
            await until_idle(two)

            assert text
            assert one.statistics().requests_finished == 1

    async def test_end_apart(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as one:
            async with new_engine(tiny_model) as two:
                running = [asyncio.create_task(tree.run(each, 3)) for each in (one, two)]
                await loop_rounds(5)
            found = await asyncio.gather(*running, return_exceptions=True)

        assert not leaves(found[0])
        assert {type(each) for each in leaves(found[1])} == {EngineClosedError}


ODD_TEXTS = {
    "combining": "e\u0301a\u0308\u0323" * 3,
    "family": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "right to left": "\u202eabc\u202c \u05d0\u05d1",
    "nul and controls": "a\0b\x01\x7f\x1b[31m",
    "line ends": "a\r\nb\rc\u2028d\u2029e\x85",
    "bom": "\ufeffa\ufffe\uffff",
    "private use": "\ue000\uf8ff\U000f0000\U0010ffff",
    "replacement": "\ufffd\ufffd",
    "spaces": " \u00a0\u2003\u3000\t ",
    "markup": "<|im_start|>system\n{{ messages }}{% raw %}<|im_end|><|endoftext|>",
}


class TestOddTexts:
    @pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
    async def test_reach_the_model_as_they_are(self, tiny_model: Path, text: str) -> None:
        @program
        async def say(s: State) -> list[int]:
            s += text
            s.user(text)
            with s.assistant():
                await s.gen("x", max_tokens=2, prompt_logprobs=0, **GREEDY)
            return [entry.token for entry in s.meta("x").prompt_logprobs]

        async with new_engine(tiny_model) as engine:
            result = await say.run(engine)
            tokenizer = engine.loaded.checkpoint.tokenizer

        read = tokenizer.decode(result.value)
        assert read == f"{text}user\n{text}\nassistant\n"
        assert [result.value.count(token) for token in (256, 257, 258)] == [0, 2, 1]
        assert result.messages()[0].content == text

    async def test_that_are_no_unicode_are_refused(self, tiny_model: Path) -> None:
        @program
        async def say(s: State) -> None:
            s.user("half of \ud83d")
            with s.assistant():
                await s.gen("x")

        async with new_engine(tiny_model) as engine:
            with pytest.raises(PromptError, match="surrogate"):
                await say.run(engine)
            await until_idle(engine)

    @pytest.mark.parametrize(
        "stops",
        [[f"never {number}" for number in range(2000)], ["never" * 2000], ["\ud83d"]],
        ids=["many", "long", "surrogate"],
    )
    async def test_as_stops_change_nothing_where_they_do_not_come(
        self, tiny_model: Path, stops: list[str]
    ) -> None:
        async with new_engine(tiny_model) as engine:
            plain = await engine.generate("abc", max_tokens=30, **GREEDY)
            stopped = await engine.generate("abc", max_tokens=30, stop=stops, **GREEDY)

        assert (stopped.text, stopped.tokens) == (plain.text, plain.tokens)

    async def test_of_any_length_stop_where_they_come(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            whole = (await engine.generate("abc", max_tokens=60, **GREEDY)).text
            stops = [whole[start : start + 12] for start in range(20, 30)]
            done = await engine.generate(
                "abc", max_tokens=60, stop=[*stops, "never" * 2000], **GREEDY
            )

        assert done.text == whole[:20]
        assert done.finish.matched == whole[20:32]
