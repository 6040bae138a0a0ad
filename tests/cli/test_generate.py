"""`structgen generate`: from a prompt to stdout."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import msgspec
import pytest

from structgen.chat import CHATML
from structgen.request import Constraint, JsonSchema, Regex, prompt_text
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

        found = msgspec.json.decode(output.out)
        assert (found["text"], found["complete"]) == ("a reply", True)

    def test_says_there_that_a_reply_was_cut_off(self, structgen: CommandLine) -> None:
        output = structgen("generate", "a prompt", "--json", "--max-tokens", "3")

        found = msgspec.json.decode(output.out)
        assert (found["text"], found["complete"]) == ("a r", False)


class TestTheFormOfTheOutput:
    @pytest.mark.parametrize(
        ("options", "constraint", "reply"),
        [
            (("--regex", "[a-z ]+"), Regex("[a-z ]+"), "a reply"),
            (("--json-schema", ' {"const": 1}'), JsonSchema(' {"const": 1}'), "1"),
            (("--json-schema", "true"), JsonSchema("true"), "[]"),
        ],
    )
    def test_is_told_by_an_option(
        self,
        structgen: CommandLine,
        options: tuple[str, ...],
        constraint: Constraint,
        reply: str,
    ) -> None:
        engine = structgen.script(reply)

        output = structgen("generate", "a prompt", *options)

        assert (output.code, output.out) == (0, f"{reply}\n")
        assert engine.requests[0].constraint == constraint

    def test_may_stand_in_a_file(self, structgen: CommandLine, tmp_path: Path) -> None:
        (tmp_path / "schema.json").write_text('{"enum": ["é"]}', encoding="utf-8")
        engine = structgen.script('"é"')

        output = structgen("generate", "a prompt", "--json-schema", tmp_path / "schema.json")

        assert output.out == '"é"\n'
        assert engine.requests[0].constraint == JsonSchema('{"enum": ["é"]}')

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--regex", "a", "--ebnf", "b"), "--regex and --ebnf cannot be combined; give one"),
            (
                ("--json-schema", "nothing.json"),
                "nothing.json: No such file .*; give a file, or a s",
            ),
            (("--ebnf", "nothing.ebnf"), "--ebnf nothing.ebnf: No such file .* grammar with ::="),
            (("--ebnf", "a\0b"), "null byte"),
            (("--regex", "(abc"), r"regex '\(abc': missing \)"),
        ],
    )
    def test_is_refused_in_one_line(
        self, structgen: CommandLine, options: tuple[str, ...], message: str
    ) -> None:
        output = structgen("generate", "a prompt", *options)

        assert (output.code, output.out) == (2, "")
        assert re.search(message, output.err)
        assert output.err.count("\n") == 1

    def test_in_a_file_must_be_text(self, structgen: CommandLine, tmp_path: Path) -> None:
        (tmp_path / "schema.json").write_bytes(b"\xff\xfe{")

        output = structgen("generate", "a prompt", "--json-schema", tmp_path / "schema.json")
        folder = structgen("generate", "a prompt", "--json-schema", tmp_path)

        assert (output.code, folder.code) == (2, 2)
        assert "no UTF-8 text" in output.err
        assert "Is a directory" in folder.err

    @pytest.mark.parametrize("form", [(), ("--json",)])
    def test_that_was_cut_off_is_a_failure(
        self, structgen: CommandLine, form: tuple[str, ...]
    ) -> None:
        structgen.script("abc" * 9)

        output = structgen(
            "generate", "a prompt", "--regex", "(abc)+d?", "--max-tokens", "2", *form
        )

        assert output.code == 1
        assert "cut off before it was complete; raise --max-tokens" in output.err
        assert "ab" in output.out
