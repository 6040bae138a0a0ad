"""What the engine computes on a tiny model, against transformers and against itself.

The references know no batch, no cache and no chunk: transformers' logits of a whole sequence, and
a greedy loop of a few lines over them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from structgen.engine.engine import Engine
from structgen.request import Completion

PROMPTS = ("the quick brown fox", "a", "1, 2, 3, 4, 5, 6, 7, 8,", "\u00e4\u20ac\U0001f600" * 5)
END = 258
Edit = Callable[[Tensor, list[int], list[int]], Tensor]


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 2000, "threads": 1, **options})


@pytest.fixture(scope="session")
def theirs(tiny_model: Path) -> Any:
    """The tiny model in transformers."""
    model: Any = LlamaForCausalLM.from_pretrained(tiny_model)
    return model.eval()


@torch.inference_mode()
def logits_tv(theirs: Any, ids: Sequence[int]) -> Tensor:
    logits: Tensor = theirs(torch.tensor([list(ids)])).logits[0]
    return logits


def logprobs_tv(theirs: Any, ids: Sequence[int]) -> Tensor:
    return logits_tv(theirs, ids).log_softmax(-1)


def greedy(
    theirs: Any, prompt: list[int], new: int, edit: Edit, ends: Sequence[int] = (END,)
) -> list[int]:
    """Decode greedily with `edit` applied to the logits of each step; the end is not kept."""
    output: list[int] = []
    for _ in range(new):
        token = int(edit(logits_tv(theirs, prompt + output)[-1], prompt, output).argmax())
        if token in ends:
            break
        output.append(token)
    return output


def encoded(engine: Engine, text: str) -> list[int]:
    return engine.loaded.checkpoint.tokenizer.encode(text)


def found_logprobs(completion: Completion) -> list[float]:
    return [entry.logprob for entry in completion.logprobs if entry.logprob is not None]


class TestGreedyIds:
    @pytest.mark.parametrize("options", [{}, {"radix": False}, {"chunk_size": 3}], ids=str)
    async def test_are_those_of_transformers(
        self, tiny_model: Path, theirs: Any, options: dict[str, Any]
    ) -> None:
        async with new_engine(tiny_model, **options) as engine:
            found = await asyncio.gather(
                *(engine.generate(text, max_tokens=40, temperature=0) for text in PROMPTS)
            )
            prompts = [torch.tensor([encoded(engine, text)]) for text in PROMPTS]

        for done, prompt in zip(found, prompts, strict=True):
            whole = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=40,
                do_sample=False,
                pad_token_id=0,
            )
            kept = [token for token in whole[0, prompt.shape[1] :].tolist() if token != END]
            assert list(done.tokens) == kept

    async def test_are_those_of_a_temperature_near_zero(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            found = [
                await engine.generate(PROMPTS[0], max_tokens=20, temperature=temperature)
                for temperature in (0, 1e-30, 1e-300)
            ]
            found.append(await engine.generate(PROMPTS[0], max_tokens=20, top_k=1))
            found.append(await engine.generate(PROMPTS[0], max_tokens=20, top_p=1e-300))

        assert {done.tokens for done in found} == {found[0].tokens}


class TestLogprobs:
    @pytest.mark.parametrize("radix", [True, False])
    @pytest.mark.parametrize("temperature", [0.0, 1.3])
    async def test_of_outputs_are_those_of_transformers_cold_and_warm(
        self, tiny_model: Path, theirs: Any, radix: bool, temperature: float
    ) -> None:
        options: Any = {"max_tokens": 12, "temperature": temperature, "seed": 7, "top_logprobs": 5}
        async with new_engine(tiny_model, radix=radix) as engine:
            prompt = encoded(engine, PROMPTS[0])
            runs = [await engine.generate(PROMPTS[0], ignore_eos=True, **options) for _ in range(2)]

        wanted_tv = logprobs_tv(theirs, [*prompt, *runs[0].tokens])
        for run in runs:
            assert run.tokens == runs[0].tokens
            for at, entry in enumerate(run.logprobs, start=len(prompt) - 1):
                best = wanted_tv[at].topk(5)
                assert entry.logprob == pytest.approx(float(wanted_tv[at, entry.token]), abs=1e-3)
                assert [token for token, _ in entry.top] == best.indices.tolist()
                assert [value for _, value in entry.top] == pytest.approx(
                    best.values.tolist(), abs=1e-3
                )

    @pytest.mark.parametrize("chunk_size", [4, 512])
    async def test_of_prompts_are_those_of_transformers_cold_and_warm(
        self, tiny_model: Path, theirs: Any, chunk_size: int
    ) -> None:
        async with new_engine(tiny_model, chunk_size=chunk_size) as engine:
            prompt = encoded(engine, PROMPTS[2])
            runs = [
                await engine.generate(
                    PROMPTS[2], max_tokens=1, prompt_logprobs=start, top_logprobs=2
                )
                for start in (0, 0, 9)
            ]

        wanted_tv = logprobs_tv(theirs, prompt)
        for run, start in zip(runs, (0, 0, 9), strict=True):
            assert [entry.token for entry in run.prompt_logprobs] == prompt[start:]
            for at, entry in enumerate(run.prompt_logprobs, start=start):
                if not at:
                    assert entry.logprob is None
                    continue
                wanted = float(wanted_tv[at - 1, prompt[at]])
                assert entry.logprob == pytest.approx(wanted, abs=1e-3)
                assert [token for token, _ in entry.top] == wanted_tv[at - 1].topk(
                    2
                ).indices.tolist()

    async def test_are_of_the_models_own_distribution(self, tiny_model: Path, theirs: Any) -> None:
        """Bias, penalties and temperature change what is drawn, not what is reported."""
        async with new_engine(tiny_model) as engine:
            prompt = encoded(engine, PROMPTS[0])
            done = await engine.generate(
                PROMPTS[0],
                max_tokens=3,
                temperature=0.3,
                logit_bias={66: 100.0},
                presence_penalty=1.0,
                logprobs=True,
            )

        wanted_tv = logprobs_tv(theirs, [*prompt, *done.tokens])[len(prompt) - 1 :]
        assert done.tokens == (66, 66, 66)
        assert found_logprobs(done) == pytest.approx(wanted_tv[:3, 66].tolist(), abs=1e-3)


class TestScores:
    async def test_are_sums_of_transformers_logprobs(self, tiny_model: Path, theirs: Any) -> None:
        endings = [" jumps", " over the lazy dog", "\U0001f600"]
        async with new_engine(tiny_model) as engine:
            before = encoded(engine, PROMPTS[0])
            scores = [*await engine.score(PROMPTS[0], endings)]
            scores += await engine.score(PROMPTS[0], endings)

        for score in scores:
            wanted_tv = logprobs_tv(theirs, [*before, *score.tokens])[len(before) - 1 : -1]
            wanted = wanted_tv.gather(1, torch.tensor(score.tokens)[:, None])[:, 0]
            assert list(score.logprobs) == pytest.approx(wanted.tolist(), abs=1e-3)
            assert score.total == pytest.approx(float(wanted.sum()), abs=1e-2)
        assert [score.text for score in scores] == endings * 2


def repeated(penalty: float) -> Edit:
    def edit(x_v: Tensor, prompt: list[int], output: list[int]) -> Tensor:
        seen = torch.tensor(sorted({*prompt, *output}))
        old = x_v[seen]
        return x_v.index_copy(0, seen, torch.where(old < 0, old * penalty, old / penalty))

    return edit


def counted(frequency: float, presence: float) -> Edit:
    def edit(x_v: Tensor, _: list[int], output: list[int]) -> Tensor:
        x_v = x_v.clone()
        for token in set(output):
            x_v[token] -= frequency * output.count(token) + presence
        return x_v

    return edit


def biased(bias: dict[int, float]) -> Edit:
    def edit(x_v: Tensor, _: list[int], __: list[int]) -> Tensor:
        x_v = x_v.clone()
        for token, value in bias.items():
            x_v[token] += value
        return x_v

    return edit


def banned_before(count: int, ids: Sequence[int]) -> Edit:
    def edit(x_v: Tensor, _: list[int], output: list[int]) -> Tensor:
        if len(output) >= count:
            return x_v
        return x_v.index_fill(0, torch.tensor(list(ids)), -torch.inf)

    return edit


def plain(x_v: Tensor, _: list[int], __: list[int]) -> Tensor:
    return x_v


class TestWhatShapesAnOutput:
    @pytest.mark.parametrize(
        ("options", "edit"),
        [
            ({"repetition_penalty": 1.8}, repeated(1.8)),
            ({"repetition_penalty": 0.7}, repeated(0.7)),
            ({"frequency_penalty": 1.5}, counted(1.5, 0.0)),
            ({"presence_penalty": 2.0}, counted(0.0, 2.0)),
            ({"frequency_penalty": -2.0, "presence_penalty": -1.0}, counted(-2.0, -1.0)),
            ({"logit_bias": {10: 5.0, 20: -4.0, 110: -100.0}}, biased({10: 5, 20: -4, 110: -100})),
        ],
        ids=["repetition up", "repetition down", "frequency", "presence", "reward", "bias"],
    )
    async def test_changes_the_logits_as_it_says(
        self, tiny_model: Path, theirs: Any, options: dict[str, Any], edit: Edit
    ) -> None:
        async with new_engine(tiny_model) as engine:
            prompts = [encoded(engine, text) for text in PROMPTS]
            asked = {"max_tokens": 30, "temperature": 0, **options}
            found = await asyncio.gather(*(engine.generate(ids, **asked) for ids in prompts))

        outputs = [list(done.tokens) for done in found]
        assert outputs == [greedy(theirs, ids, 30, edit) for ids in prompts]
        assert outputs != [greedy(theirs, ids, 30, plain) for ids in prompts]

    async def test_min_tokens_keeps_the_end_away(self, tiny_model: Path, theirs: Any) -> None:
        async with new_engine(tiny_model) as engine:
            prompt = encoded(engine, PROMPTS[0])
            free = greedy(theirs, prompt, 40, plain)
            ends = free[5:7]
            done = await engine.generate(
                PROMPTS[0], max_tokens=40, temperature=0, stop_token_ids=ends
            )
            longer = await engine.generate(
                PROMPTS[0], max_tokens=40, temperature=0, stop_token_ids=ends, min_tokens=12
            )

        stops = [END, *ends]
        assert list(done.tokens) == greedy(theirs, prompt, 40, plain, stops)
        assert (done.finish.reason, done.finish.matched) == ("stop", free[len(done.tokens)])
        assert done.usage.completion_tokens == len(done.tokens) + 1
        assert list(longer.tokens) == greedy(theirs, prompt, 40, banned_before(12, stops), stops)
        assert len(longer.tokens) >= 12

    async def test_the_end_token_ends_unless_it_is_ignored(self, tiny_model: Path) -> None:
        bias = {END: 100.0}
        async with new_engine(tiny_model) as engine:
            ended = await engine.generate(PROMPTS[0], max_tokens=5, logit_bias=bias)
            ignored = await engine.generate(
                PROMPTS[0], max_tokens=5, logit_bias=bias, ignore_eos=True
            )

        assert (ended.tokens, ended.text, ended.finish.reason) == ((), "", "stop")
        assert (ended.finish.matched, ended.usage.completion_tokens) == (END, 1)
        assert (ignored.tokens, ignored.text) == ((END,) * 5, "")
        assert ignored.finish.reason == "length"

    async def test_top_p_min_p_and_top_k_leave_out_what_is_unlikely(
        self, tiny_model: Path, theirs: Any
    ) -> None:
        async def drawn(**options: Any) -> set[int]:
            done = await asyncio.gather(
                *(
                    engine.generate(PROMPTS[0], max_tokens=1, temperature=2, seed=seed, **options)
                    for seed in range(120)
                )
            )
            return {token for each in done for token in each.tokens}

        async with new_engine(tiny_model) as engine:
            scaled_v = logits_tv(theirs, encoded(engine, PROMPTS[0]))[-1] / 2
            free, k, p, low = (
                await drawn(),
                await drawn(top_k=4),
                await drawn(top_p=0.5),
                await drawn(min_p=0.4),
            )

        probability_v, order_v = scaled_v.softmax(-1).sort(descending=True)
        inside = int((probability_v.cumsum(0) - probability_v < 0.5).sum())
        likely = int((probability_v >= 0.4 * probability_v[0]).sum())
        assert len(free) > 20
        assert k <= set(order_v[:4].tolist())
        assert p <= set(order_v[:inside].tolist())
        assert low <= set(order_v[:likely].tolist())


DRAWN: dict[str, Any] = {"max_tokens": 30, "temperature": 1.5, "ignore_eos": True}


class TestSeeds:
    async def test_give_the_same_alone_batched_and_after_retraction(self, tiny_model: Path) -> None:
        async def draw(engine: Engine, seed: int) -> tuple[int, ...]:
            return (await engine.generate(PROMPTS[0], seed=seed, **DRAWN)).tokens

        async with new_engine(tiny_model) as engine:
            alone = [await draw(engine, seed) for seed in range(6)]
            batched = await asyncio.gather(*(draw(engine, seed) for seed in range(6)))
        async with new_engine(tiny_model, slots=120, radix=False, chunk_size=7) as engine:
            # All prompts fit together, all outputs do not.
            engine._core.schedule._expected = 0.1
            retracted = await asyncio.gather(*(draw(engine, seed) for seed in range(6)))
            retractions = engine.statistics().retractions

        assert batched == alone
        assert retracted == alone
        assert retractions > 0
        assert len(set(alone)) == 6

    async def test_of_the_engine_give_its_requests_theirs(self, tiny_model: Path) -> None:
        async def draw(seed: int) -> list[tuple[int, ...]]:
            async with new_engine(tiny_model, seed=seed) as engine:
                found = [await engine.generate(PROMPTS[0], **DRAWN) for _ in range(3)]
                return [each.tokens for each in found]

        first, again, other = await draw(1), await draw(1), await draw(2)

        assert first == again
        assert len({*first, *other}) == 6


class Asked(msgspec.Struct, frozen=True):
    """One request of a random workload, when it starts, and when it is cancelled, if ever."""

    prompt: str
    new: int
    seed: int | None
    start: int
    patience: int | None


class Setting(msgspec.Struct, frozen=True):
    """Options of an engine."""

    slots: int
    chunk_size: int
    max_running: int
    radix: bool
    worker: bool


PREFIX = "ab" * 12
prompts = st.builds(
    lambda shared, end: PREFIX[:shared] + end,
    st.integers(0, len(PREFIX)),
    st.text("abc", min_size=1, max_size=6),
)
asked = st.builds(
    Asked,
    prompt=prompts,
    new=st.integers(1, 10),
    seed=st.none() | st.integers(0, 3),
    start=st.integers(0, 12),
    patience=st.none() | st.none() | st.integers(0, 25),
)
setting = st.builds(
    Setting,
    slots=st.integers(40, 160),
    chunk_size=st.integers(1, 24),
    max_running=st.integers(1, 5),
    radix=st.booleans(),
    worker=st.booleans(),
)


def options_of(each: Asked) -> Any:
    drawn = {"temperature": 0.0} if each.seed is None else {"temperature": 1.2, "seed": each.seed}
    return {"max_tokens": each.new, "ignore_eos": True, **drawn}


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Callable[[Asked], tuple[int, ...]]:
    """The ids of a request in an engine that has nothing else to do and no cache."""

    @cache
    def run(prompt: str, new: int, seed: int | None) -> tuple[int, ...]:
        async def main() -> tuple[int, ...]:
            async with new_engine(tiny_model, radix=False, worker=False) as engine:
                options = options_of(Asked(prompt, new, seed, 0, None))
                return (await engine.generate(prompt, **options)).tokens

        return asyncio.run(main())

    return lambda each: run(each.prompt, each.new, each.seed)


class TestRandomWorkloads:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(setting=setting, workload=st.lists(asked, min_size=1, max_size=9))
    def test_give_the_ids_of_each_request_alone(
        self,
        tiny_model: Path,
        alone: Callable[[Asked], tuple[int, ...]],
        setting: Setting,
        workload: list[Asked],
    ) -> None:
        found = asyncio.run(self.run(tiny_model, setting, workload))

        for each, result in zip(workload, found, strict=True):
            if isinstance(result, Completion):
                assert result.tokens == alone(each)
            else:
                assert each.patience is not None
                assert isinstance(result, asyncio.CancelledError)

    async def run(
        self, model: Path, setting: Setting, workload: list[Asked]
    ) -> list[Completion | BaseException]:
        async def one(engine: Engine, each: Asked) -> Completion:
            for _ in range(each.start):
                await asyncio.sleep(0)
            return await engine.generate(each.prompt, **options_of(each))

        async def lose_patience(task: asyncio.Task[Completion], each: Asked) -> None:
            if each.patience is not None:
                for _ in range(each.start + each.patience):
                    await asyncio.sleep(0)
                task.cancel()

        async with Engine(model, threads=1, **msgspec.structs.asdict(setting)) as engine:
            tasks = [asyncio.create_task(one(engine, each)) for each in workload]
            cancelling = [lose_patience(t, e) for t, e in zip(tasks, workload, strict=True)]
            async with asyncio.timeout(60):
                await asyncio.gather(*cancelling)
                found = await asyncio.gather(*tasks, return_exceptions=True)
                while not (now := engine.statistics()).running == now.waiting == 0:  # noqa: ASYNC110 - what is waited for is a number, not an event
                    await asyncio.sleep(0)
            assert (engine._mailboxes, engine._core._sequences) == ({}, {})
            assert now.slots_free + now.slots_cached == now.slots_total
        return found
