"""The default model against transformers' code on the same weights, in float32.

transformers' model is filled from our tensor source, which is checked elsewhere against the `gguf`
package bit for bit; what is compared here is the arithmetic and everything around it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from structgen import Engine
from structgen.engine.encode import Encoder
from structgen.models.checkpoint import Checkpoint, open_checkpoint
from structgen.models.registry import build
from structgen.request import Text
from tests.cases.probes import COUNT, PROBES, Probe, chat
from tests.models.harness import logits_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(default_model: Path) -> Checkpoint:
    return open_checkpoint(default_model)


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint) -> Any:
    source = checkpoint.source
    model: Any = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    weights = {name: source.read(name, torch.float32) for name in source.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) in (([], []), (["lm_head.weight"], []))
    model.tie_weights()
    return model.eval()


def ids_of(checkpoint: Checkpoint, probe: Probe) -> list[int]:
    ids: list[int] = Encoder(checkpoint.tokenizer).encode((Text(probe.prompt),)).tolist()
    return ids


def greedy_after(model: Any, prompt: list[int], found: Sequence[int]) -> tuple[int, ...]:
    """The best next token by the model after the prompt and after each of the tokens found.

    Where they are the tokens found themselves, the model's own greedy output begins with them.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *found]])).logits[0]
    return tuple(logits[len(prompt) - 1 :].argmax(-1).tolist())


class TestProbePrompts:
    @pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
    def test_have_the_logits_of_transformers(
        self, checkpoint: Checkpoint, theirs: Any, probe: Probe
    ) -> None:
        ids = ids_of(checkpoint, probe)
        decoder = build(
            checkpoint.config,
            checkpoint.source,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        with torch.inference_mode():
            wanted = theirs(torch.tensor([ids])).logits[0].numpy()
            found = logits_of(decoder, ids).numpy()

        assert len(ids) == probe.tokens
        assert np.abs(found - wanted).max() < 1e-3 * (wanted.max() - wanted.min())

    async def test_continue_with_the_ids_of_transformers(
        self, checkpoint: Checkpoint, theirs: Any, default_model: Path
    ) -> None:
        async with Engine(default_model, dtype="float32", slots=2000) as engine:
            all_found = await asyncio.gather(
                *(
                    engine.generate(probe.prompt, max_tokens=probe.new, temperature=0)
                    for probe in PROBES
                )
            )

        for probe, found in zip(PROBES, all_found, strict=True):
            assert len(found.tokens) == probe.new
            wanted = greedy_after(theirs, ids_of(checkpoint, probe), found.tokens[:-1])
            assert found.tokens == wanted, probe.name
            assert found.text.startswith(probe.begins)


class TestChats:
    @pytest.mark.parametrize(("text", "new"), [("What is 2+2?", 12), ("What is 1+1?", 11)])
    async def test_end_where_transformers_ends(
        self, theirs: Any, default_model: Path, text: str, new: int
    ) -> None:
        async with Engine(default_model, dtype="float32", slots=2000) as engine:
            found = await engine.generate(
                chat(text), max_tokens=40, temperature=0, prompt_logprobs=0
            )
        prompt = [entry.token for entry in found.prompt_logprobs]

        assert len(prompt) == 37
        assert (*found.tokens, 2) == greedy_after(theirs, prompt, found.tokens)
        assert found.usage.completion_tokens == new
        assert found.finish.matched == 2


class TestScores:
    @pytest.mark.parametrize(
        ("prompt", "continuations"),
        [
            ("Answer:", (" YES", " NO")),
            ("The capital of France is", (" Paris", " Antidisestablishmentarianism", " London")),
        ],
    )
    async def test_are_the_log_probabilities_of_transformers(
        self, theirs: Any, default_model: Path, prompt: str, continuations: tuple[str, ...]
    ) -> None:
        async with Engine(default_model, dtype="float32", slots=2000) as engine:
            cold = await engine.score(prompt, continuations)
            warm = await engine.score(prompt, continuations)
            ids = Encoder(engine.loaded.checkpoint.tokenizer).encode((Text(prompt),)).tolist()

        for first, again in zip(cold, warm, strict=True):
            whole = torch.tensor([[*ids, *first.tokens]])
            with torch.inference_mode():
                logprobs_tv = theirs(whole).logits[0].log_softmax(-1)
            rows = range(len(ids) - 1, whole.shape[1] - 1)
            wanted = [
                float(logprobs_tv[row, token])
                for row, token in zip(rows, first.tokens, strict=True)
            ]
            assert list(first.logprobs) == pytest.approx(wanted, abs=1e-3)
            assert list(again.logprobs) == pytest.approx(wanted, abs=1e-3)


class TestASafetensorsCopy:
    async def test_gives_the_ids_and_logprobs_of_the_gguf_file(
        self, checkpoint: Checkpoint, theirs: Any, default_model: Path, tmp_path: Path
    ) -> None:
        theirs.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["architectures"] = ["LlamaForCausalLM"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        definition = checkpoint.tokenizer._library.to_str()
        (tmp_path / "tokenizer.json").write_text(definition)
        found = []
        for model in (default_model, tmp_path):
            async with Engine(model, dtype="float32", slots=2000) as engine:
                done = await engine.generate(
                    COUNT.prompt, max_tokens=20, temperature=0, logprobs=True
                )
            found.append(done)

        gguf, copy = found
        assert copy.tokens == gguf.tokens
        assert [e.logprob for e in copy.logprobs] == pytest.approx(
            [e.logprob for e in gguf.logprobs], abs=1e-3
        )
