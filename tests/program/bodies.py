"""Running a few lines as a program: what most tests of the language need."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from structgen.program.program import Program
from structgen.program.result import Result
from structgen.program.state import State
from structgen.testing import ScriptedBackend

Body = Callable[[State], Awaitable[Any]]


async def run(body: Body, backend: ScriptedBackend | None = None, **using: Any) -> Result[Any]:
    """Run `body` as a program on `backend`, or on one that always says "abcdefgh"."""

    async def program(s: State) -> Any:
        return await body(s)

    made = Program(program).using(**using) if using else Program(program)
    return await made.run(backend if backend is not None else ScriptedBackend("abcdefgh"))


async def until(condition: Callable[[], bool]) -> None:
    """Give other tasks turns until the condition holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not come to hold in 1000 turns of the loop")


def replying(**replies: str) -> ScriptedBackend:
    """A backend that replies by the name of the variable."""
    return ScriptedBackend(replies)
