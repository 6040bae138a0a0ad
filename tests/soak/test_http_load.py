"""Minutes of 256 streams at a time over HTTP, a tenth of whose clients vanish at random moments.

The server is a process of its own. What it must not do: answer by a 5xx, break a stream that is
still read, keep slots or requests of those that left, grow, or let `/health` wait.
STRUCTGEN_SOAK_SECONDS sets the length; the default is 180. WARM seconds before it are not measured;
in them all slots are written to. Every ten seconds the engine gives unused memory back, some 50 MB,
which the next steps take again; so what is in use is the least of each window of some more seconds,
and its slope is that of those.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.server.process import ServerProcess, server_process

SECONDS = float(os.environ.get("STRUCTGEN_SOAK_SECONDS", "180"))
WARM = 120.0
WINDOW = 15  # seconds, in which a step gives unused memory back at least once
CLIENTS, VANISHING = 256, 0.1
DRAIN = 5.0  # seconds that a server that is told to stop gives its streams, where one is
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "1", "2", "3", "4"]


class Load:
    """Clients that open streams until the time is up, and what they saw."""

    def __init__(self, session: aiohttp.ClientSession, pid: int) -> None:
        self._session, self._server = session, psutil.Process(pid)
        self._loop = asyncio.get_running_loop()
        self._end = 0.0
        self.seen = Counter[str]()
        self.waited: list[float] = []
        self.memory: list[tuple[float, float]] = []

    async def run(self, seconds: float) -> None:
        """Load it so long; ends when the last stream has ended."""
        self._end = self._loop.time() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(random.Random(number)))
            group.create_task(self._watch())
            group.create_task(self._watch_memory())

    async def _client(self, choose: random.Random) -> None:
        shared = " ".join(choose.choices(WORDS, k=30))
        while self._loop.time() < self._end:
            own = " ".join(choose.choices(WORDS, k=choose.randrange(1, 60)))
            body = {
                "model": "soak",
                "prompt": shared + own if choose.random() < 0.5 else own,
                "max_tokens": choose.randrange(1, 24),
                "temperature": choose.choice([0, 1]),
                "stop": choose.choice([None, [" fox", "\n\n"]]),
                "n": choose.choice([1, 1, 1, 2]),
                "stream": True,
            }
            leaves = choose.random() < VANISHING
            try:
                async with asyncio.timeout(choose.expovariate(1 / 8) if leaves else None):
                    self.seen[await self._stream(body)] += 1
            except TimeoutError:
                self.seen["vanished"] += 1

    async def _stream(self, body: dict[str, Any]) -> str:
        """How a stream ended."""
        ends: Counter[int] = Counter()
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                return f"status {response.status}: {await response.text()}"
            async for event in events_of(response):
                if event == "[DONE]":
                    whole = ends == Counter(range(body["n"]))
                    return "whole" if whole else f"ends of its choices: {dict(ends)}"
                found = json.loads(event)
                if "error" in found:
                    return f"error: {found['error']}"
                for choice in found["choices"]:
                    ends[choice["index"]] += choice["finish_reason"] is not None
        return "broken: no [DONE]"

    async def _watch(self) -> None:
        while self._loop.time() < self._end:
            began = time.perf_counter()
            async with self._session.get("/health") as response:
                await response.read()
                self.seen[f"health {response.status}"] += 1
            self.waited.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)

    async def _watch_memory(self) -> None:
        while self._loop.time() < self._end:
            await asyncio.sleep(1)
            megabytes = self._server.memory_info().rss / 2**20
            self.memory.append((self._loop.time() / 60, megabytes))

    def slope(self) -> float:
        """Growth of the server's memory in use in MB a minute, by least squares."""
        found = self.in_use()
        if len(found) < 3:
            return 0.0
        mean_x = sum(x for x, _ in found) / len(found)
        mean_y = sum(y for _, y in found) / len(found)
        spread = sum((x - mean_x) ** 2 for x, _ in found)
        return sum((x - mean_x) * (y - mean_y) for x, y in found) / spread

    def in_use(self) -> list[tuple[float, float]]:
        """Of each window, the moment when the server held least, and how much."""
        starts = range(0, len(self.memory) - WINDOW + 1, WINDOW)
        return [min(self.memory[at : at + WINDOW], key=lambda each: each[1]) for at in starts]

    def p99(self) -> float:
        """Seconds that `/health` took, all but the slowest hundredth."""
        waited = sorted(self.waited)
        return waited[min(len(waited) - 1, len(waited) * 99 // 100)]


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of a stream's events."""
    async for line in response.content:
        text = line.decode().strip()
        if text.startswith("data: "):
            yield text.removeprefix("data: ")


async def figures(session: aiohttp.ClientSession) -> dict[str, float]:
    """What the server says of its requests and slots."""
    async with session.get("/metrics") as response:
        text = await response.text()
    slots = dict(re.findall(r'^structgen:slots{.*state="(\w+)".*} (\S+)$', text, re.MULTILINE))
    requests = dict(
        re.findall(r"^structgen:num_requests_(running|waiting){.*} (\S+)$", text, re.MULTILINE)
    )
    return {name: float(value) for name, value in {**slots, **requests}.items()}


async def idle_figures(session: aiohttp.ClientSession) -> dict[str, float]:
    """The same once nothing runs or is given back; waits for that, ten seconds at the most."""
    async with asyncio.timeout(10):
        while True:
            found = await figures(session)
            if not found["running"] and not found["waiting"] and not found["limbo"]:
                return found
            await asyncio.sleep(0.05)


@pytest.fixture
def server(default_model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    # So few slots that all of them were written to, and are resident, when the warm-up is over.
    flags = ("--served-model-name", "soak", "--max-total-tokens", "10000", "--dtype", "float32")
    with server_process(default_model, tmp_path, *flags) as process:
        yield process


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + WARM + 300)
async def test_load_over_http_leaves_no_trace(server: ServerProcess) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as session:
        before = await figures(session)
        warm = Load(session, server.pid)
        await warm.run(WARM)
        load = Load(session, server.pid)
        await load.run(SECONDS)
        after = await idle_figures(session)
    series = " ".join(f"{mb:.0f}" for _, mb in [*warm.memory, *load.memory])
    print(f"resident MB every second: {series}")
    print(f"seen {dict(load.seen)}, slope {load.slope():.2f} MB/min, p99 {load.p99():.3f} s")
    print(f"after it: {after}")

    seen = warm.seen + load.seen
    assert set(seen) == {"whole", "vanished", "health 200"}
    assert load.seen["whole"] > 0
    assert load.seen["vanished"] > 0
    assert (after["running"], after["waiting"], after["held"]) == (0, 0, 0)
    assert after["free"] + after["cached"] == before["free"]
    assert load.p99() < 0.1
    assert load.slope() < 1.0


async def end_of(session: aiohttp.ClientSession, number: int, begun: asyncio.Event) -> str:
    """How a stream that goes on for long ends: the code of its last event."""
    body = {"model": "soak", "prompt": f"{number} words", "max_tokens": 500, "ignore_eos": True}
    async with session.post("/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            return f"status {response.status}"
        last = ""
        async for event in events_of(response):
            last = event
            begun.set()
    return str(json.loads(last)["error"]["code"]) if "error" in last else f"ended by {last!r}"


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_signal_under_load_ends_all_streams_in_time(
    default_model: Path, tmp_path: Path
) -> None:
    names = ("--served-model-name", "soak", "--drain-timeout", str(DRAIN))
    limits = ("--max-total-tokens", "140000", "--max-running-requests", str(CLIENTS))
    with server_process(default_model, tmp_path, *names, *limits) as server:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            server.url, connector=connector, timeout=timeout
        ) as session:
            begun = [asyncio.Event() for _ in range(CLIENTS)]
            streams = [
                asyncio.create_task(end_of(session, number, event))
                for number, event in enumerate(begun)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            told = time.perf_counter()
            server.signal(signal.SIGTERM)
            ends = Counter(await asyncio.gather(*streams))
            ended = time.perf_counter() - told
        code = await asyncio.to_thread(server.wait, 30)
        took = time.perf_counter() - told
        errors = server.errors
    print(f"streams ended by {dict(ends)} {ended:.2f} s after the signal, exit {took:.2f} s after")

    assert ends == {"shutting_down": CLIENTS}
    assert code == 0
    assert took < DRAIN + 2
    assert "Traceback" not in errors
