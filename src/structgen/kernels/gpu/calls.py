"""The calls that the engine makes of each kernel, on tensors that only have a shape.

Owns   the list. A kernel that is not in it is not proven to compile.
Used   by `aot.py`, where a launch compiles and runs nothing.

Between them the calls of a kernel select every row that the config table has for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from structgen.kernels.attention import HeadShape
from structgen.kernels.draw import Terms
from structgen.kernels.gpu.activation import silu_and_multiply
from structgen.kernels.gpu.config import config_for
from structgen.kernels.gpu.extend import extend_attention
from structgen.kernels.gpu.norm import add_rms_norm, norm_heads, rms_norm
from structgen.kernels.gpu.rope_write import rope_write
from structgen.kernels.gpu.sample import row_terms, sample
from structgen.kernels.gpu.segment import merge_partials, segment_attention


@dataclass(frozen=True, slots=True)
class Call:
    """One call site.

    kernel   as the config table names it
    name     kernel and shapes
    run      makes the call for an architecture
    rows     rows of a block in a product of matrices, 0 where there is none
    """

    kernel: str
    name: str
    run: Callable[[str], object]
    rows: int = 0


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _integers(*shape: int) -> Tensor:
    return _tensor(*shape, dtype=torch.int32)


def _segment(heads: int, kv_heads: int, dim: int, rows: int, arch: str) -> None:
    segment_attention(
        _tensor(16, heads, dim),
        _tensor(32, kv_heads * dim),
        _tensor(32, kv_heads * dim),
        _tensor(16, heads * dim),
        _tensor(16, heads, dim, dtype=torch.float32),
        _tensor(16, heads, dtype=torch.float32),
        _integers(64),
        _integers(16),
        _integers(16),
        _integers(16),
        _integers(16, 6),
        HeadShape(heads, kv_heads, dim, dim**-0.5),
        config_for(arch, "segment", dim, rows),
    )


def _merge(heads: int, dim: int, arch: str) -> None:
    merge_partials(
        _tensor(16, heads, dim, dtype=torch.float32),
        _tensor(16, heads, dtype=torch.float32),
        _integers(8),
        _integers(9),
        _integers(16),
        _tensor(16, heads * dim),
        config_for(arch, "merge", dim),
    )


def _extend(heads: int, kv_heads: int, dim: int, window: int | None, arch: str) -> None:
    extend_attention(
        _tensor(16, heads, dim),
        _tensor(32, kv_heads * dim),
        _tensor(32, kv_heads * dim),
        _tensor(16, heads * dim),
        _integers(64),
        _integers(16, 5),
        HeadShape(heads, kv_heads, dim, dim**-0.5),
        window,
        config_for(arch, "extend", dim, 128),
    )


def _rope_write(heads: int, kv_heads: int, dim: int, rotary: bool, arch: str) -> None:
    rope_write(
        _tensor(16, (heads + 2 * kv_heads) * dim),
        _tensor(64, dim, dtype=torch.float32),
        _tensor(16, dtype=torch.int32),
        _tensor(16, dtype=torch.int32),
        _tensor(32, kv_heads * dim),
        _tensor(32, kv_heads * dim),
        HeadShape(heads, kv_heads, dim, dim**-0.5),
        rotary=rotary,
        arch=arch,
    )


def _norm(size: int, arch: str) -> None:
    rms_norm(_tensor(16, size), _tensor(size), 1e-5, arch=arch)


def _add_norm(size: int, arch: str) -> None:
    add_rms_norm(_tensor(16, size), _tensor(16, size), _tensor(size), 1e-5, arch=arch)


def _norm_heads(count: int, dim: int, arch: str) -> None:
    norm_heads(_tensor(16, (count + 8) * dim), _tensor(count, dim), 1e-6, arch=arch)


def _activation(size: int, arch: str) -> None:
    silu_and_multiply(_tensor(16, 2 * size), arch=arch)


def _sample(rows: int, vocabulary: int, masked: bool, top_p: float, arch: str) -> None:
    wide = np.zeros(rows, np.int64)
    terms = Terms(
        top_k_n=np.zeros(rows, np.int32),
        top_p_n=np.full(rows, top_p, np.float32),
        min_p_n=np.zeros(rows, np.float32),
        seed_n=wide,
        position_n=wide,
    )
    mask_row_r = np.full(rows, 0 if masked else -1, np.int32)
    packed = row_terms(np.ones(rows, np.float32), terms, mask_row_r, torch.device("cpu"))
    mask_mw = _tensor(rows, -(-vocabulary // 32), dtype=torch.int32) if masked else None
    sample(_tensor(rows, vocabulary, dtype=torch.float32), packed, mask_mw, arch=arch)


CALLS: tuple[Call, ...] = (
    *(
        Call(
            "segment",
            f"segment {heads}/{kv_heads}/{dim}, {rows} rows",
            partial(_segment, heads, kv_heads, dim, rows),
            rows,
        )
        for heads, kv_heads, dim in ((9, 3, 64), (32, 8, 128))
        for rows in (16, 32, 64, 128)
    ),
    *(
        Call("merge", f"merge {heads} x {dim}", partial(_merge, heads, dim))
        for heads, dim in ((9, 64), (32, 128))
    ),
    *(
        Call(
            "extend",
            f"extend {heads}/{kv_heads}/{dim}{', window' if window else ''}",
            partial(_extend, heads, kv_heads, dim, window),
            64,
        )
        for heads, kv_heads, dim in ((9, 3, 64), (32, 8, 128))
        for window in (None, 1000)
    ),
    *(
        Call(
            "rope_write",
            f"rope_write {heads}/{kv_heads}/{dim}{'' if rotary else ', no rotation'}",
            partial(_rope_write, heads, kv_heads, dim, rotary),
        )
        for heads, kv_heads, dim, rotary in (
            *((9, 3, 64, True), (32, 8, 128, True), (8, 1, 256, True), (32, 8, 128, False)),
        )
    ),
    *(Call("norm", f"rms_norm {size}", partial(_norm, size)) for size in (576, 4096, 16384)),
    *(
        Call("norm", f"add_rms_norm {size}", partial(_add_norm, size))
        for size in (576, 4096, 16384)
    ),
    *(
        Call("norm_heads", f"norm_heads {count} x {dim}", partial(_norm_heads, count, dim))
        for count, dim in ((24, 64), (40, 128), (12, 256))
    ),
    *(
        Call("activation", f"silu_and_multiply {size}", partial(_activation, size))
        for size in (1536, 14336)
    ),
    *(
        Call(
            "sample",
            f"sample {rows} x {vocabulary}{', masked' if masked else ''}"
            f"{', top-p' if top_p < 1 else ''}",
            partial(_sample, rows, vocabulary, masked, top_p),
        )
        for rows, vocabulary, masked, top_p in (
            *((16, 151_936, False, 1.0), (16, 151_936, True, 0.9), (1, 50_257, True, 0.9)),
        )
    ),
)
