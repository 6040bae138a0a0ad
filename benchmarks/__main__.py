"""structgen beside transformers' `generate`: same weights, prompts and token counts, one run.

    python -m benchmarks [--dtype float32] [--repeats 5] [--json OUT]

Each repeat runs every contender once, one after the other, so that drift of the machine hits all
of them; figures are medians, ratios are medians of the ratios within a repeat. Nothing else may
run on the machine. Outputs are compared: greedy ids must agree between the contenders.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.peer_transformers import Transformers
from structgen import Engine
from structgen.models.resolve import resolve

Ids = list[list[int]]
Timed = tuple[Ids, float]
PREFIX, BRANCH, FORKS, FORK_NEW = 1024, 8, 16, 64
PROMPT, NEW = 128, 128


class Bench:
    """The contenders and their workloads; every method returns (greedy ids, seconds)."""

    def __init__(self, engine: Engine, lonely: Engine, peer: Transformers) -> None:
        self.engine, self.lonely, self.peer = engine, lonely, peer
        self._random = np.random.default_rng(0)

    def prompts(self, count: int, length: int) -> Ids:
        """Random ids, never repeated, so that no cache helps across repeats."""
        return self._random.integers(1000, 40000, (count, length)).tolist()

    async def ours(self, prompts: Ids, new: int) -> Timed:
        """All prompts at once."""
        started = time.perf_counter()
        done = await asyncio.gather(*(generate(self.engine, prompt, new) for prompt in prompts))
        return list(done), time.perf_counter() - started

    async def one_by_one(self, prompts: Ids, new: int) -> Timed:
        """One after the other, without a shared cache."""
        started = time.perf_counter()
        done = [await generate(self.lonely, prompt, new) for prompt in prompts]
        return done, time.perf_counter() - started


async def generate(engine: Engine, prompt: list[int], new: int) -> list[int]:
    """Greedy ids of exactly `new` tokens."""
    done = await engine.generate(prompt, max_tokens=new, temperature=0, ignore_eos=True)
    return list(done.tokens)


def workloads(bench: Bench) -> dict[str, Callable[[bool], Awaitable[dict[str, Timed]]]]:
    """Name -> one repeat of all contenders; "one by one", a minute each, in every other repeat."""

    async def batch(count: int, prompt: int, new: int, *, lonely: bool) -> dict[str, Timed]:
        prompts = bench.prompts(count, prompt)
        result = {"structgen": await bench.ours(prompts, new)}
        result["transformers"] = bench.peer.generate(prompts, new)
        if lonely:
            result["one by one"] = await bench.one_by_one(prompts, new)
        return result

    async def fork(*, lonely: bool) -> dict[str, Timed]:
        prefix = bench.prompts(1, PREFIX)[0]
        branches = bench.prompts(FORKS, BRANCH)
        prompts = [prefix + branch for branch in branches]
        result = {"structgen": await bench.ours(prompts, FORK_NEW)}
        result["transformers"] = bench.peer.fork(prefix, branches, FORK_NEW)
        if lonely:
            result["one by one"] = await bench.one_by_one(prompts, FORK_NEW)
        return result

    return {
        "batch 1, 128 in, 128 out": lambda _: batch(1, PROMPT, NEW, lonely=False),
        "batch 16, 128 in, 128 out": lambda lonely: batch(16, PROMPT, NEW, lonely=lonely),
        "prefill 1024, 1 out": lambda _: batch(1, PREFIX, 1, lonely=False),
        "fork 1024 x 16 x 64": lambda lonely: fork(lonely=lonely),
    }


def summarise(runs: list[dict[str, Timed]]) -> dict[str, object]:
    """Medians, ratios, and how many greedy ids agree with the peer's."""
    times = {name: [run[name][1] for run in runs if name in run] for name in runs[0]}
    row: dict[str, object] = {f"{name} s": statistics.median(t) for name, t in times.items()}
    for name in times.keys() - {"structgen"}:
        ratios = [run[name][1] / run["structgen"][1] for run in runs if name in run]
        row[f"x {name}"] = statistics.median(ratios)
        row[f"x {name} range"] = [min(ratios), max(ratios)]
    pairs = [
        (a, b)
        for run in runs
        for ours, theirs in zip(run["structgen"][0], run["transformers"][0], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    row["greedy ids equal"] = sum(a == b for a, b in pairs) / len(pairs)
    return row


async def main(dtype: str, repeats: int, only: str) -> dict[str, object]:
    """Run everything; prints a line per workload."""
    peer = Transformers(resolve("smollm2-135m"), getattr(torch, dtype))
    report: dict[str, object] = {
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }
    options = {"dtype": dtype, "slots": 40_000}
    async with Engine(**options) as engine, Engine(**options, radix=False) as lonely:
        bench = Bench(engine, lonely, peer)
        for name, once in workloads(bench).items():
            if only not in name:
                continue
            await once(False)  # warm up
            row = summarise([await once(repeat % 2 == 0) for repeat in range(repeats)])
            report[name] = row
            shown = ", ".join(f"{k} {v:.3g}" for k, v in row.items() if isinstance(v, float))
            print(f"{name}: {shown}", flush=True)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="run workloads whose name contains this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outcome = asyncio.run(main(arguments.dtype, arguments.repeats, arguments.only))
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=2) + "\n")
