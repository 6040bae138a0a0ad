"""Reading a generation piece by piece inside a program."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from structgen.errors import (
    ConcurrentUseError,
    StateError,
    UnknownVariableError,
)
from structgen.program.state import State
from structgen.testing import ScriptedBackend
from tests.program.bodies import run


class TestStreaming:
    async def test_brings_the_same_text_in_pieces(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            async with s.stream("a") as pieces:
                found = [piece async for piece in pieces]
            return found, s["a"], s.text()

        result = await run(body)

        assert result.value == (["abcd", "efgh"], "abcdefgh", "xabcdefgh")

    async def test_that_is_left_early_keeps_what_was_read(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            async with s.stream("a") as pieces:
                async for piece in pieces:
                    if "d" in piece:
                        break
            return s["a"], s.text(), s.meta("a").finish.reason

        result = await run(body)

        assert result.value == ("abcd", "xabcd", "abort")

    async def test_that_is_left_early_aborts_the_rest(self) -> None:
        backend = ScriptedBackend("abcdefgh")

        async def body(s: State) -> Any:
            s += "x"
            async with s.stream() as pieces:
                await anext(aiter(pieces))
            return backend.running, backend.aborted

        assert (await run(body, backend)).value == (0, 1)

    async def test_that_is_left_early_goes_on_from_the_tokens_that_were_read(self) -> None:
        backend = ScriptedBackend("abcdefgh", chunk=1, token_size=3)

        async def body(s: State) -> Any:
            s += "x"
            async with s.stream("a") as pieces:
                await anext(aiter(pieces))
            return s.parts()

        parts = (await run(body, backend)).value

        assert parts[1].ids == backend.tokenizer.encode("abc")

    async def test_that_raises_keeps_nothing(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            with suppress(ZeroDivisionError):
                async with s.stream("a") as pieces:
                    await anext(aiter(pieces))
                    raise ZeroDivisionError
            return s.text(), "a" in s

        assert (await run(body)).value == ("x", False)

    async def test_that_raised_is_why_the_variable_is_missing(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            with suppress(ZeroDivisionError):
                async with s.stream("a"):
                    raise ZeroDivisionError
            return s["a"]

        with pytest.raises(UnknownVariableError, match=r"'a', because .*ZeroDivisionError"):
            await run(body)

    async def test_leaves_the_state_free(self) -> None:
        async def body(s: State) -> Any:
            s += "x"
            async with s.stream():
                pass
            return await s.gen()

        assert (await run(body)).value == "abcdefgh"

    async def test_can_be_read_inside_its_block_only(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            async with s.stream() as pieces:
                pass
            await anext(aiter(pieces))

        with pytest.raises(StateError, match="inside `async with"):
            await run(body)

    async def test_refuses_a_second_reader(self) -> None:
        async def body(s: State) -> None:
            s += "x"
            async with s.stream() as pieces:
                await asyncio.gather(anext(pieces), anext(pieces))

        with pytest.raises(ConcurrentUseError, match="two tasks read one stream"):
            await run(body)
