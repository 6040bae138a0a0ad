"""Attention on a CPU with torch alone: few calls per layer, all choices made in the plan.

Owns   the scratch rows that gathered keys and values are copied to; not the pools.
Holds  `plan` is made on the host from the layout alone; `write` and `attend` touch no numpy and
       loop over the parts of the plan, never over tokens.
       One implementation serves one caller at a time: parts share the scratch.
Used   by the engine's runner on CPU devices. Keys and values have the dtype of the queries.

Grouped queries become query rows of their key/value head, so that K and V are read once a group.
A part that sees its context in two runs merges the two results by their log-sum-exp, as flash
attention merges its blocks (Dao et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from structgen.kernels.attention import HeadShape, LayerSpec, Layout
from structgen.kernels.cpu_plan import Padded, Part, Rows, Run, Shared, Single, parts_of
from structgen.kernels.rope import rotary_rows, rotate

# Most that one part copies out of a pool; longer groups are cut, since a copy much larger than the
# caches costs more than another call.
GATHER_BYTES = 64 << 20

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the operator under the public call, which keeps the log-sum-exp to itself


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """One step, ready for every layer: `parts_l[layer]` is shared by layers of equal window."""

    cos_t1d: Tensor
    signed_t1d: Tensor
    slots_t: Tensor
    padding: bool
    parts_l: tuple[tuple[Part, ...], ...]


class CpuAttention:
    """The contract of `attention.py` for float32, bfloat16 and float16 on a CPU."""

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
        row_bytes = shape.kv_heads * shape.head_dim * self._dtype.itemsize
        self._gather_rows = max(1, GATHER_BYTES // row_bytes)
        self._scratch = (torch.empty(0, 0), torch.empty(0, 0))

    def plan(self, layout: Layout) -> CpuPlan:
        """Choose the calls for this step; numpy on the host, a few small tensors out."""
        longest = max((len(context) for context in layout.context_b), default=0)
        by_window: dict[int | None, tuple[Part, ...]] = {}
        for spec in self.layers:
            window = _effective(spec, longest)
            if window not in by_window:
                by_window[window] = parts_of(
                    layout,
                    window,
                    gather_rows=self._gather_rows,
                    row_values=self.k_pools[0].shape[1],
                    dtype=self._dtype,
                )
        positions_t = torch.tensor(layout.positions_t)
        cos_t1d, signed_t1d = rotary_rows(self.cos_sin_pd, positions_t, self._dtype)
        self._reserve(part for parts in by_window.values() for part in parts)
        return CpuPlan(
            cos_t1d,
            signed_t1d,
            torch.tensor(layout.slots_t),
            padding=len(layout.slots_t) > int(layout.query_start_b1[-1]),
            parts_l=tuple(by_window[_effective(spec, longest)] for spec in self.layers),
        )

    def write(self, qkv_tx: Tensor, layer: int, plan: CpuPlan) -> Tensor:
        """Rotate q and k together, write k and v, return q [T, H, D] (a view of the rotated)."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        all_tnd = qkv_tx.view(-1, heads + 2 * kv_heads, self.shape.head_dim)
        qk_tnd = all_tnd[:, : heads + kv_heads]
        if self.layers[layer].rotary:
            qk_tnd = rotate(qk_tnd, plan.cos_t1d, plan.signed_t1d)
        self.k_pools[layer].index_copy_(0, plan.slots_t, qk_tnd[:, heads:].flatten(1))
        self.v_pools[layer].index_copy_(0, plan.slots_t, all_tnd[:, heads + kv_heads :].flatten(1))
        return qk_tnd[:, :heads]

    def attend(self, q_thd: Tensor, layer: int, plan: CpuPlan) -> Tensor:
        """Run the parts of this layer; padding rows come out as zeros."""
        parts = plan.parts_l[layer]
        if len(parts) == 1 and not plan.padding:
            part = parts[0]
            if _rows(part).index is None:
                return self._part(part, q_thd, layer).flatten(1)
        out_thd = torch.zeros_like(q_thd, memory_format=torch.contiguous_format)
        for part in parts:
            rows = _rows(part)
            out_nhd = self._part(part, _take(q_thd, rows), layer)
            if rows.index is None:
                out_thd.narrow(0, rows.first, rows.count).copy_(out_nhd)
            else:
                out_thd.index_copy_(0, rows.index, out_nhd)
        return out_thd.flatten(1)

    def _part(self, part: Part, q_nhd: Tensor, layer: int) -> Tensor:
        match part:
            case Single():
                return self._single(part, q_nhd, layer)
            case Padded():
                return self._padded(part, q_nhd, layer)
            case Shared():
                return self._shared(part, q_nhd, layer)

    def _single(self, part: Single, q_qhd: Tensor, layer: int) -> Tensor:
        k_1kcd = self._run(self.k_pools[layer], part.own, 0)
        v_1kcd = self._run(self.v_pools[layer], part.own, 1)
        q_1hqd = q_qhd.transpose(0, 1).unsqueeze(0)
        if part.prefix is not None:
            return self._continued(part.prefix, q_qhd, k_1kcd, v_1kcd, layer)
        out_1hqd = scaled_dot_product_attention(
            q_1hqd,
            k_1kcd,
            v_1kcd,
            attn_mask=part.mask_qc,
            is_causal=part.rows.count > 1 and part.mask_qc is None,
            scale=self.shape.scale,
            enable_gqa=True,
        )
        return out_1hqd[0].transpose(0, 1)

    def _continued(
        self, prefix: Run, q_qhd: Tensor, k_1kqd: Tensor, v_1kqd: Tensor, layer: int
    ) -> Tensor:
        """A long chunk of a prompt: its own tokens causally, all before them without a mask."""
        group = self.shape.heads // self.shape.kv_heads
        own_1hqd, own_1hq = self._flash(
            q_qhd.transpose(0, 1).unsqueeze(0),
            k_1kqd.repeat_interleave(group, dim=1),
            v_1kqd.repeat_interleave(group, dim=1),
            causal=True,
        )
        # The own tokens are no longer needed where the prefix is gathered: the scratch is free.
        before_qhd, before_qh = self._prefix(prefix, q_qhd, layer)
        return _merge(own_1hqd[0].transpose(0, 1), own_1hq[0].t(), before_qhd, before_qh)

    def _padded(self, part: Padded, q_nhd: Tensor, layer: int) -> Tensor:
        k_nkcd, v_nkcd = self._gathered(part, layer)
        out_nkgd = scaled_dot_product_attention(
            self._grouped(q_nhd), k_nkcd, v_nkcd, attn_mask=part.mask_n11c, scale=self.shape.scale
        )
        return out_nkgd.flatten(1, 2)

    def _shared(self, part: Shared, q_nhd: Tensor, layer: int) -> Tensor:
        before_nhd, before_nh = self._prefix(part.prefix, q_nhd, layer)
        k_nkcd, v_nkcd = self._gathered(part.tails, layer)
        tail_nkgd, tail_nkg = self._flash(
            self._grouped(q_nhd), k_nkcd, v_nkcd, mask=part.tails.mask_n11c
        )
        return _merge(tail_nkgd.flatten(1, 2), tail_nkg.flatten(1), before_nhd, before_nh)

    def _prefix(self, prefix: Run, q_nhd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """All rows over one run that each of them sees whole: [N, H, D] and log-sum-exp [N, H]."""
        count, heads, dim = q_nhd.shape
        kv_heads, group = self.shape.kv_heads, heads // self.shape.kv_heads
        q_knd = self._grouped(q_nhd).transpose(0, 1).reshape(1, kv_heads, count * group, dim)
        out_1knd, lse_1kn = self._flash(
            q_knd,
            self._run(self.k_pools[layer], prefix, 0),
            self._run(self.v_pools[layer], prefix, 1),
        )
        out_nkgd = out_1knd.view(kv_heads, count, group, dim).transpose(0, 1)
        lse_nkg = lse_1kn.reshape(kv_heads, count, group).transpose(0, 1)
        return out_nkgd.flatten(1, 2), lse_nkg.flatten(1)

    def _flash(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention [.., rows, D] and its log-sum-exp f32[.., rows]; q, k, v of equal heads."""
        out: Tensor
        lse: Tensor
        out, lse = _flash_attention(q, k, v, 0.0, causal, attn_mask=mask, scale=self.shape.scale)
        return out, lse

    def _grouped(self, q_nhd: Tensor) -> Tensor:
        count, heads, dim = q_nhd.shape
        return q_nhd.view(count, self.shape.kv_heads, heads // self.shape.kv_heads, dim)

    def _run(self, pool_sx: Tensor, run: Run, which: int) -> Tensor:
        """Keys or values of a run, [1, K, C, D]: a view of the pool where the slots allow it."""
        if run.index is None:
            rows_cx = pool_sx.narrow(0, run.start, run.length)
        else:
            rows_cx = self._scratch[which].narrow(0, 0, run.length)
            torch.index_select(pool_sx, 0, run.index, out=rows_cx)
        by_head = (1, run.length, self.shape.kv_heads, self.shape.head_dim)
        return rows_cx.view(by_head).transpose(1, 2)

    def _gathered(self, part: Padded, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a padded group, each [N, K, C, D] in the scratch."""
        count, width = part.rows.count, part.width
        by_head = (count, width, self.shape.kv_heads, self.shape.head_dim)
        k_gx = self._scratch[0].narrow(0, 0, count * width)
        v_gx = self._scratch[1].narrow(0, 0, count * width)
        torch.index_select(self.k_pools[layer], 0, part.index_g, out=k_gx)
        torch.index_select(self.v_pools[layer], 0, part.index_g, out=v_gx)
        return k_gx.view(by_head).transpose(1, 2), v_gx.view(by_head).transpose(1, 2)

    def _reserve(self, parts: Iterable[Part]) -> None:
        """Make the scratch as large as the largest of these parts needs; it never shrinks."""
        needed = max((_gathered_rows(part) for part in parts), default=0)
        if needed <= self._scratch[0].shape[0]:
            return
        row = self.shape.kv_heads * self.shape.head_dim
        # Normal tensors even inside inference mode: they are written again outside of it.
        with torch.inference_mode(mode=False):
            self._scratch = (
                torch.empty(needed, row, dtype=self._dtype),
                torch.empty(needed, row, dtype=self._dtype),
            )


def _effective(spec: LayerSpec, longest: int) -> int | None:
    """The window if it cuts anything in this step, else None, so that layers share a plan."""
    return spec.window if spec.window is not None and spec.window < longest else None


def _rows(part: Part) -> Rows:
    return part.tails.rows if isinstance(part, Shared) else part.rows


def _take(q_thd: Tensor, rows: Rows) -> Tensor:
    if rows.index is None:
        return q_thd.narrow(0, rows.first, rows.count)
    return q_thd.index_select(0, rows.index)


def _gathered_rows(part: Part) -> int:
    match part:
        case Single():
            runs = (part.own,) if part.prefix is None else (part.prefix, part.own)
            return max(run.length if run.index is not None else 0 for run in runs)
        case Padded():
            return part.index_g.shape[0]
        case Shared():
            prefix = part.prefix.length if part.prefix.index is not None else 0
            return max(prefix, part.tails.index_g.shape[0])


def _merge(a_nhd: Tensor, lse_a_nh: Tensor, b_nhd: Tensor, lse_b_nh: Tensor) -> Tensor:
    """Attention over two disjoint runs from the attention over each, in float32."""
    share_nh1 = torch.sigmoid(lse_b_nh - lse_a_nh).unsqueeze(-1)
    return torch.lerp(a_nhd.float(), b_nhd.float(), share_nh1).to(a_nhd.dtype)
