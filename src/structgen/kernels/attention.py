"""The attention contract: one `plan` per step, then per layer one `write` and one `attend`.

Shape legend, used by every name in this room:
    T tokens of the step, all sequences end to end    B sequences    S pool slots    L layers
    H query heads    K key/value heads    D head dim    X = (H + 2K) * D    R logit rows
    V vocabulary

Keys and values live in a pool of S token slots: per layer one flat tensor `k_pool_sx` and one
`v_pool_sx` of shape [S, K * D], owned by the runner. Slot 0 is padding: written to by padded rows,
never owned, never read by a real row. A sequence is a list of slots, one a token, in order.

Every layer writes the keys and values of all T rows before any row attends. So a row may read
slots that another row of the same step writes, and a shared prefix is computed once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PADDING_SLOT = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the queries and keys of one step lie; numpy on the host.

    query_start_b1   i64[B + 1]; the queries of sequence b are rows [start[b], start[b + 1])
    context_b        B arrays i64[C_b]: the slots of all tokens that sequence b can see, in order,
                     those written in this step included; its Q_b queries are the last Q_b of them,
                     and query i sees the first C_b - Q_b + i + 1 (the window may cut the front)
    slots_t          i64[T]; where the keys and values of row t are written
    positions_t      i64[T]; rotary position of row t
    origin_b         B objects, all different, or None. Where two layouts have the same object, the
                     contexts beside it agree as far as both go: what was made of the one may be
                     kept for the other. Arrays of a layout are never written to again.

    T may exceed query_start_b1[-1]: rows from there on are padding (slot 0, position 0); what
    `attend` returns for them is finite and otherwise unspecified.
    """

    query_start_b1: NDArray[np.int64]
    context_b: tuple[NDArray[np.int64], ...]
    slots_t: NDArray[np.int64]
    positions_t: NDArray[np.int64]
    origin_b: tuple[object, ...] | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs between layers: `window` tokens of sliding attention, None for all of them
    (a query sees itself and window - 1 tokens before it); `rotary` False leaves q and k unrotated.
    """

    window: int | None = None
    rotary: bool = True


@dataclass(frozen=True, slots=True)
class HeadShape:
    """H, K and D of a model, and the factor on q . k before the softmax."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float


class Attention(Protocol):
    """One implementation of attention, bound to the pools of one runner."""

    def plan(self, layout: Layout) -> Any:
        """Turn a step's layout into whatever `write` and `attend` need, once for all layers."""
        ...

    def write(self, qkv_tx: Tensor, layer: int, plan: Any) -> Tensor:
        """Rotate q and k, write k and v into their slots, return q_thd [T, H, D].

        qkv_tx is [T, X]: H * D of q, then K * D of k, then K * D of v.
        """
        ...

    def attend(self, q_thd: Tensor, layer: int, plan: Any) -> Tensor:
        """Causal attention of each query over its sequence's slots; returns [T, H * D]."""
        ...


class AttentionType(Protocol):
    """How an implementation is made; the engine picks one by device, once.

    k_pools, v_pools   L tensors [S, K * D] each
    cos_sin_pd         [positions, D]: cos of the D / 2 frequencies, then sin; any factor on them
                       (yarn) is already in; rotation pairs component i with i + D / 2
    """

    def __call__(
        self,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        shape: HeadShape,
        layers: Sequence[LayerSpec],
        cos_sin_pd: Tensor,
    ) -> Attention:
        """Bind to the pools; tensors are referred to, not copied."""
        ...
