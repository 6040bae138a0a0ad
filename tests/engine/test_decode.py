"""Token ids to text, as the engine reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from structgen.engine.engine import Engine
from structgen.errors import EngineClosedError, PromptError

EMOJI = "\N{GRINNING FACE}"


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    async with Engine(tiny_model, slots=100, threads=1) as engine:
        yield engine


class TestDecoding:
    @pytest.mark.parametrize("text", ["", "plain", f"a{EMOJI}b\n", "<|im_end|>"])
    async def test_gives_back_what_was_encoded(self, engine: Engine, text: str) -> None:
        assert engine.decode(await engine.encode(text)) == text

    async def test_gives_special_tokens_no_text(self, engine: Engine) -> None:
        a, b = await engine.encode("ab")
        special = engine.defaults.end_ids[0]

        assert engine.decode([a, special, b]) == "ab"

    async def test_marks_what_is_no_whole_character(self, engine: Engine) -> None:
        ids = await engine.encode(EMOJI)

        assert engine.decode(ids[:2]) == "\ufffd"

    @pytest.mark.parametrize("ids", [[97, 259], [-1], [2**70], [1.5]], ids=str)
    async def test_refuses_what_is_no_token_of_the_model(
        self, engine: Engine, ids: list[int]
    ) -> None:
        with pytest.raises(PromptError, match="prompt token"):
            engine.decode(ids)

    async def test_needs_an_open_engine(self, tiny_model: Path) -> None:
        with pytest.raises(EngineClosedError):
            Engine(tiny_model).decode([97])
