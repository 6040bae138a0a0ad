"""The scripted backend keeps the contract of a backend, and does what its script says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgen.backend import Backend
from structgen.errors import (
    ConstraintError,
    ContextLengthError,
    OptionError,
    PromptError,
    UnsupportedError,
)
from structgen.options import request_from
from structgen.request import (
    Completion,
    Control,
    Image,
    Lineage,
    Request,
    Text,
    Tokens,
)
from structgen.testing import END_ID, ScriptedBackend, ScriptedTokenizer
from tests.conformance import (
    PROMPT,
    BackendConformance,
    MakeBackend,
    completion_of,
    deltas_of,
    first_delta,
    request,
)


class TestTheContract(BackendConformance):
    @pytest.fixture(params=[(1, 1), (4, 1), (1, 3), (4, 3)], ids=str)
    def make_backend(self, request: pytest.FixtureRequest) -> MakeBackend:
        chunk, token_size = request.param

        @asynccontextmanager
        async def make() -> AsyncIterator[Backend]:
            backend = ScriptedBackend(
                " 9, 10, 11, \N{GRINNING FACE}", chunk=chunk, token_size=token_size
            )
            yield backend

            assert (backend.running, backend.open_scopes) == (0, set())

        return make

    def check_continuation(self, whole: Completion, half: Completion, rest: Completion) -> None:
        # The script does not depend on the prompt, so it begins again.
        assert half.tokens == rest.tokens == whole.tokens[:6]


async def said(backend: ScriptedBackend, /, **options: Any) -> Completion:
    return await completion_of(backend, request_from(PROMPT, options))


class TestReplies:
    async def test_may_be_one_for_all(self) -> None:
        backend = ScriptedBackend("a")

        assert [(await said(backend)).text for _ in range(2)] == ["a", "a"]

    async def test_may_be_a_list_in_order(self) -> None:
        backend = ScriptedBackend(["a", "b"])

        assert [(await said(backend)).text for _ in range(2)] == ["a", "b"]
        with pytest.raises(AssertionError, match="only 2 replies"):
            await said(backend)

    async def test_may_go_by_the_name_of_the_variable(self) -> None:
        backend = ScriptedBackend({"x": "a"})
        named = Request(prompt=PROMPT, lineage=Lineage(parent="x"))

        assert (await completion_of(backend, named)).text == "a"
        with pytest.raises(AssertionError, match="no reply to ''"):
            await said(backend)

    async def test_may_be_made_from_the_request(self) -> None:
        backend = ScriptedBackend(lambda asked: str(asked.sampling.top_k))

        assert (await said(backend, top_k=3)).text == "3"

    async def test_end_by_themselves_with_an_end_token(self) -> None:
        completion = await said(ScriptedBackend("abc"))

        assert (completion.finish.reason, completion.finish.matched) == ("stop", END_ID)
        assert (completion.tokens, completion.usage.completion_tokens) == ((97, 98, 99), 4)

    async def test_end_at_a_stop_token(self) -> None:
        completion = await said(ScriptedBackend("abc"), stop_token_ids=[ord("b")])

        assert (completion.text, completion.finish.matched) == ("a", ord("b"))

    async def test_are_repeated_to_reach_min_tokens(self) -> None:
        assert (await said(ScriptedBackend("abc"), min_tokens=5)).text == "abcabc"
        assert (await said(ScriptedBackend(""), min_tokens=3)).text == "  "

    async def test_come_in_chunks(self) -> None:
        deltas = await deltas_of(ScriptedBackend("abcdefgh", chunk=3), request_from(PROMPT, {}))

        assert [delta.text for delta in deltas] == ["abc", "def", "gh"]

    async def test_that_contradict_the_regex_are_mistakes_of_the_test(self) -> None:
        backend = ScriptedBackend("abc")

        assert (await said(backend, regex="[a-c]+")).text == "abc"
        with pytest.raises(AssertionError, match=r"reply 'abc' has not the form of regex"):
            await said(backend, regex="[0-9]+")

    async def test_keep_to_the_context(self) -> None:
        backend = ScriptedBackend("abcdefgh", max_context=len(PROMPT[0].text) + 3)  # type: ignore[union-attr]  # is a Text

        assert (await said(backend)).text == "abc"
        with pytest.raises(ContextLengthError, match=r"has \d+ tokens, and the context \d+"):
            await completion_of(backend, request((*PROMPT, Text("1234"))))


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"regex": "(abc"}, ConstraintError),
            ({"prompt_logprobs": 0}, UnsupportedError),
            ({"regex": "a", "max_tokens": 0}, OptionError),
        ],
    )
    async def test_come_before_any_work(self, options: Any, error: type[Exception]) -> None:
        backend = ScriptedBackend("a")

        with pytest.raises(error):
            await said(backend, **options)

        assert backend.requests == []

    async def test_cover_images(self) -> None:
        with pytest.raises(UnsupportedError, match="images"):
            await first_delta(ScriptedBackend("a"), Request(prompt=(Image(b"", ""),)))

    async def test_can_be_scripted(self) -> None:
        def fail(asked: Request) -> None:
            if asked.sampling.top_k == 3:
                raise OSError("scripted")

        backend = ScriptedBackend("a", fail=fail)

        assert (await said(backend)).text == "a"
        with pytest.raises(OSError, match="scripted"):
            await said(backend, top_k=3)


class TestCounts:
    async def test_tell_finished_from_aborted(self) -> None:
        backend = ScriptedBackend("abcdefgh")

        await said(backend)
        await first_delta(backend, request())

        assert (backend.finished, backend.aborted, backend.running, backend.peak) == (1, 1, 0, 1)
        assert len(backend.requests) == 2


class TestScores:
    async def test_follow_the_script(self) -> None:
        backend = ScriptedBackend(score=lambda prompt, text: -float(len(prompt) * len(text)))

        (score,) = await backend.score((Text("abc"),), ["xy"])

        assert (score.total, score.logprobs) == (-6.0, (-3.0, -3.0))

    async def test_after_an_empty_prompt_leave_out_the_first_token(self) -> None:
        backend = ScriptedBackend(score=lambda *_: -6.0)

        scores = await backend.score((), ["xyz", "x"])

        assert [score.logprobs for score in scores] == [(0.0, -3.0, -3.0), (0.0,)]

    async def test_keep_to_the_context(self) -> None:
        backend = ScriptedBackend(max_context=5)

        assert await backend.score((Text("abc"),), ["xy"])
        with pytest.raises(ContextLengthError, match="have 6 tokens, and the context 5"):
            await backend.score((Text("abc"),), ["xyz"])


class TestTheTokenizer:
    @given(text=st.text(), size=st.integers(1, 4))
    def test_gives_back_the_text(self, text: str, size: int) -> None:
        tokenizer = ScriptedTokenizer(size)

        assert tokenizer.decode(tokenizer.encode(text)) == text

    @given(text=st.text(max_size=6), other=st.text(max_size=6))
    def test_gives_different_ids_to_different_texts(self, text: str, other: str) -> None:
        tokenizer = ScriptedTokenizer(3)

        assert (tokenizer.encode(text) == tokenizer.encode(other)) is (text == other)

    def test_never_takes_text_for_control(self) -> None:
        tokenizer = ScriptedTokenizer()
        text, control = (
            tokenizer.encode_parts((Text("x"),)),
            tokenizer.encode_parts((Control("x"),)),
        )

        assert text != control

    def test_refuses_tokens_that_are_not_their_text(self) -> None:
        with pytest.raises(PromptError, match="spell 'a' claim to be 'b'"):
            ScriptedTokenizer().encode_parts((Tokens((97,), "b"),))
