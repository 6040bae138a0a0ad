"""The end of a server: calls end in time, or are ended and told so; then nothing is left."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from aiohttp import ClientSession, web

from structgen import Engine
from structgen.server import ServerConfig, make_app
from structgen.server.app import SERVICE
from tests.server.served import Serve, Served, wait_until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SHORT = {"messages": HI, "max_tokens": 200, "ignore_eos": True}
ENDLESS = {**SHORT, "max_tokens": 3500}


async def drained(served: Served, seconds: float) -> float:
    """Drain, and say how long it took."""
    before = time.perf_counter()
    await served.service.drain(seconds)
    return time.perf_counter() - before


class TestACallThatEndsInTime:
    async def test_is_answered(self, serve: Serve) -> None:
        async with serve() as served:
            sent = asyncio.create_task(served.post(CHAT, SHORT))
            await wait_until(lambda: served.engine.statistics().running == 1)
            took = await drained(served, 30)
            answer = await sent

        assert took < 25, "it goes on as soon as the last call has ended"
        assert answer.status == 200
        assert answer.headers["Connection"] == "close"


class TestACallThatDoesNot:
    async def test_is_told_so_in_its_stream(self, serve: Serve) -> None:
        async with serve() as served:
            sent = asyncio.create_task(served.post(CHAT, {**ENDLESS, "stream": True}))
            await wait_until(lambda: served.engine.statistics().generated_tokens > 2)
            took = await drained(served, 0.1)
            answer = await sent
            # A step that is under way is the last thing to end.
            await wait_until(lambda: served.engine.statistics().running == 0, 1)
            statistics = served.engine.statistics()

        assert 0.1 <= took < 1
        assert answer.status == 200
        assert answer.events[-1] != "[DONE]"
        assert json.loads(answer.events[-1])["error"]["code"] == "shutting_down"
        assert (statistics.waiting, statistics.slots_held) == (0, 0)

    async def test_is_told_so_where_it_only_waited(self, serve: Serve) -> None:
        async with serve(max_running=1) as served:
            running = asyncio.create_task(served.post(CHAT, ENDLESS))
            await wait_until(lambda: served.engine.statistics().running == 1)
            waiting = asyncio.create_task(served.post(CHAT, SHORT))
            await wait_until(lambda: served.engine.statistics().waiting == 1)
            await drained(served, 0.1)
            answers = await asyncio.gather(running, waiting)

        for answer in answers:
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
            assert int(answer.headers["Retry-After"]) >= 1

    async def test_is_ended_at_once_in_a_hurry(self, serve: Serve) -> None:
        async with serve() as served:
            sent = asyncio.create_task(served.post(CHAT, ENDLESS))
            await wait_until(lambda: served.engine.statistics().running == 1)
            draining = asyncio.create_task(drained(served, 30))
            await wait_until(lambda: served.service.draining)
            served.service.hurry()

            assert await draining < 1
            assert (await sent).status == 503


class TestACallThatComesLate:
    async def test_is_refused_while_others_end(self, serve: Serve) -> None:
        async with serve() as served:
            running = asyncio.create_task(served.post(CHAT, ENDLESS))
            await wait_until(lambda: served.engine.statistics().running == 1)
            draining = asyncio.create_task(drained(served, 0.5))
            await wait_until(lambda: served.service.draining)
            late = await served.post(CHAT, SHORT)
            models = await served.get("/v1/models")
            metrics = await served.get("/metrics")
            await asyncio.gather(draining, running)

        assert (late.status, late.error["code"]) == (503, "shutting_down")
        assert late.headers["Connection"] == "close"
        assert (models.status, metrics.status) == (503, 200)


class TestAnApplication:
    async def test_that_ends_lets_calls_end_as_the_server_does(self, tiny_chat_model: Path) -> None:
        async with Engine(tiny_chat_model) as engine:
            app = make_app(engine, config=ServerConfig(drain=0.2))
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with ClientSession(url) as client:
                served = Served(url, client, engine, app[SERVICE])
                sent = asyncio.create_task(served.post(CHAT, {**ENDLESS, "stream": True}))
                await wait_until(lambda: engine.statistics().generated_tokens > 2)
                before = time.perf_counter()
                await runner.cleanup()
                took = time.perf_counter() - before
                answer = await sent

        assert 0.2 <= took < 2
        assert json.loads(answer.events[-1])["error"]["code"] == "shutting_down"
