"""The frame of every route: bodies, ids, clients that leave, what is answered in JSON."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import ClientError, web

from structgen.errors import EngineClosedError
from structgen.server import ServerConfig
from structgen.server.call import Call
from structgen.server.errors import ApiError
from tests.engine.test_responsive import LIMIT, TRIES, Ticker
from tests.server.served import Serve, serving_route, wait_until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ENDLESS = {"messages": HI, "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


async def echo(call: Call) -> web.StreamResponse:
    """Answers the body."""
    return call.answer(await call.body(dict[str, str]))


class TestABody:
    async def test_is_json_and_says_so(self, tiny_chat_model: Path) -> None:
        async with serving_route(echo, tiny_chat_model) as served:
            plain = await served.post("/", {"a": "b"})
            charset = await served.post("/", "{}", Content_Type="application/json; charset=utf-8")

        assert (plain.status, plain.json) == (200, {"a": "b"})
        assert plain.headers["Content-Type"].startswith("application/json")
        assert charset.status == 200

    @pytest.mark.parametrize("type_", ["text/plain", "application/x-www-form-urlencoded"])
    async def test_of_another_type_is_refused(self, tiny_chat_model: Path, type_: str) -> None:
        async with serving_route(echo, tiny_chat_model) as served:
            answer = await served.post("/", "{}", Content_Type=type_)

        assert answer.status == 415
        assert type_ in answer.error["message"]
        assert "application/json" in answer.error["message"]

    async def test_without_a_type_is_refused(self, tiny_chat_model: Path) -> None:
        async with (
            serving_route(echo, tiny_chat_model) as served,
            served.client.post("/", data=b"{}", skip_auto_headers=["Content-Type"]) as response,
        ):
            body = await response.json()

        assert response.status == 415
        assert "missing" in body["error"]["message"]

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            (b"{bad json", "not JSON"),
            (b"", "not JSON"),
            (b'{"a": "\xff"}', "not JSON"),
            (b'{"a": 5}', "Expected `str`, got `int`"),
        ],
        ids=["malformed", "empty", "invalid-utf-8", "another-form"],
    )
    async def test_that_cannot_be_read_is_refused(
        self, tiny_chat_model: Path, body: bytes, said: str
    ) -> None:
        async with serving_route(echo, tiny_chat_model) as served:
            answer = await served.post("/", body)

        assert answer.status == 400
        assert said in answer.error["message"]

    async def test_that_is_too_deep_is_refused(self, tiny_chat_model: Path) -> None:
        async def anything(call: Call) -> web.StreamResponse:
            return call.answer(await call.body(list[object]))

        async with serving_route(anything, tiny_chat_model) as served:
            answer = await served.post("/", b"[" * 90_000)

        assert answer.status == 400
        assert "not JSON" in answer.error["message"]

    async def test_may_be_compressed(self, tiny_chat_model: Path) -> None:
        async with serving_route(echo, tiny_chat_model) as served:
            whole = gzip.compress(b'{"a": "b"}')
            answer = await served.post("/", whole, Content_Encoding="gzip")
            cut = await served.post("/", b"no gzip at all", Content_Encoding="gzip")

        assert answer.json == {"a": "b"}
        assert cut.status == 400
        assert cut.error["message"]

    @pytest.mark.parametrize("encoding", ["compress", "gzip, br", "nonsense"])
    async def test_that_is_packed_in_another_way_is_refused(
        self, tiny_chat_model: Path, encoding: str
    ) -> None:
        async with serving_route(echo, tiny_chat_model) as served:
            answer = await served.post("/", {"a": "b"}, Content_Encoding=encoding)
            plain = await served.post("/", {"a": "b"}, Content_Encoding="Identity")

        assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
        assert repr(encoding) in answer.error["message"]
        assert "gzip or deflate" in answer.error["message"]
        assert plain.status == 200

    async def test_in_chunks_is_read_whole(self, tiny_chat_model: Path) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for piece in (b'{"a"', b': "', b"b" * 100_000, b'"}'):
                yield piece
                await asyncio.sleep(0)

        async with (
            serving_route(echo, tiny_chat_model) as served,
            served.client.post(
                "/", data=chunks(), headers={"Content-Type": "application/json"}
            ) as response,
        ):
            body = await response.json()

        assert len(body["a"]) == 100_000


class TestALargeBody:
    CONFIG = ServerConfig(max_body=1000)

    @pytest.mark.parametrize("encoding", ["", "gzip", "deflate"])
    async def test_is_refused_as_json(self, tiny_chat_model: Path, encoding: str) -> None:
        body = json.dumps({"a": "b" * 2_000_000}).encode()
        packs: dict[str, Callable[[bytes], bytes]]
        packs = {"gzip": gzip.compress, "deflate": zlib.compress, "": bytes}
        pack = packs[encoding]
        headers = {"Content-Encoding": encoding} if encoding else {}
        async with serving_route(echo, tiny_chat_model, config=self.CONFIG) as served:
            answer = await served.post("/", pack(body), **headers)
            small = await served.post("/", pack(b'{"a": "b"}'), **headers)

        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert "1000 bytes" in answer.error["message"]
        assert "--max-body-bytes" in answer.error["message"]
        assert small.json == {"a": "b"}

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    async def test_is_not_unpacked_beyond_the_limit(
        self, tiny_chat_model: Path, encoding: str
    ) -> None:
        """30 MB of nothing, packed: they are never here all at once."""
        pack = zlib.compressobj(9, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
        bomb = b"".join(pack.compress(b" " * 1_000_000) for _ in range(30)) + pack.flush()
        config = ServerConfig(max_body=1_000_000)
        async with serving_route(echo, tiny_chat_model, config=config) as served:
            tracemalloc.start()
            answer = await served.post("/", bomb, Content_Encoding=encoding)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()

        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert peak < 10_000_000

    async def test_of_the_largest_size_holds_up_nobody(self, tiny_chat_model: Path) -> None:
        text = json.dumps({"a": "é" * (ServerConfig().max_body // 2 - 100)}, ensure_ascii=False)
        body, lags = text.encode(), []

        async def read(call: Call) -> web.StreamResponse:
            await call.body(dict[str, str])
            return call.answer({})

        async with serving_route(read, tiny_chat_model) as served:
            for _ in range(TRIES):
                ticker = Ticker()
                async with ticker.running():
                    answer = await served.post("/", body)
                    assert answer.status == 200
                lags.append(ticker.worst)

        assert min(lags) < LIMIT

    async def test_whose_length_was_not_said_is_refused(self, tiny_chat_model: Path) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"[" * 100
                await asyncio.sleep(0)

        async with (
            serving_route(echo, tiny_chat_model, config=self.CONFIG) as served,
            served.client.post(
                "/", data=chunks(), headers={"Content-Type": "application/json"}
            ) as response,
        ):
            body = await response.json()

        assert response.status == 413
        assert body["error"]["code"] == "body_too_large"

    async def test_of_more_than_a_mebibyte_is_taken_where_that_is_allowed(
        self, serve: Serve
    ) -> None:
        async with serve() as served:
            answer = await served.post(CHAT, {"messages": HI, "user": "x" * 3_000_000})

        assert answer.status == 200


class TestARequestId:
    async def test_is_repeated(self, serve: Serve) -> None:
        async with serve() as served:
            good = await served.get("/live", X_Request_Id="my-id")
            absent = await served.get("/nowhere", X_Request_Id="another")

        assert good.headers["X-Request-Id"] == "my-id"
        assert absent.headers["X-Request-Id"] == "another"

    async def test_is_made_where_there_is_none_or_one_that_logs_could_not_hold(
        self, tiny_chat_model: Path
    ) -> None:
        async with serving_route(echo, tiny_chat_model) as served:
            first = await served.post("/", {})
            second = await served.post("/", {}, X_Request_Id="two words")
            third = await served.post("/", {}, X_Request_Id="x" * 200)

        ids = {answer.headers["X-Request-Id"] for answer in (first, second, third)}
        assert len(ids) == 3
        assert all(each.startswith("req-") for each in ids)

    async def test_stands_in_the_head_of_a_stream(self, serve: Serve) -> None:
        async with serve() as served:
            body = {"messages": HI, "max_tokens": 2, "stream": True}
            answer = await served.post(CHAT, body, X_Request_Id="streamed")

        assert answer.headers["X-Request-Id"] == "streamed"
        assert answer.headers["Content-Type"].startswith("text/event-stream")


class TestWhatNoRouteTakes:
    async def test_is_answered_as_json(self, serve: Serve) -> None:
        async with serve() as served:
            absent = await served.get("/v1/nope")
            method = await served.get(CHAT)
            preflight = await served.send("OPTIONS", CHAT)

        assert (absent.status, absent.error["code"]) == (404, "not_found")
        assert (method.status, method.error["code"]) == (405, "method_not_allowed")
        assert method.headers["Allow"] == "POST"
        assert preflight.status == 405

    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            ("/chat/completions", "/v1/chat/completions"),
            ("/models", "/v1/models"),
            ("/models/tiny", "/v1/models/tiny"),
            ("/v1/v1/chat/completions", "/v1/chat/completions"),
            ("/v1//models", "/v1/models"),
            ("/v1/models/", "/v1/models"),
            ("/api/v1/completions", "/v1/completions"),
            ("/v1/health", "/health"),
            ("/v1/nope", None),
            ("/", None),
        ],
    )
    async def test_is_told_the_route_that_was_meant(
        self, serve: Serve, path: str, meant: str | None
    ) -> None:
        async with serve() as served:
            answer = await served.get(path)

        assert (answer.status, answer.error["code"]) == (404, "not_found")
        told = answer.error["message"].partition("it is ")[2].removesuffix(" here")
        assert told == (meant or "")

    async def test_is_logged(self, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "structgen.access"):
            async with serve() as served:
                await served.get("/v1/nope?secret=1")

        assert "GET /v1/nope 404" in caplog.text
        assert "secret" not in caplog.text


class TestHead:
    async def test_is_answered_like_get_without_a_body(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.send("HEAD", "/health")

        assert (answer.status, answer.text) == (200, "")


class TestAConnection:
    async def test_is_kept_after_answers_of_all_kinds(self, serve: Serve) -> None:
        async with serve() as served:
            statuses: list[int] = []
            chat = served.named({"messages": HI, "max_tokens": 2})
            for path, body in ((CHAT, []), ("/nope", {}), (CHAT, chat)):
                async with served.client.post(path, json=body) as response:
                    await response.read()
                    statuses.append(response.status)

            connector = served.client.connector
            assert connector is not None
            # One after another: all of them went over one connection, which waits for more.
            assert sum(len(each) for each in connector._conns.values()) == 1
            assert statuses == [400, 404, 200]


class TestAClientThatLeaves:
    async def test_ends_its_stream_at_once(self, serve: Serve) -> None:
        async with serve() as served:
            before = served.engine.statistics().requests_aborted
            for _ in range(2):
                async with served.client.post(
                    CHAT, json=served.named({**ENDLESS, "stream": True})
                ) as response:
                    await response.content.readline()
                    response.close()

            await wait_until(lambda: served.engine.statistics().running == 0, 1)
            await wait_until(lambda: served.service.live == 0, 1)
            statistics = served.engine.statistics()
            assert statistics.requests_aborted == before + 2
            assert (statistics.waiting, statistics.slots_held) == (0, 0)

    async def test_ends_what_it_did_not_stream_as_well(
        self, serve: Serve, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            async with serve() as served:
                sent = asyncio.create_task(served.post(CHAT, ENDLESS))
                await wait_until(lambda: served.engine.statistics().running == 1)
                sent.cancel()

                await wait_until(lambda: served.engine.statistics().running == 0, 1)
                await wait_until(lambda: served.service.live == 0, 1)
                assert served.engine.statistics().requests_aborted == 1

        assert f"POST {CHAT} 499" in caplog.text
        assert "Traceback" not in caplog.text

    async def test_that_reads_nothing_holds_up_nobody(self, serve: Serve) -> None:
        async with serve() as served:
            async with served.client.post(
                CHAT, json=served.named({**ENDLESS, "stream": True})
            ) as response:
                answer = await served.post(CHAT, {"messages": HI, "max_tokens": 3})
                response.close()

            assert answer.status == 200

    async def test_is_no_fault_where_a_write_finds_out(
        self, tiny_chat_model: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def late(call: Call) -> web.StreamResponse:
            assert call.request.transport is not None
            call.request.transport.close()
            await call.stream().send(b"1")
            raise AssertionError("there was somebody")

        with caplog.at_level(logging.INFO):
            async with serving_route(late, tiny_chat_model) as served:
                with pytest.raises(ClientError):
                    await served.get("/")
                await wait_until(lambda: bool(caplog.records))

        assert "aiohttp.server" not in {each.name for each in caplog.records}
        ends = {record.line.status for record in caplog.records if hasattr(record, "line")}
        assert ends == {499}


class TestAFaultOfTheServer:
    async def test_is_told_without_its_details(
        self, tiny_chat_model: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def faulty(_: Call) -> web.StreamResponse:
            raise LookupError("secret detail")

        async with serving_route(faulty, tiny_chat_model) as served:
            answer = await served.get("/")

        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert "secret" not in answer.text
        assert "secret detail" in caplog.text
        assert answer.headers["X-Request-Id"] in caplog.text

    async def test_that_was_meant_is_told(self, tiny_chat_model: Path) -> None:
        async def refusing(_: Call) -> web.StreamResponse:
            raise ExceptionGroup("branches", [ApiError(409, "why", param="x", code="y")])

        async with serving_route(refusing, tiny_chat_model) as served:
            answer = await served.get("/")

        assert answer.status == 409
        assert answer.error == {
            "message": "why",
            "type": "invalid_request_error",
            "param": "x",
            "code": "y",
        }


class TestTheAccessLog:
    async def test_has_a_line_for_each_call(
        self, serve: Serve, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = ServerConfig(api_keys=("a-very-secret-key",))
        with caplog.at_level(logging.INFO, "structgen.access"):
            async with serve(config=config) as served:
                key = {"Authorization": "Bearer a-very-secret-key"}
                body = {"messages": HI, "max_tokens": 4, "ignore_eos": True}
                await served.post(CHAT, body, X_Request_Id="the-id", **key)
                await served.post(CHAT, body)
                await served.get("/live")

        good, refused = (record.line for record in caplog.records)  # type: ignore[attr-defined]  # `extra` sets it
        assert (good.id, good.status, good.completion_tokens) == ("the-id", 200, 4)
        assert good.finishes == ("length",)
        assert good.tenant
        assert (refused.status, refused.error) == (401, "invalid_api_key")
        assert "secret" not in caplog.text

    async def test_has_what_monitors_ask_only_where_everything_is_logged(
        self, tiny_chat_model: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Also while a server loads, and while it ends."""

        async def loading(_: Call) -> web.StreamResponse:
            raise EngineClosedError("not yet")

        with caplog.at_level(logging.DEBUG, "structgen.access"):
            async with serving_route(loading, tiny_chat_model, access="open") as served:
                answer = await served.get("/")

        assert answer.status == 503
        assert [record.levelname for record in caplog.records] == ["DEBUG"]

    async def test_has_no_name_that_a_client_made_up(
        self, serve: Serve, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "structgen.access"):
            async with serve() as served:
                await served.post("/v1/programs/x%0Aan%20entry", {})

        assert [record.getMessage().count("\n") for record in caplog.records] == [0]


class TestASalt:
    async def test_costs_the_cache_no_more_than_a_short_one(self, tiny_chat_model: Path) -> None:
        namespaces: list[str] = []

        async def noted(call: Call) -> web.StreamResponse:
            salts = ("s", "s" * 100_000, "t", None)
            namespaces.extend(call.namespace(salt).tenant for salt in salts)
            return call.answer({})

        async with serving_route(noted, tiny_chat_model) as served:
            await served.get("/")

        assert len(set(namespaces)) == len(namespaces)
        assert max(map(len, namespaces)) < 100
