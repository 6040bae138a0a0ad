"""What every backend must do: one suite, for fakes, the engine and remote backends.

A test module makes a class of `BackendConformance` and gives it a fixture `make_backend`: a
function that returns an async context manager of an open backend, whose model goes on for as
long as it may under `ignore_eos`. What a backend says does not matter to these tests.

    class TestTheEngine(BackendConformance):
        @pytest.fixture
        def make_backend(self, default_model: Path) -> MakeBackend:
            return lambda: Engine(default_model)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from structgen.backend import Backend
from structgen.errors import OptionError, PromptError
from structgen.options import request_from
from structgen.request import (
    Completion,
    Delta,
    Lineage,
    Prompt,
    Request,
    Text,
    Tokens,
    join_deltas,
    prompt_text,
)

MakeBackend = Callable[[], AbstractAsyncContextManager[Backend]]

PROMPT: Prompt = (Text("1, 2, 3, 4, 5, 6, 7, 8,"),)
OTHER: Prompt = (Text("The alphabet begins with a, b, c,"),)
ENDLESS = {"temperature": 0.0, "ignore_eos": True}


def request(prompt: Prompt = PROMPT, /, **options: Any) -> Request:
    return request_from(prompt, {**ENDLESS, "max_tokens": 12, **options})


async def deltas_of(backend: Backend, asked: Request) -> list[Delta]:
    async with backend.generate(asked) as deltas:
        return [delta async for delta in deltas]


async def completion_of(backend: Backend, asked: Request) -> Completion:
    return join_deltas(await deltas_of(backend, asked), backend.capabilities.tokenizer)


async def first_delta(backend: Backend, asked: Request) -> Delta:
    """Read one delta and leave."""
    async with backend.generate(asked) as deltas:
        return await anext(aiter(deltas))


class BackendConformance:
    """The suite. Needs a fixture `make_backend`."""

    @pytest.fixture
    async def backend(self, make_backend: MakeBackend) -> AsyncIterator[Backend]:
        async with make_backend() as backend:
            yield backend

    @pytest.fixture
    def scorer(self, backend: Backend) -> Backend:
        if not backend.capabilities.score:
            pytest.skip("this backend cannot score")
        return backend

    @pytest.fixture
    def encoding(self, backend: Backend) -> Backend:
        if not backend.capabilities.tokens:
            pytest.skip("this backend has no tokens")
        return backend

    # ------------------------------------------------------------ deltas

    async def test_the_deltas_of_a_request_are_its_completion(self, backend: Backend) -> None:
        deltas = await deltas_of(backend, request())
        again = await completion_of(backend, request())

        assert "".join(delta.text for delta in deltas) == again.text
        assert tuple(token for delta in deltas for token in delta.tokens) == again.tokens

    async def test_the_last_delta_and_no_other_says_why_it_ended(self, backend: Backend) -> None:
        deltas = await deltas_of(backend, request())

        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [
            True
        ]

    async def test_all_deltas_carry_the_same_request_id(self, backend: Backend) -> None:
        deltas = await deltas_of(backend, request())

        assert len({delta.request for delta in deltas}) == 1

    async def test_a_stream_that_was_read_to_its_end_stays_at_its_end(
        self, backend: Backend
    ) -> None:
        async with backend.generate(request()) as deltas:
            async for _ in deltas:
                pass

            assert [delta async for delta in deltas] == []

    async def test_logprobs_are_one_for_each_token(self, backend: Backend) -> None:
        if not backend.capabilities.logprobs:
            pytest.skip("this backend reports no logprobs")

        completion = await completion_of(backend, request(logprobs=True))

        assert tuple(entry.token for entry in completion.logprobs) == completion.tokens
        assert all(
            entry.logprob is not None and entry.logprob <= 0 for entry in completion.logprobs
        )

    # ------------------------------------------------------------ where an output ends

    @pytest.mark.parametrize("length", [1, 2, 7])
    async def test_max_tokens_bounds_the_output(self, backend: Backend, length: int) -> None:
        completion = await completion_of(backend, request(max_tokens=length))

        assert completion.finish.reason == "length"
        assert completion.usage.completion_tokens == length

    async def test_an_output_of_no_tokens_only_reads_the_prompt(self, backend: Backend) -> None:
        whole = await completion_of(backend, request())

        deltas = await deltas_of(backend, request(max_tokens=0, logprobs=True))

        completion = join_deltas(deltas)
        assert (len(deltas), completion.text, completion.tokens) == (1, "", ())
        assert (completion.logprobs, completion.finish.ended) == ((), None)
        assert (completion.finish.reason, completion.finish.complete) == ("length", False)
        assert completion.usage.completion_tokens == 0
        assert completion.usage.prompt_tokens == whole.usage.prompt_tokens

    async def test_a_token_that_ends_an_output_is_told_apart_from_it(
        self, backend: Backend
    ) -> None:
        if not (backend.capabilities.logprobs and backend.capabilities.tokens):
            pytest.skip("this backend reports no log-probabilities of tokens")
        token = (await completion_of(backend, request())).tokens[3]

        plain = await completion_of(backend, request(stop_token_ids=[token]))
        told = await completion_of(backend, request(stop_token_ids=[token], logprobs=True))

        assert (plain.finish.matched, plain.finish.ended) == (token, None)
        assert told.finish.ended is not None
        assert told.finish.ended.token == token
        assert told.finish.ended.logprob is not None
        assert told.finish.ended.logprob <= 0
        assert token not in told.tokens
        assert len(told.logprobs) == len(told.tokens)

    async def test_usage_counts_prompt_and_output(self, backend: Backend) -> None:
        usage = (await completion_of(backend, request(max_tokens=5))).usage
        longer = (await completion_of(backend, request((*PROMPT, Text(" 9,"))))).usage

        assert usage.completion_tokens == 5
        assert 0 < usage.prompt_tokens < longer.prompt_tokens
        assert 0 <= usage.cached_tokens <= usage.prompt_tokens

    async def test_the_end_tells_how_long_a_request_waited(self, backend: Backend) -> None:
        started = time.perf_counter()
        finish = (await completion_of(backend, request())).finish

        assert 0 <= finish.waited <= time.perf_counter() - started

    @pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 3), (3, 7)])
    async def test_a_stop_string_ends_the_output_before_it(
        self, backend: Backend, start: int, end: int
    ) -> None:
        whole = (await completion_of(backend, request(max_tokens=24))).text
        stop = whole[start:end]

        completion = await completion_of(backend, request(max_tokens=24, stop=stop))

        assert completion.text == whole[: whole.index(stop)]
        assert (completion.finish.reason, completion.finish.matched) == ("stop", stop)

    async def test_no_part_of_a_stop_string_is_ever_sent(self, backend: Backend) -> None:
        whole = (await completion_of(backend, request(max_tokens=24))).text
        stop = whole[3:7]

        sent = ""
        for delta in await deltas_of(backend, request(max_tokens=24, stop=stop)):
            sent += delta.text

            assert whole[: whole.index(stop)].startswith(sent)

    async def test_the_first_of_several_stop_strings_counts(self, backend: Backend) -> None:
        whole = (await completion_of(backend, request(max_tokens=24))).text
        later, sooner = whole[6:8], whole[2:4]
        first = min(whole.index(later) + 2, whole.index(sooner) + 2)

        completion = await completion_of(backend, request(max_tokens=24, stop=[later, sooner]))

        assert len(completion.text) == first - 2

    async def test_a_stop_string_does_not_count_before_min_tokens(self, backend: Backend) -> None:
        whole = (await completion_of(backend, request(max_tokens=8))).text

        completion = await completion_of(
            backend, request(max_tokens=8, min_tokens=8, stop=whole[:1])
        )

        assert completion.usage.completion_tokens == 8

    # ------------------------------------------------------------ tokens

    async def test_an_output_sent_again_as_tokens_is_continued_exactly(
        self, backend: Backend
    ) -> None:
        if not backend.capabilities.tokens:
            pytest.skip("this backend has no tokens")
        whole = await completion_of(backend, request(max_tokens=12))
        half = await completion_of(backend, request(max_tokens=6))

        rest = await completion_of(backend, request((*PROMPT, *half.parts), max_tokens=6))

        self.check_continuation(whole, half, rest)

    def check_continuation(self, whole: Completion, half: Completion, rest: Completion) -> None:
        """That `rest`, after `half`, is what `whole` said; a backend without a model cannot."""
        assert half.tokens + rest.tokens == whole.tokens

    async def test_an_output_with_a_tail_is_accepted_as_a_prompt(self, backend: Backend) -> None:
        whole = (await completion_of(backend, request(max_tokens=24))).text
        for end in range(2, 6):
            cut = await completion_of(
                backend, request(max_tokens=24, stop=whole[end - 1 : end + 1])
            )

            assert prompt_text(cut.parts) == cut.text
            assert (await completion_of(backend, request((*PROMPT, *cut.parts)))).text

    async def test_tokens_of_another_tokenizer_are_refused(self, backend: Backend) -> None:
        if not backend.capabilities.tokenizer:
            pytest.skip("this backend does not name its tokenizer")
        own = await completion_of(backend, request())
        foreign = join_deltas(await deltas_of(backend, request()), "another tokenizer")

        assert own.tokens == foreign.tokens
        with pytest.raises(PromptError):
            await completion_of(backend, request((*PROMPT, *foreign.parts)))

    # ------------------------------------------------------------ refusals

    async def test_an_empty_prompt_is_refused(self, backend: Backend) -> None:
        with pytest.raises(PromptError):
            await first_delta(backend, request(()))

        assert (await completion_of(backend, request())).text

    async def test_a_prompt_of_empty_text_is_refused(self, backend: Backend) -> None:
        with pytest.raises(PromptError):
            await first_delta(backend, request((Text(""),)))

    def test_an_unknown_option_is_refused(self) -> None:
        with pytest.raises(OptionError, match="heat"):
            request(heat=1)

    # ------------------------------------------------------------ leaving early

    async def test_a_request_that_was_left_does_not_disturb_the_next(
        self, backend: Backend
    ) -> None:
        alone = await completion_of(backend, request())

        await first_delta(backend, request(max_tokens=200))
        after = await completion_of(backend, request())

        assert after.text == alone.text

    async def test_a_request_can_be_left_before_anything_was_read(self, backend: Backend) -> None:
        async with backend.generate(request(max_tokens=200)):
            pass

        assert (await completion_of(backend, request())).text

    async def test_a_request_can_be_left_by_another_task(self, backend: Backend) -> None:
        context = backend.generate(request(max_tokens=200))
        deltas = await asyncio.create_task(entered(context))
        await anext(aiter(deltas))

        await asyncio.create_task(left(context))

        assert (await completion_of(backend, request())).text

    async def test_cancelling_the_reader_ends_the_request(self, backend: Backend) -> None:
        started = asyncio.Event()

        async def read() -> None:
            async with backend.generate(request(max_tokens=200)) as deltas:
                async for _ in deltas:
                    started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        assert (await completion_of(backend, request())).text

    async def test_an_error_of_the_reader_is_not_changed(self, backend: Backend) -> None:
        with pytest.raises(ZeroDivisionError):
            async with backend.generate(request(max_tokens=200)):
                raise ZeroDivisionError

    # ------------------------------------------------------------ several at once

    async def test_requests_at_the_same_time_do_not_mix(self, backend: Backend) -> None:
        asked = [request(), request(OTHER), request(stop=","), request(OTHER, max_tokens=3)]
        alone = [(await completion_of(backend, each)).text for each in asked]

        together = await asyncio.gather(*(completion_of(backend, each) for each in asked))

        assert [completion.text for completion in together] == alone

    async def test_one_that_is_refused_leaves_the_others_alone(self, backend: Backend) -> None:
        alone = (await completion_of(backend, request())).text

        first, refused, second = await asyncio.gather(
            completion_of(backend, request()),
            completion_of(backend, request(())),
            completion_of(backend, request()),
            return_exceptions=True,
        )

        assert isinstance(refused, PromptError)
        assert [getattr(each, "text", each) for each in (first, second)] == [alone, alone]

    # ------------------------------------------------------------ scores, ids, scopes, priming

    @pytest.mark.parametrize("continuations", [[" 9"], [" 9", " nine", " a much longer one"]])
    async def test_scores_are_in_order_and_one_logprob_a_token(
        self, scorer: Backend, continuations: Sequence[str]
    ) -> None:
        scores = await scorer.score(PROMPT, continuations)

        assert [score.text for score in scores] == continuations
        assert all(len(score.tokens) == len(score.logprobs) > 0 for score in scores)
        assert all(score.total <= 0 for score in scores)

    async def test_scores_of_the_same_text_are_the_same(self, scorer: Backend) -> None:
        first, other, second = await scorer.score(PROMPT, [" 9", " nine", " 9"])

        assert first == second
        assert other.text == " nine"

    async def test_scores_count_the_prompt_once(self, scorer: Backend) -> None:
        usage = (await scorer.score(PROMPT, [" 9", " nine", " a much longer one"])).usage

        assert usage.prompt_tokens == (await completion_of(scorer, request())).usage.prompt_tokens
        assert 0 <= usage.cached_tokens < usage.prompt_tokens
        assert usage.completion_tokens == 0

    async def test_without_a_prompt_nothing_but_bos_tells_of_the_first_token(
        self, scorer: Backend
    ) -> None:
        scores = await scorer.score((), [" 9, 10", " nine"])

        bos = scores.usage.prompt_tokens
        assert bos in {0, 1}
        for score in scores:
            assert len(score.tokens) == len(score.logprobs)
            assert (score.logprobs[0] == 0) == (not bos)
            assert all(logprob < 0 for logprob in score.logprobs[1:])

    async def test_an_empty_continuation_is_refused(self, scorer: Backend) -> None:
        with pytest.raises(PromptError, match="empty"):
            await scorer.score(PROMPT, [" 9", ""])

    async def test_no_continuations_at_all_are_refused(self, scorer: Backend) -> None:
        with pytest.raises(OptionError, match=r"continuations: .*empty list"):
            await scorer.score(PROMPT, [])
        with pytest.raises(OptionError, match=r"continuations: .*write \[text\]"):
            await scorer.score(PROMPT, " 9")

    async def test_a_prompt_encoded_is_as_long_as_it_counts(self, encoding: Backend) -> None:
        ids = await encoding.encode(PROMPT)

        assert isinstance(ids, tuple)
        assert len(ids) == (await completion_of(encoding, request())).usage.prompt_tokens

    async def test_a_prompt_sent_as_its_ids_is_the_same_prompt(self, encoding: Backend) -> None:
        ids = await encoding.encode(PROMPT)
        tokens = Tokens(ids, prompt_text(PROMPT), encoding.capabilities.tokenizer)

        assert await encoding.encode((tokens,)) == ids
        as_ids = await completion_of(encoding, request((tokens,)))
        assert as_ids.tokens == (await completion_of(encoding, request())).tokens

    async def test_a_continuation_is_encoded_as_a_part_of_its_own(self, encoding: Backend) -> None:
        if not encoding.capabilities.score:
            pytest.skip("this backend cannot score")

        (score,) = await encoding.score(PROMPT, [" nine"])

        whole = await encoding.encode((*PROMPT, Text(" nine")))
        assert whole == await encoding.encode(PROMPT) + score.tokens

    async def test_an_empty_prompt_has_no_ids(self, encoding: Backend) -> None:
        assert await encoding.encode(()) == ()

    async def test_priming_counts_the_prompt(self, backend: Backend) -> None:
        usage = await backend.prime(PROMPT)

        assert usage.prompt_tokens == (await completion_of(backend, request())).usage.prompt_tokens
        assert usage.completion_tokens == 0

    async def test_scopes_have_ids_of_their_own(self, backend: Backend) -> None:
        async with backend.scope(PROMPT) as outer, backend.scope((*PROMPT, Text(" 9,"))) as inner:
            assert outer > 0
            assert inner > 0
            assert outer != inner

    async def test_requests_inside_a_scope_say_what_they_say_outside(
        self, backend: Backend
    ) -> None:
        alone = (await completion_of(backend, request())).text

        async with backend.scope(PROMPT) as scope:
            inside = request_from(
                PROMPT, {**ENDLESS, "max_tokens": 12}, lineage=Lineage(scope=scope)
            )
            assert (await completion_of(backend, inside)).text == alone

        assert (await completion_of(backend, inside)).text == alone

    async def test_a_scope_closes_when_its_block_raises(self, backend: Backend) -> None:
        with pytest.raises(ZeroDivisionError):
            async with backend.scope(PROMPT):
                raise ZeroDivisionError

        assert (await completion_of(backend, request())).text


async def entered(
    context: AbstractAsyncContextManager[AsyncIterator[Delta]],
) -> AsyncIterator[Delta]:
    """Enter a context in the task that runs this."""
    return await context.__aenter__()


async def left(context: AbstractAsyncContextManager[AsyncIterator[Delta]]) -> None:
    """Leave a context in the task that runs this."""
    await context.__aexit__(None, None, None)
