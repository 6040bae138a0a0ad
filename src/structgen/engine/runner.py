"""Batch to logits, logits to tokens: everything that touches a tensor of the model.

Owns   the weights and, per layer, the two flat tensors of keys and values.
Holds  only `forward` and `pick` touch them, one call at a time, on the worker.
Used   by `loop`, in the order forward, pick.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.core.batch import Batch, Picked
from structgen.engine.sample import pick
from structgen.grammar.matcher import Mask
from structgen.kernels.choose import Kernels, kernels_for
from structgen.models.decoder import Decoder
from structgen.models.linear import padded_rows


class Runner:
    """One model on one device, with the pools of its keys and values."""

    def __init__(
        self, decoder: Decoder, slots: int, dtype: torch.dtype, kernels: Kernels | None = None
    ) -> None:
        """`slots` usable slots; slot 0, the padding slot, comes on top.

        kernels   None: those of the table for the decoder's device
        """
        kernels = kernels or kernels_for(decoder.device)
        self.decoder = decoder
        self.device = decoder.device
        width = decoder.shape.kv_heads * decoder.shape.head_dim
        shape = (slots + 1, width)
        self.k_pools = [zeros(shape, dtype, self.device) for _ in decoder.layers]
        self.v_pools = [zeros(shape, dtype, self.device) for _ in decoder.layers]
        self._sampler = kernels.sampler
        self._attention = kernels.attention(
            self.k_pools, self.v_pools, decoder.shape, decoder.layers, decoder.cos_sin_pd
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Compute a step; returns logits_rv, float32, for the rows that want them."""
        plan = self._attention.plan(batch.layout)
        tokens_t = uploaded(batch.tokens_t, self.device)
        hidden_th = self.decoder.forward(tokens_t, self._attention, plan)
        count = len(batch.logit_rows_r)
        if count != len(hidden_th):
            rows = np.zeros(padded_rows(count), np.int64)
            rows[:count] = batch.logit_rows_r
            hidden_th = hidden_th.index_select(0, uploaded(rows, self.device))
        return self.decoder.logits(hidden_th)[:count]

    @torch.inference_mode()
    def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
        """Draw tokens and look up log-probabilities; `logits_rv` is only read."""
        mask_mw = None if mask is None else uploaded(mask, self.device)
        return pick(logits_rv, batch.rows, mask_mw, self._sampler)


def uploaded(array: NDArray[np.integer], device: torch.device) -> Tensor:
    """The array on the device; the host does not wait for the copy to a GPU.

    Pages that the driver has pinned are what it can copy from by itself; torch keeps them until
    the copy is done. On a CPU the tensor shares the array's memory.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU without touching the memory: pages come into being as slots are used.

    Zeros and not stale memory: a padded read that met a NaN there would spread it (0 * NaN).
    `torch.zeros` writes them one by one, seconds of work for a pool of gigabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    rows, width = shape
    raw = np.zeros((rows, width * dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def slot_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token, over all layers."""
    width = decoder.shape.kv_heads * decoder.shape.head_dim
    return 2 * len(decoder.layers) * width * dtype.itemsize
