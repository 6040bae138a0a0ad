"""From a checkpoint to a model: the one place that knows which architectures there are.

Owns   nothing. A new relative of Llama is a `Family` in `config`; another architecture is another
       file beside `decoder` and a branch here.
Used   by the engine when it loads a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from structgen.errors import OptionError
from structgen.kernels.operations import Operations
from structgen.models.checkpoint import TensorSource
from structgen.models.config import read_config
from structgen.models.decoder import Decoder
from structgen.models.rope import rotary_table
from structgen.models.weights import load_weights


def build(
    config: Mapping[str, Any],
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int | None = None,
    operations: Operations | None = None,
) -> Decoder:
    """Load the decoder that `config` describes, in the shape of a config.json, from `source`.

    dtype         of weights, activations and, by the runner's choice, keys and values
    max_context   most tokens a sequence may have; None for what the model was made for
    operations    norms and activation of the device; None: in torch

    CheckpointError names what is not supported, missing, left over or of another shape;
    OptionError if `max_context` is beyond the model's positions.
    """
    model = read_config(config)
    context = model.max_context if max_context is None else max_context
    longest = model.rope.longest_context
    if not 0 < context <= longest:
        raise OptionError("max_context", f"{context} is not between 1 and this model's {longest}")
    weights = load_weights(model, source, dtype=dtype, device=device)
    table_pd = rotary_table(model.rope, model.shape.head_dim, context, weights.rope_divisors_f)
    return Decoder(model, weights, table_pd.to(device), operations)
