"""Scores: equal to a run of the whole text in transformers, and computed once a place."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from structgen.core.batch import Batch, Picked
from structgen.engine.engine import Engine
from structgen.engine.loop import Computer
from structgen.engine.score import Path as Way
from structgen.engine.score import Trie
from structgen.errors import (
    ContextLengthError,
    NumericalError,
    OptionError,
    PromptError,
    StepFailedError,
    StructgenError,
)
from structgen.grammar.matcher import Mask
from structgen.models.checkpoint import open_checkpoint
from structgen.request import Lineage, Scores, TokenLogprob, Usage

PROMPT = "the quick brown fox"
SHARED = [" jumps", " jumps over", " jumps over the dog", " jumped", " sits", "."]
EMOJI = "\N{GRINNING FACE}"
THREES = [chr(ord("0") + number) + "ab" for number in range(50)]


def new_engine(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 4000, "threads": 1, **options})


def inner(continuations: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """What the continuations have before each of their tokens: the places that need a row."""
    return {tuple(ids[:end]) for ids in continuations for end in range(len(ids))}


def logprobs_of(scores: Scores) -> list[float]:
    return [logprob for score in scores for logprob in score.logprobs]


def is_idle(engine: Engine) -> bool:
    now = engine.statistics()
    return now.running == now.waiting == now.slots_held == 0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come to be within seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is a number, not an event
            await asyncio.sleep(0.002)


class Work(msgspec.Struct, frozen=True):
    """What an engine did between two looks at it."""

    steps: int
    rows: int
    requests: int


def work_since(engine: Engine, before: Work) -> Work:
    now = engine.statistics()
    return Work(
        steps=now.steps - before.steps,
        rows=now.prefilled_tokens - before.rows,
        requests=now.requests_finished - before.requests,
    )


NOTHING = Work(steps=0, rows=0, requests=0)


# ---------------------------------------------------------------- transformers, one by one


@torch.inference_mode()
def brute_force(
    theirs: Any, before: Sequence[int], endings: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Log-probabilities of each ending, from a run over its whole text; the first of all has 0.

    They run side by side, filled up behind their ends, where nothing that counts can see it.
    """
    wholes = [torch.tensor([*before, *tokens]) for tokens in endings]
    ids_bt = torch.nn.utils.rnn.pad_sequence(wholes, batch_first=True)
    logprobs_btv: Tensor = theirs(ids_bt).logits.float().log_softmax(-1)
    return [
        [
            float(logprobs_btv[number, at - 1, whole[at]]) if at else 0.0
            for at in range(len(before), len(whole))
        ]
        for number, whole in enumerate(wholes)
    ]


def check(theirs: Any, before: Sequence[int], scores: Scores) -> None:
    for start in range(0, len(scores), 32):
        some = scores[start : start + 32]
        wanted = brute_force(theirs, before, [score.tokens for score in some])
        for score, logprobs in zip(some, wanted, strict=True):
            assert list(score.logprobs) == pytest.approx(logprobs, abs=1e-3)
            assert score.total == math.fsum(score.logprobs)


@pytest.fixture(scope="module")
def theirs(tiny_model: Path) -> Any:
    """The tiny model in transformers."""
    model: Any = LlamaForCausalLM.from_pretrained(tiny_model)
    return model.eval()


# ---------------------------------------------------------------- the trie

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def covered(ways: Sequence[Way]) -> list[tuple[int, ...]]:
    """The places that the ways have rows for, in order."""
    return [tuple(way.tokens[: node.depth]) for way in ways for node in way.nodes]


class TestTheTrie:
    @given(continuations=st.lists(tokens, min_size=1, max_size=12))
    @example(continuations=[[0], [0], [0, 1], [0, 1, 2]])
    def test_has_a_row_for_every_place_once(self, continuations: list[list[int]]) -> None:
        places = covered(list(Trie(continuations).paths(rooted=True)))

        assert len(places) == len(set(places))
        assert set(places) == inner(continuations)

    @given(continuations=st.lists(tokens, min_size=1, max_size=12))
    def test_begins_each_path_below_an_earlier_one(self, continuations: list[list[int]]) -> None:
        places: set[tuple[int, ...]] = set()
        for number, way in enumerate(Trie(continuations).paths(rooted=True)):
            first = tuple(way.tokens[: way.nodes[0].depth])

            assert first[:-1] in places or (number == 0 and not first)
            assert [node.depth for node in way.nodes] == [*range(len(first), len(way.tokens) + 1)]
            places.update(covered([way]))

    @given(continuations=st.lists(tokens, min_size=1, max_size=12))
    def test_goes_to_a_deepest_place_first(self, continuations: list[list[int]]) -> None:
        first = next(Trie(continuations).paths(rooted=True))

        assert len(first.tokens) == max(map(len, continuations)) - 1

    @given(continuations=st.lists(tokens, min_size=1, max_size=12))
    def test_without_a_row_at_the_root_has_all_the_others(
        self, continuations: list[list[int]]
    ) -> None:
        ways = list(Trie(continuations).paths(rooted=False))

        assert sorted(covered(ways)) == sorted(inner(continuations) - {()})
        assert all(way.tokens for way in ways)

    @given(continuations=st.lists(tokens, min_size=1, max_size=12))
    def test_gives_back_what_was_found(self, continuations: list[list[int]]) -> None:
        trie = Trie(continuations)
        for way in trie.paths(rooted=True):
            wanted = way.candidates(3)
            places = covered([way])
            assert wanted.first == 3 + len(places[0])
            way.take(
                [
                    TokenLogprob(token, float(hash((place, token))))
                    for place, ids in zip(places, wanted.each, strict=True)
                    for token in ids.tolist()
                ]
            )

        for ids in continuations:
            expected = [float(hash((tuple(ids[:at]), token))) for at, token in enumerate(ids)]
            assert list(trie.logprobs(ids)) == expected

    def test_asks_for_each_token_of_a_place_once(self) -> None:
        (way,) = Trie([[1, 2], [1, 2], [1, 3], [4], [5], [4]]).paths(rooted=True)

        assert [ids.tolist() for ids in way.candidates(1).each] == [[1, 4, 5], [2, 3]]

    def test_may_be_deep(self) -> None:
        continuations = [[0] * 5000, [0] * 4000 + [1, 1]]

        first, second = Trie(continuations).paths(rooted=True)

        assert (len(first.tokens), len(second.tokens)) == (4999, 4001)
        assert len(second.nodes) == 1


# ---------------------------------------------------------------- the figures


class Setting(msgspec.Struct, frozen=True):
    """Options of an engine."""

    chunk_size: int
    max_running: int
    radix: bool
    worker: bool


setting = st.builds(
    Setting,
    chunk_size=st.sampled_from([1, 5, 16, 256]),
    max_running=st.sampled_from([1, 3, 64]),
    radix=st.booleans(),
    worker=st.booleans(),
)
choices = st.lists(
    st.builds(
        lambda shared, end: "ab\N{LATIN SMALL LETTER E WITH ACUTE}ab"[:shared] + end,
        st.integers(0, 5),
        st.text("abx \N{EURO SIGN}", min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=12,
)


class TestScores:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(setting=setting, prompt=st.text("ab \N{EURO SIGN}", max_size=20), texts=choices)
    @example(setting=Setting(256, 64, True, True), prompt="a", texts=["a", "ab", "abx", "a"])
    def test_are_those_of_transformers(
        self, tiny_model: Path, theirs: Any, setting: Setting, prompt: str, texts: list[str]
    ) -> None:
        async def run() -> tuple[tuple[int, ...], list[bytes], Scores, Scores]:
            async with new_engine(tiny_model, **msgspec.structs.asdict(setting)) as engine:
                cold = await engine.score(prompt, texts)
                warm = await engine.score(prompt, texts)
                assert is_idle(engine)
                table = engine.loaded.checkpoint.tokenizer.token_bytes
                return await engine.encode(prompt), table, cold, warm

        before, table, cold, warm = asyncio.run(run())
        spelled = [b"".join(table[token] for token in score.tokens) for score in cold]

        assert [score.text for score in cold] == texts
        assert spelled == [text.encode() for text in texts]
        check(theirs, before, cold)
        assert logprobs_of(warm) == pytest.approx(logprobs_of(cold), abs=1e-4)

    @pytest.mark.parametrize(
        "texts",
        [
            pytest.param(["x"], id="one"),
            pytest.param(["x", "y", "z"], id="single tokens"),
            pytest.param(["a", "ab", "abc", "b"], id="one a prefix of another"),
            pytest.param([EMOJI, EMOJI * 2, "\N{EURO SIGN}", "\u00e9"], id="unicode"),
            pytest.param([f"{number} of 200" for number in range(200)], id="many"),
            pytest.param(["the " * 60, "the " * 59 + "end"], id="long"),
        ],
    )
    @pytest.mark.parametrize("prompt", ["a", PROMPT])
    async def test_of_any_list_are_those_of_transformers(
        self, tiny_model: Path, theirs: Any, prompt: str, texts: list[str]
    ) -> None:
        async with new_engine(tiny_model) as engine:
            scores = await engine.score(prompt, texts)
            before = await engine.encode(prompt)

        check(theirs, before, scores)
        assert [score.text for score in scores] == texts

    @pytest.mark.parametrize("radix", [True, False])
    async def test_are_the_prompt_logprobs_of_the_whole(
        self, tiny_model: Path, radix: bool
    ) -> None:
        async with new_engine(tiny_model, radix=radix) as engine:
            scores = await engine.score(PROMPT, SHARED)
            wholes = [
                await engine.generate(PROMPT + text, max_tokens=1, prompt_logprobs=len(PROMPT))
                for text in SHARED
            ]

        for score, whole in zip(scores, wholes, strict=True):
            entries = [entry.logprob for entry in whole.prompt_logprobs]
            assert list(score.logprobs) == pytest.approx(entries, abs=1e-4)
            assert score.tokens == tuple(entry.token for entry in whole.prompt_logprobs)

    async def test_of_the_same_text_are_the_same(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            scores = await engine.score(PROMPT, [" a", " ab", " a", " ab", " a"])

        assert scores[0] == scores[2] == scores[4]
        assert scores[1] == scores[3] != scores[0]

    async def test_do_not_depend_on_the_order_of_the_list(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            forth = await engine.score(PROMPT, SHARED)
            back = await engine.score(PROMPT, SHARED[::-1])

        assert logprobs_of(Scores(back[::-1])) == pytest.approx(logprobs_of(forth), abs=1e-4)

    async def test_are_found_by_the_side_of_generations(
        self, tiny_model: Path, theirs: Any
    ) -> None:
        options: Any = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        async with new_engine(tiny_model, chunk_size=16) as engine:
            alone = await engine.generate(PROMPT, **options)
            done, scores = await asyncio.gather(
                engine.generate(PROMPT, **options), engine.score(PROMPT, SHARED)
            )
            before = await engine.encode(PROMPT)

        assert done.tokens == alone.tokens
        check(theirs, before, scores)

    async def test_under_pressure_are_the_same(self, tiny_model: Path, theirs: Any) -> None:
        texts = [f"{number} " * 6 for number in range(20)]
        async with new_engine(tiny_model, slots=60, chunk_size=16) as engine:
            scores = await engine.score(PROMPT, texts)
            before = await engine.encode(PROMPT)
            evicted = engine.statistics().evicted_tokens

        assert evicted > 0
        check(theirs, before, scores)


class TestAnEmptyPrompt:
    async def test_leaves_out_the_first_token(self, tiny_model: Path, theirs: Any) -> None:
        texts = ["ab", "abc", "ax", "b", "by", EMOJI]
        async with new_engine(tiny_model) as engine:
            scores = await engine.score("", texts)
            work = work_since(engine, NOTHING)

        assert all(score.logprobs[0] == 0.0 for score in scores)
        check(theirs, [], scores)
        assert scores.usage == Usage()
        assert work.rows == len(inner([score.tokens for score in scores])) - 1

    async def test_with_single_tokens_has_nothing_to_compute(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            scores = await engine.score((), ["a", "b"])

            assert [score.logprobs for score in scores] == [(0.0,), (0.0,)]
            assert engine.statistics().steps == 0

    @pytest.mark.parametrize("put", [True, False], ids=["put by the tokenizer", "only named"])
    async def test_is_the_bos_token_where_there_is_one(
        self, tiny_model: Path, tmp_path: Path, theirs: Any, put: bool
    ) -> None:
        async with new_engine(with_bos(tiny_model, tmp_path, put=put)) as engine:
            scores = await engine.score("", ["ab", "ac", "b"])

        check(theirs, [256], scores)
        assert scores.usage == Usage(prompt_tokens=1)


def with_bos(model: Path, folder: Path, *, put: bool) -> Path:
    """A copy of the tiny model that names token 256 as BOS; `put`: before every text, too."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    bos = "<|endoftext|>"
    change(copy / "tokenizer_config.json", bos_token=bos)
    if put:
        special = {"SpecialToken": {"id": bos, "type_id": 0}}
        one, two = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
        template = {
            "type": "TemplateProcessing",
            "single": [special, one],
            "pair": [special, one, two],
            "special_tokens": {bos: {"id": bos, "ids": [256], "tokens": [bos]}},
        }
        change(copy / "tokenizer.json", post_processor=template)
    return copy


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# ---------------------------------------------------------------- what they cost


class TestTheWork:
    async def test_of_fifty_choices_of_three_tokens_is_one_step(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.prime(PROMPT)
            primed = work_since(engine, NOTHING)
            await engine.score(PROMPT, THREES)

            # The prompt's last token, for its logits, and two of each choice.
            assert work_since(engine, primed) == Work(steps=1, rows=1 + 100, requests=50)

    async def test_takes_in_the_prompt_in_the_same_step(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.score(PROMPT, THREES)

            assert work_since(engine, NOTHING) == Work(1, len(PROMPT) + 100, 50)

    async def test_of_single_tokens_is_one_row(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.prime(PROMPT)
            primed = work_since(engine, NOTHING)
            await engine.score(PROMPT, [chr(number) for number in range(32, 127)])

            assert work_since(engine, primed) == Work(1, 1, 1)

    @pytest.mark.parametrize("max_running", [1, 2, 7, 64])
    @pytest.mark.parametrize("chunk_size", [1, 16, 256])
    async def test_computes_each_place_once_however_many_steps_it_takes(
        self, tiny_model: Path, max_running: int, chunk_size: int
    ) -> None:
        texts = [f"{a}{b}{c}!" for a in "abcde" for b in "fgh" for c in "ijklm"]
        async with new_engine(tiny_model, max_running=max_running, chunk_size=chunk_size) as engine:
            scores = await engine.score(PROMPT, texts)
            work = work_since(engine, NOTHING)

        places = inner([score.tokens for score in scores])
        assert work.rows == len(PROMPT) + len(places) - 1
        assert work.steps <= -(-75 // max_running) + -(-work.rows // chunk_size)

    async def test_of_two_hundred_choices_takes_as_many_steps_as_jobs_need(
        self, tiny_model: Path
    ) -> None:
        texts = [f"{number:03d}" for number in range(200)]
        async with new_engine(tiny_model) as engine:
            await engine.prime(PROMPT)
            primed = work_since(engine, NOTHING)
            await engine.score(PROMPT, texts)

            # Places: the prompt's end, 2 hundreds, 20 tens; the paths are as many as the tens.
            assert work_since(engine, primed) == Work(1, 1 + 2 + 20, 20)

    async def test_is_the_same_again_but_for_the_slots(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.score(PROMPT, THREES)
            first, free = work_since(engine, NOTHING), engine.statistics().slots_free
            await engine.score(PROMPT, THREES)

            assert work_since(engine, first) == Work(1, 1 + 100, 50)
            assert engine.statistics().slots_free == free

    async def test_never_includes_the_last_token_of_a_choice(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.score(PROMPT, ["x", "yz"])
            done = await engine.generate(PROMPT + "yz", max_tokens=1)
            other = await engine.generate(PROMPT + "x!", max_tokens=1)

        assert done.usage.cached_tokens == len(PROMPT) + 1
        assert other.usage.cached_tokens == len(PROMPT)

    async def test_without_the_radix_tree_is_a_path_for_each_end(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, radix=False) as engine:
            await engine.score(PROMPT, THREES)

            assert work_since(engine, NOTHING).rows == 50 * (len(PROMPT) + 2)


class TestTheUsage:
    async def test_counts_the_prompt_once_and_nothing_else(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine:
            cold = (await engine.score(PROMPT, SHARED)).usage
            warm = (await engine.score(PROMPT, SHARED)).usage

        assert cold == Usage(prompt_tokens=len(PROMPT))
        assert warm == Usage(prompt_tokens=len(PROMPT), cached_tokens=len(PROMPT) - 1)

    async def test_counts_as_cached_what_was_there_before(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, chunk_size=4) as engine:
            await engine.prime(PROMPT[:7])
            usage = (await engine.score(PROMPT, SHARED)).usage

        assert usage == Usage(prompt_tokens=len(PROMPT), cached_tokens=7)

    async def test_does_not_count_what_choices_find_beyond_the_prompt(
        self, tiny_model: Path
    ) -> None:
        async with new_engine(tiny_model) as engine:
            await engine.prime(PROMPT + " jumps over the")
            usage = (await engine.score(PROMPT, SHARED)).usage

        assert usage.cached_tokens == len(PROMPT) - 1

    async def test_without_the_radix_tree_counts_nothing_as_cached(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, radix=False) as engine:
            await engine.prime(PROMPT)
            usage = (await engine.score(PROMPT, SHARED)).usage

        assert usage == Usage(prompt_tokens=len(PROMPT))


# ---------------------------------------------------------------- how they end


class TestARefusal:
    @pytest.mark.parametrize(
        ("prompt", "continuations", "error", "message"),
        [
            (PROMPT, ["fine", "x" * 600], ContextLengthError, "xxx.* make 619, more than the"),
            (PROMPT, ["fine", "x" * 600_000], ContextLengthError, "at least 46153 tokens"),
            ("", ["x" * 513], ContextLengthError, "make 513, more than the context of 512"),
            (PROMPT, ["fine", "x" * 200], ContextLengthError, "218 slots, but the pool has 200"),
            (PROMPT, ["fine", ""], PromptError, "a continuation is empty"),
            (PROMPT, ["fine", "\ud83d"], PromptError, "not text"),
            (PROMPT, "a string", OptionError, r"continuations: .*write \[text\]"),
            (PROMPT, b"bytes", OptionError, "continuations: expected strings, got 98"),
            (PROMPT, None, OptionError, "continuations: expected a list of strings"),
            (PROMPT, [], OptionError, "continuations: .*an empty list"),
            (PROMPT, ["fine", 3], OptionError, "continuations: expected strings, got 3"),
        ],
    )
    async def test_comes_before_any_work(
        self,
        tiny_model: Path,
        prompt: str,
        continuations: Any,
        error: type[StructgenError],
        message: str,
    ) -> None:
        async with new_engine(tiny_model, slots=200) as engine:
            with pytest.raises(error, match=message):
                await engine.score(prompt, continuations)

            assert engine.statistics().steps == engine.statistics().requests_aborted == 0
            assert engine._core._sequences == {}
            assert (await engine.score(PROMPT, ["fine"]))[0].text == "fine"

    async def test_is_not_met_by_what_just_fits(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, slots=200) as engine:
            (score,) = await engine.score(PROMPT, ["x" * (201 - len(PROMPT))])

        assert len(score.logprobs) == 201 - len(PROMPT)


def is_untouched(engine: Engine) -> bool:
    """That nobody remembers a request."""
    left = (engine._mailboxes, engine._core._sequences, engine._waits._waited, engine._timers)
    return all(each == {} for each in left)


class TestCancelling:
    @pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5, 8, 13, 21])
    @pytest.mark.parametrize("worker", [True, False])
    async def test_leaves_no_trace(self, tiny_model: Path, rounds: int, worker: bool) -> None:
        async with new_engine(tiny_model, chunk_size=3, max_running=4, worker=worker) as engine:
            wanted = await engine.score(PROMPT, SHARED)
            engine.flush_cache()
            task = asyncio.ensure_future(engine.score(PROMPT, SHARED))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: is_idle(engine))

            assert is_untouched(engine)
            now = engine.statistics()
            assert now.slots_free + now.slots_cached == now.slots_total
            again = await engine.score(PROMPT, SHARED)
            assert logprobs_of(again) == pytest.approx(logprobs_of(wanted), abs=1e-4)

    async def test_ends_all_jobs_of_the_call(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model, chunk_size=1) as engine:
            task = asyncio.ensure_future(engine.score(PROMPT * 20, ["ab", "cd", "e", "ef"]))
            await until(lambda: engine.statistics().steps > 2)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: is_idle(engine))

            assert engine.statistics().requests_aborted == 3
            assert is_untouched(engine)


class Faulty:
    """A computer whose step with that number, counted from 1, raises or computes nonsense."""

    def __init__(self, real: Computer, step: int, *, raises: bool) -> None:
        self.real, self.step, self.raises = real, step, raises
        self.steps = 0

    def forward(self, batch: Batch) -> Tensor:
        self.steps += 1
        if self.steps != self.step:
            return self.real.forward(batch)
        if self.raises:
            raise ZeroDivisionError("the cause")
        return torch.full_like(self.real.forward(batch), torch.nan)

    def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
        return self.real.pick(logits_rv, batch, mask)


class TestAFault:
    @pytest.mark.parametrize("step", [1, 2, 3])
    @pytest.mark.parametrize(
        ("raises", "error"), [(True, StepFailedError), (False, NumericalError)]
    )
    async def test_in_any_step_fails_the_call_and_nothing_later(
        self, tiny_model: Path, step: int, raises: bool, error: type[StructgenError]
    ) -> None:
        async with new_engine(tiny_model, max_running=1) as engine:
            wanted = await engine.score(PROMPT, SHARED)
            engine.flush_cache()
            engine._loop._computer = Faulty(engine.loaded.runner, step, raises=raises)
            with pytest.raises(error):
                await engine.score(PROMPT, SHARED)
            await until(lambda: is_idle(engine))

            assert is_untouched(engine)
            again = await engine.score(PROMPT, SHARED)
            assert logprobs_of(again) == pytest.approx(logprobs_of(wanted), abs=1e-4)


class TestAScope:
    async def test_keeps_the_prompt_that_was_scored_in_it(self, tiny_model: Path) -> None:
        async with new_engine(tiny_model) as engine, engine.scope(PROMPT) as scope:
            await engine.score(PROMPT, SHARED, lineage=Lineage(scope=scope))
            engine.flush_cache()

            assert engine.statistics().slots_held == len(PROMPT)


# ---------------------------------------------------------------- the default model

WORDS = tuple(
    word
    for line in (
        "red blue old new big small good bad cat dog",
        "man woman sun moon tree house car road",
    )
    for word in line.split()
)


@pytest.fixture(scope="module")
def default_theirs(default_model: Path) -> Any:
    """transformers' code on the weights of the default model, in float32."""
    checkpoint = open_checkpoint(default_model)
    model: Any = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    source = checkpoint.source
    weights = {name: source.read(name, torch.float32) for name in source.names()}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.mark.slow
class TestTheDefaultModel:
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    async def scored(
        self, model: Path, prompt: str, texts: Sequence[str]
    ) -> tuple[tuple[int, ...], Scores, Work]:
        """The ids of the prompt, the scores behind it, and what they took once it was primed."""
        async with new_engine(model, dtype="float32") as engine:
            await engine.prime(prompt)
            primed = work_since(engine, NOTHING)
            scores = await engine.score(prompt, texts)
            work = work_since(engine, primed)
            assert is_idle(engine)
            return await engine.encode(prompt), scores, work

    @pytest.mark.parametrize(
        "options", [{}, {"chunk_size": 16, "max_running": 3}, {"radix": False}], ids=str
    )
    async def test_scores_as_transformers_does(
        self, default_model: Path, default_theirs: Any, options: dict[str, Any]
    ) -> None:
        random = Random(0)
        async with new_engine(default_model, dtype="float32", **options) as engine:
            for _ in range(3):
                prompt = " ".join(random.choices(WORDS, k=random.randint(1, 12)))
                few = [*random.sample(WORDS, 2), EMOJI, "Z\u00fcrich"]
                texts = [
                    " " + " ".join(random.choices(few, k=random.randint(1, 4)))
                    for _ in range(random.randint(1, 12))
                ]
                scores = await engine.score(prompt, texts)
                check(default_theirs, await engine.encode(prompt), scores)

    async def test_scores_two_hundred_choices_as_transformers_does(
        self, default_model: Path, default_theirs: Any
    ) -> None:
        texts = [f" {a} {b}" for a in WORDS for b in WORDS][:200]
        before, scores, work = await self.scored(default_model, "I see a", texts)

        check(default_theirs, before, scores)
        assert work.rows == len(inner([score.tokens for score in scores]))

    async def test_scores_fifty_choices_of_three_tokens_in_one_step(
        self, default_model: Path, default_theirs: Any
    ) -> None:
        texts = [f" {a} {b} {b}" for a in WORDS for b in WORDS[:3]][:50]
        before, scores, work = await self.scored(default_model, "I see a", texts)

        assert all(len(score.tokens) == 3 for score in scores)
        check(default_theirs, before, scores)
        assert work.steps == 1
        assert work.rows == len(inner([score.tokens for score in scores]))

    async def test_scores_yes_and_no_so_that_sum_and_mean_differ(
        self, default_model: Path, default_theirs: Any
    ) -> None:
        before, scores, _ = await self.scored(default_model, "Answer:", [" YES", " NO"])
        yes, no = scores

        check(default_theirs, before, scores)
        # What another copy of the weights, rounded to bfloat16, gave.
        assert list(yes.logprobs) == pytest.approx([-9.4275, -2.8949], abs=0.03)
        assert list(no.logprobs) == pytest.approx([-10.8771], abs=0.03)
        assert yes.total < no.total
        assert np.mean(yes.logprobs) > np.mean(no.logprobs)

    async def test_scores_after_no_prompt_what_follows_its_bos(
        self, default_model: Path, default_theirs: Any
    ) -> None:
        async with new_engine(default_model, dtype="float32") as engine:
            scores = await engine.score("", [" YES", " NO", " Paris"])

        check(default_theirs, [1], scores)

    async def test_scores_the_capital_of_france_highest_by_any_measure(
        self, default_model: Path, default_theirs: Any
    ) -> None:
        texts = [" Paris", " Antidisestablishmentarianism", " London"]
        before, scores, _ = await self.scored(default_model, "The capital of France is", texts)

        check(default_theirs, before, scores)
        assert max(scores, key=lambda score: score.total).text == " Paris"
        assert max(scores, key=lambda score: float(np.mean(score.logprobs))).text == " Paris"
        assert max(scores, key=lambda score: score.logprobs[0]).text == " Paris"
