"""What HTTP costs: the same requests over a socket and straight to the engine, alternated.

    python -m benchmarks.http [--repeats 5] [--requests 64] [--json OUT]

The engine and its server run in this process, the client in another, which idles while the engine
is asked without it. Each repeat runs both sides on the same prompts, the cache emptied between
them, one side first in one repeat and the other in the next; the figure is the median of the
ratios within a repeat. The greedy ids of both sides must agree. Nothing else may run on the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from structgen import Engine
from structgen.server import ServerConfig, make_app

Ids = list[list[int]]
Timed = tuple[Ids, float]
REQUESTS, PROMPT, NEW = 64, 128, 64
WANTED = 0.9  # of the engine's throughput, over HTTP
LONGEST_LINE = 1 << 24  # of a client's answer, which has all ids


class Client:
    """The client's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def send(self, prompts: Ids, new: int) -> Timed:
        """Send all prompts at once; the seconds are the client's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the client ended; what it wrote stands above")
        answer = json.loads(line)
        return answer["ids"], answer["seconds"]


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    """A client in a process of its own, which ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.http_client", url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
    )
    try:
        yield Client(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[str]:
    """The engine's server on loopback."""
    app = make_app(engine, config=ServerConfig(names=("bench",)))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def straight(engine: Engine, prompts: Ids, new: int) -> Timed:
    """The same work without a server."""
    started = time.perf_counter()
    done = await asyncio.gather(
        *(
            engine.generate(prompt, max_tokens=new, temperature=0, ignore_eos=True)
            for prompt in prompts
        )
    )
    return [list(each.tokens) for each in done], time.perf_counter() - started


async def compare(
    engine: Engine, client: Client, repeats: int, requests: int, new: int
) -> list[dict[str, Any]]:
    """One row a repeat; prints it."""
    random, rows = np.random.default_rng(0), []
    sides: dict[str, Callable[[Ids, int], Awaitable[Timed]]] = {
        "http": client.send,
        "engine": lambda prompts, new: straight(engine, prompts, new),
    }
    for repeat in range(repeats):
        prompts: Ids = random.integers(1000, 40000, (requests, PROMPT)).tolist()
        found: dict[str, Timed] = {}
        for name in sorted(sides, reverse=repeat % 2 == 0):
            engine.flush_cache()
            found[name] = await sides[name](prompts, new)
        row: dict[str, Any] = {f"{name} s": seconds for name, (_, seconds) in found.items()}
        row["http / engine"] = found["engine"][1] / found["http"][1]
        row["greedy ids equal"] = found["engine"][0] == found["http"][0]
        rows.append(row)
        shown = ", ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float))
        print(f"repeat {repeat}: {shown}, ids equal: {row['greedy ids equal']}", flush=True)
    return rows


async def main(dtype: str, repeats: int, requests: int, new: int) -> dict[str, Any]:
    """Run everything; prints the outcome."""
    async with (
        Engine("smollm2-135m", dtype=dtype, slots=requests * (PROMPT + new) + 4000) as engine,
        served(engine) as url,
        client_of(url) as client,
    ):
        for side in (client.send, lambda p, n: straight(engine, p, n)):
            await side([[1000 + i] * 8 for i in range(requests)], 2)  # connections, code, kernels
        rows = await compare(engine, client, repeats, requests, new)
    ratios = [row["http / engine"] for row in rows]
    tokens = requests * new
    report = {
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "requests": requests,
        "prompt, new": [PROMPT, new],
        "http tokens/s": tokens / statistics.median(row["http s"] for row in rows),
        "engine tokens/s": tokens / statistics.median(row["engine s"] for row in rows),
        "throughput over HTTP, of the engine's": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "greedy ids equal": all(row["greedy ids equal"] for row in rows),
        "repeats": rows,
    }
    for name, value in report.items():
        if name != "repeats":
            print(f"{name:40} {value}")
    print("met" if statistics.median(ratios) >= WANTED else "MISSED", f"(wanted {WANTED})")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outcome = asyncio.run(
        main(arguments.dtype, arguments.repeats, arguments.requests, arguments.new)
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=2) + "\n")
