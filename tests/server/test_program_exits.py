"""Programs that want to end the process: an error of theirs, and of nobody else."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import pydantic
import pytest

from structgen import State, program
from tests.server.served import Serve, wait_until

pytestmark = pytest.mark.anyio


def leave(_: object) -> Any:
    sys.exit(3)


class Picky(pydantic.BaseModel):
    name: Annotated[str, pydantic.AfterValidator(leave)]


@program
async def branch(s: State) -> None:
    s += "a"

    async def work(state: State, index: int) -> None:
        if index == 1:
            raise KeyboardInterrupt
        await state.gen(max_tokens=3000, ignore_eos=True)

    await s.fork(3).map(work)


@program
async def late(s: State) -> None:
    s += "a"
    await s.gen(n=2, max_tokens=2, pick=leave)


@program
async def read(s: State, whom: Picky) -> None: ...


PROGRAMS = (branch, late, read)


class TestAProgramThatExits:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("name", "arguments", "said"),
        [
            ("branch", {}, "KeyboardInterrupt"),
            ("late", {}, "SystemExit: 3"),
            ("read", {"whom": {"name": "a"}}, "SystemExit: 3"),
        ],
    )
    async def test_fails_alone(
        self, serve: Serve, name: str, arguments: Any, said: str, stream: bool
    ) -> None:
        async with serve(programs=PROGRAMS) as served:
            body = {"arguments": arguments, "stream": stream}
            answer = await served.post(f"/v1/programs/{name}", body)
            await wait_until(lambda: served.engine.statistics().running == 0)
            statistics = served.engine.statistics()
            after = await served.get("/health")

        assert f"the program {name} ended by {said}" in answer.text
        assert '"program_failed"' in answer.text
        assert (statistics.waiting, statistics.slots_held, after.status) == (0, 0, 200)

    async def test_is_no_error_of_those_beside_it(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
            beside = asyncio.create_task(served.post("/v1/completions", body))
            await wait_until(lambda: served.engine.statistics().running == 1)
            await served.post("/v1/programs/branch", {})
            whole = await beside

        assert whole.status == 200
        assert whole.json["usage"]["completion_tokens"] == 100
