"""Several generations at once: what is left of them when somebody leaves, or one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from structgen.errors import ContextLengthError
from structgen.options import request_from
from structgen.request import Request, Text
from structgen.server.answers import Answers
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
            kept = Answers(served.engine, [request(400)] * count)
            async with kept as answers:
                await anext(answers)
            await wait_until(lambda: served.engine.statistics().running == 0)

            assert served.engine.statistics().requests_aborted == count

    async def test_of_which_one_is_refused_are_none(self, tiny_chat_model: Path) -> None:
        async with serving(tiny_chat_model) as served:
            kept = Answers(served.engine, [request(400), request(10**6)])
            with pytest.raises(ContextLengthError):
                await kept.__aenter__()
            await wait_until(lambda: served.engine.statistics().running == 0)

            assert served.engine.statistics().requests_aborted == 1
