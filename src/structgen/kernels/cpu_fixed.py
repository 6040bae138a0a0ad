"""Attention on a CPU whose rows have the same bits whatever rows stand beside them.

Owns   the scratch rows that gathered keys and values are copied to; not the pools.
Holds  a row's result is a function of its query, its position, and the keys and values before it:
       not of the other rows, of how its sequence was cut into chunks, or of where slots lie.
       Its sums are of blocks of BLOCK keys, in order, each by a product of one shape.
       One implementation serves one caller at a time: parts share the scratch.
Used   by the engine's runner on CPU devices, for a deterministic engine.

What this rests on: torch's flash attention takes each (sequence, head) by itself, in blocks, and a
block of keys that are hidden from a row leaves its maximum, sum and result as they were. Keys are
always copied, and queries padded to a multiple of ROWS, so that all that is multiplied is aligned
in memory alike: MKL sums some small products by other steps where it is not. All is float32.

A product of other shape may sum in another order, so that chunks of a prompt would have to be as
slow as decodes, one query a product. Whether theirs give the same bits is tried when this is made,
with as many threads as it will have; a library's order of sums does not depend on its numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structgen.kernels.attention import HeadShape, LayerSpec, Layout
from structgen.kernels.cpu import GATHER_BYTES
from structgen.kernels.cpu_fixed_plan import BLOCK, COLUMNS, QUERIES, Chunk, Lone, Part, fixed_parts
from structgen.kernels.rope import rotary_rows

# Query rows of a product are multiples of these: eight times a few numbers are whole cache lines.
ROWS = 8
# All numbers of columns that one step of flash attention may have; the last has two steps.
TRIED_WIDTHS = (*range(COLUMNS, BLOCK, COLUMNS), 2 * BLOCK)

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the operator under the public call, which might choose another


@dataclass(frozen=True, slots=True)
class FixedCpuPlan:
    """One step, ready for every layer: `parts_l[layer]` is shared by layers of equal window."""

    cos_t1d: Tensor
    signed_t1d: Tensor
    slots_t: Tensor
    parts_l: tuple[tuple[Part, ...], ...]


class FixedCpuAttention:
    """The contract of `attention.py` for float32, bfloat16 and float16 on a CPU.

    ValueError if this processor's products depend on what they stand beside.
    """

    def __init__(
        self,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        shape: HeadShape,
        layers: Sequence[LayerSpec],
        cos_sin_pd: Tensor,
    ) -> None:
        self.k_pools = tuple(k_pools)
        self.v_pools = tuple(v_pools)
        self.shape = shape
        self.layers = tuple(layers)
        self.cos_sin_pd = cos_sin_pd
        self._dtype = self.k_pools[0].dtype
        self._row = shape.kv_heads * shape.head_dim
        self._gather_rows = max(1, GATHER_BYTES // (4 * self._row))
        self._scratch = (torch.empty(0, 0), torch.empty(0, 0))
        self.chunks = chunks_agree(shape, torch.get_num_threads())

    def plan(self, layout: Layout) -> FixedCpuPlan:
        """Choose the calls for this step; numpy on the host, a few small tensors out."""
        parts = {
            window: fixed_parts(
                layout,
                window,
                gather_rows=self._gather_rows,
                chunks=self.chunks,
                # A product that is alone may be cut for several threads.
                pairs=self.shape.kv_heads == 1,
            )
            for window in {spec.window for spec in self.layers}
        }
        positions_t = torch.tensor(layout.positions_t)
        cos_t1d, signed_t1d = rotary_rows(self.cos_sin_pd, positions_t, self._dtype)
        self._reserve([part for each in parts.values() for part in each])
        return FixedCpuPlan(
            cos_t1d,
            signed_t1d,
            torch.tensor(layout.slots_t),
            tuple(parts[spec.window] for spec in self.layers),
        )

    def write(self, qkv_tx: Tensor, layer: int, plan: FixedCpuPlan) -> Tensor:
        """Rotate q and k together, write k and v, return q [T, H, D]."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        all_tnd = qkv_tx.view(-1, heads + 2 * kv_heads, self.shape.head_dim)
        qk_tnd = all_tnd[:, : heads + kv_heads]
        if self.layers[layer].rotary:
            # Not `rotate`: a product that is fused with its sum for most elements, and not for the
            # last of a thread's share, would round those differently.
            swapped_tnd = torch.roll(qk_tnd, self.shape.head_dim // 2, -1)
            qk_tnd = (qk_tnd * plan.cos_t1d).add_(swapped_tnd.mul_(plan.signed_t1d))
        self.k_pools[layer].index_copy_(0, plan.slots_t, qk_tnd[:, heads:].flatten(1))
        self.v_pools[layer].index_copy_(0, plan.slots_t, all_tnd[:, heads + kv_heads :].flatten(1))
        return qk_tnd[:, :heads]

    def attend(self, q_thd: Tensor, layer: int, plan: FixedCpuPlan) -> Tensor:
        """Run the parts of this layer; padding rows come out as zeros."""
        out_thd = torch.zeros_like(q_thd, memory_format=torch.contiguous_format)
        for part in plan.parts_l[layer]:
            match part:
                case Lone():
                    self._lone(part, q_thd, layer, out_thd)
                case Chunk():
                    self._chunk(part, q_thd, layer, out_thd)
        return out_thd.flatten(1)

    def _lone(self, part: Lone, q_thd: Tensor, layer: int, out_thd: Tensor) -> None:
        by_head = (len(part.rows_n), part.width, self.shape.kv_heads, self.shape.head_dim)
        k_nkcd, v_nkcd = (
            self._gathered(pool_sx[layer], part.index_g, which).view(by_head).transpose(1, 2)
            for which, pool_sx in enumerate((self.k_pools, self.v_pools))
        )
        q_nhd = q_thd.index_select(0, part.rows_n)
        out_nhd = lone_queries(q_nhd, k_nkcd, v_nkcd, part.mask_n11c, self.shape)
        out_thd.index_copy_(0, part.rows_n, out_nhd.to(self._dtype))

    def _chunk(self, part: Chunk, q_thd: Tensor, layer: int, out_thd: Tensor) -> None:
        by_head = (len(part.index_c), self.shape.kv_heads, self.shape.head_dim)
        k_kcd, v_kcd = (
            self._gathered(pool_sx[layer], part.index_c, which).view(by_head).transpose(0, 1)
            for which, pool_sx in enumerate((self.k_pools, self.v_pools))
        )
        q_qhd = q_thd.narrow(0, part.first, part.count)
        out_qhd = chunk_queries(q_qhd, k_kcd, v_kcd, part.mask_qc, self.shape)
        out_thd.narrow(0, part.first, part.count).copy_(out_qhd)

    def _gathered(self, pool_sx: Tensor, index_g: Tensor, which: int) -> Tensor:
        rows_gx = self._scratch[which].narrow(0, 0, len(index_g))
        if self._dtype is torch.float32:
            return torch.index_select(pool_sx, 0, index_g, out=rows_gx)
        return rows_gx.copy_(pool_sx.index_select(0, index_g))

    def _reserve(self, parts: Sequence[Part]) -> None:
        """Make the scratch as large as the largest of these parts needs; it never shrinks."""
        needed = max(
            (len(part.index_g if isinstance(part, Lone) else part.index_c) for part in parts),
            default=0,
        )
        if needed <= self._scratch[0].shape[0]:
            return
        # Normal tensors even inside inference mode: they are written again outside of it.
        with torch.inference_mode(mode=False):
            self._scratch = (torch.empty(needed, self._row), torch.empty(needed, self._row))


def lone_queries(
    q_nhd: Tensor, k_nkcd: Tensor, v_nkcd: Tensor, mask_n11c: Tensor, shape: HeadShape
) -> Tensor:
    """Each row over its own keys, f32[N, H, D]: a product of a group's heads for each of K."""
    count, group = len(q_nhd), shape.heads // shape.kv_heads
    rows = -(-group // ROWS) * ROWS
    q_nkgd = torch.zeros(count, shape.kv_heads, rows, shape.head_dim)
    q_nkgd[:, :, :group] = q_nhd.view(count, shape.kv_heads, group, shape.head_dim)
    out_nkgd = _flash(q_nkgd, k_nkcd, v_nkcd, mask_n11c, shape)
    return out_nkgd[:, :, :group].flatten(1, 2)


def chunk_queries(
    q_qhd: Tensor, k_kcd: Tensor, v_kcd: Tensor, mask_qc: Tensor, shape: HeadShape
) -> Tensor:
    """Rows of one sequence over the same keys, f32[Q, H, D]: a product of QUERIES a head."""
    count, group = len(q_qhd), shape.heads // shape.kv_heads
    q_kgqd = torch.zeros(shape.kv_heads, group, len(mask_qc), shape.head_dim)
    q_kgqd[:, :, :count] = q_qhd.view(count, shape.kv_heads, group, -1).permute(1, 2, 0, 3)
    out_kgqd = _flash(
        q_kgqd,
        k_kcd.unsqueeze(1).expand(-1, group, -1, -1),
        v_kcd.unsqueeze(1).expand(-1, group, -1, -1),
        mask_qc[None, None],
        shape,
    )
    return out_kgqd[:, :, :count].permute(2, 0, 1, 3).flatten(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: HeadShape) -> Tensor:
    out: Tensor
    out, _ = _flash_attention(q, k, v, 0.0, is_causal=False, attn_mask=mask, scale=shape.scale)
    return out


@functools.cache
def chunks_agree(shape: HeadShape, threads: int) -> bool:
    """Whether queries in a chunk have the bits that they have alone, in every place.

    threads   that torch computes with

    ValueError if queries have other bits alone than beside others.
    """
    assert threads == torch.get_num_threads(), "what holds for other threads cannot be tried"
    if shape.heads == 1:
        return False  # a chunk's one product would be alone, and might be cut: see `plan`
    with torch.inference_mode():
        agreeing = [_agrees(shape, width) for width in TRIED_WIDTHS]
    return all(agreeing)


def _agrees(shape: HeadShape, width: int) -> bool:
    generator = torch.Generator().manual_seed(width)
    q_qhd = torch.randn(QUERIES, shape.heads, shape.head_dim, generator=generator)
    k_kcd, v_kcd = torch.randn(
        2, shape.kv_heads, width, shape.head_dim, generator=generator
    ).unbind()
    seen_q1 = torch.randint(1, width + 1, (QUERIES, 1), generator=generator)
    mask_qc = torch.zeros(QUERIES, width)
    mask_qc.masked_fill_(torch.arange(width) >= seen_q1, -torch.inf)

    def alone(low: int, high: int) -> Tensor:
        k_nkcd, v_nkcd = (x_kcd.expand(high - low, -1, -1, -1) for x_kcd in (k_kcd, v_kcd))
        return lone_queries(q_qhd[low:high], k_nkcd, v_nkcd, mask_qc[low:high, None, None], shape)

    wanted_qhd = alone(0, QUERIES)
    for low, high in ((0, 2), (5, 12), (QUERIES - 2, QUERIES)):
        if not torch.equal(alone(low, high), wanted_qhd[low:high]):
            raise ValueError(
                "on this processor the attention of a row depends on the rows beside it; "
                "leave out deterministic=True"
            )
    forwards = chunk_queries(q_qhd, k_kcd, v_kcd, mask_qc, shape)
    backwards = chunk_queries(q_qhd.flip(0), k_kcd, v_kcd, mask_qc.flip(0), shape).flip(0)
    return torch.equal(forwards, wanted_qhd) and torch.equal(backwards, wanted_qhd)
