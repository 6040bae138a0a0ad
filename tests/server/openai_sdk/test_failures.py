"""What the official client raises, what it tries again, and what its errors say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from openai import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)

from structgen.server.config import ServerConfig
from tests.server.openai_sdk.sdk import ENDLESS, HI, MODEL, client_of, idle
from tests.server.served import Serve, Served

LONG = 3000


def config_of(**options: Any) -> ServerConfig:
    """The config of a server that calls its model `tiny`."""
    return ServerConfig(names=(MODEL,), **options)


@asynccontextmanager
async def streaming(client: AsyncOpenAI) -> AsyncIterator[None]:
    """While a stream runs, which has begun."""
    async with await client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=LONG, stream=True, extra_body=ENDLESS
    ) as stream:
        await anext(aiter(stream))
        yield


class TestAnError:
    @pytest.mark.parametrize(
        ("options", "param"),
        [
            ({"temperature": -1}, "temperature"),
            ({"n": 0}, "n"),
            ({"max_tokens": -5}, "max_tokens"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"messages": []}, "messages"),
            ({"extra_body": {"stpo": ["x"]}}, "stpo"),
            ({"extra_body": {"regex": "(abc"}}, "regex"),
        ],
        ids=str,
    )
    async def test_of_a_request_names_the_field(
        self, client: AsyncOpenAI, options: dict[str, Any], param: str
    ) -> None:
        for stream in (False, True):
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(
                    **{"model": MODEL, "messages": HI, "stream": stream, **options}
                )

            assert caught.value.param == param
            assert caught.value.type == "invalid_request_error"
            assert caught.value.request_id
            assert param in caught.value.message

    async def test_of_an_unknown_model_says_which_there_are(self, client: AsyncOpenAI) -> None:
        with pytest.raises(NotFoundError, match="tiny") as caught:
            await client.chat.completions.create(model="gpt-5", messages=HI)

        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

    async def test_of_a_prompt_that_is_too_long_has_its_code(self, client: AsyncOpenAI) -> None:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "long " * 2000}]
            )

        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"

    async def test_of_a_route_that_is_not_there_is_json_too(self, client: AsyncOpenAI) -> None:
        with pytest.raises(NotFoundError) as missing:
            await client.get("/nope", cast_to=object)
        with pytest.raises(APIStatusError) as method:
            await client.get("/chat/completions", cast_to=object)

        assert missing.value.code == "not_found"
        assert (method.value.status_code, method.value.code) == (405, "method_not_allowed")

    async def test_of_a_body_that_is_too_large_is_json_too(self, serve: Serve) -> None:
        async with serve(config=config_of(max_body=2000)) as served, client_of(served) as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "x" * 3000}]
                )

            assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")

    async def test_repeats_the_id_of_the_request(self, client: AsyncOpenAI) -> None:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=[], extra_headers={"X-Request-Id": "mine-2"}
            )

        assert caught.value.request_id == "mine-2"

    async def test_of_a_key_is_an_authentication_error(self, serve: Serve) -> None:
        config = config_of(api_keys=("right",))
        async with serve(config=config) as served:
            async with client_of(served, api_key="wrong") as client:
                with pytest.raises(AuthenticationError) as caught:
                    await client.chat.completions.create(model=MODEL, messages=HI)
            async with client_of(served, api_key="right") as client:
                await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1)

        assert caught.value.code == "invalid_api_key"
        assert "wrong" not in caught.value.message.replace("is wrong", "")

    async def test_of_a_time_limit_is_one_of_the_server(self, serve: Serve) -> None:
        config = config_of(request_timeout=0.2)
        async with serve(config=config) as served, client_of(served) as client:
            with pytest.raises(InternalServerError) as caught:
                await client.chat.completions.create(
                    model=MODEL, messages=HI, max_tokens=LONG, extra_body=ENDLESS
                )

            assert (caught.value.status_code, caught.value.code) == (504, "timeout")
            await idle(served.engine)


class TestAClientThatGivesUp:
    async def test_ends_its_request(self, served: Served, client: AsyncOpenAI) -> None:
        with pytest.raises(APITimeoutError):
            await client.with_options(timeout=0.2).chat.completions.create(
                model=MODEL, messages=HI, max_tokens=LONG, extra_body=ENDLESS
            )

        await idle(served.engine)
        assert served.engine.statistics().requests_aborted == 1

    async def test_finds_nobody_after_the_server_has_ended(self, serve: Serve) -> None:
        async with serve(config=config_of()) as served:
            pass
        async with client_of(served) as client:
            with pytest.raises(APIConnectionError):
                await client.chat.completions.create(model=MODEL, messages=HI)


class TestRetries:
    async def test_come_after_the_time_that_a_full_server_asks_for(self, serve: Serve) -> None:
        async with (
            serve(config=config_of(), max_running=1, max_waiting=0) as served,
            client_of(served) as client,
        ):
            async with anyio.create_task_group() as tasks:
                busy = anyio.Event()

                async def hold() -> None:
                    async with streaming(client):
                        busy.set()
                        await anyio.sleep(0.3)

                tasks.start_soon(hold)
                await busy.wait()
                began = time.monotonic()
                raw = await client.with_options(
                    max_retries=2
                ).chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=1)

            assert raw.retries_taken == 1
            assert 1.0 <= time.monotonic() - began < 3.0

    async def test_that_are_not_wanted_leave_the_error_of_a_full_server(self, serve: Serve) -> None:
        async with (
            serve(config=config_of(), max_running=1, max_waiting=0) as served,
            client_of(served) as client,
            streaming(client),
        ):
            for stream in (False, True):
                with pytest.raises(InternalServerError) as caught:
                    await client.chat.completions.create(model=MODEL, messages=HI, stream=stream)

                assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
                assert caught.value.response.headers["retry-after"] == "1"

    async def test_are_limited_for_each_key(self, serve: Serve) -> None:
        config = config_of(api_keys=("one", "two"), key_concurrency=1)
        async with (
            serve(config=config) as served,
            client_of(served, api_key="one") as one,
            client_of(served, api_key="two") as two,
            streaming(one),
        ):
            with pytest.raises(RateLimitError) as caught:
                await one.chat.completions.create(model=MODEL, messages=HI)
            await two.chat.completions.create(model=MODEL, messages=HI, max_tokens=1)

            assert caught.value.code == "rate_limit_exceeded"
            assert int(caught.value.response.headers["retry-after"]) >= 1

    async def test_are_not_made_of_what_is_wrong_at_any_time(self, client: AsyncOpenAI) -> None:
        began = time.monotonic()
        with pytest.raises(BadRequestError) as caught:
            await client.with_options(max_retries=5).chat.completions.create(
                model=MODEL, messages=HI, temperature=-1
            )

        assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
        assert time.monotonic() - began < 0.5


class TestOneBadRequestAmongMany:
    async def test_hurts_no_other(self, client: AsyncOpenAI) -> None:
        async def chat(number: int) -> str | None:
            completion = await client.chat.completions.create(
                model=MODEL,
                messages=HI,
                max_tokens=12,
                temperature=0,
                extra_body={"regex": "("} if number % 4 == 3 else None,
            )
            return completion.choices[0].message.content

        found = await asyncio.gather(*map(chat, range(16)), return_exceptions=True)

        errors = [number for number, each in enumerate(found) if isinstance(each, BaseException)]
        assert errors == [3, 7, 11, 15]
        assert len({each for each in found if isinstance(each, str)}) == 1
