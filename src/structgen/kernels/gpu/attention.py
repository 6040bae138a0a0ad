"""Attention on a GPU: the kernels of this folder behind the contract of `kernels/attention.py`.

Owns   the copy of each step's work lists on the device, and room for partial results; the table of
       slots, which stays there and is given what a step adds to it.
Holds  a plan is one upload; `write` is one launch, `attend` at most one for each bucket of rows,
       one for merges and one for prompts, all on the current stream. Nothing waits for the device.
       A plan is good until the next one is made: what is launched after that reads its table.
Used   by the engine's runner, which gets it from `kernels/choose.py`.

On the CPU it runs where Triton interprets, with `arch` given: slow, for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.attention import HeadShape, LayerSpec, Layout
from structgen.kernels.gpu.config import Config, arch_of, config_for
from structgen.kernels.gpu.extend import extend_attention
from structgen.kernels.gpu.rope_write import rope_write
from structgen.kernels.gpu.segment import merge_partials, segment_attention
from structgen.kernels.segment_plan import Limits, SegmentPlan, SegmentPlanner

MOST_ROWS = 128  # rows x group of a block or tile, where the table has one so tall
# More rows in one block than a lone decode needs, so that forks share; fewer than fill the matrix
# units, since every item takes this block.
DETERMINISTIC_ROWS = 64
# Arrays begin at multiples of 16 bytes: a kernel is compiled anew for pointers that do not.
ALIGNED_INTS = 4


@dataclass(frozen=True, slots=True)
class WorkLists:
    """A `SegmentPlan` on the device, and room for its partials; buckets are (block rows, items)."""

    window: int | None
    table_c: Tensor
    order_n: Tensor
    low_n: Tensor
    high_n: Tensor
    merged_m: Tensor
    part_start_m1: Tensor
    parts_p: Tensor
    tiles_i5: Tensor
    buckets: tuple[tuple[int, Tensor], ...]
    part_out_phd: Tensor
    part_lse_ph: Tensor


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step, ready for every layer: `lists_l[layer]` is shared by layers of equal window."""

    positions_t: Tensor
    slots_t: Tensor
    padding: bool
    lists_l: tuple[WorkLists, ...]


class TritonAttention:
    """The contract of `attention.py` for float32, bfloat16 and float16.

    arch            as `config.py` names it; None asks the device
    deterministic   what a row gets does not depend on the other rows of the step, see `Limits`
    """

    def __init__(
        self,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        shape: HeadShape,
        layers: Sequence[LayerSpec],
        cos_sin_pd: Tensor,
        *,
        arch: str | None = None,
        deterministic: bool = False,
    ) -> None:
        self.k_pools = tuple(k_pools)
        self.v_pools = tuple(v_pools)
        self.shape = shape
        self.layers = tuple(layers)
        self.cos_sin_pd = cos_sin_pd
        self.device = self.k_pools[0].device
        if arch is None and self.device.type != "cuda":
            raise ValueError(
                f"Triton attention runs on CUDA devices and the pools are on {self.device.type!r}; "
                f"use the attention that `kernels_for` gives for it"
            )
        self.arch = arch or arch_of(self.device)
        self.limits = self._limits(deterministic)
        self._check_shape()
        self._planner = SegmentPlanner(shape, self.limits)
        self._table_c = torch.zeros(0, dtype=torch.int32, device=self.device)

    def plan(self, layout: Layout) -> TritonPlan:
        """Write the work lists on the host and start their copy to the device."""
        longest = max((len(context) for context in layout.context_b), default=0)
        windows = [_effective(spec, longest) for spec in self.layers]
        self._planner.step(layout)
        plans = {window: self._planner.plan(window) for window in dict.fromkeys(windows)}
        arrays = [layout.positions_t, layout.slots_t, *self._added()]
        for plan in plans.values():
            arrays += _arrays(plan)
        there = iter(self._upload(arrays))
        positions_t, slots_t = next(there), next(there)
        self._extend_table(there)
        lists = {window: self._lists(plan, window, there) for window, plan in plans.items()}
        padding = len(layout.slots_t) > int(layout.query_start_b1[-1])
        return TritonPlan(positions_t, slots_t, padding, tuple(lists[window] for window in windows))

    def write(self, qkv_tx: Tensor, layer: int, plan: TritonPlan) -> Tensor:
        """Rotate q and k, write k and v into their slots, return q [T, H, D]."""
        return rope_write(
            qkv_tx,
            self.cos_sin_pd,
            plan.positions_t,
            plan.slots_t,
            self.k_pools[layer],
            self.v_pools[layer],
            self.shape,
            rotary=self.layers[layer].rotary,
            arch=self.arch,
        )

    def attend(self, q_thd: Tensor, layer: int, plan: TritonPlan) -> Tensor:
        """Launch the work of this layer; padding rows come out as zeros."""
        count, heads, dim = q_thd.shape
        make = torch.zeros if plan.padding else torch.empty
        out_tx = make(count, heads * dim, dtype=q_thd.dtype, device=q_thd.device)
        lists = plan.lists_l[layer]
        pools = self.k_pools[layer], self.v_pools[layer]
        for rows, items_i6 in lists.buckets:
            segment_attention(
                q_thd,
                *pools,
                out_tx,
                lists.part_out_phd,
                lists.part_lse_ph,
                lists.table_c,
                lists.order_n,
                lists.low_n,
                lists.high_n,
                items_i6,
                self.shape,
                self._config("segment", rows),
            )
        merge_partials(
            lists.part_out_phd,
            lists.part_lse_ph,
            lists.merged_m,
            lists.part_start_m1,
            lists.parts_p,
            out_tx,
            self._config("merge", 1),
        )
        extend_attention(
            q_thd,
            *pools,
            out_tx,
            lists.table_c,
            lists.tiles_i5,
            self.shape,
            lists.window,
            self._config("extend", self.limits.tile_rows),
        )
        return out_tx

    def _added(self) -> list[NDArray[np.integer]]:
        """What this step has written to the table: places and slots, then whole ranges."""
        table, edits = self._planner.table, self._planner.table.edits
        ranges = [(0, table.used)] if edits.whole else edits.ranges
        at_e, slots_e = np.array(edits.at, np.int32), np.array(edits.slots, np.int32)
        return [at_e, slots_e, *(table.slots_c[low:high] for low, high in ranges)]

    def _extend_table(self, there: Iterator[Tensor]) -> None:
        """Write the same to the table on the device; the tensors are those of `_added`."""
        table, edits = self._planner.table, self._planner.table.edits
        at_e, slots_e = next(there), next(there)
        if edits.whole and len(self._table_c) != len(table.slots_c):
            self._table_c = self._table_c.new_zeros(len(table.slots_c))
        for low, high in [(0, table.used)] if edits.whole else edits.ranges:
            self._table_c[low:high] = next(there)
        if len(at_e):
            self._table_c.index_copy_(0, at_e.long(), slots_e)

    def _lists(self, plan: SegmentPlan, window: int | None, there: Iterator[Tensor]) -> WorkLists:
        order_n, low_n, high_n, merged_m, part_start_m1, parts_p, tiles_i5 = islice(there, 7)
        by_rows = [(bucket.block_rows, next(there)) for bucket in plan.buckets]
        partials = plan.part_count, self.shape.heads
        return WorkLists(
            window=window,
            table_c=self._table_c,
            order_n=order_n,
            low_n=low_n,
            high_n=high_n,
            merged_m=merged_m,
            part_start_m1=part_start_m1,
            parts_p=parts_p,
            tiles_i5=tiles_i5,
            buckets=tuple(by_rows),
            part_out_phd=self._float32(*partials, self.shape.head_dim),
            part_lse_ph=self._float32(*partials),
        )

    def _float32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _upload(self, arrays: Sequence[NDArray[np.integer]]) -> list[Tensor]:
        """The arrays as i32 tensors on the device, in one copy that the host does not wait for."""
        starts = [0]
        for array in arrays:
            starts.append(starts[-1] + -(-array.size // ALIGNED_INTS) * ALIGNED_INTS)
        host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=self.device.type == "cuda")
        flat = host.numpy()
        for start, array in zip(starts, arrays, strict=False):
            flat[start : start + array.size] = array.reshape(-1)
        there = host.to(self.device, non_blocking=True)
        return [
            there[start : start + array.size].view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]

    def _config(self, kernel: str, rows: int) -> Config:
        return config_for(self.arch, kernel, self.shape.head_dim, rows)

    def _limits(self, deterministic: bool) -> Limits:
        rows = DETERMINISTIC_ROWS if deterministic else MOST_ROWS
        limits = Limits(
            element_bytes=self.k_pools[0].element_size(),
            block_rows=self._config("segment", rows).block_m,
            tile_rows=self._config("extend", MOST_ROWS).block_m,
            deterministic=deterministic,
        )
        if self.device.type != "cuda":
            return limits
        properties = torch.cuda.get_device_properties(self.device)
        return replace(limits, processors=properties.multi_processor_count)

    def _check_shape(self) -> None:
        """ValueError names what the kernels cannot do."""
        dim, group = self.shape.head_dim, self.shape.heads // self.shape.kv_heads
        if dim < 16 or dim & (dim - 1):
            raise ValueError(
                f"Triton attention takes heads of 16, 32, 64 or 128 components, not {dim}; "
                f"run this model on the CPU"
            )
        most = min(self.limits.block_rows, self.limits.tile_rows)
        if group > most:
            raise ValueError(
                f"Triton attention takes at most {most} query heads to a key/value head, "
                f"not {group}; run this model on the CPU"
            )


def _arrays(plan: SegmentPlan) -> list[NDArray[np.int32]]:
    """What is uploaded for a window: seven lists, then the items of each bucket."""
    lists = [plan.order_n, plan.low_n, plan.high_n, plan.merged_m, plan.part_start_m1]
    lists += [plan.parts_p, plan.tiles_i]
    return lists + [plan.items_i[bucket.first : bucket.last] for bucket in plan.buckets]


def _effective(spec: LayerSpec, longest: int) -> int | None:
    """The window if it cuts anything in this step, else None, so that layers share a plan."""
    return spec.window if spec.window is not None and spec.window < longest else None
