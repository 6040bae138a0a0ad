"""Runs the attention kernels on a scene and says how far they are from the oracle.

Outputs and partials are filled with NaN and lie between guards; pools are poisoned by the scene;
the table goes on with slot 0, which is poisoned too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from structgen.kernels.gpu import extend, segment
from structgen.kernels.gpu.config import Config
from structgen.kernels.reference import ReferenceAttention
from structgen.kernels.segment_plan import Limits, SegmentPlan, padded, plan_segments
from tests.kernels.scenes import Scene

GUARD = 1024
GUARDED_BY = 7.25
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


class Guarded:
    """Tensors full of NaN, and whether anything was written beside them."""

    def __init__(self) -> None:
        self.whole: list[Tensor] = []

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = int(np.prod(shape))
        whole = torch.full((size + 2 * GUARD,), GUARDED_BY, dtype=dtype)
        whole[GUARD : GUARD + size] = torch.nan
        self.whole.append(whole)
        return whole[GUARD : GUARD + size].view(shape)

    def intact(self) -> bool:
        zones = [zone for whole in self.whole for zone in (whole[:GUARD], whole[-GUARD:])]
        return all(bool((zone == GUARDED_BY).all()) for zone in zones)


@dataclass(frozen=True)
class Setting:
    """How a scene is planned and launched."""

    limits: Limits
    block_n: int = 32
    pad: int = 3
    segment: ModuleType = field(default=segment)
    extend: ModuleType = field(default=extend)


# Chunks are longer than blocks, so that sums are rescaled within an item and merged across items.
FAST = Setting(
    Limits(block_rows=64, tile_rows=64, split_queries=4, shared_tokens=32, chunk_tokens=(64, 128))
)
FIXED = Setting(
    Limits(
        block_rows=32, tile_rows=32, split_queries=4, shared_tokens=32, fixed_chunk=64,
        deterministic=True,
    )
)  # fmt: skip


def attended(scene: Scene, setting: Setting) -> tuple[Tensor, Tensor]:
    """What the kernels give for the real rows of a scene, and the oracle's answer in float64."""
    k_pool_sx, v_pool_sx = scene.k_pool_sx.clone(), scene.v_pool_sx.clone()
    oracle = ReferenceAttention(
        [k_pool_sx], [v_pool_sx], scene.shape, [scene.spec], scene.cos_sin_pd
    )
    q_thd = oracle.write(scene.qkv_tx, 0, scene.layout)
    # The padding slot is written by padded rows only; poison it for those who would read it.
    k_pool_sx[0], v_pool_sx[0] = torch.nan, torch.nan
    plan = plan_segments(scene.layout, scene.spec.window, scene.shape, setting.limits)
    guarded = Guarded()
    out_tx = guarded.tensor(*q_thd.flatten(1).shape, dtype=q_thd.dtype)
    launch = _Launch(scene, setting, q_thd, k_pool_sx, v_pool_sx, out_tx)
    launch.run(padded(plan, setting.pad), guarded)
    real = int(scene.layout.query_start_b1[-1])
    assert guarded.intact(), "a kernel wrote beside its output"
    assert bool(out_tx[real:].isnan().all()), "a kernel wrote a row that is not in the plan"
    return out_tx[:real], oracle.attend(q_thd.double(), 0, scene.layout)[:real]


@dataclass(frozen=True)
class _Launch:
    scene: Scene
    setting: Setting
    q_thd: Tensor
    k_pool_sx: Tensor
    v_pool_sx: Tensor
    out_tx: Tensor

    def run(self, plan: SegmentPlan, guarded: Guarded) -> None:
        setting, shape = self.setting, self.scene.shape
        tensors = (self.q_thd, self.k_pool_sx, self.v_pool_sx, self.out_tx)
        part_out_phd = guarded.tensor(plan.part_count, shape.heads, shape.head_dim)
        part_lse_ph = guarded.tensor(plan.part_count, shape.heads)
        table_c = torch.from_numpy(np.pad(plan.table_c, (0, 2 * setting.block_n)))
        # A faulty kernel that reads a row too many is to find a wrong row, and no foreign memory.
        spare = (0, setting.limits.block_rows)
        arrays = (plan.order_n, plan.low_n, plan.high_n)
        rows = [torch.from_numpy(np.pad(array, spare)) for array in arrays]
        for bucket in plan.buckets:
            items_i6 = torch.from_numpy(plan.items_i[bucket.first : bucket.last])
            config = Config(bucket.block_rows, setting.block_n, 4, 2)
            setting.segment.segment_attention(
                *tensors, part_out_phd, part_lse_ph, table_c, *rows, items_i6, shape, config
            )
        merges = (plan.merged_m, plan.part_start_m1, plan.parts_p)
        setting.segment.merge_partials(
            part_out_phd,
            part_lse_ph,
            *(torch.from_numpy(array) for array in merges),
            self.out_tx,
            Config(16, 1, 1, 2),
        )
        tiles_i5 = torch.from_numpy(plan.tiles_i)
        config = Config(setting.limits.tile_rows, setting.block_n, 4, 2)
        setting.extend.extend_attention(
            *tensors, table_c, tiles_i5, shape, self.scene.spec.window, config
        )


def distance(scene: Scene, setting: Setting) -> float:
    """Relative Frobenius distance from the oracle; NaN where any value is NaN."""
    out_tx, expected_tx = attended(scene, setting)
    return float((out_tx.double() - expected_tx).norm() / expected_tx.norm())
