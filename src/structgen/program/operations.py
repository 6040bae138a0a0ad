"""The operations that need a model: generate, select, settle, prime.

Owns   nothing; each takes the cursor for as long as it runs, and changes it only at its end.
Used   by `State`, at once or for expressions that were appended before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import anyio

from structgen.errors import DeadlineError, UnsupportedError
from structgen.output.tools import Called
from structgen.program.calls.generating import generated
from structgen.program.calls.reporting import reported
from structgen.program.calls.selecting import selected
from structgen.program.calls.tools import Calling, called
from structgen.program.cursor import Cursor
from structgen.program.expression import Gen, Select
from structgen.program.variables import Value
from structgen.request import Prompt, Usage

T = TypeVar("T")


async def operate(
    cursor: Cursor,
    action: str,
    work: Callable[[], Awaitable[T]],
    *,
    call: Gen | Select | None = None,
    ahead: bool = False,
) -> T:
    """Run one operation on a cursor, after what was appended before it.

    call    the call that this is, whose timeout binds all of it
    ahead   see `settle`
    """
    await cursor.begin(action)
    try:
        with nullcontext() if call is None else _limits(cursor, call):
            await _settle(cursor, ahead=ahead)
            return await work()
    finally:
        cursor.end()


async def generate(cursor: Cursor, call: Gen) -> Value:
    """Generate here: the text, the value of its type, or the list of n of them."""
    return await operate(cursor, str(call), lambda: generated(cursor, call), call=call)


async def select(cursor: Cursor, call: Select) -> str:
    """Choose here."""
    return await operate(cursor, str(call), lambda: selected(cursor, call), call=call)


async def call(cursor: Cursor, calling: Calling) -> Called:
    """Have the model call tools here."""
    gen = calling.gen
    return await operate(cursor, str(gen), lambda: called(cursor, calling), call=gen)


async def settle(cursor: Cursor, *, ahead: bool = True) -> None:
    """Run what was appended and not run yet, in order.

    What fails stays the first thing that is pending: awaiting the state again tries it again.

    ahead   text that follows the last call is computed at once, for whatever comes next
    """
    if cursor.pending:
        await operate(cursor, f"`await s` of {cursor.waiting()}", _nothing, ahead=ahead)
    else:
        cursor.require_idle("`await s`")


async def prime(cursor: Cursor) -> Usage:
    """Have the backend compute all that was said, so that what follows finds it cached."""

    async def work() -> Usage:
        parts = cursor.prompt("prime()").parts
        usage = await cursor.run.waiting("prime()", cursor.place, lambda: _primed(cursor, parts))
        cursor.sent(parts)
        return usage

    return await operate(cursor, "prime()", work)


async def encode(cursor: Cursor) -> tuple[int, ...]:
    """The token ids of all that was said."""

    async def work() -> tuple[int, ...]:
        backend = cursor.run.backend
        if not backend.capabilities.tokens:
            raise UnsupportedError("this backend tells no token ids; read s.text() instead")
        parts = cursor.prompt("tokens()").parts
        cursor.transcript.seal()  # what is told here stays the beginning of what follows
        return await cursor.run.waiting("tokens()", cursor.place, lambda: backend.encode(parts))

    return await operate(cursor, "tokens()", work)


async def _primed(cursor: Cursor, parts: Prompt) -> Usage:
    """Have the backend compute a prompt; no usage of the run, whose requests will find it."""
    backend, lineage = cursor.run.backend, cursor.lineage(None)

    async def work() -> tuple[Usage, Usage]:
        usage = await backend.prime(parts, lineage=lineage)
        return usage, usage

    return (await reported(cursor, "prime", None, work))[0]


# ---------------------------------------------------------------- settling


async def _nothing() -> None:
    """What `await s` does after settling."""


async def _settle(cursor: Cursor, *, ahead: bool) -> None:
    followed = False  # literal text came after the last call
    while cursor.pending:
        atom = cursor.pending[0]
        match atom:
            case Gen():
                with _limits(cursor, atom):
                    await generated(cursor, atom)
                followed = False
            case Select():
                with _limits(cursor, atom):
                    await selected(cursor, atom)
                followed = False
            case _:
                cursor.apply(atom)
                followed = True
        cursor.done(atom)
    if followed and ahead and cursor.run.backend.capabilities.primes:
        # It is known to follow what was just generated: computed in the very next step, it is
        # there when whatever the program does now, such as a tool, is done.
        parts = cursor.prompt("await s").parts
        cursor.sent(parts)
        cursor.run.aside(lambda: _primed(cursor, parts))


@contextmanager
def _limits(cursor: Cursor, call: Gen | Select) -> Iterator[None]:
    """The timeout of a call; what it fails by is noted for its variable."""
    with cursor.noting(call.name), time_limit(call.timeout, str(call)):
        yield


@contextmanager
def time_limit(seconds: float | None, action: str, *, since: float | None = None) -> Iterator[None]:
    """Raise `DeadlineError` when the block takes longer, counted from its start or `since`."""
    if seconds is None:
        yield
        return
    deadline = (anyio.current_time() if since is None else since) + seconds
    with anyio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineError(f"{action} was not finished within its timeout of {seconds:g} s")
