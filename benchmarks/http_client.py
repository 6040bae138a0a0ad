"""The client of `http.py`, in a process of its own: it sends what it is told to, and times it.

Reads one order a line from its standard input, answers by one line, and idles between orders.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector


async def complete(session: ClientSession, prompt: list[int], new: int) -> list[int]:
    """Greedy ids of exactly `new` tokens, answered at once."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with session.post("/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer}")
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids


async def carry_out(session: ClientSession, order: dict[str, Any]) -> dict[str, Any]:
    """All requests of an order at once, on connections that are open already."""
    started = time.perf_counter()
    ids = await asyncio.gather(
        *(complete(session, prompt, order["new"]) for prompt in order["prompts"])
    )
    return {"seconds": time.perf_counter() - started, "ids": ids}


async def main(url: str) -> None:
    """Take orders until there are no more."""
    connector, timeout = TCPConnector(limit=0), ClientTimeout(total=None)
    async with ClientSession(url, connector=connector, timeout=timeout) as session:
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await carry_out(session, json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
