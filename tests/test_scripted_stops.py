"""The scripted backend heeds stop patterns as the engine does: by the same automaton."""

from __future__ import annotations

from typing import Any

import pytest

from structgen.errors import ConstraintError
from structgen.request import Regex, Request
from structgen.sampling import Sampling
from structgen.testing import ScriptedBackend
from tests.conformance import PROMPT, completion_of, request


class TestStopPatterns:
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize(
        ("options", "text", "matched"),
        [
            ({"stop_regex": r"1[0-9], 1"}, "9, ", "10, 1"),
            ({"stop_regex": r"\d\d", "stop": " 1"}, "9,", " 1"),
            ({"stop_regex": r" 1", "stop": "9, 1"}, "", "9, 1"),
            ({"stop_regex": r"9, 1", "stop": " 1"}, "", "9, 1"),
            ({"stop_regex": [r"\d\d", r", \d"]}, "9", ", 1"),
        ],
    )
    async def test_end_the_output(
        self, options: dict[str, object], text: str, matched: str, size: int
    ) -> None:
        backend = ScriptedBackend("9, 10, 11, 12", token_size=size)

        completion = await completion_of(backend, request(max_tokens=20, **options))

        assert (completion.text, completion.finish.matched) == (text, matched)
        whole = len(completion.text) - len(completion.tail)
        assert completion.tokens == backend.tokenizer.encode(text[:whole])

    async def test_are_passed_over_before_min_tokens(self) -> None:
        backend = ScriptedBackend("9, 10, 11, 12")

        completion = await completion_of(
            backend, request(max_tokens=20, stop_regex="1", min_tokens=6)
        )

        assert (completion.text, completion.finish.matched) == ("9, 10, ", "1")

    async def test_are_refused_before_the_script_is_asked(self) -> None:
        backend = ScriptedBackend(["a"])

        with pytest.raises(ConstraintError, match=r"stop_regex 'a\*': it matches the empty text"):
            await completion_of(backend, request(stop_regex="a*"))

        assert (backend.requests, backend.running) == ([], 0)

    def test_are_among_its_capabilities(self) -> None:
        assert ScriptedBackend().capabilities.stop_regex


class TestStopsInsideAConstraint:
    """They end the output where what stands before them is complete; elsewhere they are text."""

    @pytest.mark.parametrize(
        "options", [{"stop": (",",)}, {"stop_regex": ("[,;]",)}, {"stop_token_ids": (44,)}]
    )
    async def test_are_text_where_it_is_not_complete(self, options: dict[str, Any]) -> None:
        backend = ScriptedBackend("a,b,c")
        assert backend.tokenizer.encode(",") == (44,)
        sampling = Sampling(max_tokens=20, **options)

        completion = await completion_of(
            backend, Request(prompt=PROMPT, sampling=sampling, constraint=Regex("a,b(,[a-z])*"))
        )

        assert (completion.text, completion.finish.complete) == ("a,b", True)
        assert completion.finish.matched in {",", 44}
