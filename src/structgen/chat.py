"""Chat turns, and what turns them into prompt parts.

A `Chat` is made from a model's own template (`models/template.py`) or from a table of markers
(`MarkerChat`, for backends that have no template). Programs use it through `Backend.chat`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self, get_args

import msgspec

from structgen.errors import TemplateError
from structgen.request import Control, Part, Prompt, Text, prompt_text

Role = Literal["system", "user", "assistant", "tool"]


class Turn(msgspec.Struct, frozen=True):
    """One message of a chat, its content as parts.

    An `open` turn is still being written: it can only be the last one, and nothing closes it.
    """

    role: str
    content: Prompt
    open: bool = False

    @property
    def text(self) -> str:
        """The content as text."""
        return prompt_text(self.content)


class Message(msgspec.Struct, frozen=True):
    """One message of a chat, its content as text."""

    role: str
    content: str


class Rendering(msgspec.Struct, frozen=True):
    """Turns as prompt parts.

    `turns[i]` is the part index at which the content of turn i begins: markup that opens the
    turn lies before it. `rewritten` is true where the template changed or dropped what an
    earlier turn said, so that this prompt does not continue the one before it.
    """

    parts: Prompt
    starts: tuple[int, ...]
    rewritten: bool = False


class Chat(Protocol):
    """Turns to prompt parts, the way one model was trained to read them."""

    def render(self, turns: Sequence[Turn]) -> Rendering:
        """Render turns; raises `TemplateError` where the template refuses them.

        Content of every turn stays `Text` or `Tokens`; markup is `Control`. If the last turn is
        open, the rendering ends with its content (an open assistant turn begins with the
        template's generation prompt). A closed last turn ends with its closing markup.
        """
        ...

    def closing(self, turns: Sequence[Turn]) -> str:
        """The markup with which the template closes the last of these turns."""
        ...

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Chat:
        """This chat with tools described where the template has a place for them; else itself.

        Each is `{"type": "function", "function": {"name": ..., "description": ...,
        "parameters": a JSON Schema}}`. Raises `TemplateError` for tools that spell control tokens.
        """
        ...

    def with_variables(self, variables: Mapping[str, Any]) -> Chat:
        """This chat with values for variables of its template, such as `enable_thinking`.

        Raises `TemplateError` for a variable that the template does not read, for one that is not
        the caller's to set, and for values that spell control tokens.
        """
        ...


class MarkerChat:
    """A chat whose markup is the same for each role: `{open}{content}{close}`."""

    def __init__(self, opening: str, closing: str) -> None:
        """`opening` may contain `{role}`; both are control text."""
        self._opening, self._closing = opening, closing

    def render(self, turns: Sequence[Turn]) -> Rendering:
        """Render turns one after another; see `Chat.render`."""
        parts: list[Part] = []
        starts: list[int] = []
        for index, turn in enumerate(turns):
            if turn.open and index != len(turns) - 1:
                raise TemplateError("only the last turn of a chat can be open")
            parts.append(Control(self._opening.format(role=turn.role)))
            starts.append(len(parts))
            parts.extend(turn.content)
            if not turn.open:
                parts.append(Control(self._closing))
        return Rendering(tuple(parts), tuple(starts))

    def closing(self, turns: Sequence[Turn]) -> str:
        """The closing marker."""
        return self._closing if turns else ""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Markers have no place for tools."""
        del tools
        return self

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """Markers have no variables. Raises `TemplateError` for any."""
        for name in variables:
            raise TemplateError(
                f"this chat is made of markers and has no variable {name!r}; leave it out"
            )
        return self


CHATML = MarkerChat("<|im_start|>{role}\n", "<|im_end|>\n")


def turns_from(messages: Sequence[object]) -> list[Turn]:
    """Turns from `{"role": ..., "content": ...}` mappings or `Message` objects.

    Raises `TemplateError` for an empty list, a message of another shape or an unknown role.
    """
    if not messages:
        raise TemplateError("messages: expected at least one message")
    try:
        found = msgspec.convert(messages, list[Message], from_attributes=True)
    except msgspec.ValidationError as error:
        raise TemplateError(f"messages: {error}") from None
    known = get_args(Role)
    if unknown := [m.role for m in found if m.role not in known]:
        raise TemplateError(f"messages: unknown role {unknown[0]!r}; roles are {', '.join(known)}")
    return [Turn(m.role, (Text(m.content),) if m.content else ()) for m in found]
