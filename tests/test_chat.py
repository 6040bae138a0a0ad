"""Turns from messages: what is a message, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from structgen.chat import CHATML, Message, Turn, turns_from
from structgen.errors import TemplateError
from structgen.request import Text


class TestMessages:
    def test_are_mappings_or_objects(self) -> None:
        turns = turns_from([{"role": "user", "content": "hi"}, Message("assistant", "")])

        assert turns == [Turn("user", (Text("hi"),)), Turn("assistant", ())]

    @pytest.mark.parametrize(
        ("messages", "why"),
        [
            ([], "at least one message"),
            ([{"role": "usr", "content": "hi"}], "unknown role 'usr'; roles are system, user,"),
            ([{"role": "user"}], "content"),
            (["hi"], "messages:"),
        ],
        ids=["none", "role", "content", "text"],
    )
    def test_of_another_kind_are_refused(self, messages: list[Any], why: str) -> None:
        with pytest.raises(TemplateError, match=why):
            turns_from(messages)


class TestMarkers:
    def test_have_no_variables(self) -> None:
        with pytest.raises(TemplateError, match="markers and has no variable 'enable_thinking'"):
            CHATML.with_variables({"enable_thinking": False})

    def test_are_the_same_without_any(self) -> None:
        assert CHATML.with_variables({}) is CHATML
