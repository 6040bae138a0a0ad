"""The server's own seed: that of requests which bring none."""

from __future__ import annotations

from typing import Any

import pytest

from structgen import State, program
from structgen.errors import OptionError
from structgen.server import ServerConfig
from tests.server.served import Serve, Served

pytestmark = pytest.mark.anyio


@program
async def drawn(s: State) -> list[str]:
    s += "a"
    texts = [await s.gen(max_tokens=8, ignore_eos=True) for _ in range(2)]
    return [*texts, await s.select(choices=["b", "c", "d"], temperature=5)]


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "ignore_eos": True}
ASKED = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 8, "ignore_eos": True, "n": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/programs/drawn", {}),
]


async def said(served: Served, path: str, body: Any) -> Any:
    found = (await served.post(path, body)).json
    if "value" in found:
        return found["value"]
    return [each.get("text") or each["message"]["content"] for each in found["choices"]]


class TestTheSeedOfAServer:
    @pytest.mark.parametrize(("path", "body"), ASKED, ids=lambda value: str(value)[:20])
    async def test_makes_equal_requests_equal_whatever_came_between(
        self, serve: Serve, path: str, body: dict[str, Any]
    ) -> None:
        found = []
        for seed, between in ((7, 0), (7, 3), (8, 0)):
            async with serve(programs=[drawn], config=ServerConfig(seed=seed)) as served:
                for _ in range(between):
                    await said(served, "/v1/chat/completions", CHAT)
                found.append(await said(served, path, body))

        assert found[0] == found[1] != found[2]

    async def test_is_the_same_as_one_in_the_body(self, serve: Serve) -> None:
        async with serve(programs=[drawn], config=ServerConfig(seed=7)) as served:
            own = [await said(served, path, body) for path, body in ASKED]
        async with serve(programs=[drawn]) as served:
            given = [await said(served, path, {**body, "seed": 7}) for path, body in ASKED[:2]]
            given.append(await said(served, ASKED[2][0], {"options": {"seed": 7}}))

        assert own == given

    async def test_gives_each_choice_noise_of_its_own(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(seed=7)) as served:
            first, second = await said(served, *ASKED[0])

        assert first != second

    async def test_comes_after_that_of_a_request_and_of_a_program(self, serve: Serve) -> None:
        programs = [drawn.using(seed=1)]
        async with serve(programs=programs, config=ServerConfig(seed=7)) as served:
            own = await said(served, "/v1/programs/drawn", {})
            asked = await said(served, "/v1/programs/drawn", {"options": {"seed": 2}})
            found = [own, asked]
        for seed in (1, 2):
            async with serve(programs=[drawn.using(seed=seed)]) as served:
                assert found.pop(0) == await said(served, "/v1/programs/drawn", {})

    def test_is_a_whole_number(self) -> None:
        with pytest.raises(OptionError, match="seed: must be between 0 and"):
            ServerConfig(seed=-1)
