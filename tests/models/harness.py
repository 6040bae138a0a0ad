"""One sequence through a Decoder, in chunks, over a pool of its own.

`Harness` stands in for the engine: it hands out slots and keeps none of the engine's promises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from structgen.kernels.attention import AttentionType, Layout
from structgen.kernels.cpu import CpuAttention
from structgen.models.decoder import Decoder


class Harness:
    """Runs a decoder over token ids; slots are handed out in order from 1."""

    def __init__(self, decoder: Decoder, slots: int, kind: AttentionType = CpuAttention) -> None:
        shape, dtype = decoder.shape, decoder.embed(torch.tensor([0])).dtype
        row = shape.kv_heads * shape.head_dim
        # NaN wherever nothing was written, so that a read of a wrong slot shows.
        pools = [
            [torch.full((slots + 1, row), torch.nan, dtype=dtype) for _ in decoder.layers]
            for _ in range(2)
        ]
        self.decoder = decoder
        self.attention = kind(pools[0], pools[1], shape, decoder.layers, decoder.cos_sin_pd)
        self.used = 0

    def step(self, inputs: Tensor) -> Tensor:
        """Logits of the next tokens of the sequence, given ids [T] or embeddings [T, h]."""
        count = inputs.shape[0]
        layout = Layout(
            query_start_b1=np.array([0, count], dtype=np.int64),
            context_b=(np.arange(1, self.used + count + 1, dtype=np.int64),),
            slots_t=np.arange(self.used + 1, self.used + count + 1, dtype=np.int64),
            positions_t=np.arange(self.used, self.used + count, dtype=np.int64),
        )
        self.used += count
        with torch.inference_mode():
            plan = self.attention.plan(layout)
            return self.decoder.logits(self.decoder.forward(inputs, self.attention, plan))


def logits_of(
    decoder: Decoder,
    tokens: Sequence[int],
    *,
    chunks: Sequence[int] = (),
    kind: AttentionType = CpuAttention,
) -> Tensor:
    """f32[T, V]: logits of a whole sequence, fed in these chunk sizes (default: all at once)."""
    harness = Harness(decoder, len(tokens), kind)
    parts = torch.split(torch.tensor(tokens), list(chunks) or len(tokens))
    return torch.cat([harness.step(part) for part in parts])
