"""What is answered on a server's sockets before there is a server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from structgen.cli.early import EarlyAnswers
from structgen.cli.sockets import Listening, listening


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listening]:
    """Sockets that listen."""
    with listening(
        "127.0.0.1", 0, tmp_path / "server.sock" if request.param == "unix" else None
    ) as found:
        yield found


@contextmanager
def connected(address: Listening) -> Iterator[socket.socket]:
    listens = address.sockets[0]
    with socket.socket(listens.family) as made:
        made.settimeout(5)
        made.connect(listens.getsockname())
        yield made


def rest_of(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def asked(address: Listening, data: bytes) -> tuple[bytes, bytes]:
    """Head and body of an answer."""
    with connected(address) as client:
        client.sendall(data)
        head, _, body = rest_of(client).partition(b"\r\n\r\n")
        return head, body


def request(method: str, path: str, body: bytes = b"") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class TestEarlyAnswers:
    def test_say_that_the_process_lives_and_that_its_model_does_not(
        self, address: Listening
    ) -> None:
        chat = request("POST", "/v1/chat/completions", b"x" * 500_000)
        with EarlyAnswers(address.sockets, None):
            live = asked(address, request("GET", "/live"))
            head = asked(address, request("HEAD", "/live"))
            others = [asked(address, data) for data in (request("GET", "/health"), chat)]

        assert live[0].startswith(b"HTTP/1.1 200 OK\r\n")
        assert json.loads(live[1]) == {"status": "ok"}
        assert head[0].startswith(b"HTTP/1.1 200 OK\r\n")
        assert head[1] == b""
        for found, body in others:
            error: dict[str, Any] = json.loads(body)["error"]
            assert found.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"\r\nRetry-After: 5" in found
            assert b"\r\nX-Request-Id: req-" in found
            assert (error["code"], error["type"]) == ("not_ready", "server_error")

    def test_leave_the_sockets_to_who_comes_after_them(self, address: Listening) -> None:
        with EarlyAnswers(address.sockets, None) as early:
            with connected(address) as slow:
                slow.sendall(b"GET /live HTTP/1.1\r\n")
                time.sleep(0.05)
                early.hand_over()
                slow.sendall(b"\r\n")
                answer = rest_of(slow)
            time.sleep(0.05)
            with connected(address) as later:
                taken, _ = address.sockets[0].accept()
                with closing(taken):
                    taken.sendall(b"mine")
                assert rest_of(later) == b"mine"

        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), "it was here before"

    def test_end_at_once_where_loading_fails(self, address: Listening) -> None:
        before = time.perf_counter()
        with pytest.raises(OSError, match="no model"), EarlyAnswers(address.sockets, None):
            raise OSError("no model")
        with connected(address), EarlyAnswers(address.sockets, None):
            time.sleep(0.05)

        assert time.perf_counter() - before < 1
        assert "structgen early answers" not in {each.name for each in threading.enumerate()}
