"""Programs that raise what is no plain error: it is theirs, and of nobody else."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import pydantic
import pytest
from aiohttp import web

from structgen import State, program
from structgen.errors import StateError
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


class Odd(BaseException):
    pass


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED: dict[str, BaseException] = {
    "redirect": web.HTTPFound("/elsewhere"),
    "absent": web.HTTPNotFound(),
    "group": BaseExceptionGroup("work", [ValueError("a"), SystemExit(4)]),
    "generator": GeneratorExit("gone"),
    "odd": Odd("own"),
    "mute": MuteError(),
    "misuse": StateError("of a state"),
    "cancelled": asyncio.CancelledError("by itself"),
}
SAID = {
    "redirect": "raised HTTPFound: Found",
    "absent": "raised HTTPNotFound: Not Found",
    "group": "ended by SystemExit: 4",
    "generator": "raised RuntimeError: the program raised GeneratorExit",
    "odd": "ended by Odd: own",
    "mute": "raised MuteError: (what it says is not known: its __str__ raised RuntimeError)",
    "misuse": "raised StateError: of a state",
    "cancelled": "raised StructgenError: the program was cancelled from within: ",
}


@program
async def raising(_: State, what: str) -> None:
    raise RAISED[what]


PROGRAMS = (branch, late, read, raising)


class TestWhatAProgramRaises:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_is_one_answer_whatever_it_is(self, serve: Serve, stream: bool) -> None:
        async with serve(programs=PROGRAMS) as served:
            for what, said in SAID.items():
                body = {"arguments": {"what": what}, "stream": stream}
                answer = await served.post("/v1/programs/raising", body)

                assert (answer.status, answer.error["code"]) == (500, "program_failed"), what
                assert f"the program raising {said}" in answer.error["message"]
                assert "no words" not in answer.text
            assert (await served.get("/health")).status == 200


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
