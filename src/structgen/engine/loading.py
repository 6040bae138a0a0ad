"""From a model's name to a runner and everything that belongs to the model.

Slow and synchronous: the engine calls it in a thread.
Used   by `engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from structgen.engine.config import (
    EngineConfig,
    choose_dtype,
    choose_slots,
    memory_of,
)
from structgen.engine.constraints import vocabulary_of
from structgen.engine.runner import Runner, slot_bytes
from structgen.errors import OptionError, UnsupportedError
from structgen.grammar.matcher import Vocabulary
from structgen.grammar.xgrammar_matcher import Compiler
from structgen.kernels.choose import Kernels, deterministic_kernels_for, kernels_for
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


def load(
    model: str | Path,
    config: EngineConfig,
    *,
    kernels_of: Callable[[torch.device], Kernels] = kernels_for,
) -> Loaded:
    """Find, read and place a model on `config.device`.

    kernels_of   another table than that of `kernels/choose.py`; tests give one in which Triton
                 interprets on the CPU

    Raises `ModelError` for what cannot be found or read, `OptionError` for a device or a model
    that there are no kernels for, `UnsupportedError` if the engine is to be deterministic where
    that cannot be had.
    """
    device = torch.device(config.device)
    try:
        kernels = (deterministic_kernels_for if config.deterministic else kernels_of)(device)
    except ValueError as error:
        raise OptionError("device", str(error)) from error
    template = None if config.chat_template is None else Path(config.chat_template)
    checkpoint = open_checkpoint(resolve(model), chat_template=template)
    source = checkpoint.source
    weights = sum(_size(source.shape(name)) for name in source.names())
    dtype = choose_dtype(config, weights, checkpoint.dtype, device.type)
    decoder = build(
        checkpoint.config,
        source,
        dtype=dtype,
        device=device,
        max_context=config.max_context,
        operations=kernels.operations,
    )
    slots = choose_slots(
        config,
        slot_bytes(decoder, dtype),
        decoder.max_context,
        *memory_of(device),
    )
    vocabulary = vocabulary_of(checkpoint, decoder.config.vocab_size)
    if config.xgrammar:
        vocabulary.derived(Compiler)
    runner = _runner(decoder, slots, dtype, kernels, config)
    return Loaded(checkpoint, runner, dtype, slots, decoder.max_context, vocabulary)


def _runner(
    decoder: Decoder, slots: int, dtype: torch.dtype, kernels: Kernels, config: EngineConfig
) -> Runner:
    if not config.deterministic:
        try:
            return Runner(decoder, slots, dtype, kernels)
        except ValueError as error:
            raise OptionError("device", str(error)) from error
    # What it may count on is tried here, and depends on how many threads compute.
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or before)
    try:
        return Runner(decoder.deterministic(), slots, dtype, kernels)
    except ValueError as error:
        raise UnsupportedError(str(error)) from error
    finally:
        torch.set_num_threads(before)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
