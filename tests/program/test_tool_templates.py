"""`call` and chat templates: those with a place for tools, without one, and without their turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from structgen.chat import CHATML, MarkerChat, Rendering, Turn
from structgen.errors import InvalidOutputError, TemplateError
from structgen.models.template import Template, TemplateChat
from structgen.program.state import State
from structgen.request import prompt_text
from structgen.testing import ScriptedBackend
from tests.program.bodies import run
from tests.program.test_tools import TWICE, ULM, calling, visit, weather, wrote


class SilentChat:
    """A template that shows nothing of the turns of tools."""

    def __init__(self, role: str = "tool") -> None:
        self.silent = role

    def render(self, turns: Sequence[Turn]) -> Rendering:
        return CHATML.render([t if t.role != self.silent else Turn(t.role, ()) for t in turns])

    def closing(self, turns: Sequence[Turn]) -> str:
        return CHATML.closing(turns)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> SilentChat:
        del tools
        return self

    def with_variables(self, variables: Mapping[str, Any]) -> SilentChat:
        del variables
        return self


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
EQUIPPED = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def template(source: str) -> TemplateChat:
    return TemplateChat(Template(source, name="test"), ["<|end|>", "<|user|>", "<|assistant|>"])


class TestTemplates:
    async def test_that_show_nothing_of_results_are_told_before_anything_is_generated(self) -> None:
        backend = ScriptedBackend(ULM, chat=SilentChat())

        with pytest.raises(TemplateError, match=r"shows nothing.*'tool'; tell .*role='user'"):
            await run(calling(), backend)

        assert backend.requests == []

    async def test_that_refuse_the_role_are_quoted(self) -> None:
        backend = ScriptedBackend(ULM, chat=template(ALTERNATING.replace("'user'", "'tool'")))

        with pytest.raises(TemplateError, match=r"refuses turns of the role 'tool'.*alternate"):
            await run(calling(), backend)

    async def test_can_be_given_results_as_the_user(self) -> None:
        backend = ScriptedBackend([ULM, "x"], chat=template(ALTERNATING))

        async def body(s: State) -> str:
            s.user("Ulm?")
            await s.call([weather], role="user")
            with s.assistant():
                await s.gen()
            return s.text()

        assert (await run(body, backend)).value == (
            f'[user]Ulm?[assistant]{ULM}[user]{{"city":"Ulm","days":1}}[assistant]x'
        )

    async def test_without_either_are_told_so(self) -> None:
        with pytest.raises(TemplateError, match=r"shows nothing.*'user'; generate the call with"):
            await run(calling(role="user"), ScriptedBackend(ULM, chat=SilentChat("user")))

    async def test_describe_the_tools_where_they_have_a_place(self) -> None:
        backend = ScriptedBackend([ULM, "x"], chat=template(EQUIPPED))

        async def body(s: State) -> Any:
            s.user("Ulm?")
            await s.call([weather])
            with s.assistant():
                await s.gen("answer")
            return s.meta("answer").prefix_lost, s.text()

        result = await run(body, backend)
        first, second = (prompt_text(each.prompt) for each in backend.requests)

        assert '"parameters": {"type": "object", "properties": {"city"' in first
        specs = json.loads(first.split("<tools>")[1].split("</tools>")[0])
        assert specs["function"]["description"] == "The weather of a city."
        assert second.startswith(first)
        assert result.value == (False, second + "x<|end|>")
        assert result.text() == second + "x<|end|>"

    async def test_are_as_they_were_after_a_call_that_failed(self) -> None:
        async def body(s: State) -> Any:
            s.user("Ulm?")
            with pytest.raises(InvalidOutputError):
                await s.call([visit])
            return s.text()

        backend = ScriptedBackend(TWICE, chat=template(EQUIPPED))

        assert (await run(body, backend)).value == "<|user|>Ulm?<|end|>"

    async def test_take_no_tools_that_spell_control_tokens(self) -> None:
        async def ended() -> None:
            """Say <|end|>."""

        async def body(s: State) -> None:
            s.user("Ulm?")
            await s.call([ended])

        with pytest.raises(TemplateError, match=r"the tools spell the control token '<.end.>'"):
            await run(body, ScriptedBackend(wrote("ended"), chat=template(EQUIPPED)))

    def test_of_markers_have_no_place_for_tools(self) -> None:
        chat = MarkerChat("<{role}>", "</>")

        assert chat.with_tools([{"type": "function"}]) is chat
