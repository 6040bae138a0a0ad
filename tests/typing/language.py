"""What type checkers must say about the rest of the language. This file is checked, not run.

As in `programs.py`: right uses carry `assert_type`, wrong ones an `ignore` for each checker.
"""

from __future__ import annotations

import enum
from typing import Any, Literal, assert_type

import msgspec

from structgen import (
    Expression,
    Piece,
    Result,
    State,
    Vote,
    Winner,
    assistant,
    gen,
    program,
    select,
    user,
)
from structgen.backend import Backend
from structgen.errors import BatchError
from structgen.events import Event
from structgen.request import Usage


class City(msgspec.Struct):
    name: str


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


@program
async def describe(s: State, name: str) -> City:
    s.user(f"Describe {name}.")
    with s.assistant():
        return await s.gen("city", type=City)


async def typed_generation(s: State) -> None:
    assert_type(await s.gen("x"), str)
    assert_type(await s.gen("x", type=int), int)
    assert_type(await s.gen("x", type=float, max_tokens=5), float)
    assert_type(await s.gen(type=City, timeout=3), City)
    assert_type(await s.gen(type=Mood), Mood)
    assert_type(await s.gen(type=list[int]), list[int])
    assert_type(await s.gen("x", n=3), list[str])
    assert_type(await s.gen("x", n=3, pick=max_length), list[str])
    assert_type(await s.gen("x", n=3, type=int), list[int])
    assert_type(await s.gen("x", choices=["a", "b"]), str)
    assert_type(await s.gen("x", choices=["a", "b"], by="sum"), str)
    assert_type(await s.select("x", ["a", "b"], by="greedy_token_selection"), str)
    side: Literal["left", "right"] = await s.gen(type=Literal["left", "right"])
    assert_type(await s.gen("x", reasoning="qwen3"), str)
    assert_type(side, Literal["left", "right"])


def max_length(values: list[Any]) -> int:
    return max(range(len(values)), key=lambda index: len(values[index]))


def numbered(index: int) -> Expression:
    return f"{index}: " + gen("c")


async def expressions(s: State) -> None:
    assert_type("It is " + gen("x") + ".", Expression)
    assert_type(assistant("It is " + gen("x")), Expression)
    s += user("Hi") + assistant(gen("x"))
    s += select("y", ["a", "b"])
    s.user("Say " + gen("z", max_tokens=3))
    branches = s.fork(2)
    branches += gen("b")
    branches += numbered
    branches[0] += gen("d")
    assert_type(await s, State)
    assert_type(await s.settle(), State)
    assert_type(await s.tokens(), tuple[int, ...])
    assert_type(await s.prime(), Usage)
    with s.var_scope("v"):
        s += "x"


async def combinators(s: State) -> None:
    async def work(branch: State, index: int) -> int:
        return await branch.gen(f"v{index}", type=int)

    async with s.fork(3) as branches:
        assert_type(await branches.map(work), list[int])
        assert_type(await branches.race(work), Winner[int])
        assert_type(await branches.vote(work), Vote[int])
        assert_type(await branches.best_of(work, lambda _, value: -value), Winner[int])
        await branches.join("gather", return_exceptions=True)


async def pieces(s: State) -> None:
    async with s.stream("x", timeout=3) as read:
        async for piece in read:
            assert_type(piece, Piece)
            assert_type(piece.channel, Literal["answer", "reasoning"])


async def running(backend: Backend) -> None:
    assert_type(await describe.run(backend, "Ulm"), Result[City])
    assert_type(await describe.bind(name="Ulm").run(backend), Result[City])
    assert_type(await describe.budget(tokens=100).run(backend, "Ulm"), Result[City])
    assert_type(describe.run_sync(backend, "Ulm"), Result[City])
    results = await describe.run_batch(backend, ["Ulm", "Bern"])
    assert_type(results, list[Result[City]])
    mixed = await describe.run_batch(backend, ["Ulm"], return_exceptions=True)
    assert_type(mixed, list[Result[City] | Exception])
    async with describe.iter_batch(backend, ["Ulm"], concurrency=2) as found:
        async for result in found:
            assert_type(result, Result[City])
    async with describe.stream(backend, "Ulm") as run:
        async for event in run:
            assert_type(event, Event)
        async for text in run.text("city"):
            assert_type(text, str)
    assert_type(run.result, Result[City])
    try:
        await describe.run_batch(backend, [1])
    except BatchError as error:
        assert_type(error.outcomes, list[Any])


async def wrong(backend: Backend, s: State) -> None:
    await s.gen(type=int, heat=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await s.gen(n="3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    await s.select("x", ["a"], by="luck")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    gen("x", max_token=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    s += gen  # type: ignore[arg-type]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
    await describe.run_batch(backend)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    describe.run_sync(backend, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def forgotten_await(backend: Backend, s: State) -> None:
    s.gen("x", type=int)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    s.select("x", ["a"])  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    s.settle()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    describe.run_batch(backend, [])  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    s.fork(2).race(lambda b, _: b.gen())  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
