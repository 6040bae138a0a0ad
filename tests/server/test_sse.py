"""Streams of events: their form, the silence, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
from aiohttp import web

from structgen.errors import OverloadedError
from structgen.server import ServerConfig
from structgen.server.call import Call
from structgen.server.errors import ApiError
from tests.server.served import serving_route, wait_until

SHORT = ServerConfig(keep_alive=0.05)


class TestEvents:
    async def test_are_lines_of_data_and_end_by_done(self, tiny_chat_model: Path) -> None:
        async def two(call: Call) -> web.StreamResponse:
            stream = call.stream()
            await stream.send(b'{"a": 1}')
            await stream.send(b'{"b": 2}', event="named")
            return await stream.done()

        async with serving_route(two, tiny_chat_model) as served:
            answer = await served.get("/")

        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-cache"
        assert answer.text == ('data: {"a": 1}\n\nevent: named\ndata: {"b": 2}\n\ndata: [DONE]\n\n')


class TestAnError:
    async def test_before_the_first_event_has_a_status(self, tiny_chat_model: Path) -> None:
        async def early(call: Call) -> web.StreamResponse:
            call.stream()
            raise OverloadedError("full")

        async with serving_route(early, tiny_chat_model) as served:
            answer = await served.get("/")

        assert (answer.status, answer.error["code"]) == (503, "overloaded")

    async def test_after_it_is_the_last_event(self, tiny_chat_model: Path) -> None:
        async def late(call: Call) -> web.StreamResponse:
            await call.stream().send(b"{}")
            raise ApiError(500, "broke")

        async with serving_route(late, tiny_chat_model) as served:
            answer = await served.get("/")

        first, last = answer.events
        assert (answer.status, first) == (200, "{}")
        assert json.loads(last)["error"]["message"] == "broke"


class TestSilence:
    async def test_is_broken_by_comments(self, tiny_chat_model: Path) -> None:
        async def slow(call: Call) -> web.StreamResponse:
            stream = call.stream()
            await stream.send(b"{}")
            await anyio.sleep(0.18)
            return await stream.done()

        async with serving_route(slow, tiny_chat_model, config=SHORT) as served:
            answer = await served.get("/")

        assert 1 <= answer.text.count(": ping\n\n") <= 3
        assert answer.events == ["{}", "[DONE]"]

    async def test_before_the_first_event_begins_the_stream(self, tiny_chat_model: Path) -> None:
        async def slow(call: Call) -> web.StreamResponse:
            stream = call.stream()
            await anyio.sleep(0.12)
            await stream.send(b"{}")
            return await stream.done()

        async with serving_route(slow, tiny_chat_model, config=SHORT) as served:
            answer = await served.get("/")

        assert answer.text.startswith(": ping\n\n")
        assert answer.events == ["{}", "[DONE]"]

    async def test_ends_with_the_client(self, tiny_chat_model: Path) -> None:
        async def endless(call: Call) -> web.StreamResponse:
            await call.stream().send(b"{}")
            await anyio.sleep_forever()
            raise AssertionError("it ends by cancellation")

        async with serving_route(endless, tiny_chat_model, config=SHORT) as served:
            async with served.client.get("/") as response:
                await response.content.readline()
                response.close()

            await wait_until(lambda: served.service.live == 0, 1)

    async def test_of_a_client_that_reads_nothing_holds_up_no_other(
        self, tiny_chat_model: Path
    ) -> None:
        async def flood(call: Call) -> web.StreamResponse:
            stream = call.stream()
            while True:
                await stream.send(b"x" * 100_000)

        async with serving_route(flood, tiny_chat_model, config=SHORT) as served:
            async with served.client.get("/") as response:
                # Buffers fill, and then the write waits; the keep-alive must not write past it.
                await anyio.sleep(0.2)
                assert served.service.live == 1
                response.close()

            await wait_until(lambda: served.service.live == 0, 1)
