"""Ten minutes of load: 64 requests at a time, a good part of them cancelled at random moments.

What leaks a slot, a task, a thread or memory a request at a time shows here and nowhere else.
STRUCTGEN_SOAK_SECONDS sets the length; the default is 600.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from pathlib import Path

import psutil
import pytest

from structgen import Engine
from structgen.engine.memory import give_back
from structgen.models.linear import padded_rows

SECONDS = float(os.environ.get("STRUCTGEN_SOAK_SECONDS", "600"))
CLIENTS = 64
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "1", "2", "3", "4"]


class Load:
    """Clients that send requests until the time is up, and what they saw."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.end = self.loop.time() + seconds
        self.finished = self.cancelled = 0
        self.memory: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Send until the end; ends with no request left."""
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(random.Random(number)))
            group.create_task(self._watch_memory())

    async def _client(self, choose: random.Random) -> None:
        shared = " ".join(choose.choices(WORDS, k=40))
        while self.loop.time() < self.end:
            own = " ".join(choose.choices(WORDS, k=choose.randrange(1, 200)))
            prompt = shared + own if choose.random() < 0.5 else own
            new = choose.randrange(1, 120)
            patience = choose.expovariate(1 / 5) if choose.random() < 0.3 else None
            try:
                async with asyncio.timeout(patience):
                    await self._request(prompt, new, choose)
                self.finished += 1
            except TimeoutError:
                self.cancelled += 1

    async def _request(self, prompt: str, new: int, choose: random.Random) -> None:
        temperature = choose.choice([0.0, 1.0])
        stops = choose.choice([(), (" fox", "\n\n")])
        async with self.engine.stream(
            prompt, max_tokens=new, temperature=temperature, stop=stops
        ) as deltas:
            async for delta in deltas:
                if choose.random() < 0.002:
                    break  # a reader that leaves early
                assert not any(stop in delta.text for stop in stops)

    async def _watch_memory(self) -> None:
        process = psutil.Process()
        while self.loop.time() < self.end:
            await asyncio.sleep(5)
            gc.collect()
            give_back()  # what is left is in use; the engine itself does this now and then
            self.memory.append((self.loop.time() / 60, process.memory_info().rss / 2**20))

    def slope(self) -> float:
        """Growth of the resident set in MB a minute, by least squares, without the first third."""
        points = self.memory[len(self.memory) // 3 :]
        if len(points) < 3:
            return 0.0
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def live_threads() -> set[threading.Thread]:
    """All threads but those that anyio keeps for the loop's next call, and ends with the loop."""
    return {each for each in threading.enumerate() if each.name != "AnyIO worker thread"}


async def meet_all_shapes(engine: Engine) -> None:
    """Compute each number of rows that a step may have once: oneDNN keeps something for each; and
    a step of all clients with long contexts: attention keeps the room that it gathers these in."""
    most, choose = engine.config.chunk_size, random.Random(0)

    async def once(length: int, new: int) -> None:
        prompt = [choose.randrange(1000, 40000) for _ in range(length)]
        await engine.generate(prompt, max_tokens=new, ignore_eos=True)

    for rows in sorted({padded_rows(count) for count in range(1, most + 1)}):
        await once(min(rows, most), 1)
    for clients in sorted({padded_rows(count) for count in range(1, CLIENTS + 1)}):
        # Rows that decode come on top of a chunk, and each of them needs logits.
        await asyncio.gather(*(once(4, 4) for _ in range(clients - 1)), once(2 * most, 1))
    longest = engine.statistics().slots_total // CLIENTS - 16
    await asyncio.gather(*(once(longest, 8) for _ in range(CLIENTS)))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 2 + 300)
async def test_load_with_cancellations_leaves_no_trace(default_model: Path) -> None:
    threads, tasks = live_threads(), len(asyncio.all_tasks())
    async with Engine(default_model, slots=12_000, max_running=CLIENTS) as engine:
        await meet_all_shapes(engine)
        load = Load(engine, SECONDS)
        await load.run()
        async with asyncio.timeout(30):
            # A reader that left last leaves its slots to the step that is in flight.
            while (after := engine.statistics()).running:  # noqa: ASYNC110 - polls
                await asyncio.sleep(0.01)
        left = (len(engine._mailboxes), len(engine._core._sequences), len(engine._timers))
    slope = load.slope()
    series = " ".join(f"{mb:.0f}" for _, mb in load.memory)
    print(f"resident MB every 5 s: {series}")
    print(
        f"finished {load.finished}, cancelled {load.cancelled}, slope {slope:.2f} MB/min, {after}"
    )

    assert (after.running, after.waiting, after.slots_held, after.slots_limbo) == (0, 0, 0, 0)
    assert after.slots_free + after.slots_cached == after.slots_total
    assert left == (0, 0, 0)
    assert load.finished > 0
    assert load.cancelled > 0
    assert after.requests_failed == 0
    assert after.loop_lag_p99 < 0.05
    assert slope < 1.0
    assert (live_threads(), len(asyncio.all_tasks())) == (threads, tasks)
