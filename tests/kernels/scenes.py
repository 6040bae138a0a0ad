"""Random steps for attention: sequences over a poisoned pool, run through an implementation.

Every slot that no sequence owns holds NaN, slot 0 included, so that a read of a wrong slot shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.attention import Attention, AttentionType, HeadShape, LayerSpec, Layout

POSITIONS = 4096


@dataclass(frozen=True)
class Branch:
    """A sequence of a step: `cached` tokens of its own lie in the pool, `new` ones are computed.

    `after` is the index of an earlier sequence whose whole context, tokens of this step included,
    comes first.
    """

    cached: int
    new: int
    after: int | None = None


@dataclass(frozen=True)
class Scene:
    """One step on paper: layout, inputs and pools."""

    layout: Layout
    qkv_tx: Tensor
    k_pool_sx: Tensor
    v_pool_sx: Tensor
    shape: HeadShape
    spec: LayerSpec
    cos_sin_pd: Tensor


@dataclass(frozen=True)
class Outcome:
    """What an implementation made of a scene."""

    q_thd: Tensor
    out_tx: Tensor
    k_pool_sx: Tensor
    v_pool_sx: Tensor


def head_shape(heads: int, kv_heads: int, head_dim: int) -> HeadShape:
    return HeadShape(heads, kv_heads, head_dim, head_dim**-0.5)


def angles(head_dim: int) -> Tensor:
    frequencies_f = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles_pf = torch.arange(POSITIONS)[:, None] * frequencies_f
    return torch.cat([angles_pf.cos(), angles_pf.sin()], dim=-1)


def layout_of(
    branches: list[Branch], *, scattered: bool, padding: int, seed: int
) -> tuple[Layout, int]:
    """The layout of these sequences and the number of slots it takes, slot 0 included."""
    total = sum(b.cached + b.new for b in branches)
    free = np.arange(1, total + 1, dtype=np.int64)
    if scattered:
        free = np.random.default_rng(seed).permutation(free)
    contexts: list[NDArray[np.int64]] = []
    written, positions, starts, taken = [], [], [0], 0
    for branch in branches:
        own = free[taken : taken + branch.cached + branch.new]
        taken += len(own)
        before = contexts[branch.after] if branch.after is not None else own[:0]
        contexts.append(np.concatenate([before, own]))
        written.append(own[branch.cached :])
        last = len(contexts[-1])
        positions.append(np.arange(last - branch.new, last, dtype=np.int64))
        starts.append(starts[-1] + branch.new)
    pad = np.zeros(padding, dtype=np.int64)
    layout = Layout(
        query_start_b1=np.array(starts, dtype=np.int64),
        context_b=tuple(contexts),
        slots_t=np.concatenate([*written, pad]),
        positions_t=np.concatenate([*positions, pad]),
    )
    return layout, total + 1


def scene(
    branches: list[Branch],
    shape: HeadShape,
    *,
    dtype: torch.dtype = torch.float32,
    spec: LayerSpec | None = None,
    scattered: bool = True,
    padding: int = 0,
    seed: int = 0,
) -> Scene:
    layout, slots = layout_of(branches, scattered=scattered, padding=padding, seed=seed)
    noise = torch.Generator().manual_seed(seed)
    row = shape.kv_heads * shape.head_dim
    pools = []
    for _ in range(2):
        pool_sx = torch.randn(slots + 8, row, generator=noise).to(dtype)
        # Slots of this step, slot 0 and slots that nobody owns are poisoned before the step.
        pool_sx[torch.from_numpy(layout.slots_t)] = torch.nan
        pool_sx[0] = torch.nan
        pool_sx[slots:] = torch.nan
        pools.append(pool_sx)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv_tx = torch.randn(len(layout.slots_t), width, generator=noise).to(dtype)
    return Scene(
        layout, qkv_tx, pools[0], pools[1], shape, spec or LayerSpec(), angles(shape.head_dim)
    )


def outcome(kind: AttentionType, scene: Scene) -> Outcome:
    k_pool_sx, v_pool_sx = scene.k_pool_sx.clone(), scene.v_pool_sx.clone()
    attention: Attention = kind(
        [k_pool_sx], [v_pool_sx], scene.shape, [scene.spec], scene.cos_sin_pd
    )
    plan = attention.plan(scene.layout)
    q_thd = attention.write(scene.qkv_tx, 0, plan)
    out_tx = attention.attend(q_thd, 0, plan)
    return Outcome(q_thd, out_tx, k_pool_sx, v_pool_sx)
