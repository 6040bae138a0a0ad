"""What type checkers must say about structured output. This file is checked, not run.

As in `programs.py`: right uses carry `assert_type`, wrong ones an `ignore` for each checker.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal, TypedDict, assert_type

import msgspec
import pydantic

from structgen import Called, Piece, Regex, State, ToolCall, gen
from structgen.terms import Term, capture, json, literal, regex


class City(msgspec.Struct):
    name: str


class Town(pydantic.BaseModel):
    name: str


class Movie(TypedDict):
    title: str


Rank = Annotated[int, msgspec.Meta(ge=1)]


async def weather(city: str) -> int:
    return len(city)


def blocking(city: str) -> int:
    return len(city)


async def values(s: State) -> None:
    assert_type(await s.gen(type=Town), Town)
    assert_type(await s.gen(type=Movie), Movie)
    assert_type(await s.gen(type=Rank), int)
    assert_type(await s.gen(type=dt.date), dt.date)
    assert_type(await s.gen(type=dict[str, City]), dict[str, City])
    assert_type(await s.gen(type=City | Literal["none"]), City | Literal["none"])
    assert_type(await s.gen("x", type=City, retries=2, separators=(",", ":")), City)
    assert_type(await s.gen("x", n=2, type=Town), list[Town])
    assert_type(await s.gen(json_schema=City), str)
    assert_type(await s.gen(json_schema={"type": "null"}, retries=1), str)
    assert_type(await s.gen(constraint=Regex("a+")), str)
    assert_type(s.meta("x").attempts, int)
    assert_type(s.meta("x").finish.complete, bool)


async def captures(s: State) -> None:
    term = literal("a") + capture("b", regex("[0-9]")) | json(City)
    assert_type(term, Term)
    assert_type(await s.gen(term), str)
    assert_type(await s.gen(constraint=term, n=2), list[str])
    s += "x" + gen(term)


async def objects(s: State) -> None:
    async with s.stream("x", type=City) as pieces:
        async for value in pieces.objects():
            assert_type(value, Any)
    async with s.stream("x", json_schema=True) as pieces:
        async for piece in pieces:
            assert_type(piece, Piece)


async def tools(s: State) -> None:
    found = await s.call([weather], "x", choice="auto", parallel=True, max_tokens=9)
    assert_type(found, Called)
    assert_type(found.calls, tuple[ToolCall, ...])
    assert_type(found.text, str)


async def wrong(s: State) -> None:
    await s.call([blocking])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    await s.call([weather], on_error="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await s.gen(type=City, retry=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


async def forgotten_await(s: State) -> None:
    s.call([weather])  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
