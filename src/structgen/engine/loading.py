"""From a model's name to a runner and everything that belongs to the model.

Slow and synchronous: the engine calls it in a thread.
Used   by `engine`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from structgen.engine.config import (
    EngineConfig,
    available_memory,
    choose_dtype,
    choose_slots,
    total_memory,
)
from structgen.engine.constraints import vocabulary_of
from structgen.engine.runner import Runner, slot_bytes
from structgen.errors import UnsupportedError
from structgen.grammar.matcher import Vocabulary
from structgen.grammar.xgrammar_matcher import Compiler
from structgen.models.checkpoint import Checkpoint, open_checkpoint
from structgen.models.decoder import Decoder
from structgen.models.registry import build
from structgen.models.resolve import resolve


class Loaded(msgspec.Struct, frozen=True):
    """A model, ready to run."""

    checkpoint: Checkpoint
    runner: Runner
    dtype: torch.dtype
    slots: int
    max_context: int
    vocabulary: Vocabulary


def load(model: str | Path, config: EngineConfig, device: str = "cpu") -> Loaded:
    """Find, read and place a model. Raises `ModelError` for what cannot be found or read.

    UnsupportedError if the engine is to be deterministic where that cannot be had.
    """
    template = None if config.chat_template is None else Path(config.chat_template)
    checkpoint = open_checkpoint(resolve(model), chat_template=template)
    source = checkpoint.source
    weights = sum(_size(source.shape(name)) for name in source.names())
    dtype = choose_dtype(config, weights, checkpoint.dtype, device)
    decoder = build(
        checkpoint.config,
        source,
        dtype=dtype,
        device=torch.device(device),
        max_context=config.max_context,
    )
    slots = choose_slots(
        config,
        slot_bytes(decoder, dtype),
        decoder.max_context,
        available_memory(),
        total_memory(),
    )
    vocabulary = vocabulary_of(checkpoint, decoder.config.vocab_size)
    if config.xgrammar:
        vocabulary.derived(Compiler)
    runner = _runner(decoder, slots, dtype, config)
    return Loaded(checkpoint, runner, dtype, slots, decoder.max_context, vocabulary)


def _runner(decoder: Decoder, slots: int, dtype: torch.dtype, config: EngineConfig) -> Runner:
    if not config.deterministic:
        return Runner(decoder, slots, dtype)
    # What it may count on is tried here, and depends on how many threads compute.
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or before)
    try:
        return Runner(decoder.deterministic(), slots, dtype, deterministic=True)
    except ValueError as error:
        raise UnsupportedError(str(error)) from error
    finally:
        torch.set_num_threads(before)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
