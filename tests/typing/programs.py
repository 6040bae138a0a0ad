"""What type checkers must say about programs. This file is checked, not run.

Right uses carry `assert_type`. Wrong uses carry an `ignore` for each checker: both are run so
that an ignore without its error is an error itself.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any, assert_type

from structgen.backend import Backend
from structgen.program.branches import Branches
from structgen.program.pieces import Piece
from structgen.program.program import Program, program
from structgen.program.result import Result
from structgen.program.state import State
from structgen.program.variables import Meta
from structgen.request import Completion


@program
async def judge(s: State, essay: str, *, careful: bool = False) -> float:
    s += essay
    s.user(essay)
    with s.assistant():
        text = await s.gen("score", max_tokens=3, temperature=0, stop=["\n"])
        assert_type(text, str)
    return float(text) + careful


@program
async def nothing(s: State) -> None:
    s += "x"


class Teacher:
    @program
    async def greet(self, s: State, pupil: str) -> str:
        s += pupil
        return await s.gen()


async def right(backend: Backend, s: State) -> None:
    assert_type(await judge.run(backend, "e"), Result[float])
    assert_type((await judge.run(backend, essay="e", careful=True)).value, float)
    assert_type(await judge(s, "e"), float)
    assert_type(await judge.using(temperature=0).run(backend, "e"), Result[float])
    assert_type((await Teacher().greet.run(backend, "p")).value, str)
    assert_type(await Teacher().greet(s, "p"), str)
    assert_type(nothing, Program[[], None])

    assert_type(s.user(), AbstractContextManager[None])
    assert_type(s["x"], Any)
    assert_type(s.meta("x"), Meta)
    completion: Completion = s.meta("x")
    assert_type(completion.text, str)
    async with s.stream("x", max_tokens=9) as pieces:
        async for piece in pieces:
            assert_type(piece, Piece)


def numbered(index: int) -> str:
    return f"text {index}"


async def branching(s: State) -> None:
    branches = s.fork(2)
    assert_type(branches, Branches)
    assert_type(branches[0], State)
    assert_type(branches["x"], list[Any])
    branches += "text"
    branches += numbered
    branches[0] += "text"
    one, two = await asyncio.gather(*(judge(branch, "e") for branch in branches))
    assert_type(one + two, float)
    async with s.fork(3) as forked:
        assert_type(forked, Branches)
        assert_type(await forked.map(lambda branch, index: branch.gen(f"v{index}")), list[str])
        await forked.join("append")


async def wrong(backend: Backend, s: State) -> None:
    await judge.run(backend, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await judge.run(backend)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await judge.run("e", "e")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await judge(backend, "e")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await s.gen(heat=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await s.gen(top_k="3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    judge.using(heat=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await s.fork(2).join("splice")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await Teacher().greet.run(backend, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await Teacher.greet.run(backend)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    s += 7  # type: ignore[arg-type]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]


async def forgotten_await(backend: Backend, s: State) -> None:
    s.gen("x")  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    judge(s, "e")  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    judge.run(backend, "e")  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    s.fork(2).join()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
