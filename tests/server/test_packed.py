"""Bodies that clients have packed: what they unpack to, and that a bomb holds up nobody."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web

from structgen.server.body import Unpacker
from structgen.server.call import Call
from structgen.server.config import ServerConfig
from tests.engine.test_responsive import LIMIT, least_lag
from tests.server.served import serving_route
from tests.server.test_connections import JSON, LIVE, Client, asked, connected
from tests.server.test_serving import Running, running

BODY = json.dumps({"a": "b" * 1000, "c": list(range(300))}).encode()


def raw_deflate(data: bytes) -> bytes:
    pack = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return pack.compress(data) + pack.flush()


PACKS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw": ("deflate", raw_deflate),
}


def bomb() -> bytes:
    """64 MB of text, packed."""
    pack = zlib.compressobj(1, zlib.DEFLATED, 31)
    return b"".join(pack.compress(b"a" * 1_000_000) for _ in range(64)) + pack.flush()


def packed(path: str, body: bytes, encoding: str = "gzip", key: str = "right") -> bytes:
    """A request that sends a body, packed."""
    head = f"POST {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n".encode() + JSON
    head += f"Content-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return head + body


def pieces(unpacker: Unpacker, data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield from unpacker.unpacked(data[start : start + size])


class TestTheUnpacker:
    @pytest.mark.parametrize("form", PACKS)
    @pytest.mark.parametrize("size", [1, 7, 1 << 16])
    def test_gives_back_what_was_packed(self, form: str, size: int) -> None:
        encoding, pack = PACKS[form]
        unpacker = Unpacker(encoding)

        assert b"".join(pieces(unpacker, pack(BODY), size)) == BODY
        unpacker.check_whole()

    def test_gives_little_at_a_time(self) -> None:
        sizes = [len(piece) for piece in Unpacker("gzip").unpacked(bomb())]

        assert max(sizes) <= 1 << 17
        assert sum(sizes) == 64_000_000

    @pytest.mark.parametrize("form", PACKS)
    def test_refuses_what_goes_on_after_its_end(self, form: str) -> None:
        encoding, pack = PACKS[form]
        for size in (1, 1 << 16):
            with pytest.raises(ValueError, match="follows its end"):
                list(pieces(Unpacker(encoding), pack(BODY) + b"more", size))

    @pytest.mark.parametrize("form", PACKS)
    def test_refuses_what_has_no_end(self, form: str) -> None:
        encoding, pack = PACKS[form]
        unpacker = Unpacker(encoding)
        list(unpacker.unpacked(pack(BODY)[:-1]))

        with pytest.raises(ValueError, match="end is missing"):
            unpacker.check_whole()

    def test_refuses_what_is_not_packed(self) -> None:
        with pytest.raises(ValueError, match="header"):
            list(Unpacker("gzip").unpacked(BODY))


class TestABodyThatIsPacked:
    async def test_is_served_or_refused_by_what_it_unpacks_to(self, tiny_chat_model: Path) -> None:
        body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
        whole = gzip.compress(body)
        cases: dict[str, tuple[bytes, str, int]] = {
            "gzip": (whole, "gzip", 200),
            "deflate": (zlib.compress(body), "deflate", 200),
            "raw": (raw_deflate(body), "Deflate", 200),
            "large": (gzip.compress(body + b" " * 2000), "gzip", 413),
            "cut": (whole[:-1], "gzip", 400),
            "long": (whole + b"x", "gzip", 400),
            "plain": (body, "gzip", 400),
            "empty": (b"", "gzip", 400),
            # It unpacks to nothing, for ever.
            "blocks": (gzip.compress(b"")[:10] + b"\0\0\0\xff\xff" * 300, "gzip", 413),
            "twice": (whole, "gzip\r\nContent-Encoding: gzip", 415),
        }
        async with running(tiny_chat_model, max_body=1000) as server:
            await server.ready.wait()
            for name, (data, encoding, expected) in cases.items():
                status, _, answer = await asked(server, packed("/v1/completions", data, encoding))

                assert status == expected, (name, answer)


class TestABomb:
    async def test_holds_up_nobody_and_is_refused(self, tiny_chat_model: Path) -> None:
        """Nor after the answer, while the rest of it is read."""
        data = bomb()
        requests = {
            packed("/v1/completions", data): 413,
            packed("/v1/completions", data, key="wrong"): 401,
            packed("/nope", data): 404,
            packed("/live", data): 405,
        }
        async with running(tiny_chat_model, api_keys=("right",)) as server:
            await server.ready.wait()
            statuses: list[int] = []

            async def thrown(_: int) -> None:
                statuses[:] = await asyncio.gather(*(_thrown(server, each) for each in requests))

            lag = await least_lag(thrown)

        assert statuses == list(requests.values())
        assert lag < LIMIT

    async def test_ends_its_connection_where_aiohttp_would_go_on(
        self, tiny_chat_model: Path
    ) -> None:
        """In an application of somebody else's, whose connections are its own."""

        async def read(call: Call) -> web.StreamResponse:
            return call.answer(await call.body(dict[str, str]))

        request = packed("/", bomb())
        statuses: list[int] = []
        config = ServerConfig(max_body=1000)
        async with serving_route(read, tiny_chat_model, config=config) as served:

            async def thrown(_: int) -> None:
                port = int(served.url.rpartition(":")[2])
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with closing(writer):
                    client = Client(reader, writer)
                    client.say(request)
                    statuses.append((await client.answer())[0])
                    assert await client.closed()

            lag = await least_lag(thrown)

        assert set(statuses) == {413}
        assert lag < LIMIT


async def _thrown(server: Running, request: bytes) -> int:
    """The status that it gets; afterwards its connection answers again."""
    async with connected(server) as client:
        client.say(request)
        status, *_ = await client.answer()
        client.say(LIVE + b"\r\n")
        assert (await client.answer())[0] == 200
    return status
