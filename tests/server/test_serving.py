"""Running a server in this process: sockets, the model, signals, the end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import ClientSession, TCPConnector, UnixConnector

from structgen import Engine
from structgen.cli.sockets import Listening, listening
from structgen.errors import ModelNotFoundError, TemplateError
from structgen.server import ServerConfig
from structgen.server.serving import run
from tests.server.served import ENGINE_OPTIONS

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Running:
    """A server that runs in a task of this loop."""

    def __init__(self, address: Listening) -> None:
        self.address = address
        self.ready = anyio.Event()
        self.task: asyncio.Task[int] | None = None

    async def stopped(self) -> int:
        """Send this process SIGTERM, which is the server's while it runs; what it returned."""
        assert self.task is not None
        assert self.ready.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        with anyio.fail_after(10):
            return await self.task


@asynccontextmanager
async def running(
    model: Path, *, uds: Path | None = None, tls: ssl.SSLContext | None = None, **config: Any
) -> AsyncIterator[Running]:
    with listening("127.0.0.1", 0, uds) as address:
        found = Running(address)
        engine = Engine(model, **ENGINE_OPTIONS)
        found.task = asyncio.create_task(
            run(
                engine,
                address.sockets,
                config=ServerConfig(names=("tiny",), **config),
                tls=tls,
                ready=lambda _: found.ready.set(),
            )
        )
        try:
            yield found
        finally:
            found.task.cancel()
            await asyncio.gather(found.task, return_exceptions=True)


class TestAServer:
    async def test_answers_while_it_loads_serves_and_ends_by_a_signal(
        self, tiny_chat_model: Path
    ) -> None:
        async with (
            running(tiny_chat_model) as server,
            ClientSession(server.address.url) as client,
        ):
            async with client.get("/health") as response:
                early = response.status
            await server.ready.wait()
            async with client.post("/v1/chat/completions", json=HI) as response:
                answered = response.status
            ended = await server.stopped()
            with pytest.raises(OSError, match="Connect"):
                await client.get("/health")

        assert early in {503, 200}, "200 where the tiny model was faster"
        assert (answered, ended) == (200, 0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    async def test_that_cannot_load_says_why_and_leaves_its_port(self, tmp_path: Path) -> None:
        with listening("127.0.0.1", 0, None) as address:
            port = address.sockets[0].getsockname()[1]
            with pytest.raises(ModelNotFoundError, match=r"config\.json"):
                await run(Engine(tmp_path), address.sockets)
        with closing(socket.create_server(("127.0.0.1", port))):
            pass

    async def test_refuses_a_template_that_cannot_be_read_by_file_and_line(
        self, tiny_chat_model: Path, tmp_path: Path
    ) -> None:
        template = tmp_path / "broken.jinja"
        template.write_text("{{ messages }}\n{% for m in %}\n")
        engine = Engine(tiny_chat_model, chat_template=template, **ENGINE_OPTIONS)
        with (
            listening("127.0.0.1", 0, None) as address,
            pytest.raises(TemplateError, match=r"broken\.jinja.*2"),
        ):
            await run(engine, address.sockets)


class TestAUnixSocket:
    async def test_is_served_and_gone_afterwards(
        self, tiny_chat_model: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "server.sock"
        async with running(tiny_chat_model, uds=path) as server:
            assert server.address.url == f"unix:{path}"
            await server.ready.wait()
            async with (
                ClientSession("http://localhost", connector=UnixConnector(str(path))) as client,
                client.post("/v1/chat/completions", json=HI) as response,
            ):
                status = response.status
            await server.stopped()

        assert status == 200
        assert not path.exists()


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of localhost and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("nothing here makes a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    made += ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = [*made, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class TestTls:
    async def test_is_served(self, tiny_chat_model: Path, certified: tuple[Path, Path]) -> None:
        certificate, key = certified
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate, key)
        trusted = ssl.create_default_context(cafile=str(certificate))

        async with running(tiny_chat_model, tls=tls) as server:
            await server.ready.wait()
            port = server.address.sockets[0].getsockname()[1]
            async with (
                ClientSession(connector=TCPConnector(ssl=trusted)) as client,
                client.get(f"https://localhost:{port}/health") as response,
            ):
                status = response.status
            await server.stopped()

        assert status == 200


class TestWhoeverSpeaksNoHttp:
    async def test_gets_an_answer_and_is_no_fault(
        self, tiny_chat_model: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with running(tiny_chat_model) as server:
            port = server.address.sockets[0].getsockname()[1]
            await server.ready.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            answer = await reader.readline()
            writer.close()
            await server.stopped()

        assert b" 400 " in answer
        assert "Task was destroyed" not in caplog.text


class TestADrain:
    async def test_ends_a_stream_by_an_event_and_closes(self, tiny_chat_model: Path) -> None:
        body = {**HI, "max_tokens": 3500, "ignore_eos": True, "stream": True}
        async with (
            running(tiny_chat_model, drain=0.2) as server,
            ClientSession(server.address.url) as client,
        ):
            await server.ready.wait()
            async with client.post("/v1/chat/completions", json=body) as response:
                await response.content.readline()
                stopping = asyncio.create_task(server.stopped())
                rest = (await response.content.read()).decode()
                ended = await stopping

        assert ended == 0
        assert "shutting_down" in rest.split("\n\n")[-2]
        assert "[DONE]" not in rest
