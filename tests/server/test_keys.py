"""API keys: who may call, how much, and whose cache it is."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from structgen import State, program
from structgen.errors import OptionError
from structgen.server import ServerConfig
from structgen.server.errors import ApiError
from structgen.server.keys import Keys
from tests.server.served import Serve, Served, wait_until

CHAT = "/v1/chat/completions"
LONG = "a prompt that is long enough to be found again in the cache"
HI = [{"role": "user", "content": LONG}]
BODY = {"messages": HI, "max_tokens": 2, "ignore_eos": True, "temperature": 0}


@program
async def long(s: State, words: str) -> None:
    s += words
    await s.gen(max_tokens=9)


TWO = ServerConfig(api_keys=("one", "two"), admin_keys=("root",))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def keys(**options: object) -> Keys:
    return Keys(ServerConfig(**{"api_keys": ("one", "two"), **options}))  # type: ignore[arg-type]  # of each its own


def begin(keys: Keys) -> None:
    holder = keys.holder("Bearer one", "user")
    assert holder is not None
    holder.begin()


class TestAKey:
    async def test_is_asked_for(self, serve: Serve) -> None:
        async with serve(config=TWO) as served:
            missing = await served.post(CHAT, BODY)
            wrong = await served.post(CHAT, BODY, **bearer("three"))
            other = await served.post(CHAT, BODY, Authorization="Basic one")
            good = [(await served.post(CHAT, BODY, **bearer(key))).status for key in ("one", "two")]

        for answer in (missing, wrong, other):
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert "missing" in missing.error["message"]
        assert "wrong" in wrong.error["message"]
        assert good == [200, 200]

    async def test_is_not_asked_for_where_there_are_none(self, serve: Serve) -> None:
        async with serve() as served:
            assert (await served.post(CHAT, BODY)).status == 200
            assert (await served.post("/flush_cache")).status == 200

    async def test_is_not_needed_to_see_whether_the_server_lives(self, serve: Serve) -> None:
        async with serve(config=TWO) as served:
            paths = ("/live", "/health", "/ready", "/metrics", "/version", "/load")
            found = {path: (await served.get(path)).status for path in paths}

        assert set(found.values()) == {200}

    async def test_of_an_admin_is_needed_to_flush_the_cache(self, serve: Serve) -> None:
        async with serve(config=TWO) as served:
            for path in ("/flush_cache", "/reset_prefix_cache"):
                refused = await served.post(path, **bearer("one"))
                assert refused.status == 401
                assert "the admin's API key is wrong" in refused.error["message"]
                assert (await served.post(path, **bearer("root"))).status == 200
            assert (await served.post(CHAT, BODY, **bearer("root"))).status == 200

    @pytest.mark.parametrize("sent", ["Bearer öne", "Bearer", "", "Bearer one two", "\x00"])
    def test_of_any_form_is_refused_and_no_fault(self, sent: str) -> None:
        with pytest.raises(ApiError, match="API key is"):
            keys().holder(sent, "user")

    def test_is_compared_with_all_in_constant_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[bytes] = []

        def compare(key: bytes, sent: bytes) -> bool:
            compared.append(key)
            return key == sent

        monkeypatch.setattr("structgen.server.keys.secrets.compare_digest", compare)
        keys().holder("Bearer one", "user")

        assert compared == [b"one", b"two"], "the first match must not end it"

    def test_is_named_by_a_digest(self) -> None:
        holder = keys().holder("Bearer one", "user")

        assert holder is not None
        assert holder.tenant
        assert "one" not in holder.tenant


class TestTheCacheOfAKey:
    @staticmethod
    async def cached(served: Served, **more: str) -> int:
        key = more.pop("key", "one")
        answer = await served.post(CHAT, {**BODY, **more}, **bearer(key))
        details = answer.json["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    async def test_is_its_own(self, serve: Serve) -> None:
        async with serve(config=TWO) as served:
            assert await self.cached(served) == 0
            assert await self.cached(served) > 0
            assert await self.cached(served, key="two") == 0, "another's prompt must not show"
            assert await self.cached(served, key="two") > 0

    async def test_is_divided_by_a_salt(self, serve: Serve) -> None:
        async with serve(config=TWO) as served:
            await self.cached(served)

            assert await self.cached(served, cache_salt="a") == 0
            assert await self.cached(served, cache_salt="a") > 0
            assert await self.cached(served, cache_salt="b") == 0
            assert await self.cached(served) > 0


class TestALimit:
    async def test_of_requests_at_a_time_is_kept(self, serve: Serve) -> None:
        config = ServerConfig(api_keys=("one", "two"), key_concurrency=1)
        endless = {**BODY, "max_tokens": 3000}
        async with serve(config=config) as served:
            running = asyncio.create_task(served.post(CHAT, endless, **bearer("one")))
            await wait_until(lambda: served.engine.statistics().running == 1)
            second = await served.post(CHAT, BODY, **bearer("one"))
            other = await served.post(CHAT, BODY, **bearer("two"))
            running.cancel()
            await wait_until(lambda: served.service.live == 0)
            after = await served.post(CHAT, BODY, **bearer("one"))

        assert (second.status, second.error["type"]) == (429, "rate_limit_error")
        assert second.error["code"] == "rate_limit_exceeded"
        assert int(second.headers["Retry-After"]) >= 1
        assert (other.status, after.status) == (200, 200)

    def test_of_requests_in_a_minute_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        limited = keys(key_requests=2)
        for _ in range(2):
            begin(limited)
        with pytest.raises(ApiError, match="in a minute: 2, and 2 are allowed") as refused:
            begin(limited)
        assert (refused.value.status, refused.value.retry_after) == (429, 60)

        now += 59.5
        with pytest.raises(ApiError) as refused:
            begin(limited)
        assert refused.value.retry_after == 1, "not a moment before it can succeed"

        now += 0.6
        begin(limited)

    @pytest.mark.parametrize("limit", ["key_concurrency", "key_requests", "key_tokens"])
    def test_without_keys_is_refused(self, limit: str) -> None:
        with pytest.raises(OptionError, match=f"{limit}: .* there are none"):
            ServerConfig(**{limit: 1})  # type: ignore[arg-type]  # of each its own

    async def test_of_tokens_in_a_minute_is_kept(self, serve: Serve) -> None:
        config = ServerConfig(api_keys=("one", "two"), key_tokens=20)
        async with serve(config=config) as served:
            first = await served.post(CHAT, BODY, **bearer("one"))
            second = await served.post(CHAT, BODY, **bearer("one"))
            other = await served.post(CHAT, BODY, **bearer("two"))

        assert [first.status, second.status, other.status] == [200, 429, 200]
        assert re.search(
            r"tokens of this key in a minute: \d+, and 20 are allowed", second.error["message"]
        )

    async def test_of_tokens_counts_what_a_client_left(self, serve: Serve) -> None:
        config = ServerConfig(api_keys=("one",), key_tokens=5)
        async with serve(config=config) as served:
            body = served.named({**BODY, "max_tokens": 3000, "stream": True})
            async with served.client.post(CHAT, json=body, headers=bearer("one")) as response:
                for _ in range(20):
                    await response.content.readline()
                response.close()
            await wait_until(lambda: served.service.live == 0)

            assert (await served.post(CHAT, BODY, **bearer("one"))).status == 429

    @pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/programs/long"])
    async def test_of_tokens_counts_the_prompt_of_what_a_client_left(
        self, serve: Serve, path: str
    ) -> None:
        config = ServerConfig(api_keys=("one",), key_tokens=2000)
        words = "a b c d e f g h " * 150
        bodies: dict[str, Any] = {
            CHAT: {"messages": [{"role": "user", "content": words}], "n": 2},
            "/v1/completions": {"prompt": words},
            "/v1/programs/long": {"arguments": {"words": words}},
        }
        sent = {**bodies[path], "stream": True, **({} if "programs" in path else {"max_tokens": 9})}
        async with serve(config=config, programs=[long], chunk_size=16) as served:
            request = asyncio.create_task(served.post(path, sent, **bearer("one")))
            await wait_until(lambda: served.engine.statistics().prefilled_tokens > 0)
            request.cancel()
            await wait_until(lambda: served.service.live == 0)
            statistics = served.engine.statistics()
            refused = await served.get("/v1/models", **bearer("one"))

        assert statistics.generated_tokens == 0
        used = re.search(r"tokens of this key in a minute: (\d+)", refused.error["message"])
        assert used is not None
        assert 2000 <= int(used[1]) <= statistics.prompt_tokens

    async def test_that_refuses_names_the_key_in_the_log(
        self, serve: Serve, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "structgen.access")
        config = ServerConfig(api_keys=("one",), key_requests=1)
        async with serve(config=config) as served:
            for _ in range(2):
                await served.get("/v1/models", **bearer("one"))

        (good, bad) = [record.line for record in caplog.records if hasattr(record, "line")]
        assert (bad.status, bad.tenant) == (429, good.tenant)
        assert good.tenant
