"""Models without a chat template, templates from a file, templates that refuse a chat."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.server.served import Serve, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BARE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
REFUSING = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('begin by a rule') }}{% endif %}"
)


@pytest.fixture
def without_template(tiny_chat_model: Path, tmp_path: Path) -> Path:
    """A model that has none."""
    folder = tmp_path / "plain"
    shutil.copytree(tiny_chat_model, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


class TestAModelWithoutATemplate:
    async def test_continues_texts_and_says_what_chats_need(self, without_template: Path) -> None:
        async with serving(without_template) as served:
            chat = await served.post(CHAT, HI)
            text = await served.post(TEXT, {"prompt": "hi", "max_tokens": 2})

        assert text.status == 200
        assert chat.status == 400
        assert "chat template" in chat.error["message"]
        assert "--chat-template" in chat.error["message"], "the option that gives it one"

    async def test_takes_one_from_a_file(self, without_template: Path, tmp_path: Path) -> None:
        file = tmp_path / "bare.jinja"
        file.write_text(BARE)
        async with serving(without_template, chat_template=file) as served:
            answer = await served.post(CHAT, HI)

        assert answer.status == 200
        assert answer.json["usage"]["prompt_tokens"] == len("[hi]")


class TestATemplateThatRefuses:
    async def test_is_quoted(self, serve: Serve, tmp_path: Path) -> None:
        file = tmp_path / "refusing.jinja"
        file.write_text(REFUSING + BARE)
        async with serve(chat_template=file) as served:
            refused = await served.post(CHAT, HI)
            streamed = await served.post(CHAT, {**HI, "stream": True})

        for answer in (refused, streamed):
            assert answer.status == 400
            assert "begin by a rule" in answer.error["message"]
            assert answer.error["param"] == "messages"


THINKING = (
    "{% if enable_thinking is defined and enable_thinking %}{{ 1 + enable_thinking }}{% endif %}"
    "{% if level is defined and level > 3 %}{{ raise_exception('no such level') }}{% endif %}"
)


class TestVariablesThatBreakATemplate:
    @pytest.mark.parametrize(
        ("variables", "said"),
        [
            ({"enable_thinking": "yes"}, "the chat template fails: unsupported operand type"),
            ({"enable_thinking": [1]}, "the chat template fails: "),
            ({"level": 5}, "chat_template_kwargs: no such level"),
            ({"level": "a"}, "the chat template fails: '>' not supported between"),
            ({"levle": 1}, "does not read the variable 'levle' (did you mean level?)"),
        ],
    )
    async def test_are_to_blame(
        self, serve: Serve, tmp_path: Path, variables: dict[str, object], said: str
    ) -> None:
        file = tmp_path / "thinking.jinja"
        file.write_text(THINKING + BARE)
        async with serve(chat_template=file) as served:
            answer = await served.post(CHAT, {**HI, "chat_template_kwargs": variables})
            fine = await served.post(CHAT, {**HI, "chat_template_kwargs": {"level": 1}})

        assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
        assert said in answer.error["message"]
        assert "thinking.jinja" not in answer.error["message"], "a path of the server's machine"
        assert fine.status == 200

    async def test_are_not_to_blame_for_messages_that_it_refuses_anyhow(
        self, serve: Serve, tmp_path: Path
    ) -> None:
        file = tmp_path / "thinking.jinja"
        file.write_text(REFUSING + THINKING + BARE)
        async with serve(chat_template=file) as served:
            answer = await served.post(CHAT, {**HI, "chat_template_kwargs": {"level": 1}})

        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "begin by a rule" in answer.error["message"]
