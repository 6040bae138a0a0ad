"""`structgen generate`: from a prompt to stdout."""

from __future__ import annotations

import io
import sys

import msgspec
import pytest

from structgen.chat import CHATML
from structgen.request import prompt_text
from tests.cli.scripted import CommandLine, options_of


class TestGenerating:
    def test_writes_the_output_and_nothing_else(self, structgen: CommandLine) -> None:
        output = structgen("generate", "a prompt")

        assert output.out == "a reply\n"

    def test_chats_with_a_model_that_has_a_template(self, structgen: CommandLine) -> None:
        engine = structgen.script("Hello.", chat=CHATML)

        structgen("generate", "Hi.")

        assert prompt_text(engine.requests[0].prompt) == (
            "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_continues_the_text_when_told_to(self, structgen: CommandLine) -> None:
        engine = structgen.script("Hello.", chat=CHATML)

        structgen("generate", "Hi.", "--raw")

        assert prompt_text(engine.requests[0].prompt) == "Hi."

    def test_refuses_to_chat_without_a_template(self, structgen: CommandLine) -> None:
        output = structgen("generate", "Hi.", "--chat")

        assert output.code == 2
        assert "no chat template" in output.err

    @pytest.mark.parametrize("prompt", ["", " \n"])
    def test_refuses_an_empty_turn(self, structgen: CommandLine, prompt: str) -> None:
        engine = structgen.script("Hello.", chat=CHATML)

        output = structgen("generate", prompt)

        assert (output.code, output.out) == (2, "")
        assert "the prompt is empty: there is nothing to answer" in output.err
        assert engine.requests == []

    def test_continues_space(self, structgen: CommandLine) -> None:
        assert structgen("generate", " ", "--raw").out == "a reply\n"

    def test_passes_sampling_options_on(self, structgen: CommandLine) -> None:
        structgen("generate", "a prompt", "--max-tokens", "4", "--temperature", "0")

        assert options_of(structgen.engine)["max_tokens"] == 4

    def test_reads_a_prompt_from_stdin(
        self, structgen: CommandLine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))

        structgen("generate", "-")

        assert prompt_text(structgen.engine.requests[0].prompt) == "from a pipe"

    def test_reports_as_json_when_told_to(self, structgen: CommandLine) -> None:
        output = structgen("generate", "a prompt", "--json")

        assert msgspec.json.decode(output.out)["text"] == "a reply"
