"""Transcript to prompt: turns are rendered by the model's chat, text outside turns is placed.

Owns nothing. Used by `State` for requests, `text()` and `messages()`.

Text may stand before, between and after turns. A rendering says where the content of each turn
begins, and the chat what closes a turn: text between two turns goes behind that closing markup.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from structgen.chat import Chat, Message, Turn
from structgen.errors import RoleError, TemplateError
from structgen.request import Control, Part, Prompt
from structgen.transcript.chain import Closed, Opened, Said

NO_CHAT = (
    "the model has no chat template, so roles have no markup; append plain text instead, or give "
    "the engine one with the option chat_template"
)


class Layout(msgspec.Struct, frozen=True):
    """A prompt. `rewritten`: the template changed what an earlier turn said."""

    parts: Prompt
    rewritten: bool = False


def lay_out(said: Sequence[Said], chat: Chat | None) -> Layout:
    """Lay out a transcript as a prompt.

    Raises `TemplateError` where there is no template or it refuses the turns, and `RoleError`
    where it has no place for text between two turns.
    """
    turns, outside = _turns(said)
    if not turns:
        return Layout(tuple(outside[0]))
    if chat is None:
        raise TemplateError(NO_CHAT)
    rendering = chat.render(turns)
    parts, starts = rendering.parts, rendering.starts
    placed: list[Part] = [*outside[0]]
    done = 0
    for turn in range(1, len(turns)):
        if not outside[turn]:
            continue
        for neighbour in (turn - 1, turn):
            _require_place(turns, starts, neighbour)
        end = _end_of_content(parts, starts[turn - 1], starts[turn])
        closing = chat.closing(turns[:turn])
        before, after = _split(parts[end : starts[turn]], closing, turns[turn])
        placed += [*parts[done:end], *before, *outside[turn], *after]
        done = starts[turn]
    return Layout((*placed, *parts[done:], *outside[-1]), rendering.rewritten)


def messages_in(said: Sequence[Said]) -> list[Message]:
    """The turns of a transcript as messages; text outside of turns is in none."""
    return [Message(turn.role, turn.text) for turn in _turns(said)[0]]


def extends(prompt: Prompt, earlier: Prompt) -> bool:
    """Whether `prompt` begins with the parts of `earlier`: then its keys and values serve again.

    Where one piece of markup ends and the next begins does not matter.
    """
    new, old = _markup_joined(prompt), _markup_joined(earlier)
    if not old:
        return True
    if len(new) < len(old) or new[: len(old) - 1] != old[:-1]:
        return False
    last, there = old[-1], new[len(old) - 1]
    if isinstance(last, Control) and isinstance(there, Control):
        return there.text.startswith(last.text)
    return there == last


def _turns(said: Sequence[Said]) -> tuple[list[Turn], list[list[Part]]]:
    """Turns, and the parts outside of them: `outside[i]` stands before turn i, the last behind."""
    turns: list[Turn] = []
    outside: list[list[Part]] = [[]]
    role: str | None = None
    content: list[Part] = []
    for each in said:
        match each:
            case Opened(opened):
                role, content = opened, []
            case Closed():
                assert role is not None, "a role closes that did not open"
                turns.append(Turn(role, tuple(content)))
                outside.append([])
                role = None
            case part:
                (outside[-1] if role is None else content).append(part)
    if role is not None:
        turns.append(Turn(role, tuple(content), open=True))
        outside.append([])
    return turns, outside


def _require_place(turns: Sequence[Turn], starts: Sequence[int], turn: int) -> None:
    """Raise `RoleError` for a turn whose content the rendering could not find.

    It is said to begin where the turn before it does, though markup stands between them.
    """
    first_is_found = bool(starts[0] or turns[0].text)
    found = starts[turn] > starts[turn - 1] if turn else first_is_found
    if not found:
        raise RoleError(
            f"text stands next to a turn of the role {turns[turn].role!r} that the chat template "
            "shows nothing of, so its place cannot be told; say something in that turn, or put "
            "the text inside a role"
        )


def _end_of_content(parts: Prompt, first: int, next_start: int) -> int:
    """Where the content that begins at `first` ends: before the markup that leads to the next."""
    end = next_start
    while end > first and isinstance(parts[end - 1], Control):
        end -= 1
    return end


def _split(markup: Prompt, closing: str, turn: Turn) -> tuple[list[Part], list[Part]]:
    """Split the markup between two turns into what closes the one and what opens the other."""
    text = "".join(part.text for part in markup if isinstance(part, Control))
    if not text.startswith(closing):
        raise RoleError(
            f"the chat template leaves no place for text before the role {turn.role!r}: it writes "
            f"{text!r} there, and closes a turn with {closing!r}; put the text inside a role"
        )
    before: list[Part] = []
    after: list[Part] = []
    left = len(closing)
    for part in markup:
        assert isinstance(part, Control), "only markup stands between the contents of two turns"
        if head := part.text[:left]:
            before.append(part if head == part.text else Control(head))
        if rest := part.text[left:]:
            after.append(part if rest == part.text else Control(rest))
        left = max(0, left - len(part.text))
    return before, after


def _markup_joined(parts: Prompt) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Control) and isinstance(last, Control):
            joined[-1] = Control(last.text + part.text)
        else:
            joined.append(part)
    return joined
