"""From the fields of a body to the engine's requests: the shapes that clients really send."""

from __future__ import annotations

from typing import Any, cast

import pytest

from structgen.engine.stream import DeltaStream
from structgen.errors import InvalidOutputError
from structgen.request import Request, Text
from structgen.sampling import Sampling
from structgen.server.call import Call
from structgen.server.openai.choices import attempted
from structgen.server.openai.requests import with_seed
from tests.server.served import Serve, Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": "What is 2+2?"}],
        "temperature": 0,
        "max_tokens": 8,
    },
    COMPLETIONS: {"prompt": "What is 2+2?", "temperature": 0, "max_tokens": 8},
}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])


EMPTY: list[dict[str, Any]] = [
    {"stop": []},
    {"logit_bias": {}},
    {"user": ""},
    {"n": 1},
    {"stream": False},
    {"skip_special_tokens": True},
    {"response_format": {"type": "text"}},
    {"metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
]


async def said(served: Served, path: str, **options: Any) -> Any:
    """The only choice of an answer, without what differs between two equal answers."""
    answer = await served.post(path, {**BODIES[path], **options})
    assert answer.status == 200, answer.text
    (choice,) = answer.json["choices"]
    return choice, answer.json["usage"]["completion_tokens"]


async def sent(served: Served, path: str, **options: Any) -> list[Request]:
    """The requests that the engine gets."""
    found: list[Request] = []
    generate = served.engine.generate

    def watched(request: Request) -> DeltaStream:
        found.append(request)
        return generate(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.engine, "generate", watched)
        answer = await served.post(path, {**BODIES[path], **options})
    assert answer.status == 200, answer.text
    return found


class TestNulls:
    @BOTH
    async def test_mean_the_default_whatever_the_field(self, serve: Serve, path: str) -> None:
        names = [
            *("n", "stop", "seed", "top_p", "top_k", "min_p", "stream", "stream_options"),
            *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("min_tokens", "stop_token_ids", "stop_regex", "ignore_eos", "priority", "cache_salt"),
            *("response_format", "structured_outputs", "regex", "ebnf", "json_schema", "logprobs"),
            *("user", "metadata", "store", "return_token_ids", "skip_special_tokens"),
        ]
        async with serve() as served:
            plain = await said(served, path)
            nulls = await said(served, path, **dict.fromkeys(names))

        assert nulls == plain

    @BOTH
    async def test_are_what_empty_values_mean(self, serve: Serve, path: str) -> None:
        async with serve() as served:
            plain = await said(served, path)
            for options in EMPTY:
                assert await said(served, path, **options) == plain, options


class TestStops:
    @BOTH
    async def test_may_be_one_or_several(self, serve: Serve, path: str) -> None:
        async with serve() as served:
            (one, _) = await said(served, path, stop="e", max_tokens=200)
            (several, _) = await said(served, path, stop=["e"], max_tokens=200)

        assert one == several
        assert one["finish_reason"] == "stop"
        assert "e" not in str(one.get("text", one.get("message", {}).get("content")))


class TestTheRequest:
    @BOTH
    async def test_has_what_the_body_says(self, serve: Serve, path: str) -> None:
        options = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "min_tokens": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "stop": "END",
            "stop_token_ids": [3],
            "ignore_eos": True,
            "seed": 5,
            "logit_bias": {"7": -1.5},
            "priority": 2,
            "stop_regex": ["[0-9]+"],
        }
        async with serve() as served:
            (request,) = await sent(served, path, **options)

        assert request.sampling == Sampling(
            max_tokens=8,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            min_tokens=2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            stop=("END",),
            stop_regex=("[0-9]+",),
            stop_token_ids=(3,),
            ignore_eos=True,
            seed=5,
            logit_bias=((7, -1.5),),
        )
        assert request.priority == 2

    @BOTH
    async def test_has_no_top_k_where_other_servers_would_have_none(
        self, serve: Serve, path: str
    ) -> None:
        async with serve() as served:
            (request,) = await sent(served, path, top_k=-1)

        assert request.sampling.top_k == 0

    @BOTH
    async def test_of_each_choice_has_a_seed_of_its_own(self, serve: Serve, path: str) -> None:
        async with serve() as served:
            requests = await sent(served, path, n=3, seed=-5)
            unseeded = await sent(served, path, n=2)

        seeds = [request.sampling.seed for request in requests]
        assert len(set(seeds)) == 3
        assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
        assert [request.sampling.seed for request in unseeded] == [None, None]

    @BOTH
    async def test_has_a_cache_of_its_salt(self, serve: Serve, path: str) -> None:
        async with serve() as served:
            await said(served, path)
            answers = [
                await served.post(path, {**BODIES[path], **options})
                for options in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"})
            ]

        cached = [each.json["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
        assert [count > 0 for count in cached] == [True, False, True, False]

    async def test_of_a_chat_takes_either_name_of_its_length(self, serve: Serve) -> None:
        body = {**BODIES[CHAT], "ignore_eos": True}
        del body["max_tokens"]
        async with serve() as served:
            named = [
                await served.post(CHAT, {**body, **given})
                for given in (
                    {"max_completion_tokens": 3},
                    {"max_tokens": 3},
                    {"max_tokens": 3, "max_completion_tokens": 3},
                )
            ]
            torn = await served.post(CHAT, {**body, "max_tokens": 3, "max_completion_tokens": 4})

        assert [each.json["usage"]["completion_tokens"] for each in named] == [3, 3, 3]
        assert (torn.status, torn.error["param"]) == (400, "max_completion_tokens")


class TestParts:
    async def test_of_a_content_are_joined(self, serve: Serve) -> None:
        parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
        async with serve() as served:
            whole = await served.post(CHAT, BODIES[CHAT])
            apart = await served.post(
                CHAT, {**BODIES[CHAT], "messages": [{"role": "user", "content": parts}]}
            )

        assert apart.json["choices"] == whole.json["choices"]
        assert apart.json["usage"]["prompt_tokens"] == whole.json["usage"]["prompt_tokens"]

    async def test_that_are_no_text_are_refused_by_their_type(self, serve: Serve) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        async with serve() as served:
            answer = await served.post(
                CHAT, {**BODIES[CHAT], "messages": [{"role": "user", "content": [image]}]}
            )

        assert answer.status == 400
        assert "image_url" in answer.error["message"]
        assert answer.error["param"] == "messages[0].content[0].type"


class TestUnknownFields:
    @BOTH
    async def test_are_refused_by_name(self, serve: Serve, path: str) -> None:
        hints = {"stpo": "did you mean stop?", "guided_regex": "structured_outputs.regex"}
        async with serve() as served:
            for field, hint in hints.items():
                answer = await served.post(path, {**BODIES[path], field: ["x"]})

                assert (answer.status, answer.error["param"]) == (400, field)
                assert hint in answer.error["message"]


def request_with(**options: Any) -> Request:
    return Request(prompt=(Text("a"),), sampling=Sampling(**options))


class Attempts:
    """Answers that break their constraint, so many times."""

    def __init__(self, broken: int) -> None:
        self.broken = broken
        self.seeds: list[int | None] = []

    async def once(self, requests: Any) -> str:
        self.seeds.append(requests[0].sampling.seed)
        if len(self.seeds) <= self.broken:
            raise InvalidOutputError("a key comes twice", "{}")
        return "an answer"


class FakeConfig:
    retries = 2


class FakeService:
    config = FakeConfig()


class FakeCall:
    service = FakeService()


CALL = cast("Call", FakeCall())


class TestAnAnswerThatBreaksItsConstraint:
    async def test_is_made_again_with_another_seed(self) -> None:
        attempts = Attempts(broken=2)

        assert await attempted(CALL, [request_with(seed=5)], attempts.once) == "an answer"
        assert len(set(attempts.seeds)) == 3
        assert attempts.seeds[0] == 5

    async def test_is_an_error_after_the_last_attempt(self) -> None:
        attempts = Attempts(broken=3)

        with pytest.raises(InvalidOutputError):
            await attempted(CALL, [request_with()], attempts.once)
        assert attempts.seeds == [None] * 3

    async def test_is_not_made_again_where_it_would_be_the_same(self) -> None:
        attempts = Attempts(broken=1)

        with pytest.raises(InvalidOutputError):
            await attempted(CALL, [request_with(temperature=0.0)], attempts.once)
        assert len(attempts.seeds) == 1

    def test_keeps_all_but_the_seed(self) -> None:
        request = request_with(seed=5, top_k=3)

        assert with_seed(request, 0) is request
        assert with_seed(request, 1).sampling.top_k == 3
        assert with_seed(request, 1) != request
