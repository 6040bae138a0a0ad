"""Streamed chats through the official client, and what becomes of streams that are left."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio
import pytest
from openai import APIError, AsyncOpenAI

from structgen.server.config import ServerConfig
from tests.server.openai_sdk.sdk import ENDLESS, HI, LETTERS, MODEL, client_of, content_of, idle
from tests.server.served import Serve, Served

LONG = 3000


class TestAStream:
    async def test_is_the_whole_answer_in_pieces(self, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(
            model=MODEL, messages=HI, temperature=0, extra_body=LETTERS
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, temperature=0, extra_body=LETTERS, stream=True
        )
        chunks = [chunk async for chunk in stream]

        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert {chunk.choices[0].delta.role for chunk in chunks[1:]} <= {None}
        ends = [chunk.choices[0].finish_reason for chunk in chunks]
        assert ends == [None] * (len(chunks) - 1) + ["stop"]
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
        assert {chunk.usage for chunk in chunks} == {None}

    async def test_ends_with_its_usage_where_that_was_asked_for(self, client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            max_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = [chunk async for chunk in stream]

        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 7
        assert {chunk.usage for chunk in chunks} == {None}
        assert {len(chunk.choices) for chunk in chunks} == {1}

    async def test_has_each_choice_whole(self, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(
            model=MODEL, messages=HI, n=3, seed=5, extra_body=LETTERS
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, n=3, seed=5, extra_body=LETTERS, stream=True
        )
        texts, ends = ["", "", ""], Counter[int]()
        async for chunk in stream:
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None

        assert texts == [choice.message.content for choice in whole.choices]
        assert ends == {0: 1, 1: 1, 2: 1}

    async def test_has_the_logprobs_of_the_whole_answer(self, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(
            model=MODEL, messages=HI, logprobs=True, temperature=0, extra_body=LETTERS
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, logprobs=True, temperature=0, extra_body=LETTERS, stream=True
        )
        logprobs = [chunk.choices[0].logprobs async for chunk in stream]
        streamed = [entry for each in logprobs if each for entry in each.content or ()]

        assert whole.choices[0].logprobs is not None
        wanted = whole.choices[0].logprobs.content or []
        assert [entry.token for entry in streamed] == [entry.token for entry in wanted]
        assert [entry.logprob for entry in streamed] == pytest.approx(
            [entry.logprob for entry in wanted], abs=1e-3
        )

    async def test_has_every_field_of_an_event_where_all_is_asked_for(
        self, client: AsyncOpenAI
    ) -> None:
        """Several choices, log-probabilities and the usage: the client refuses what is amiss."""
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            n=2,
            logprobs=True,
            top_logprobs=2,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=ENDLESS,
        )
        *chunks, last = [chunk async for chunk in stream]

        choices = [choice for chunk in chunks for choice in chunk.choices]
        for index in range(2):
            first, *others = [choice for choice in choices if choice.index == index]
            assert (first.delta.role, first.delta.content is None) == ("assistant", False)
            assert {choice.delta.role for choice in others} == {None}
            ends = [choice.finish_reason for choice in (first, *others)]
            assert ends == [None] * len(others) + ["length"]
        logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
        assert sum(len(each.content or ()) for each in logprobs) == 8
        assert all(each.refusal is None and "refusal" in each.model_fields_set for each in logprobs)
        assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
        assert all("usage" in chunk.model_fields_set for chunk in chunks)
        assert (last.choices, last.usage is None) == ([], False)

    async def test_feeds_the_events_that_the_package_makes_of_it(self, client: AsyncOpenAI) -> None:
        deltas, done = [], []
        async with client.chat.completions.stream(
            model=MODEL, messages=HI, temperature=0, extra_body=LETTERS
        ) as stream:
            async for event in stream:
                if event.type == "content.delta":
                    deltas.append(event.delta)
                elif event.type == "content.done":
                    done.append(event.content)
            completion = await stream.get_final_completion()

        assert done == ["".join(deltas)]
        assert completion.choices[0].message.content == done[0]
        assert completion.choices[0].finish_reason == "stop"


class TestManyStreams:
    async def test_at_once_are_each_what_they_are_alone(self, client: AsyncOpenAI) -> None:
        async def whole(number: int) -> str:
            completion = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"number {number}"}],
                temperature=0,
                extra_body=LETTERS,
            )
            return completion.choices[0].message.content or ""

        async def streamed(number: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"number {number}"}],
                temperature=0,
                extra_body=LETTERS,
                stream=True,
            )
            return await content_of(stream)

        texts = await asyncio.gather(*(streamed(number) for number in range(32)))

        assert len(set(texts)) > 1
        for number in (0, 9, 20, 31):
            assert texts[number] == await whole(number)


class TestAStreamThatIsLeft:
    async def test_is_aborted_when_it_is_closed(self, served: Served, client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=LONG, stream=True, extra_body=ENDLESS
        )
        await anext(aiter(stream))
        await stream.close()

        await idle(served.engine)
        assert served.engine.statistics().requests_aborted == 1
        assert served.engine.statistics().slots_held == 0

    async def test_is_aborted_at_the_end_of_its_block(
        self, served: Served, client: AsyncOpenAI
    ) -> None:
        async with await client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=LONG, stream=True, extra_body=ENDLESS
        ) as stream:
            async for _ in stream:
                break

        await idle(served.engine)
        assert served.engine.statistics().requests_aborted == 1

    async def test_is_aborted_with_the_task_that_reads_it(
        self, served: Served, client: AsyncOpenAI
    ) -> None:
        begun = anyio.Event()

        async def read() -> None:
            async with await client.chat.completions.create(
                model=MODEL, messages=HI, max_tokens=LONG, stream=True, extra_body=ENDLESS
            ) as stream:
                async for _ in stream:
                    begun.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await begun.wait()
            tasks.cancel_scope.cancel()

        await idle(served.engine)
        assert served.engine.statistics().requests_aborted == 1

    async def test_leaves_the_client_and_the_server_as_they_were(
        self, served: Served, client: AsyncOpenAI
    ) -> None:
        before = await client.chat.completions.create(
            model=MODEL, messages=HI, temperature=0, extra_body=LETTERS
        )
        async with await client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=LONG, stream=True, extra_body=ENDLESS
        ) as stream:
            await anext(aiter(stream))
        await idle(served.engine)
        after = await client.chat.completions.create(
            model=MODEL, messages=HI, temperature=0, extra_body=LETTERS
        )

        assert after.choices[0].message.content == before.choices[0].message.content

    async def test_does_not_end_a_request_that_waits_for_its_whole_answer(
        self, served: Served, client: AsyncOpenAI
    ) -> None:
        """Nor the other way round: a client that gives up waiting ends its own request only."""
        waiting = asyncio.create_task(
            client.chat.completions.create(
                model=MODEL, messages=HI, max_tokens=LONG, extra_body=ENDLESS
            )
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, temperature=0, extra_body=LETTERS, stream=True
        )
        await anext(aiter(stream))
        waiting.cancel()
        rest = await content_of(stream)

        assert rest
        await idle(served.engine)
        statistics = served.engine.statistics()
        assert (statistics.requests_aborted, statistics.requests_finished) == (1, 1)


class TestAStreamThatFails:
    async def test_raises_what_its_last_event_says(self, serve: Serve) -> None:
        config = ServerConfig(names=(MODEL,), request_timeout=0.5)
        async with serve(config=config) as served, client_of(served) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HI, max_tokens=LONG, stream=True, extra_body=ENDLESS
            )
            with pytest.raises(APIError) as caught:
                await content_of(stream)

            assert caught.value.code == "timeout"
            assert caught.value.type == "server_error"
            await idle(served.engine)
