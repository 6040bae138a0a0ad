"""What the program language costs: live programs, streams, a select, a tree of thought.

    python -m benchmarks.language [--repeats 5] [--json OUT]

Programs without a model run on `ScriptedBackend`; the rest on the default model. Each repeat runs
both sides of a comparison one after the other; ratios are medians of the ratios within a repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from structgen import Engine, State, program
from structgen.testing import ScriptedBackend

LIVE = 10_000
STREAMS, STREAM_NEW = 60, 24
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Gate(ScriptedBackend):
    """A backend that answers when the gate is open."""

    def __init__(self) -> None:
        super().__init__("answer")
        self.gate = asyncio.Event()

    async def turn(self) -> None:
        await self.gate.wait()


@program
async def ask(s: State, number: int) -> str:
    s.user(f"Question {number}")
    with s.assistant():
        return await s.gen("answer", max_tokens=16)


async def live_programs() -> dict[str, object]:
    """Ten thousand programs that all wait for their first answer."""
    backend, process = Gate(), psutil.Process()
    gc.collect()
    before, threads = process.memory_info().rss, threading.active_count()
    started = time.perf_counter()
    tasks = [asyncio.create_task(ask.run(backend, number)) for number in range(LIVE)]
    while backend.running < LIVE:  # noqa: ASYNC110 - the backend has no event for it
        await asyncio.sleep(0.01)
    seconds = time.perf_counter() - started
    gc.collect()
    memory = process.memory_info().rss - before
    extra = threading.active_count() - threads
    backend.gate.set()
    results = await asyncio.gather(*tasks)
    assert all(result.value == "answer" for result in results)
    return {
        "live programs": LIVE,
        "KB each": memory / LIVE / 1024,
        "us to start each": seconds / LIVE * 1e6,
        "threads more": extra,
    }


@program
async def whole(s: State, number: int) -> float:
    """Returns the seconds to its text, all of it."""
    s += f"Count with me, number {number}: 1, 2, 3,"
    started = time.perf_counter()
    await s.gen(max_tokens=STREAM_NEW, **GREEDY)
    return time.perf_counter() - started


@program
async def streamed(s: State, number: int) -> float:
    """Returns the seconds to its first piece."""
    s += f"Count with me, number {number}: 1, 2, 3,"
    started = time.perf_counter()
    first = 0.0
    async with s.stream(max_tokens=STREAM_NEW, **GREEDY) as pieces:
        async for _ in pieces:
            first = first or time.perf_counter() - started
    return first


async def streams(engine: Engine, repeats: int) -> dict[str, object]:
    """Sixty streams beside the same sixty generations unstreamed."""
    ratios, spreads, seconds = [], [], []
    for _ in range(repeats):
        times = {}
        for each in (whole, streamed):
            engine.flush_cache()
            started = time.perf_counter()
            results = await each.run_batch(engine, range(STREAMS))
            times[each.__name__] = time.perf_counter() - started
        firsts = [result.value for result in results]
        ratios.append(times["streamed"] / times["whole"])
        spreads.append(max(firsts) / statistics.median(firsts))
        seconds.append(times["streamed"])
    return {
        "streams": STREAMS,
        "s": statistics.median(seconds),
        "x unstreamed": statistics.median(ratios),
        "slowest first piece, of the median": statistics.median(spreads),
    }


async def selects(engine: Engine, repeats: int) -> dict[str, object]:
    """A select of fifty choices of three tokens each after a primed prompt."""
    choices = [f" {word} {number}" for word in ("red", "blue") for number in range(10, 35)]

    @program
    async def choose(s: State) -> float:
        s += "The lucky colour and number are:"
        await s.prime()
        started = time.perf_counter()
        await s.select("x", choices)
        return time.perf_counter() - started

    seconds, steps = [], set()
    for _ in range(repeats):
        engine.flush_cache()
        before = engine.statistics().steps
        seconds.append((await choose.run(engine)).value)
        steps.add(engine.statistics().steps - before - 1)
    return {"choices": len(choices), "s": statistics.median(seconds), "steps": sorted(steps)}


@program
async def tree_of_thought(s: State) -> int:
    """Three branches, three levels: 39 generations. Returns the most threads that were seen."""
    s += "How can a town save water?"
    seen = 0

    async def grow(state: State, depth: int) -> None:
        nonlocal seen
        await state.gen(max_tokens=16, temperature=0.3, ignore_eos=True)
        seen = max(seen, threading.active_count())
        if depth:
            async with state.fork(3) as branches:
                for index, branch in enumerate(branches):
                    branch.append(f"\nThought {index}:")
                await branches.map(lambda branch, _: grow(branch, depth - 1))

    await grow(s, 3)
    return seen


async def trees(engine: Engine) -> dict[str, object]:
    """One tree of thought on the real engine, and its threads."""
    before, started = threading.active_count(), time.perf_counter()
    result = await tree_of_thought.run(engine)
    return {
        "tree of thought 3x3x3, s": time.perf_counter() - started,
        "threads before": before,
        "threads at most": result.value,
        "prompt tokens": result.usage.prompt_tokens,
        "cached tokens": result.usage.cached_tokens,
    }


async def main(repeats: int) -> list[dict[str, object]]:
    """Run everything; prints a line for each."""
    report = [await live_programs()]
    print(report[-1], flush=True)
    async with Engine("smollm2-135m", dtype="float32", slots=20_000) as engine:
        await engine.generate("warm", max_tokens=4)
        for work in (streams(engine, repeats), selects(engine, repeats), trees(engine)):
            report.append(await work)
            print(report[-1], flush=True)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(main(arguments.repeats))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
