"""Several generations at once: what is left of them when somebody leaves, or one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from structgen.errors import ContextLengthError
from structgen.options import request_from
from structgen.request import Request, Text, Usage
from structgen.server.answers import Answers, usage_of
from tests.server.served import serving, wait_until


def request(max_tokens: int) -> Request:
    return request_from((Text("1, 2, 3,"),), {"max_tokens": max_tokens, "ignore_eos": True})


class TestAnswers:
    """They are kept, so that it is not the collector of garbage that ends their requests."""

    @pytest.mark.parametrize("count", [1, 3])
    async def test_that_are_left_end_their_requests(
        self, tiny_chat_model: Path, count: int
    ) -> None:
        async with serving(tiny_chat_model) as served:
            kept = Answers(served.engine, [request(400)] * count, count)
            async with kept as answers:
                await anext(answers)
            await wait_until(lambda: served.engine.statistics().running == 0)

            assert served.engine.statistics().requests_aborted == count

    async def test_of_which_one_is_refused_are_none(self, tiny_chat_model: Path) -> None:
        async with serving(tiny_chat_model) as served:
            kept = Answers(served.engine, [request(400), request(10**6)], 2)
            with pytest.raises(ContextLengthError):
                await kept.__aenter__()
            await wait_until(lambda: served.engine.statistics().running == 0)

            assert served.engine.statistics().requests_aborted == 1


def spent(prompt: int, cached: int, completion: int) -> Usage:
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


class TestTheUsage:
    def test_counts_a_prompt_once(self) -> None:
        each = [spent(9, 8, 1), spent(9, 2, 3), spent(5, 0, 4), spent(5, 4, 2)]

        assert usage_of(each, 2) == spent(14, 2, 10)
        assert usage_of(each, 1).prompt_tokens == 28

    def test_leaves_out_what_never_began(self) -> None:
        assert usage_of([Usage(), spent(9, 2, 3), Usage(), Usage()], 2) == spent(9, 2, 3)
