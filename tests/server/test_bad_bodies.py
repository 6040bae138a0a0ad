"""Requests that are wrong: each gets an error of its own status, as JSON, and nothing is computed.

A stream that was asked for makes no difference: an error comes before the 200, or not at all.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from structgen.server.config import ServerConfig
from tests.server.served import Answer, Serve, Served

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CONFIG = ServerConfig(names=("tiny",))


def admitted(served: Served) -> int:
    """How many tokens of prompts the engine has taken so far."""
    statistics = served.engine.statistics()
    assert (statistics.running, statistics.waiting) == (0, 0)
    return statistics.prompt_tokens


def is_json(answer: Answer) -> bool:
    return answer.headers["Content-Type"].split(";")[0] == "application/json"


BODIES = [
    pytest.param({"temperature": -1}, 400, "temperature", id="temperature"),
    pytest.param({"n": 0}, 400, "n", id="n"),
    pytest.param({"max_tokens": -5}, 400, "max_tokens", id="max_tokens"),
    pytest.param({"model": "no-such-model"}, 404, "model", id="model"),
    pytest.param({"messages": []}, 400, "messages", id="messages"),
    pytest.param({"stpo": ["x"]}, 400, "stpo", id="unknown"),
    pytest.param({"temperature": "warm"}, 400, "temperature", id="type"),
    pytest.param({"messages": [{"role": "user"}]}, 400, "messages[0].content", id="content"),
    pytest.param(
        {"messages": [{"role": "pirate", "content": "arr"}]}, 400, "messages[0].role", id="role"
    ),
    pytest.param({"logit_bias": {"999999": 1}}, 400, "logit_bias", id="token"),
    pytest.param({"stop": ["a", ""]}, 400, "stop", id="stop"),
    pytest.param({"max_tokens": 100_000}, 400, "messages", id="context"),
]


class TestABadBody:
    @pytest.mark.parametrize(("fields", "status", "param"), BODIES)
    async def test_is_refused_by_the_name_of_its_field(
        self, serve: Serve, fields: dict[str, Any], status: int, param: str
    ) -> None:
        async with serve(config=CONFIG) as served:
            for stream in (False, True):
                began = time.monotonic()
                answer = await served.post(CHAT, {**HI, "stream": stream, **fields})

                assert time.monotonic() - began < 1.0
                assert answer.status == status
                assert is_json(answer)
                assert answer.error["message"]
                assert answer.error["type"] == "invalid_request_error"
                assert answer.error["param"] == param
            assert admitted(served) == 0

    async def test_that_is_no_json_object_is_refused(self, serve: Serve) -> None:
        bodies: tuple[bytes, ...] = (
            *(b"{bad json", b"", b" ", b"null", b"[]", b'"text"', b"3", b"{}", b"{}{}"),
            *(b"\xff\xfe", b'{"messages": "\xff"}', b"[" * 100_000, b'{"n": NaN}', b'{"n": 1e999}'),
            *(b'{"a' * 50_000, b"\x00", b'{"messages": [null]}', b'{"messages": {"role": 1}}'),
            *(b'{"stream": true, "messages": 5}', b"model=tiny&messages=hi"),
        )
        async with serve(config=CONFIG) as served:
            for body in bodies:
                answer = await served.post(CHAT, body)

                assert (answer.status, is_json(answer)) == (400, True), body[:40]
                assert answer.error["message"], body[:40]
            assert admitted(served) == 0
            assert (await served.post(CHAT, {**HI, "max_tokens": 1})).status == 200

    async def test_is_told_what_an_older_name_is_called_now(self, serve: Serve) -> None:
        async with serve(config=CONFIG) as served:
            answer = await served.post(CHAT, {**HI, "guided_json": {}})

        assert (answer.status, answer.error["param"]) == (400, "guided_json")
        assert "structured_outputs.json" in answer.error["message"]

    async def test_too_large_is_json_whether_or_not_its_length_is_told(self, serve: Serve) -> None:
        async def pieces() -> Any:
            for _ in range(30):
                yield b" " * 1000

        async with serve(config=ServerConfig(names=("tiny",), max_body=20_000)) as served:
            told = await served.post(CHAT, b" " * 30_000)
            headers = {"Content-Type": "application/json"}
            async with served.client.post(CHAT, data=pieces(), headers=headers) as response:
                untold = Answer(response.status, response.headers, await response.text())

            for answer in (told, untold):
                assert (answer.status, is_json(answer)) == (413, True)
                assert answer.error["code"] == "body_too_large"
            assert admitted(served) == 0


class TestARouteThatIsNotThere:
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/v1/nope", 404),
            ("POST", "/v1/nope", 404),
            ("GET", "/", 404),
            ("GET", CHAT, 405),
            ("DELETE", CHAT, 405),
            ("POST", "/v1/models", 405),
        ],
    )
    async def test_is_told_as_json(self, serve: Serve, method: str, path: str, status: int) -> None:
        async with serve(config=CONFIG) as served:
            answer = await served.send(method, path)

        assert (answer.status, is_json(answer)) == (status, True)
        assert answer.error["message"]
        assert ("Allow" in answer.headers) == (status == 405)


class TestAStreamThatCannotBegin:
    async def test_has_a_status_of_its_own(self, serve: Serve) -> None:
        """The engine refuses these, not the reading of the body; it is asked before the 200."""
        async with serve(config=CONFIG, slots=100) as served:
            long = [{"role": "user", "content": "x" * 200}]
            broken = {"json_schema": json.dumps({"type": "strng"})}
            for fields in ({"messages": long, "max_tokens": 5}, broken, {"regex": "(abc"}):
                answer = await served.post(CHAT, {**HI, "stream": True, **fields})

                assert (answer.status, is_json(answer)) == (400, True), fields
            assert admitted(served) == 0
