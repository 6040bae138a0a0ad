"""Health, readiness, load: what a server says of itself."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

import structgen
from structgen import Engine
from structgen.errors import EngineDiedError
from structgen.server import ServerConfig, make_app
from tests.server.served import ENGINE_OPTIONS, Answer, Serve, wait_until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ENGINE = web.AppKey("engine", Engine)


class TestAServerThatWorks:
    async def test_says_so(self, serve: Serve) -> None:
        async with serve() as served:
            found = {path: await served.get(path) for path in ("/live", "/health", "/ready")}
            version = await served.get("/version")

        assert {path: answer.status for path, answer in found.items()} == {
            "/live": 200,
            "/health": 200,
            "/ready": 200,
        }
        assert version.json == {"version": structgen.__version__}


class TestAServerThatLoads:
    async def test_lives_but_is_not_ready(self) -> None:
        app = make_app(ENGINE)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found: dict[str, int] = {}
        async with ClientSession(url) as client:
            for path in ("/live", "/health", "/ready", "/load", "/metrics", "/v1/models"):
                async with client.get(path) as response:
                    found[path] = response.status
            async with client.post(CHAT, json={"model": "m", "messages": HI}) as response:
                refused, retry = await response.json(), response.headers["Retry-After"]
        await runner.cleanup()

        assert found.pop("/live") == 200
        assert found.pop("/metrics") == 200
        assert set(found.values()) == {503}
        assert (refused["error"]["code"], int(retry)) == ("not_ready", 5)

    async def test_serves_an_engine_that_its_application_opens(self, tiny_chat_model: Path) -> None:
        async def engine(app: web.Application) -> object:
            async with Engine(tiny_chat_model, **ENGINE_OPTIONS) as opened:
                app[ENGINE] = opened
                yield

        app = make_app(ENGINE)
        app.cleanup_ctx.append(engine)  # type: ignore[arg-type]  # any asynchronous generator will do
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession(url) as client, client.get("/ready") as response:
            status = response.status
        await runner.cleanup()

        assert status == 200


class TestAServerThatDrains:
    async def test_is_healthy_but_not_ready(self, serve: Serve) -> None:
        async with serve() as served:
            await served.service.drain(0)
            live, health, ready = [
                await served.get(path) for path in ("/live", "/health", "/ready")
            ]
            refused = await served.post(CHAT, {"messages": HI})

        assert (live.status, health.status, ready.status) == (200, 200, 503)
        assert ready.error["code"] == "shutting_down"
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")


class TestAnEngineThatStalls:
    async def test_is_not_healthy(self, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        goes_on = threading.Event()
        async with serve(config=ServerConfig(stall=0.1)) as served:
            runner = served.engine.loaded.runner
            forward = runner.forward

            def stuck(batch: object) -> object:
                goes_on.wait(20)
                return forward(batch)  # type: ignore[arg-type]  # what the loop gave

            monkeypatch.setattr(runner, "forward", stuck)
            sent = asyncio.create_task(served.post(CHAT, {"messages": HI, "max_tokens": 2}))
            await wait_until(lambda: served.engine.statistics().stalled > 0.1)
            bad, live = await served.get("/health"), await served.get("/live")
            not_ready = await served.get("/ready")
            goes_on.set()
            assert (await sent).status == 200
            good = await served.get("/health")

        assert (bad.status, bad.error["code"]) == (503, "stalled")
        assert (not_ready.status, live.status, good.status) == (503, 200, 200)

    async def test_or_dies_is_not_healthy(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken() -> None:
            raise RuntimeError("a fault of the engine")

        async def serve_on() -> None:
            async with serve() as served:
                monkeypatch.setattr(served.engine._core, "plan", broken)
                answers.append(await served.post(CHAT, {"messages": HI}))
                answers.extend([await served.get("/health"), await served.get("/live")])

        answers: list[Answer] = []
        with pytest.raises(EngineDiedError):
            await serve_on()

        lost, health, live = answers
        assert (lost.status, lost.error["code"]) == (503, "engine_died")
        assert (health.status, health.error["code"], live.status) == (503, "engine_died", 200)


class TestTheLoad:
    async def test_counts_what_runs_and_waits(self, serve: Serve) -> None:
        async with serve(max_running=1) as served:
            body = {"messages": HI, "max_tokens": 3000, "ignore_eos": True}
            sent = [asyncio.create_task(served.post(CHAT, body)) for _ in range(3)]
            await wait_until(lambda: served.engine.statistics().waiting == 2)
            load = (await served.get("/load")).json
            for each in sent:
                each.cancel()
            await wait_until(lambda: served.engine.statistics().running == 0)
            idle = (await served.get("/load")).json

        assert (load["running"], load["waiting"], load["calls"]) == (1, 2, 3)
        assert load["waiting_tokens"] > 0
        assert 0 < load["slots_held"] <= load["slots_total"]
        assert (idle["running"], idle["waiting"], idle["slots_held"]) == (0, 0, 0)
        assert load["draining"] is False


class TestFlushingTheCache:
    async def test_makes_a_prompt_new_again(self, serve: Serve) -> None:
        async with serve() as served:
            body = {"messages": [{"role": "user", "content": "a prompt"}], "max_tokens": 2}

            async def cached() -> int:
                answer = await served.post(CHAT, body)
                return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert await cached() == 0
            assert await cached() > 0
            flushed = await served.post("/flush_cache")
            assert flushed.json["dropped_tokens"] > 0
            assert await cached() == 0
