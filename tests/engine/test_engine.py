"""The engine as a whole on a tiny model: its life, its requests, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from torch import Tensor

from structgen.chat import Message
from structgen.core.batch import Batch, Picked
from structgen.engine.engine import Engine
from structgen.engine.loading import load
from structgen.engine.loop import Computer
from structgen.engine.stream import DeltaStream
from structgen.errors import (
    ConstraintError,
    DeadlineError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    ModelNotFoundError,
    NumericalError,
    OptionError,
    PromptError,
    StepFailedError,
    StructgenError,
    TemplateError,
    UnsupportedError,
)
from structgen.grammar.matcher import Mask
from structgen.options import request_from
from structgen.request import (
    Completion,
    Control,
    Image,
    JsonSchema,
    Lineage,
    Namespace,
    Request,
    Text,
    Tokens,
)
from structgen.sampling import Sampling, Want

ENDLESS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
PROMPT = "the quick brown fox"


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 2000, "threads": 1, **options})


async def loop_rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come to be within seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is a number, not an event
            await asyncio.sleep(0.002)


def threads_that_load() -> int:
    def is_in_load(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is load.__code__:
                return True
            frame = frame.f_back
        return False

    return sum(is_in_load(frame) for frame in sys._current_frames().values())


async def read(engine: Engine, request: Request) -> Completion:
    return await engine._complete(request)


async def collect(deltas: DeltaStream, tokens: list[int]) -> None:
    async for delta in deltas:
        tokens += delta.tokens


def is_idle(engine: Engine) -> bool:
    now = engine.statistics()
    return now.running == now.waiting == now.slots_held == 0


class TestOpening:
    async def test_an_engine_is_open_inside_its_block(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(PROMPT, max_tokens=3)

        assert done.usage.completion_tokens <= 3

    async def test_twice_at_once_is_refused(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(EngineError, match="opened before; make a new one"):
                async with engine:
                    pass

            assert (await engine.generate(PROMPT, max_tokens=1)).tokens

    async def test_by_two_tasks_lets_one_in(self, tiny_model: Path) -> None:
        engine = new_engine(tiny_model)

        async def use() -> None:
            async with engine:
                await engine.generate(PROMPT, max_tokens=1)

        found = await asyncio.gather(use(), use(), return_exceptions=True)

        assert {type(each) for each in found} == {type(None), EngineError}

    async def test_again_after_closing_is_refused(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            pass

        with pytest.raises(EngineError, match="opened before; make a new one"):
            async with engine:
                pass

    async def test_can_be_tried_again_if_it_failed(self, tiny_model: Path, tmp_path: Path) -> None:
        engine = new_engine(tmp_path / "model")
        with pytest.raises(ModelNotFoundError):
            async with engine:
                pass
        (tmp_path / "model").symlink_to(tiny_model)

        async with engine:
            assert (await engine.generate(PROMPT, max_tokens=1)).tokens

    @pytest.mark.parametrize("rounds", range(5))
    async def test_that_is_cancelled_leaves_no_thread_and_no_task(
        self, tiny_model: Path, rounds: int
    ) -> None:
        before = asyncio.all_tasks()

        async def use() -> None:
            async with new_engine(tiny_model):
                await asyncio.Event().wait()

        task = asyncio.create_task(use())
        await loop_rounds(rounds)
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        assert threads_that_load() == 0
        assert asyncio.all_tasks() <= before

    async def test_that_is_cancelled_by_a_scope_leaves_no_thread_and_no_task(
        self, tiny_model: Path
    ) -> None:
        before = asyncio.all_tasks()
        with anyio.move_on_after(0.003) as scope:
            async with new_engine(tiny_model):
                await anyio.sleep_forever()

        assert scope.cancelled_caught
        assert threads_that_load() == 0
        assert asyncio.all_tasks() <= before


USES: dict[str, Callable[[Engine], Awaitable[Any]]] = {
    "generate": lambda engine: engine.generate(PROMPT),
    "generate a request": lambda engine: engine.generate(
        Request(prompt=(Text(PROMPT),))
    ).__aenter__(),
    "stream": lambda engine: engine.stream(PROMPT).__aenter__(),
    "score": lambda engine: engine.score(PROMPT, ["."]),
    "encode": lambda engine: engine.encode(PROMPT),
    "prime": lambda engine: engine.prime(PROMPT),
    "scope": lambda engine: engine.scope(PROMPT).__aenter__(),
}
LOOKS: dict[str, Callable[[Engine], Any]] = {
    "statistics": Engine.statistics,
    "flush": Engine.flush_cache,
    "chat": lambda engine: engine.chat,
    "defaults": lambda engine: engine.defaults,
    "capabilities": lambda engine: engine.capabilities,
    "loaded": lambda engine: engine.loaded,
}


class TestAnEngineThatIsNotOpen:
    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    async def test_refuses_requests_before(
        self, tiny_model: Path, use: Callable[[Engine], Awaitable[Any]]
    ) -> None:
        with pytest.raises(EngineClosedError, match="inside `async with Engine"):
            await use(new_engine(tiny_model))

    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    async def test_refuses_requests_after(
        self, tiny_model: Path, use: Callable[[Engine], Awaitable[Any]]
    ) -> None:
        async with new_engine(tiny_model) as engine:
            pass

        with pytest.raises(EngineClosedError, match="inside `async with Engine"):
            await use(engine)

    @pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
    async def test_says_nothing_of_itself(
        self, tiny_model: Path, look: Callable[[Engine], Any]
    ) -> None:
        with pytest.raises(EngineClosedError, match="inside `async with Engine"):
            look(new_engine(tiny_model))


class TestClosing:
    async def test_ends_what_runs_by_an_error(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            running = [asyncio.ensure_future(engine.generate(f"{n}", **ENDLESS)) for n in range(5)]
            await until(lambda: engine.statistics().steps > 2)

        found = await asyncio.gather(*running, return_exceptions=True)
        assert [type(each) for each in found] == [EngineClosedError] * 5

    async def test_ends_what_waits_for_its_turn(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, max_running=1) as engine:
            running = [asyncio.ensure_future(engine.generate("x", **ENDLESS)) for _ in range(3)]
            await until(lambda: engine.statistics().waiting == 2)

        found = await asyncio.gather(*running, return_exceptions=True)
        assert [type(each) for each in found] == [EngineClosedError] * 3

    async def test_lets_a_stream_read_what_had_come(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            stream = engine.stream(PROMPT, **ENDLESS)
            await stream.__aenter__()
            await until(lambda: engine.statistics().generated_tokens >= 3)
        seen: list[int] = []
        with pytest.raises(EngineClosedError):
            await collect(stream, seen)
        await stream.__aexit__(None, None, None)

        assert len(seen) >= 3

    async def test_refuses_a_prompt_that_was_being_encoded(self, long_model: Path) -> None:
        async with new_engine(long_model, slots=250_000) as engine:
            encoding = asyncio.ensure_future(engine.generate("x" * 200_000, max_tokens=1))
            await loop_rounds(2)

        with pytest.raises(EngineClosedError):
            await encoding

    @pytest.mark.parametrize("worker", [True, False])
    async def test_leaves_no_task_no_timer_and_no_worker(
        self, tiny_model: Path, worker: bool
    ) -> None:
        before = asyncio.all_tasks()
        async with new_engine(tiny_model, worker=worker) as engine:
            running = asyncio.ensure_future(engine.generate(PROMPT, deadline=60, **ENDLESS))
            await until(lambda: engine.statistics().steps > 2)
        await asyncio.wait([running])

        assert asyncio.all_tasks() <= before
        assert (engine._mailboxes, engine._timers) == ({}, {})
        assert [t for t in threading.enumerate() if t.name.startswith("structgen")] == []
        assert isinstance(running.exception(), EngineClosedError)

    async def test_frees_the_weights_of_an_engine_that_is_kept(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            stream = engine.stream(PROMPT)
            await engine.generate(PROMPT, max_tokens=1)
            runner = weakref.ref(engine.loaded.runner)
        gc.collect()

        assert runner() is None
        assert not engine._open
        del stream

    async def test_does_not_change_the_error_of_the_block(self, tiny_model: Path) -> None:
        before = asyncio.all_tasks()

        async def use() -> None:
            async with new_engine(tiny_model) as engine:
                await engine.generate(PROMPT, max_tokens=1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await use()

        assert asyncio.all_tasks() <= before

    async def test_happens_when_the_block_is_cancelled(self, tiny_model: Path) -> None:
        before = asyncio.all_tasks()
        opened: list[Engine] = []

        async def use() -> None:
            async with new_engine(tiny_model) as engine:
                opened.append(engine)
                await engine.generate(PROMPT, **ENDLESS)

        task = asyncio.create_task(use())
        await until(lambda: bool(opened) and opened[0].statistics().steps > 2)
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        assert not opened[0]._open
        assert asyncio.all_tasks() <= before

    async def test_is_told_from_dying(self, tiny_model: Path) -> None:
        """A loop task that somebody else cancels must not let requests wait for ever."""
        found: list[Any] = []

        async def use() -> None:
            async with new_engine(tiny_model) as engine:
                running = asyncio.ensure_future(engine.generate(PROMPT, **ENDLESS))
                await until(lambda: engine.statistics().steps > 2)
                engine._tasks[0].cancel()
                later = asyncio.ensure_future(asyncio.wait_for(engine.generate("x"), 5))
                found.extend(await asyncio.gather(running, later, return_exceptions=True))

        with pytest.raises(EngineDiedError):
            await use()

        assert [type(each) for each in found] == [EngineDiedError] * 2


class TestTwoEngines:
    async def test_run_side_by_side(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as alone:
            wanted = await alone.generate(PROMPT, max_tokens=20, temperature=0)
        async with new_engine(tiny_model) as one, new_engine(tiny_model, radix=False) as two:
            found = await asyncio.gather(
                *(engine.generate(PROMPT, max_tokens=20, temperature=0) for engine in (one, two))
            )

        assert [each.tokens for each in found] == [wanted.tokens] * 2

    async def test_have_counts_of_their_own(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as one, new_engine(tiny_model) as two:
            await one.generate(PROMPT, max_tokens=4, ignore_eos=True)

            assert one.statistics().generated_tokens == 4
            assert two.statistics().generated_tokens == two.statistics().steps == 0


class TestAnotherEventLoop:
    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    async def test_is_refused_and_changes_nothing(
        self, tiny_model: Path, use: Callable[[Engine], Awaitable[Any]]
    ) -> None:
        def elsewhere(engine: Engine) -> None:
            async def main() -> None:
                await use(engine)

            asyncio.run(main())

        async with new_engine(tiny_model) as engine:
            with pytest.raises(EngineError, match="opened on another event loop"):
                await anyio.to_thread.run_sync(elsewhere, engine)

            now = engine.statistics()
            assert (now.steps, now.running, now.waiting, now.scopes) == (0, 0, 0, 0)


class TestPrompts:
    async def test_of_every_form_are_the_same_request(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, radix=False) as engine:
            ids = engine.loaded.checkpoint.tokenizer.encode(PROMPT)
            forms: list[Any] = [
                PROMPT,
                ids,
                tuple(ids),
                (Text(PROMPT),),
                [Text(PROMPT)],
                (Tokens(tuple(ids), PROMPT),),
            ]
            found = [await engine.generate(form, max_tokens=9, temperature=0) for form in forms]

        assert {each.tokens for each in found} == {found[0].tokens}
        assert {each.usage for each in found} == {found[0].usage}

    async def test_of_messages_are_rendered_with_an_open_answer(self, tiny_model: Path) -> None:
        parts = (
            Control("<|im_start|>user\n"),
            Text("hi"),
            Control("<|im_end|>\n<|im_start|>assistant\n"),
        )
        async with new_engine(tiny_model, radix=False) as engine:
            found = [
                await engine.generate(prompt, max_tokens=9, temperature=0, prompt_logprobs=0)
                for prompt in (parts, [{"role": "user", "content": "hi"}], [Message("user", "hi")])
            ]

        ids = [[entry.token for entry in each.prompt_logprobs] for each in found]
        assert ids[0] == ids[1] == ids[2]
        assert (ids[0].count(257), ids[0].count(258)) == (2, 1)

    async def test_of_messages_need_a_template(self, tiny_model: Path, tmp_path: Path) -> None:
        bare = tmp_path / "bare"
        bare.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (bare / name).symlink_to(tiny_model / name)
        async with new_engine(bare) as engine:
            with pytest.raises(TemplateError, match=r"has no chat template.*chat_template="):
                await engine.generate([{"role": "user", "content": "hi"}])

            assert engine.chat is None
            assert (await engine.generate(PROMPT, max_tokens=1)).tokens

    @pytest.mark.parametrize(
        "prompt",
        [None, 5, b"abc", {"role": "user", "content": "x"}, np.array([1, 2]), torch.ones(2)],
        ids=lambda prompt: type(prompt).__name__,
    )
    async def test_of_other_kinds_are_refused(self, tiny_model: Path, prompt: Any) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(TypeError, match=f"not {type(prompt).__name__}"):
                await engine.generate(prompt)

    @pytest.mark.parametrize(
        "prompt", [[True, False], ["a", "b"], [1, "a"], [1.5], [[1]], [{"role": "user"}]], ids=repr
    )
    async def test_that_are_lists_of_something_else_are_refused(
        self, tiny_model: Path, prompt: Any
    ) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(TemplateError, match="messages: "):
                await engine.generate(prompt)

    @pytest.mark.parametrize(
        "ids", [(1.5,), (True, False), (10**30,), ("a",), ((1,), (2,))], ids=repr
    )
    async def test_of_tokens_that_are_no_ids_are_refused(self, tiny_model: Path, ids: Any) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(PromptError, match="prompt tokens: expected whole numbers"):
                await engine.generate((Tokens(ids, ""),))

    @pytest.mark.parametrize("ids", [[259], [-1], [5, 10**12], [2**63 + 1]], ids=repr)
    async def test_of_ids_outside_the_vocabulary_are_refused(
        self, tiny_model: Path, ids: list[int]
    ) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(PromptError, match=f"token {ids[-1]} is not in the vocabulary"):
                await engine.generate(ids)

    @pytest.mark.parametrize("part", [Text("a\ud800b"), Control("\udfff")], ids=repr)
    async def test_that_are_not_unicode_are_refused(
        self, tiny_model: Path, part: Text | Control
    ) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(PromptError, match="half of a surrogate pair"):
                await engine.generate((part,))
            with pytest.raises(PromptError, match="half of a surrogate pair"):
                await engine.score(PROMPT, [part.text])

    async def test_with_images_are_refused_by_name(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(UnsupportedError, match="sees no images"):
                await engine.generate((Text(PROMPT), Image(b"", "")))

    async def test_may_fill_the_context_to_the_last_token(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            full = await engine.generate([65] * 500, max_tokens=12, ignore_eos=True)
            primed = await engine.prime([66] * 512)
            with pytest.raises(PromptError, match="500 prompt tokens and max_tokens=13 make 513"):
                await engine.generate([65] * 500, max_tokens=13)
            with pytest.raises(PromptError, match="at least 513 tokens"):
                await engine.prime([66] * 513)

        assert full.usage.completion_tokens == 12
        assert primed.prompt_tokens == 512

    async def test_of_many_control_tokens_are_not_taken_for_long(self, tiny_model: Path) -> None:
        """A control token is one token, however long it is spelled."""
        async with new_engine(tiny_model) as engine:
            done = await engine.generate((Control("<|im_start|>" * 400),), max_tokens=1)

        assert done.usage.prompt_tokens == 400


class TestOptions:
    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("priority", "high"),
            ("priority", 1.5),
            ("priority", 10**40),
            ("deadline", float("nan")),
            ("deadline", 0),
            ("deadline", -1),
            ("deadline", "soon"),
            ("top_k", 2**40),
            ("temperature", 1e300),
            ("repetition_penalty", 1e300),
            ("stop", 5),
            ("stop", ["a", 5]),
            ("stop", [""]),
            ("stop", ["x" * 100_001]),
            ("stop_token_ids", 5),
            ("stop_token_ids", [None]),
            ("stop_token_ids", [259]),
            ("logit_bias", {5: "x"}),
            ("logit_bias", {5: None}),
            ("logit_bias", {"5": 1.0}),
            ("logit_bias", {259: 1.0}),
            ("logit_bias", [5]),
        ],
        ids=lambda value: repr(value)[:30],
    )
    async def test_that_cannot_be_used_are_refused_by_name(
        self, tiny_model: Path, option: str, value: Any
    ) -> None:
        options: dict[str, Any] = {option: value}
        async with new_engine(tiny_model) as engine:
            with pytest.raises(OptionError, match=option) as caught:
                await engine.generate(PROMPT, **options)

            assert caught.value.option == option
            assert engine.statistics().steps == 0
            assert (await engine.generate(PROMPT, max_tokens=1)).tokens

    @pytest.mark.parametrize(
        "option", [*Sampling.__struct_fields__, *Want.__struct_fields__, "priority", "deadline"]
    )
    def test_of_none_have_their_defaults(self, option: str) -> None:
        options: dict[str, Any] = {option: None}

        assert request_from((Text(PROMPT),), options) == Request(prompt=(Text(PROMPT),))

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            (Sampling, {"min_tokens": None}),
            (Sampling, {"frequency_penalty": None}),
            (Sampling, {"stop_token_ids": (None,)}),
            (Want, {"top_logprobs": None}),
            (Request, {"prompt": (), "priority": None}),
            (Namespace, {"tenant": []}),
            (Namespace, {"epoch": "1"}),
            (Lineage, {"scope": []}),
        ],
        ids=str,
    )
    def test_of_the_wrong_type_never_reach_an_engine(
        self, kind: Callable[..., Any], fields: dict[str, Any]
    ) -> None:
        with pytest.raises(OptionError):
            kind(**fields)

    @pytest.mark.parametrize("prompt", ["text", ["text"], (Text(None),), (5,)], ids=repr)  # type: ignore[arg-type]  # what is tested
    def test_a_request_is_made_of_parts(self, prompt: Any) -> None:
        with pytest.raises(PromptError, match="prompt"):
            Request(prompt=prompt)

    async def test_do_not_come_on_top_of_a_request(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(TypeError, match="max_tokens cannot come on top"):
                engine.generate(Request(prompt=(Text(PROMPT),)), max_tokens=3)  # type: ignore[call-overload]  # what is tested


class TestWhatThisEngineCannotDo:
    @pytest.mark.parametrize(
        ("fields", "error", "message"),
        [
            ({"namespace": Namespace(adapter="poet")}, UnsupportedError, "no adapters"),
            ({"namespace": Namespace(spliced=True)}, UnsupportedError, "no spliced prefixes"),
            ({"model": "another"}, UnsupportedError, "not 'another'"),
            ({"constraint": JsonSchema('{"type": "strng"}')}, ConstraintError, "strng' is no type"),
        ],
        ids=["adapter", "spliced", "model", "constraint"],
    )
    async def test_is_refused_by_name(
        self, tiny_model: Path, fields: dict[str, Any], error: type[StructgenError], message: str
    ) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(error, match=message):
                await read(engine, Request(prompt=(Text(PROMPT),), **fields))

            assert engine.statistics().steps == 0

    async def test_is_refused_for_scores_priming_and_scopes_too(self, tiny_model: Path) -> None:
        namespace = Namespace(adapter="poet")
        async with new_engine(tiny_model) as engine:
            for use in (
                engine.score(PROMPT, ["."], namespace=namespace),
                engine.prime(PROMPT, namespace=namespace),
                engine.scope(PROMPT, namespace=namespace).__aenter__(),
            ):
                with pytest.raises(UnsupportedError, match="no adapters"):
                    await use

            assert engine.statistics().scopes == 0

    async def test_quotes_the_regex(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(ConstraintError, match=r"\(abc"):
                await engine.generate(PROMPT, regex="(abc")

    async def test_does_not_include_its_own_names(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            for model in ("", str(tiny_model), engine.loaded.checkpoint.name):
                request = Request(
                    prompt=(Text(PROMPT),), model=model, sampling=Sampling(max_tokens=1)
                )
                assert (await read(engine, request)).tokens


class TestEncoding:
    async def test_gives_the_ids_that_are_sent(self, tiny_model: Path) -> None:
        messages = [Message("user", "hello")]
        async with new_engine(tiny_model) as engine:
            for prompt in (PROMPT, messages, [1, 2, 3]):
                ids = await engine.encode(prompt)
                done = await engine.generate(prompt, max_tokens=1, prompt_logprobs=0)

                assert ids == tuple(entry.token for entry in done.prompt_logprobs)

    async def test_of_a_long_text_is_done_elsewhere(self, long_model: Path) -> None:
        async with new_engine(long_model) as engine:
            here = engine._encoder._fresh
            threads = set()

            def fresh(stretch: Any) -> Any:
                threads.add(threading.current_thread())
                return here(stretch)

            engine._encoder._fresh = fresh  # type: ignore[method-assign]  # to see where it runs
            ids = await engine.encode("x" * 100_000)
            with pytest.raises(PromptError, match="need 100000 slots"):
                await engine.score(ids[:1], ["x" * 100_000])

        assert len(ids) == 100_000
        assert threading.main_thread() not in threads

    async def test_refuses_what_no_request_may_send(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(PromptError, match="not in the vocabulary"):
                await engine.encode([5, 100_000])
            with pytest.raises(PromptError, match="more than the context of 512"):
                await engine.encode("x" * 100_000)


class TestWaiting:
    async def test_is_told_at_the_end_and_ends_with_the_first_step(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, max_running=1) as engine:
            started = time.perf_counter()
            first, second, third = await asyncio.gather(
                *(engine.generate(PROMPT, max_tokens=30, ignore_eos=True) for _ in range(3))
            )
            took = time.perf_counter() - started

        waits = [done.finish.waited for done in (first, second, third)]
        assert 0 < waits[0] < waits[1] < waits[2] < took

    async def test_of_a_request_that_was_left_is_forgotten(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.generate(PROMPT, max_tokens=2)
            async with engine.stream(PROMPT, **ENDLESS) as deltas:
                await anext(deltas)

            assert engine._waits._waited == {}


class TestPriming:
    async def test_lets_later_requests_hit_the_cache(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            primed = await engine.prime(PROMPT)
            done = await engine.generate(PROMPT + "!", max_tokens=1)

        assert (primed.prompt_tokens, primed.completion_tokens) == (len(PROMPT), 0)
        assert done.usage.cached_tokens == len(PROMPT)

    async def test_twice_takes_all_but_one_token_from_the_cache(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.prime(PROMPT)
            again = await engine.prime(PROMPT)

        assert again.cached_tokens == len(PROMPT) - 1


class TestFlushing:
    async def test_empties_the_cache(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.prime(PROMPT)
            cached = engine.statistics().slots_cached
            dropped = engine.flush_cache()
            now = engine.statistics()
            done = await engine.generate(PROMPT, max_tokens=1)

        assert cached == dropped == len(PROMPT)
        assert (now.slots_cached, now.slots_free) == (0, now.slots_total)
        assert done.usage.cached_tokens == 0

    async def test_leaves_what_a_scope_holds(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.prime(PROMPT)
            async with engine.scope(PROMPT):
                held = engine.flush_cache()
            free = engine.flush_cache()

        assert (held, free) == (0, len(PROMPT))

    async def test_while_requests_run_changes_no_token(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            alone = await engine.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
            async with engine.stream(
                PROMPT, max_tokens=40, temperature=0, ignore_eos=True
            ) as deltas:
                tokens: list[int] = []
                async for delta in deltas:
                    engine.flush_cache()
                    tokens += delta.tokens

        assert tuple(tokens) == alone.tokens


class TestStatistics:
    async def test_count_what_was_done(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            for _ in range(2):
                await engine.generate(PROMPT, max_tokens=5, ignore_eos=True)
            async with engine.stream("another", **ENDLESS):
                pass
            await until(lambda: is_idle(engine))
            now = engine.statistics()

        assert (now.requests_finished, now.requests_aborted, now.requests_failed) == (2, 1, 0)
        assert now.cached_tokens == len(PROMPT) - 1
        assert now.generated_tokens >= 10
        assert now.slots_free + now.slots_cached == now.slots_total
        assert now.prompt_tokens in {2 * len(PROMPT), 2 * len(PROMPT) + len("another")}

    async def test_are_a_snapshot(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            before = engine.statistics()
            await engine.generate(PROMPT, max_tokens=1)

            assert (before.steps, engine.statistics().steps) == (0, 1)


class TestADeadline:
    async def test_ends_a_request_and_frees_its_slots(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            with pytest.raises(DeadlineError, match=r"deadline of 0\.02 s"):
                await engine.generate(PROMPT, deadline=0.02, **ENDLESS)
            await until(lambda: is_idle(engine))

            assert engine.statistics().requests_aborted == 1
            assert engine._timers == engine._mailboxes == {}

    async def test_ends_a_request_that_waits_for_its_turn(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, max_running=1) as engine:
            async with engine.stream(PROMPT, **ENDLESS):
                with pytest.raises(DeadlineError):
                    await engine.generate("another", deadline=0.02, max_tokens=1)

            await until(lambda: is_idle(engine))

    async def test_lets_a_stream_read_what_had_come(self, tiny_model: Path) -> None:
        seen: list[int] = []
        async with (
            new_engine(tiny_model) as engine,
            engine.stream(PROMPT, deadline=0.05, **ENDLESS) as deltas,
        ):
            with pytest.raises(DeadlineError):
                await collect(deltas, seen)

        assert seen

    async def test_that_is_far_away_changes_nothing(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            done = await engine.generate(PROMPT, max_tokens=3, deadline=1e30, ignore_eos=True)

            assert done.usage.completion_tokens == 3
            assert engine._timers == {}


class TestNamespaces:
    async def test_share_within_a_tenant_and_never_across(self, tiny_model: Path) -> None:
        async def cached(tenant: str) -> int:
            request = Request(
                prompt=(Text(PROMPT),),
                sampling=Sampling(max_tokens=1),
                namespace=Namespace(tenant=tenant),
            )
            return (await read(engine, request)).usage.cached_tokens

        async with new_engine(tiny_model) as engine:
            found = [await cached(tenant) for tenant in ("a", "a", "b", "", "b", "a")]

        hit = len(PROMPT) - 1
        assert found == [0, hit, 0, 0, hit, hit]

    async def test_at_the_same_time_share_nothing_either(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            used = await asyncio.gather(
                *(engine.prime(PROMPT, namespace=Namespace(tenant=t)) for t in ("a", "b", "c"))
            )

        assert [each.cached_tokens for each in used] == [0, 0, 0]


class Failing:
    """A computer that raises, or computes nonsense, whenever `fault` is set."""

    def __init__(self, real: Computer) -> None:
        self.real = real
        self.fault: BaseException | None = None
        self.broken = False

    def forward(self, batch: Batch) -> Tensor:
        if self.fault is not None:
            raise self.fault
        logits_rv = self.real.forward(batch)
        return torch.full_like(logits_rv, torch.nan) if self.broken else logits_rv

    def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
        return self.real.pick(logits_rv, batch, mask)


def make_fail(engine: Engine) -> Failing:
    failing = Failing(engine.loaded.runner)
    engine._loop._computer = failing
    return failing


@pytest.mark.parametrize("worker", [True, False])
class TestAStepThatFails:
    @pytest.mark.parametrize(
        "fault", [RuntimeError("no memory left"), StopIteration(), KeyError("x")], ids=repr
    )
    async def test_fails_its_requests_and_the_engine_goes_on(
        self, tiny_model: Path, worker: bool, fault: BaseException
    ) -> None:
        async with new_engine(tiny_model, worker=worker) as engine:
            wanted = await engine.generate(PROMPT, max_tokens=9, temperature=0)
            failing = make_fail(engine)
            failing.fault = fault
            found = await asyncio.gather(
                *(engine.generate(PROMPT + end, max_tokens=9) for end in ("", "a", "b")),
                return_exceptions=True,
            )
            failing.fault = None
            after = await engine.generate(PROMPT, max_tokens=9, temperature=0)

            assert [type(each) for each in found] == [StepFailedError] * 3
            assert after.tokens == wanted.tokens
            assert is_idle(engine)
            assert engine.statistics().requests_failed == 3

    async def test_raises_from_its_cause(self, tiny_model: Path, worker: bool) -> None:
        async with new_engine(tiny_model, worker=worker) as engine:
            make_fail(engine).fault = ZeroDivisionError("the cause")
            with pytest.raises(StepFailedError, match="the cause") as caught:
                await engine.score(PROMPT, ["a"])

        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    async def test_of_logits_that_are_not_numbers_poisons_no_later_request(
        self, tiny_model: Path, worker: bool
    ) -> None:
        async with new_engine(tiny_model, worker=worker) as engine:
            wanted = await engine.generate(PROMPT, max_tokens=9, temperature=0)
            engine.flush_cache()
            failing = make_fail(engine)
            failing.broken = True
            with pytest.raises(NumericalError):
                await engine.generate(PROMPT, max_tokens=9, temperature=0)
            failing.broken = False
            after = await engine.generate(PROMPT, max_tokens=9, temperature=0)

            assert after.tokens == wanted.tokens
            assert after.usage.cached_tokens == 0


class TestConfigurations:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    async def test_of_every_dtype_run(self, tiny_model: Path, dtype: Any) -> None:
        async with new_engine(tiny_model, dtype=dtype) as engine:
            done = await engine.generate(PROMPT, max_tokens=8, ignore_eos=True, logprobs=True)

            assert engine.loaded.dtype == getattr(torch, dtype)
            assert done.usage.completion_tokens == 8
            assert all(entry.logprob is not None for entry in done.logprobs)

    async def test_without_a_radix_tree_cache_nothing(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, radix=False) as engine:
            used = [(await engine.generate(PROMPT, max_tokens=3)).usage for _ in range(2)]
            async with engine.scope(PROMPT):
                used.append(await engine.prime(PROMPT))

            assert [each.cached_tokens for each in used] == [0, 0, 0]
            assert engine.statistics().slots_free == engine.statistics().slots_total

    async def test_without_a_worker_compute_on_the_loops_thread(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, worker=False) as engine:
            done = await engine.generate(PROMPT, max_tokens=8, ignore_eos=True)

            assert done.usage.completion_tokens == 8
            assert [t for t in threading.enumerate() if t.name.startswith("structgen")] == []
