"""How a transcript becomes a prompt, and that prompts only ever grow at their end."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgen.chat import CHATML, MarkerChat, Rendering, Turn
from structgen.errors import RoleError, TemplateError
from structgen.request import Control, Part, Prompt, Text, Tokens
from structgen.transcript.chain import Closed, Opened, Said, Transcript
from structgen.transcript.layout import extends, lay_out

CLOSE = Control("<|im_end|>\n")


def opening(role: str) -> Control:
    return Control(f"<|im_start|>{role}\n")


def turn(role: str, *content: Part) -> list[Said]:
    return [Opened(role), *content, Closed()]


class OnePiece:
    """ChatML whose markup between two contents is one control part, as real templates give it."""

    def render(self, turns: Sequence[Turn]) -> Rendering:
        parts: list[Part] = []
        starts: list[int] = []
        pending = ""
        for each in turns:
            parts.append(Control(f"{pending}<|im_start|>{each.role}\n"))
            starts.append(len(parts))
            parts.extend(each.content)
            pending = "" if each.open else "<|im_end|>\n"
        return Rendering((*parts, Control(pending)) if pending else tuple(parts), tuple(starts))

    def closing(self, turns: Sequence[Turn]) -> str:
        return CLOSE.text if turns else ""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> OnePiece:
        del tools
        return self

    def with_variables(self, variables: Mapping[str, Any]) -> OnePiece:
        del variables
        return self


class TestTextOutsideRoles:
    def test_alone_is_the_prompt(self) -> None:
        assert lay_out([Text("a"), Tokens((1,), "b")], None).parts == (Text("a"), Tokens((1,), "b"))

    def test_stands_before_between_and_after_turns(self) -> None:
        said = [Text("A"), *turn("user", Text("b")), Text("C"), *turn("user", Text("d")), Text("E")]

        assert lay_out(said, CHATML).parts == (
            *(Text("A"), opening("user"), Text("b"), CLOSE),
            *(Text("C"), opening("user"), Text("d"), CLOSE, Text("E")),
        )

    def test_stands_behind_the_closing_markup_that_is_part_of_a_longer_piece(self) -> None:
        said = [*turn("user", Text("b")), Text("C"), *turn("assistant", Text("d"))]

        assert lay_out(said, OnePiece()).parts == (
            *(opening("user"), Text("b"), CLOSE, Text("C")),
            *(opening("assistant"), Text("d"), CLOSE),
        )

    def test_stands_behind_a_turn_without_content(self) -> None:
        said = [*turn("user"), Text("C"), *turn("assistant")]

        assert lay_out(said, OnePiece()).parts == (
            *(opening("user"), CLOSE, Text("C"), opening("assistant"), CLOSE),
        )

    @pytest.mark.parametrize("empty", [0, 1])
    def test_is_refused_next_to_a_turn_that_cannot_be_found(self, empty: int) -> None:
        class Searching(OnePiece):
            """Finds contents by their text, so an empty one seems to be where the last was."""

            def render(self, turns: Sequence[Turn]) -> Rendering:
                rendering = super().render(turns)
                starts = list(rendering.starts)
                starts[empty] = starts[empty - 1] if empty else 0
                return Rendering(rendering.parts, tuple(starts))

        contents: list[list[Part]] = [[Text("b")], [Text("d")]]
        contents[empty] = []
        said = [*turn("user", *contents[0]), Text("C"), *turn("assistant", *contents[1])]

        with pytest.raises(RoleError, match=r"'(user|assistant)' that the chat template shows"):
            lay_out(said, Searching())

    def test_is_refused_where_the_template_has_no_place_for_it(self) -> None:
        class Strange(OnePiece):
            def closing(self, turns: Sequence[Turn]) -> str:
                return "</turn>" if turns else ""

        said = [*turn("user", Text("b")), Text("C"), *turn("assistant", Text("d"))]

        with pytest.raises(RoleError, match="no place for text before the role 'assistant'"):
            lay_out(said, Strange())


class TestTurns:
    def test_need_a_chat(self) -> None:
        with pytest.raises(TemplateError, match="no chat template"):
            lay_out(turn("user"), None)

    def test_that_are_open_are_not_closed(self) -> None:
        said = [*turn("user", Text("a")), Opened("assistant"), Text("b")]

        assert lay_out(said, CHATML).parts[-2:] == (opening("assistant"), Text("b"))

    def test_that_the_template_rewrote_are_reported(self) -> None:
        class Rewriting(MarkerChat):
            def render(self, turns: Sequence[Turn]) -> Rendering:
                rendering = super().render(turns)
                return Rendering(rendering.parts, rendering.starts, rewritten=True)

        assert lay_out(turn("user"), Rewriting("<{role}>", "</>")).rewritten


class TestExtending:
    @pytest.mark.parametrize(
        ("prompt", "earlier", "expected"),
        [
            ((Text("a"), Text("b")), (Text("a"),), True),
            ((Text("ab"),), (Text("a"),), False),
            ((Text("a"),), (Text("a"), Text("b")), False),
            ((Control("ab"), Text("c")), (Control("a"), Control("b")), True),
            ((Control("ab"), Text("c")), (Control("a"),), True),
            ((Control("ab"), Text("c")), (Control("b"),), False),
            ((Text("ab"),), (Control("a"),), False),
            ((Tokens((1, 2), "ab"),), (Tokens((1, 3), "ab"),), False),
            ((), (), True),
        ],
    )
    def test_compares_parts_and_the_text_of_markup(
        self, prompt: Prompt, earlier: Prompt, *, expected: bool
    ) -> None:
        assert extends(prompt, earlier) is expected


def steps(rng: random.Random, transcript: Transcript, count: int) -> None:
    """Say random things."""
    for _ in range(count):
        match rng.randrange(4):
            case 0:
                transcript.append(rng.choice("abc"))
            case 1:
                transcript.write((Tokens((rng.randrange(9),), "t"),))
            case 2 if transcript.role is None:
                transcript.open(rng.choice(["user", "assistant"]))
            case 3 if transcript.role is not None:
                transcript.close()


class TestAPrompt:
    @given(
        chat=st.sampled_from([CHATML, OnePiece()]),
        rng=st.randoms(),
        before=st.integers(0, 8),
        after=st.integers(0, 8),
    )
    def test_of_a_branch_begins_with_that_of_its_parent(
        self, chat: Any, rng: random.Random, before: int, after: int
    ) -> None:
        parent = Transcript()
        steps(rng, parent, before)

        child = parent.fork()
        sent = lay_out(parent.said(), chat).parts
        steps(rng, child, after)

        assert extends(lay_out(child.said(), chat).parts, sent)

    @given(rng=st.randoms(), before=st.integers(0, 8), after=st.integers(0, 8))
    def test_says_the_same_when_a_branch_is_repeated_on_its_parent(
        self, rng: random.Random, before: int, after: int
    ) -> None:
        parent = Transcript()
        steps(rng, parent, before)
        child = parent.fork()
        start = parent.seal()
        steps(rng, child, after)

        parent.repeat(child.said(since=start))

        assert parent.said() == child.said()


def test_a_chain_of_a_million_segments_is_freed_without_recursion() -> None:
    transcript = Transcript()
    for _ in range(1_000_000):
        transcript.write((Text("a"),))

    del transcript
