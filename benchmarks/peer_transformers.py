"""The peer: transformers' own Llama code and `generate`, on the very weights that structgen reads.

Used by `__main__.py`. The model is filled from structgen's tensor source, so that both sides hold
the same numbers and no second copy of the checkpoint is needed on disk.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.utils import logging

from structgen.models.checkpoint import open_checkpoint

logging.set_verbosity_error()


class Transformers:
    """transformers' `generate`: greedy, batched, with a prefix cache that is copied if wanted."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        checkpoint = open_checkpoint(model)
        config = LlamaConfig(**checkpoint.config)
        config._attn_implementation = "sdpa"  # noqa: SLF001 - its documented switch is a loader's
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        source = checkpoint.source
        weights = {name: source.read(name, dtype) for name in source.names()}
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert set(missing) <= {"lm_head.weight"}, missing
        assert not unexpected, unexpected
        self.model.tie_weights()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
        """Greedy ids for prompts of one length, and the seconds that it took."""
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
        )
        return out[:, ids.shape[1] :].tolist(), time.perf_counter() - started

    @torch.inference_mode()
    def fork(
        self, prefix: list[int], branches: list[list[int]], new: int
    ) -> tuple[list[list[int]], float]:
        """The prefix once, its cache copied for every branch, then one batched `generate`."""
        started = time.perf_counter()
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([prefix]), past_key_values=cache, logits_to_keep=1)
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(len(branches))
        ids = torch.tensor([prefix + branch for branch in branches])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
        )
        return out[:, ids.shape[1] :].tolist(), time.perf_counter() - started
