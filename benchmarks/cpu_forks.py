"""Decode attention over a shared prefix on a CPU: read once for all branches or once for each.

    python -m benchmarks.cpu_forks [--branches 16] [--prefix 1024] [--tail 64] [--repeats 5]
                                   [--threads 1] [--dtype float32] [--json OUT]

One layer of 9 query and 3 key/value heads of 64, as in the default model. Each repeat runs both, in
turns first; times are medians of the repeats, the ratio is the median of those within a repeat. One
path is the other with its gate shut or open. Further rows have few branches, around the prefix from
which the engine reads it once; the last column says what it does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import Tensor

from structgen.kernels import cpu_plan
from structgen.kernels.attention import HeadShape, LayerSpec, Layout
from structgen.kernels.cpu import CpuAttention, CpuPlan

SHAPE = HeadShape(9, 3, 64, 64**-0.5)
AROUND = {2: (512, 768, 1024), 4: (192, 256, 512), 16: (64, 128, 512)}  # prefixes by branches
NEVER = 1 << 60
SECONDS = 0.05  # of one timing, at least: as many calls as that takes


class Forks(msgspec.Struct, frozen=True):
    """Branches of `tail` tokens each over a prefix, decoding one token each."""

    branches: int
    prefix: int
    tail: int

    def layout(self) -> Layout:
        """Slots as the pool gives them: runs, in place."""
        ends = [self.prefix + self.tail * branch for branch in range(self.branches + 1)]
        contexts = tuple(
            np.concatenate([np.arange(self.prefix), np.arange(low, high)]) + 1
            for low, high in pairwise(ends)
        )
        return Layout(
            np.arange(self.branches + 1),
            contexts,
            np.array(ends[1:]),
            np.full(self.branches, self.prefix + self.tail - 1),
        )

    @property
    def slots(self) -> int:
        """Slots of the pool, the padding slot among them."""
        return 1 + self.prefix + self.branches * self.tail


class Result(msgspec.Struct, frozen=True):
    """Milliseconds of one layer's attention, medians, and plain by shared.

    enabled   the engine reads this prefix once
    """

    forks: Forks
    shared: float
    plain: float
    ratio: float
    enabled: bool


def main() -> None:
    """Measure and print."""
    options = arguments()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    asked = Forks(options.branches, options.prefix, options.tail)
    around = [Forks(n, prefix, options.tail) for n, each in AROUND.items() for prefix in each]
    results = [measured(forks, dtype, options.repeats) for forks in (asked, *around)]
    print(f"{options.dtype}, {options.threads} threads, {options.repeats} repeats")
    print("| branches | prefix | tail | plain ms | read once ms | plain / read once | engine |")
    print("|--:|--:|--:|--:|--:|--:|---|")
    for each in results:
        forks = each.forks
        print(
            f"| {forks.branches} | {forks.prefix} | {forks.tail} | {each.plain:.3g} "
            f"| {each.shared:.3g} | {each.ratio:.3g} | {'once' if each.enabled else 'each'} |"
        )
    if options.json is not None:
        options.json.write_bytes(
            json.dumps([msgspec.to_builtins(each) for each in results]).encode()
        )


def measured(forks: Forks, dtype: torch.dtype, repeats: int) -> Result:
    """Both paths in turns; their results are compared first."""
    attention = attention_of(forks, dtype)
    q_thd = torch.randn(forks.branches, SHAPE.heads, SHAPE.head_dim).to(dtype)
    chosen = attention.plan(forks.layout())
    with mock.patch.multiple(cpu_plan, SHARED_TOKENS=1, SAVED_VALUES=0):
        shared = attention.plan(forks.layout())
    with mock.patch.object(cpu_plan, "SHARED_TOKENS", NEVER):
        plain = attention.plan(forks.layout())
    a_tx, b_tx = attention.attend(q_thd, 0, shared), attention.attend(q_thd, 0, plain)
    torch.testing.assert_close(a_tx, b_tx, atol=2e-2, rtol=2e-2)
    pairs: list[tuple[float, float]] = []
    for repeat in range(repeats):
        if repeat % 2:
            pairs.append((timed(attention, q_thd, shared), timed(attention, q_thd, plain)))
        else:
            second = timed(attention, q_thd, plain)
            pairs.append((timed(attention, q_thd, shared), second))
    return Result(
        forks,
        statistics.median(once for once, _ in pairs),
        statistics.median(each for _, each in pairs),
        statistics.median(each / once for once, each in pairs),
        any(isinstance(part, cpu_plan.Shared) for part in chosen.parts_l[0]),
    )


def attention_of(forks: Forks, dtype: torch.dtype) -> CpuAttention:
    """One layer over pools of random keys and values."""
    pools = [torch.randn(forks.slots, SHAPE.kv_heads * SHAPE.head_dim).to(dtype) for _ in range(2)]
    angles_pd = torch.zeros(forks.prefix + forks.tail, SHAPE.head_dim)
    return CpuAttention([pools[0]], [pools[1]], SHAPE, [LayerSpec()], angles_pd)


def timed(attention: CpuAttention, q_thd: Tensor, plan: CpuPlan) -> float:
    """Milliseconds of one call, over as many as take `SECONDS`."""
    calls, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < SECONDS:
        attention.attend(q_thd, 0, plan)
        calls += 1
    return passed / calls * 1e3


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--tail", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
