"""Messages to turns: roles, parts, earlier calls and their results, variables of templates."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from structgen.chat import CHATML, Rendering, Turn
from structgen.errors import TemplateError
from structgen.models.template import Template, TemplateChat
from structgen.request import Control, Text, prompt_text
from structgen.server.errors import ApiError
from structgen.server.openai.prompts import rendered, turns_of
from structgen.server.openai.tools import form_of
from structgen.server.openai.wire import ChatMessage
from tests.engine.tiny import CHATML as TEMPLATE
from tests.engine.tiny import write_tiny_model
from tests.server.served import Serve, serving

Message = dict[str, Any]
WRITTEN = form_of("json", None).written
THINKING = "{% if enable_thinking %}<think>{% endif %}" + TEMPLATE
USER = {"role": "user", "content": "hi"}


def turns(*messages: Message) -> list[tuple[str, str]]:
    found = turns_of(msgspec.convert(messages, list[ChatMessage]), WRITTEN)
    return [(turn.role, turn.text) for turn in found]


def call(name: str = "now", arguments: str = "{}", **fields: Any) -> Message:
    return {"id": f"id_{name}", "function": {"name": name, "arguments": arguments}, **fields}


def asked(*calls: Message, content: str | None = None) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"id_{name}", "content": content}


class TestAMessage:
    def test_is_a_turn(self) -> None:
        assert turns(
            {"role": "developer", "content": "a"}, USER, {"role": "assistant", "content": "b"}
        ) == [
            ("system", "a"),
            ("user", "hi"),
            ("assistant", "b"),
        ]

    def test_of_parts_is_their_text(self) -> None:
        parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]

        assert turns({"role": "user", "content": parts}) == [("user", "What is 2+2?")]

    def test_that_refused_says_why(self) -> None:
        part = {"type": "refusal", "refusal": "No."}

        assert turns({"role": "assistant", "content": [part]}) == [("assistant", "No.")]

    def test_is_ordinary_text(self) -> None:
        [turn] = turns_of([ChatMessage(role="user", content="<|im_end|>")], WRITTEN)

        assert turn.content == (Text("<|im_end|>"),)

    def test_with_calls_says_them(self) -> None:
        found = turns(asked(call(arguments='{"a": 1}'), call("b"), content="Hm."))

        assert found == [
            (
                "assistant",
                'Hm.\n[{"name": "now", "arguments": {"a": 1}}, {"name": "b", "arguments": {}}]',
            )
        ]

    @pytest.mark.parametrize(
        ("message", "param", "why"),
        [
            ({"role": "usr"}, "messages[0].role", "unknown role 'usr'; the roles are system, dev"),
            ({"role": "user"}, "messages[0].content", "it is missing"),
            (asked(), "messages[0].content", "it is missing"),
            (
                {"role": "user", "content": [{"type": "image_url"}]},
                "messages[0].content[0].type",
                "a part of type 'image_url'; this model reads text only",
            ),
            (
                {"role": "user", "content": [{"type": "text"}]},
                "messages[0].content[0].text",
                "it is missing",
            ),
            ({**USER, "audio": {}}, "messages[0].audio", "not supported"),
            (
                {**USER, "tool_calls": [call()]},
                "messages[0].tool_calls",
                "only a message of the assistant has them",
            ),
            (asked(call(type="custom")), "messages[0].tool_calls[0].type", "expected function"),
            (
                asked(call(), call("b", "{")),
                "messages[0].tool_calls[1].function.arguments",
                "they are no JSON",
            ),
            (
                asked(call(arguments="[]")),
                "messages[0].tool_calls[0].function.arguments",
                "expected the JSON text of an object",
            ),
            (
                asked(call(arguments="")),
                "messages[0].tool_calls[0].function.arguments",
                "they are no JSON",
            ),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_that_cannot_be_read_is_named(self, message: Message, param: str, why: str) -> None:
        with pytest.raises(ApiError, match=why) as caught:
            turns(message)

        assert (caught.value.status, caught.value.param) == (400, param)
        assert caught.value.message.startswith(param.removesuffix(".type"))

    def test_is_missing(self) -> None:
        with pytest.raises(ApiError, match="at least one message"):
            turns()


class TestResults:
    CALLS = asked(call("a"), call("b"))

    def test_stand_in_the_order_of_their_calls(self) -> None:
        found = turns(USER, self.CALLS, result("b", "2"), result("a", "1"), USER)

        assert [text for _, text in found[2:]] == ["1", "2", "hi"]

    def test_belong_to_the_calls_before_them(self) -> None:
        again = asked(call("c"))
        found = turns(self.CALLS, result("b", "2"), result("a", "1"), again, result("c", "3"))

        assert [text for role, text in found if role == "tool"] == ["1", "2", "3"]

    def test_of_calls_without_ids_stay_where_they_are(self) -> None:
        nameless = asked({"function": {"name": "a"}}, {"function": {"name": "b"}})

        found = turns(nameless, result("b", "2"), {"role": "tool", "content": "1"})

        assert [text for _, text in found[1:]] == ["2", "1"]

    @pytest.mark.parametrize(
        ("message", "why"),
        [
            (result("c", "3"), "no call before it has this id; the calls are id_a, id_b"),
            ({"role": "tool", "content": "3"}, "it is missing; the calls are id_a, id_b"),
        ],
    )
    def test_of_no_call_are_refused(self, message: Message, why: str) -> None:
        with pytest.raises(ApiError, match=why) as caught:
            turns(USER, self.CALLS, result("a", "1"), message)

        assert caught.value.param == "messages[3].tool_call_id"


class TestAPrompt:
    def test_ends_where_the_answer_begins(self) -> None:
        parts = rendered(CHATML, [Turn("user", (Text("hi"),))])

        assert prompt_text(parts) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    def test_goes_on_with_the_last_message(self) -> None:
        said = [Turn("user", (Text("hi"),)), Turn("assistant", (Text("He"),))]

        assert prompt_text(rendered(CHATML, said, extend=True)).endswith("assistant\nHe")

    def test_goes_on_with_no_one_else(self) -> None:
        with pytest.raises(ApiError, match="the last message is not the assistant's") as caught:
            rendered(CHATML, [Turn("user", (Text("hi"),))], extend=True)

        assert caught.value.param == "continue_final_message"

    def test_needs_a_template(self) -> None:
        with pytest.raises(TemplateError, match=r"no chat template.*--chat-template FILE"):
            rendered(None, [Turn("user", (Text("hi"),))])

    def test_takes_no_tools_that_would_become_control_tokens(self) -> None:
        chat = TemplateChat(Template("{{ tools }}" + TEMPLATE, name="x"), ["<|im_end|>"])

        with pytest.raises(ApiError, match=r"^tools: the tools spell the control token") as caught:
            rendered(chat, [Turn("user", ())], tools=[{"function": {"name": "<|im_end|>"}}])

        assert caught.value.param == "tools"

    def test_has_what_the_template_writes_for_its_variables(self) -> None:
        chat = TemplateChat(Template(THINKING, name="x"), [])

        [first, *_] = rendered(chat, [Turn("user", ())], variables={"enable_thinking": True})

        assert isinstance(first, Control)
        assert first.text.startswith("<think><|im_start|>user")


class TestALongChat:
    @pytest.mark.parametrize(
        ("path", "more"), [("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})]
    )
    async def test_is_written_beside_the_event_loop(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, more: Message
    ) -> None:
        threads: list[threading.Thread] = []
        render = TemplateChat.render

        def seen(chat: TemplateChat, turns: Sequence[Turn]) -> Rendering:
            threads.append(threading.current_thread())
            return render(chat, turns)

        monkeypatch.setattr(TemplateChat, "render", seen)
        async with serve() as served:
            threads.clear()  # those of loading
            for count in (1, 200):
                answer = await served.post(path, {"messages": [USER] * count, **more})
                assert answer.status in {200, 400}, answer.text
        short, long = threads
        assert short is threading.main_thread()
        assert long is not threading.main_thread()


class TestVariablesOverHttp:
    async def test_reach_the_template(self, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path)
        (folder / "chat_template.jinja").write_text(THINKING)
        async with serving(folder) as served:
            usages = [
                (
                    await served.post(
                        "/v1/chat/completions", {"messages": [USER], "max_tokens": 1, **f}
                    )
                )
                for f in ({}, {"chat_template_kwargs": {"enable_thinking": True}})
            ]

        without, with_ = (each.json["usage"]["prompt_tokens"] for each in usages)
        assert with_ - without == len("<think>")

    @pytest.mark.parametrize(
        ("variables", "why"),
        [
            ({"enable_thinking": True}, "does not read the variable 'enable_thinking'"),
            ({"messages": []}, "'messages' is no variable to be set"),
        ],
    )
    async def test_that_mean_nothing_are_refused(
        self, serve: Serve, variables: Message, why: str
    ) -> None:
        body = {"messages": [USER], "chat_template_kwargs": variables}
        async with serve() as served:
            answer = await served.post("/v1/chat/completions", body)

        assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
        assert why in answer.error["message"]
