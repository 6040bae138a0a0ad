"""Web pages of other origins: they may call where that is allowed, and nowhere else."""

from __future__ import annotations

from structgen.server import ServerConfig
from tests.server.served import Serve

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PAGE, OTHER = "https://page.example", "https://other.example"


class TestByDefault:
    async def test_no_page_may_read_anything(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post(CHAT, BODY, Origin=PAGE)
            ahead = await served.send("OPTIONS", CHAT, Origin=PAGE)

        for each in (answer, ahead):
            assert not [name for name in each.headers if name.startswith("Access-Control")]
        assert ahead.status == 405


class TestAnAllowedOrigin:
    CONFIG = ServerConfig(allowed_origins=(PAGE,), api_keys=("k",))

    async def test_is_told_so_ahead_without_a_key(self, serve: Serve) -> None:
        async with serve(config=self.CONFIG) as served:
            headers = {"Access_Control_Request_Headers": "authorization, x-own"}
            ahead = await served.send("OPTIONS", CHAT, Origin=PAGE, **headers)

        assert ahead.status == 204
        assert ahead.headers["Access-Control-Allow-Origin"] == PAGE
        assert ahead.headers["Access-Control-Allow-Headers"] == "authorization, x-own"
        assert "POST" in ahead.headers["Access-Control-Allow-Methods"]
        assert ahead.headers["Vary"] == "Origin"

    async def test_may_read_answers_errors_and_streams(self, serve: Serve) -> None:
        async with serve(config=self.CONFIG) as served:
            key = {"Authorization": "Bearer k", "Origin": PAGE}
            answers = [
                await served.post(CHAT, BODY, **key),
                await served.post(CHAT, {**BODY, "stream": True}, **key),
                await served.post(CHAT, {**BODY, "n": 0}, **key),
                await served.post(CHAT, BODY, Origin=PAGE),
            ]

        assert [answer.status for answer in answers] == [200, 200, 400, 401]
        found = {answer.headers["Access-Control-Allow-Origin"] for answer in answers}
        assert found == {PAGE}

    async def test_is_the_only_one(self, serve: Serve) -> None:
        async with serve(config=self.CONFIG) as served:
            ahead = await served.send("OPTIONS", CHAT, Origin=OTHER)
            answer = await served.post(CHAT, BODY, Authorization="Bearer k", Origin=OTHER)

        assert "Access-Control-Allow-Origin" not in ahead.headers
        assert "Access-Control-Allow-Origin" not in answer.headers


class TestAStar:
    async def test_allows_every_page(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(allowed_origins=("*",))) as served:
            answer = await served.post(CHAT, BODY, Origin=OTHER)

        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
