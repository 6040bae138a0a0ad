"""What a program leaves behind may be large, or much: others are served meanwhile."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from structgen import State, program
from tests.engine.test_responsive import LIMIT, TRIES, Ticker
from tests.server.served import Serve

pytestmark = pytest.mark.anyio
MANY, LONG = 10_000, 2_000_000


@pytest.fixture(autouse=True)
def without_pauses() -> Iterator[None]:
    """The collector looks through all that the test session keeps, which is not the server's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@program
async def many(s: State) -> int:
    for number in range(MANY):
        s[f"v{number}"] = number
        if number % 100 == 0:
            await asyncio.sleep(0)
    return MANY


@program
async def large(s: State) -> str:
    s["text"] = text = "\u00e9\n" * LONG
    return text


PROGRAMS = (many, large)
SIZES = {"many": MANY * len("v1234,,"), "large": 2 * 2 * LONG}


class TestWhatAProgramLeaves:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("name", list(SIZES))
    async def test_is_told_while_others_are_served(
        self, serve: Serve, name: str, stream: bool
    ) -> None:
        lags: list[float] = []
        status = size = 0
        async with serve(programs=PROGRAMS) as served:
            while min(lags, default=LIMIT) >= LIMIT and len(lags) < TRIES:
                ticker, size = Ticker(), 0
                async with ticker.running():
                    path, body = f"/v1/programs/{name}", {"stream": stream}
                    async with served.client.post(path, json=body) as response:
                        async for piece in response.content.iter_any():
                            size += len(piece)
                        status = response.status
                lags.append(ticker.worst)

        assert status == 200
        assert size > SIZES[name]
        assert min(lags) < LIMIT
