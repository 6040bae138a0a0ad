"""Typed outputs that are generated again, on a real engine and as clients see them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest

from structgen import State
from structgen.program.program import Program
from tests.server.served import Serve, wait_until
from tests.server.test_program_routes import told

pytestmark = pytest.mark.anyio


def choosing(wrong: Callable[[int], bool], retries: int = 2) -> Program[..., Any]:
    """A program of a typed output; `wrong` says of an attempt, counted from 1, whether it fails."""
    attempts: list[int] = []

    class Choice(msgspec.Struct):
        side: Literal["left", "right"]

        def __post_init__(self) -> None:
            attempts.append(1)
            if wrong(len(attempts)):
                raise ValueError(f"no {self.side} at attempt {len(attempts)}")

    async def choose(s: State) -> Any:
        s += "Choose: "
        chosen = await s.gen("chosen", type=Choice, retries=retries)
        return [chosen, s.meta("chosen").attempts]

    return Program(choose)


class TestAnOutputThatFailsItsCheckOnce:
    async def test_is_generated_again(self, serve: Serve) -> None:
        async with serve(programs=[choosing(lambda attempt: attempt == 1)]) as served:
            found = (await served.post("/v1/programs/choose", {"options": {"seed": 1}})).json

        chosen, attempts = found["value"]
        assert chosen["side"] in {"left", "right"}
        assert attempts == 2
        assert json.loads(found["text"].removeprefix("Choose: ")) == chosen
        # The second attempt found the prompt cached.
        usage = found["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= len("Choose: ") - 1
        assert usage["prompt_tokens"] == 2 * len("Choose: ")

    async def test_shows_in_a_stream_as_a_call_that_failed_and_another(self, serve: Serve) -> None:
        async with serve(programs=[choosing(lambda attempt: attempt == 1)]) as served:
            events = told(await served.post("/v1/programs/choose", {"stream": True}))

        calls = [(name, data["call"]) for name, data in events if name.startswith("call_")]
        assert calls == [
            *(("call_started", 1), ("call_ended", 1)),
            *(("call_started", 2), ("call_ended", 2)),
        ]
        failed, ended = (data for name, data in events if name == "call_ended")
        assert failed["error"].startswith("InvalidOutputError: ")
        assert "at attempt 1" in failed["error"]
        assert (failed["reason"], ended["reason"], ended["error"]) == (None, "stop", "")
        assert {data["name"] for name, data in events if name == "text_delta"} == {"chosen"}
        kept = [d["text"] for name, d in events if name == "text_delta" and d["call"] == 2]
        assert events[-1][1]["text"] == "Choose: " + "".join(kept)
        assert [name for name, _ in events].count("variable_set") == 1


class TestAnOutputThatAlwaysFails:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_ends_the_run_when_all_attempts_were_made(
        self, serve: Serve, stream: bool
    ) -> None:
        async with serve(programs=[choosing(lambda _: True, retries=1)]) as served:
            answer = await served.post("/v1/programs/choose", {"stream": stream})
            await wait_until(lambda: served.engine.statistics().running == 0)
            held = served.engine.statistics().slots_held

        error = told(answer)[-1][1]["error"] if stream else answer.error
        assert error["code"] == "invalid_output"
        assert "at attempt 2" in error["message"]
        assert held == 0
