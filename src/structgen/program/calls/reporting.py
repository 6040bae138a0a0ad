"""The beginning and the end of a call that generates nothing, told to those who listen.

Owns   nothing. Used by `operations` for `prime`, and by `selecting`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from structgen.events import CallEnded, CallKind, CallStarted
from structgen.program.cursor import Cursor
from structgen.program.tasks import named
from structgen.request import Usage

T = TypeVar("T")


async def reported(
    cursor: Cursor,
    kind: CallKind,
    name: str | None,
    work: Callable[[], Awaitable[tuple[T, Usage]]],
) -> tuple[T, Usage]:
    """Await a call of the backend that generates nothing, and report its beginning and its end."""
    run, name = cursor.run, name or ""
    where = {"call": next(run.calls), "state": cursor.number, "name": name}
    run.tell(CallStarted, kind=kind, **where)
    try:
        value, usage = await work()
    except BaseException as error:
        run.tell(CallEnded, error=named(error), **where)
        raise
    run.tell(CallEnded, reason="stop", usage=usage, **where)
    return value, usage
