"""Streams of typed values: what is there while it is written, and what is there in the end."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

import msgspec
import pytest

from structgen.errors import (
    IncompleteOutputError,
    InvalidOutputError,
    OptionError,
    StateError,
    UnknownVariableError,
)
from structgen.program.pieces import Pieces
from structgen.program.state import State
from structgen.testing import ScriptedBackend
from tests.program.bodies import run


class City(msgspec.Struct):
    name: str
    people: Annotated[int, msgspec.Meta(ge=0)]
    rivers: list[str] = []

    def __post_init__(self) -> None:
        if self.name in self.rivers:
            raise ValueError("a city is no river")


ULM = City("Ulm", 130_000, ["Donau", "Iller"])
TEXT = msgspec.json.encode(ULM).decode()


def streaming(**options: Any) -> Any:
    async def body(s: State) -> Any:
        s += "A "
        async with s.stream("city", **options) as pieces:
            seen = [json.dumps(each) async for each in pieces.objects()]
        return seen, s["city"], s.text()

    return body


async def read(stream: AbstractAsyncContextManager[Pieces]) -> None:
    async with stream as pieces:
        async for _ in pieces:
            pass


class TestObjects:
    @pytest.mark.parametrize("chunk", [1, 3, 1000])
    async def test_grow_to_the_value_of_the_type(self, chunk: int) -> None:
        result = await run(streaming(type=City), ScriptedBackend(TEXT, chunk=chunk))
        seen, value, text = result.value

        assert value == ULM
        assert json.loads(seen[-1]) == json.loads(TEXT)
        assert len(set(seen)) == len(seen)
        assert text == "A " + TEXT
        assert result.meta("city").text == TEXT

    async def test_have_what_is_complete_and_the_last_string_as_it_grows(self) -> None:
        seen = (await run(streaming(type=City), ScriptedBackend(TEXT, chunk=1))).value[0]

        assert seen[:6] == [
            "{}",
            '{"name": ""}',
            '{"name": "U"}',
            '{"name": "Ul"}',
            '{"name": "Ulm"}',
            '{"name": "Ulm", "people": 130000}',
        ]

    @pytest.mark.parametrize(
        "options", [{"json_schema": True}, {"json_schema": City}, {"type": Any}], ids=str
    )
    async def test_are_there_for_any_json(self, options: dict[str, Any]) -> None:
        seen, value, _ = (await run(streaming(**options), ScriptedBackend(TEXT))).value

        assert json.loads(seen[-1]) == json.loads(TEXT)
        assert value == (json.loads(TEXT) if "type" in options else TEXT)

    async def test_of_a_number_are_the_number_when_it_has_ended(self) -> None:
        found = await run(streaming(json_schema=True), ScriptedBackend("12.5", chunk=1))

        assert found.value[0] == ["12.5"]

    async def test_end_where_the_output_was_cut_off(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            seen = []
            with pytest.raises(IncompleteOutputError, match="cut off by max_tokens"):
                async with s.stream("city", type=City, max_tokens=11) as pieces:
                    seen = [each async for each in pieces.objects()]
            return seen[-1], s.text(), "city" in s

        found = await run(body, ScriptedBackend(TEXT))

        assert found.value == ({"name": "Ul"}, "A ", False)

    async def test_end_by_the_final_check(self) -> None:
        body = streaming(json_schema={"not": {"const": [1]}})

        with pytest.raises(InvalidOutputError):
            await run(body, ScriptedBackend("[1]"))

    async def test_are_asked_for_once_and_read_on(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            async with s.stream("city", type=City) as pieces:
                first = await anext(aiter(pieces.objects()))
                rest = [each async for each in pieces.objects()]
            return first, rest[-1]

        first, last = (await run(body, ScriptedBackend(TEXT, chunk=2))).value

        assert first == {}
        assert last == json.loads(TEXT)

    @pytest.mark.parametrize("options", [{}, {"type": int}, {"regex": ".*"}], ids=str)
    async def test_are_none_where_the_output_is_no_json(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=r"^type: objects\(\) reads JSON"):
            await run(streaming(**options), ScriptedBackend("12"))

    async def test_are_not_read_after_text_or_outside_of_the_block(self) -> None:
        async def body(s: State) -> None:
            s += "A "
            async with s.stream("city", type=City) as pieces:
                await anext(pieces)
                with pytest.raises(StateError, match="text of this stream was read already"):
                    pieces.objects()
            with pytest.raises(StateError, match=r"objects\(\) is read inside"):
                pieces.objects()

        await run(body, ScriptedBackend(TEXT))


class TestATypedStream:
    async def test_gives_text_and_then_the_value(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            async with s.stream("city", type=City) as pieces:
                text = "".join([piece async for piece in pieces])
            return text, s["city"]

        assert (await run(body, ScriptedBackend(TEXT))).value == (TEXT, ULM)

    async def test_gives_plain_values_too(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            async with s.stream("x", type=int) as pieces:
                async for _ in pieces:
                    pass
            return s["x"]

        assert (await run(body, ScriptedBackend("12"))).value == 12

    async def test_that_is_left_has_text_and_no_value(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            async with s.stream("city", type=City) as pieces:
                async for _ in pieces:
                    break
            with pytest.raises(UnknownVariableError, match="was left before there was a whole"):
                s["city"]
            return s.text()

        assert (await run(body, ScriptedBackend(TEXT, chunk=5))).value == "A " + TEXT[:5]

    async def test_that_is_no_value_keeps_nothing(self) -> None:
        async def body(s: State) -> Any:
            s += "A "
            with pytest.raises(InvalidOutputError):
                await read(s.stream("city", type=City))
            with pytest.raises(UnknownVariableError, match="InvalidOutputError"):
                s["city"]
            return s.text()

        reply = '{"name":"Ulm","people":1,"rivers":["Ulm"]}'

        assert (await run(body, ScriptedBackend(reply))).value == "A "
