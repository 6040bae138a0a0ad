"""Typed values, captures, tools and objects on engines: what programs see of real outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from structgen import Engine, terms
from structgen.errors import IncompleteOutputError
from structgen.program.program import Program
from structgen.program.state import State

pytestmark = pytest.mark.slow


class City(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(max_length=12)]
    size: Literal["small", "large"]
    rank: Annotated[int, msgspec.Meta(ge=1, le=99)]


class Town(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=12)]
    rank: Annotated[int, pydantic.Field(ge=1, le=99)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def engine(default_model: Path) -> AsyncIterator[Engine]:
    async with Engine(default_model, slots=4000) as engine:
        yield engine


async def run(engine: Engine, body: Callable[[State], Any], **using: Any) -> Any:
    async def program(s: State) -> Any:
        s.user("Describe the city of Ulm.")
        return await body(s)

    return await Program(program).using(temperature=0, **using).run(engine)


async def weather(city: Annotated[str, msgspec.Meta(max_length=12)]) -> str:
    """The weather of a city."""
    return f"Fine in {city}."


class TestValues:
    @pytest.mark.parametrize("type_", [City, Town], ids=["msgspec", "pydantic"])
    async def test_come_from_the_model(self, engine: Engine, type_: Any) -> None:
        async def body(s: State) -> Any:
            with s.assistant():
                return await s.gen("city", type=type_, max_tokens=80)

        result = await run(engine, body)

        assert isinstance(result.value, type_)
        assert 1 <= result.value.rank <= 99
        assert result.meta("city").finish.complete
        assert result.meta("city").finish.enforced

    async def test_that_are_cut_off_say_so(self, engine: Engine) -> None:
        async def body(s: State) -> Any:
            with s.assistant():
                await s.gen("city", type=City, max_tokens=6)

        with pytest.raises(IncompleteOutputError, match="cut off by max_tokens") as info:
            await run(engine, body)

        assert info.value.text.startswith("{")

    async def test_can_be_watched(self, engine: Engine) -> None:
        async def body(s: State) -> Any:
            with s.assistant():
                async with s.stream("city", type=City, max_tokens=80) as pieces:
                    seen = [each async for each in pieces.objects()]
            return seen, s["city"]

        seen, city = (await run(engine, body)).value

        assert seen[-1] == msgspec.to_builtins(city)
        assert len(seen) > 3


class TestCaptures:
    async def test_are_variables(self, engine: Engine) -> None:
        term = (
            terms.literal("Ulm lies in ")
            + terms.capture("country", terms.choice(["Germany", "France"]))
            + " and has "
            + terms.capture("people", terms.regex("[1-9][0-9]{2,6}"))
            + " people."
        )

        async def body(s: State) -> Any:
            with s.assistant():
                return await s.gen(term, max_tokens=60)

        result = await run(engine, body)

        country, people = result["country"], result["people"]
        assert result.value == f"Ulm lies in {country} and has {people} people."


class TestCalls:
    async def test_run_a_tool_that_the_model_names(self, engine: Engine) -> None:
        async def body(s: State) -> Any:
            return await s.call([weather], "call", max_tokens=60)

        result = await run(engine, body)

        [call] = result.value.calls
        assert call.text == f"Fine in {call.arguments['city']}."
        assert [each.role for each in result.messages()] == ["user", "assistant", "tool"]

    async def test_are_answers_where_the_model_may_choose(self, engine: Engine) -> None:
        async def body(s: State) -> Any:
            return await s.call([weather], "call", choice="auto", max_tokens=12, stop="\n")

        result = await run(engine, body)

        assert result.value.text
        assert result.meta("call").finish.enforced
