"""Connections of a server: their times, their number, and what is no HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.server.test_serving import Running, running

JSON = b"Host: x\r\nContent-Type: application/json\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + JSON
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n"
SHORT = 0.15  # seconds of a limit


class Client:
    """A connection that says what it is told to, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of the next answer."""
        head = (await self.told()).decode()
        with anyio.fail_after(5):
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            body = await self._reader.readexactly(int(headers["Content-Length"]))
        return int(first.split()[1]), headers, json.loads(body)

    async def closed(self) -> bool:
        """Wait until the server has closed it; whether nothing came before that."""
        with anyio.fail_after(5):
            return await self._reader.read() == b""

    async def told(self) -> bytes:
        """The next lines, up to an empty one."""
        with anyio.fail_after(5):
            return await self._reader.readuntil(b"\r\n\r\n")


@asynccontextmanager
async def connected(server: Running) -> AsyncIterator[Client]:
    host, port = server.address.sockets[0].getsockname()[:2]
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def asked(server: Running, data: bytes) -> tuple[int, dict[str, str], Any]:
    """The answer to some bytes, on a connection of their own."""
    async with connected(server) as client:
        client.say(data)
        return await client.answer()


async def rest_of(client: socket.socket) -> bytes:
    """All that comes before the end of a connection, orderly or not."""
    found = bytearray()
    with anyio.fail_after(5), suppress(ConnectionResetError):
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            found += piece
    return bytes(found)


class TestARequestThatDoesNotEnd:
    @pytest.mark.parametrize(
        ("part", "sent"),
        [
            ("head", b"GET /live HTTP/1.1\r\nX-Slow: "),
            ("body", POST + b'Content-Length: 100\r\n\r\n{"model"'),
            ("body", POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n[[[["),
        ],
        ids=["head", "body", "chunk"],
    )
    async def test_is_answered_in_time_and_its_connection_closed(
        self, tiny_chat_model: Path, part: str, sent: bytes
    ) -> None:
        async with running(tiny_chat_model, transfer=SHORT) as server, connected(server) as client:
            client.say(sent)
            status, headers, body = await client.answer()
            closed = await client.closed()

        assert (status, body["error"]["code"], closed) == (408, "request_timeout", True)
        assert f"the {part} of the request" in body["error"]["message"]
        assert "--transfer-timeout" in body["error"]["message"]
        assert headers["Connection"] == "close"
        assert headers["X-Request-Id"].startswith("req-")

    async def test_may_take_its_time_within_the_limit(self, tiny_chat_model: Path) -> None:
        """Each request has the limit anew, also on a connection that stays open."""
        async with (
            running(tiny_chat_model, transfer=2 * SHORT) as server,
            connected(server) as client,
        ):
            statuses: list[int] = []
            for _ in range(3):
                client.say(LIVE)
                await asyncio.sleep(SHORT)
                client.say(b"\r\n")
                statuses.append((await client.answer())[0])

        assert statuses == [200, 200, 200]


class TestAConnectionThatIsIdle:
    async def test_is_closed_after_a_time(self, tiny_chat_model: Path) -> None:
        async with (
            running(tiny_chat_model, idle=SHORT) as server,
            connected(server) as silent,
            connected(server) as used,
        ):
            used.say(LIVE + b"\r\n")
            status, *_ = await used.answer()

            assert status == 200
            assert await silent.closed()
            assert await used.closed()

    async def test_is_not_while_its_next_request_comes(self, tiny_chat_model: Path) -> None:
        async with running(tiny_chat_model, idle=SHORT) as server, connected(server) as client:
            client.say(LIVE)
            await asyncio.sleep(2 * SHORT)
            client.say(b"\r\n")
            status, *_ = await client.answer()

            assert status == 200
            assert await client.closed(), "it was idle again, for as long"


class TestAClientThatReadsNothing:
    async def test_is_cut_off_after_a_time(self, tiny_chat_model: Path) -> None:
        async with running(tiny_chat_model, transfer=SHORT) as server:
            await server.ready.wait()
            request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
            await asked(server, request)  # it takes long once
            listening = server.address.sockets[0]
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, listening.getsockname())
                await loop.sock_sendall(client, request * 100)
                await asyncio.sleep(3 * SHORT)
                answers = (await rest_of(client)).count(b"HTTP/1.1 200")

        assert 0 < answers < 50


class TestAConnectionTooMany:
    async def test_is_told_so_and_others_are_served(self, tiny_chat_model: Path) -> None:
        async with running(tiny_chat_model, connections=1) as server, connected(server) as first:
            await server.ready.wait()
            first.say(LIVE + b"\r\n")
            served, *_ = await first.answer()
            status, headers, body = await asked(server, POST + b"Content-Length: 2\r\n\r\n{}")
            alive, *_ = await asked(server, LIVE + b"\r\n")
            first.say(LIVE + b"\r\n")
            again, *_ = await first.answer()

        assert (served, again, alive) == (200, 200, 200)
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert (headers["Connection"], headers["Retry-After"]) == ("close", "1")

    async def test_is_taken_where_another_has_gone(self, tiny_chat_model: Path) -> None:
        async with running(tiny_chat_model, connections=1, idle=SHORT) as server:
            statuses: list[int] = []
            for _ in range(3):
                async with connected(server) as client:
                    client.say(LIVE + b"\r\n")
                    statuses.append((await client.answer())[0])
                    assert await client.closed()

        assert statuses == [200, 200, 200]


MALFORMED = {
    "line": b"GARBAGE\r\n\r\n",
    "method": b"G@T / HTTP/1.1\r\n\r\n",
    "long line": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    "long header": LIVE + b"X: " + b"y" * 20_000 + b"\r\n\r\n",
    "header": LIVE + b"Bad Header: x\r\n\r\n",
    "secret": LIVE + b"Authorization: Bearer hidden\x00\r\n\r\n",
    "many headers": LIVE + b"".join(b"H%d: x\r\n" % i for i in range(300)) + b"\r\n",
    "length": POST + b"Content-Length: abc\r\n\r\n",
    "chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


class TestWhatIsNoHttp:
    async def test_is_answered_as_json_logged_and_no_fault(
        self, tiny_chat_model: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            async with running(tiny_chat_model) as server:
                await server.ready.wait()
                for name, data in MALFORMED.items():
                    caplog.clear()
                    status, headers, body = await asked(server, data)

                    assert (status, body["error"]["code"]) == (400, "invalid_http"), name
                    assert set(body["error"]) == {"message", "type", "param", "code"}
                    assert headers["Content-Type"].startswith("application/json")
                    lines = [record.getMessage() for record in caplog.records]
                    assert len(lines) == 1, name
                    assert f"id={headers['X-Request-Id']}" in lines[0]
                    assert "error=invalid_http" in lines[0]
                    assert "hidden" not in lines[0]

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/nowhere"])
    async def test_nor_is_a_wish_that_nobody_knows(self, tiny_chat_model: Path, path: str) -> None:
        async with running(tiny_chat_model) as server:
            head = f"POST {path} HTTP/1.1\r\nExpect: something\r\n".encode() + JSON
            status, headers, body = await asked(server, head + b"Content-Length: 2\r\n\r\n{}")

        assert (status, body["error"]["code"]) == (417, "expectation_failed")
        assert "X-Request-Id" in headers

    @pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, br"])
    async def test_nor_is_a_body_packed_in_a_way_that_is_not_undone(
        self, tiny_chat_model: Path, encoding: str
    ) -> None:
        """For some of them, aiohttp asks for a package by its name."""
        async with running(tiny_chat_model) as server:
            head = POST + f"Content-Encoding: {encoding}\r\n".encode()
            status, _, body = await asked(server, head + b"Content-Length: 2\r\n\r\n{}")

        assert (status, body["error"]["code"]) == (415, "unsupported_encoding")
        assert repr(encoding) in body["error"]["message"]


class TestAClientThatAsksFirst:
    async def test_is_told_to_go_on(self, tiny_chat_model: Path) -> None:
        async with running(tiny_chat_model) as server, connected(server) as client:
            await server.ready.wait()
            client.say(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
            told = await client.told()
            client.say(b"{}")
            status, *_ = await client.answer()

        assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert status == 400
