"""Programs and those who ask for them: who leaves, who reads slowly, who is beside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from structgen import State, program
from structgen.errors import StateClosedError
from structgen.program.program import Program
from structgen.server import programs
from tests.server.served import Serve, Served, wait_until
from tests.server.test_program_routes import told

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


def at_rest(served: Served) -> bool:
    """Whether the server and its engine have nothing to do, and hold nothing."""
    found = served.engine.statistics()
    return not (served.service.live or found.running or found.waiting or found.slots_held)


def tasks_of_runs() -> list[str]:
    names = [task.get_name() for task in asyncio.all_tasks()]
    return [each for each in names if each in {"structgen run", "structgen stream"}]


async def leave(served: Served, path: str, begun: asyncio.Event, *, stream: bool) -> None:
    """Ask for a program, and leave when it has begun."""
    asking = asyncio.create_task(served.client.post(path, json={"stream": stream}))
    await asyncio.wait_for(begun.wait(), 5)
    if stream:
        (await asking).close()
    else:
        asking.cancel()


class Stubborn:
    """A program that goes on when it is cancelled, by one more operation."""

    def __init__(self, more: Callable[[State], Awaitable[object]]) -> None:
        self.begun = asyncio.Event()
        self.errors: list[Exception] = []

        async def stubborn(s: State) -> None:
            s += "on and on"
            try:
                async with s.stream(max_tokens=3000, ignore_eos=True) as pieces:
                    async for _ in pieces:
                        self.begun.set()
            except asyncio.CancelledError:
                for _ in range(3):
                    try:
                        await more(s)
                    except StateClosedError as error:
                        self.errors.append(error)

        self.program = Program(stubborn)


async def forked(s: State) -> None:
    async with s.fork(2):
        raise AssertionError("it is refused before")


class TestAClientThatLeft:
    @pytest.mark.parametrize(
        ("more", "stream"),
        [
            (lambda s: s.gen(max_tokens=3000, ignore_eos=True), False),
            (lambda s: s.select(choices=["a", "b"]), True),
            (lambda s: s.prime(), False),
            (forked, True),
        ],
        ids=["gen", "select", "prime", "fork"],
    )
    async def test_gets_nothing_more_computed_whatever_the_program_catches(
        self, serve: Serve, more: Callable[[State], Awaitable[object]], stream: bool
    ) -> None:
        stubborn = Stubborn(more)
        async with serve(programs=[stubborn.program]) as served:
            await leave(served, "/v1/programs/stubborn", stubborn.begun, stream=stream)
            await wait_until(lambda: at_rest(served))
            generated = served.engine.statistics().generated_tokens

        assert len(stubborn.errors) == 3
        assert "the client of this program has left" in str(stubborn.errors[0])
        assert generated < 3000

    async def test_leaves_nothing_behind_among_many(self, serve: Serve) -> None:
        @program
        async def pair(s: State) -> None:
            s += "a"
            async with s.fork(2) as branches:
                await branches.map(lambda b, _: b.gen(max_tokens=12, ignore_eos=True))

        async def ask(served: Served, number: int) -> object:
            body = {"stream": number % 3 != 0}
            async with served.client.post("/v1/programs/pair", json=body) as response:
                if number % 2:
                    async for _ in response.content:
                        return "left"
                return (await response.read())[-1:]

        async with serve(programs=[pair]) as served:
            asked = [asyncio.create_task(ask(served, number)) for number in range(24)]
            await wait_until(lambda: served.engine.statistics().running > 0)
            for task in asked[3::6]:
                task.cancel()
            ended = await asyncio.gather(*asked, return_exceptions=True)
            await wait_until(lambda: at_rest(served))

            assert tasks_of_runs() == []
        assert not [each for each in ended if isinstance(each, aiohttp.ClientError)]
        assert len([each for each in ended if isinstance(each, bytes)]) == 12


class TestAStreamOfVeryManyEvents:
    async def test_lets_others_have_their_turns(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(programs, "TURN", 0.0)
        turns: list[int] = []

        @program
        async def busy(s: State) -> None:
            s += "a"
            await s.gen(max_tokens=1, ignore_eos=True)
            for number in range(200):
                s["x"] = number
            turns.clear()

        async def beside() -> None:
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        async with serve(programs=[busy]) as served:
            ticking = asyncio.create_task(beside())
            answer = await served.post("/v1/programs/busy", {"stream": True})
            ticking.cancel()

        assert [name for name, _ in told(answer)].count("variable_set") == 200
        assert len(turns) >= 200


class TestAStreamOfWhatComputesNothing:
    @pytest.mark.parametrize("awaited", [False, True])
    async def test_has_a_status_for_a_value_that_cannot_be_written(
        self, serve: Serve, awaited: bool
    ) -> None:
        @program
        async def odd(s: State) -> object:
            s += "a"
            lost = asyncio.sleep(0, 1j)
            return await lost if awaited else lost

        async with serve(programs=[odd]) as served:
            answer = await served.post("/v1/programs/odd", {"stream": True})

        assert answer.status == 500
        assert answer.error["code"] == ("value_not_json" if awaited else "program_failed")

    async def test_tells_its_events_and_its_result(self, serve: Serve) -> None:
        @program
        async def nothing(s: State) -> int:
            s += "a"
            return 1

        async with serve(programs=[nothing]) as served:
            answer = await served.post("/v1/programs/nothing", {"stream": True})

        assert [name for name, _ in told(answer)] == [
            *("run_started", "program_entered", "program_left", "run_ended", "result")
        ]
