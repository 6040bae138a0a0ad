"""Attention written for the eye: the oracle that every fast implementation is compared with.

Owns   nothing but the obvious reading of the contract in `attention.py`: one loop over sequences,
       one over queries, one over heads, all arithmetic in float64.
Used   by tests. It is correct on any device and far too slow for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structgen.kernels.attention import HeadShape, LayerSpec, Layout


class ReferenceAttention:
    """Attention over the pools by loops in float64; results are cast to the dtype of the input."""

    def __init__(
        self,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        shape: HeadShape,
        layers: Sequence[LayerSpec],
        cos_sin_pd: Tensor,
    ) -> None:
        self.k_pools = k_pools
        self.v_pools = v_pools
        self.shape = shape
        self.layers = layers
        self.cos_sin_pd = cos_sin_pd.double()

    def plan(self, layout: Layout) -> Layout:
        """The layout is all that the loops need."""
        return layout

    def write(self, qkv_tx: Tensor, layer: int, plan: Layout) -> Tensor:
        """Rotate, write k and v row by row, return q [T, H, D]."""
        heads, kv_heads, dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        all_tnd = qkv_tx.double().reshape(-1, heads + 2 * kv_heads, dim)
        q_thd, k_tkd, v_tkd = torch.split(all_tnd, [heads, kv_heads, kv_heads], dim=1)
        if self.layers[layer].rotary:
            q_thd = self._rotate(q_thd, plan)
            k_tkd = self._rotate(k_tkd, plan)
        for row, slot in enumerate(plan.slots_t.tolist()):
            self.k_pools[layer][slot] = k_tkd[row].flatten().to(qkv_tx.dtype)
            self.v_pools[layer][slot] = v_tkd[row].flatten().to(qkv_tx.dtype)
        rotated_thd: Tensor = q_thd.to(qkv_tx.dtype)
        return rotated_thd

    def attend(self, q_thd: Tensor, layer: int, plan: Layout) -> Tensor:
        """Softmax attention of each query over its own slots; padding rows give zeros."""
        out_thd = torch.zeros_like(q_thd, dtype=torch.float64)
        window = self.layers[layer].window
        for b, context in enumerate(plan.context_b):
            first, last = plan.query_start_b1[b : b + 2].tolist()
            for row in range(first, last):
                visible = context[: len(context) - (last - row) + 1]
                if window is not None:
                    visible = visible[-window:]
                slots = torch.tensor(visible, device=q_thd.device)
                out_thd[row] = self._one_query(q_thd[row].double(), layer, slots)
        return out_thd.to(q_thd.dtype).flatten(1)

    def _one_query(self, q_hd: Tensor, layer: int, slots: Tensor) -> Tensor:
        kv_shape = (-1, self.shape.kv_heads, self.shape.head_dim)
        k_ckd = self.k_pools[layer][slots].double().reshape(kv_shape)
        v_ckd = self.v_pools[layer][slots].double().reshape(kv_shape)
        group = self.shape.heads // self.shape.kv_heads
        out_hd = torch.empty_like(q_hd)
        for head in range(self.shape.heads):
            scores_c = k_ckd[:, head // group] @ q_hd[head] * self.shape.scale
            out_hd[head] = torch.softmax(scores_c, dim=0) @ v_ckd[:, head // group]
        return out_hd

    def _rotate(self, x_tnd: Tensor, plan: Layout) -> Tensor:
        positions = torch.tensor(plan.positions_t, device=x_tnd.device)
        cos_t1f, sin_t1f = self.cos_sin_pd[positions].unsqueeze(1).chunk(2, dim=-1)
        low_tnf, high_tnf = x_tnd.chunk(2, dim=-1)
        return torch.cat(
            [low_tnf * cos_t1f - high_tnf * sin_t1f, high_tnf * cos_t1f + low_tnf * sin_t1f], dim=-1
        )
