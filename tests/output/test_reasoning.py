"""Reasoning and answer: the whole text split by rule is the oracle of the text in pieces."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.errors import OptionError
from structgen.events import Channel
from structgen.output.reasoning import FAMILIES, Piece, Splitter, check_family, separate

always = settings(deadline=None, derandomize=True)

MARKERS = {
    "deepseek-r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "gpt-oss": (
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|return|>", "<|call|>"),
    ),
}
WORDS = {
    "gpt-oss": ("analysis", "final", "commentary", " to=f", "assistant", "<|", "<|en", "|>", "new"),
}
HARMONY = (
    "<|channel|>analysis<|message|>2 + 2.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>4<|return|>"
)


def texts(family: str) -> st.SearchStrategy[str]:
    """Texts that are full of markers, whole and broken."""
    markers = MARKERS[family]
    broken = [marker[:cut] for marker in markers for cut in (1, 2, 4)]
    words = ("\n", "\n\n", " ", "a", "bc", "<", ">", *WORDS.get(family, ()))
    return st.lists(st.sampled_from((*markers, *markers, *broken, *words))).map("".join)


def tagged(text: str, opening: str, closing: str, *, inside: bool) -> tuple[str, str]:
    """Think tags, on the whole text."""
    opened = re.match(rf"\s*{opening}", text)
    if not opened and not inside:
        return "", text
    head, closed, tail = text[opened.end() if opened else 0 :].partition(closing)
    head = head.lstrip("\n")
    return (head.rstrip("\n"), tail.lstrip("\n")) if closed else (head, "")


def harmony(text: str) -> tuple[str, str]:
    """Harmony, on the whole text: first cut into parts, then given to those they are for."""
    parts = [["outside", "", ""]]
    pieces = re.split(r"(<\|(?:start|channel|message|constrain|end|return|call)\|>)", text)
    for index, piece in enumerate(pieces):
        kind, header, _ = parts[-1]
        if index % 2 == 0:
            parts[-1][1 if kind == "header" else 2] += piece
        elif piece in {"<|start|>", "<|channel|>"} and kind == "header":
            parts[-1][1] += piece
        elif piece in {"<|start|>", "<|channel|>"}:
            parts.append(["header", piece, ""])
        elif piece == "<|message|>" and kind != "body":
            parts.append(["body", header, ""])
        elif piece in {"<|end|>", "<|return|>", "<|call|>"}:
            parts.append(["outside", "", ""])
    said: dict[Channel, list[str]] = {"reasoning": [], "answer": []}
    for kind, header, body in parts:
        between = kind == "outside" and not body.strip() and len(pieces) > 1
        if kind != "header" and body and not between:
            said[addressed(header)].append(body)
    return "\n".join(said["reasoning"]), "\n".join(said["answer"])


def addressed(header: str) -> Channel:
    channels = header.split("<|channel|>")
    name = "" if len(channels) == 1 else re.split(r"\W", channels[-1].lstrip())[0]
    return "answer" if name in {"", "final", "commentary"} and " to=" not in header else "reasoning"


def whole(text: str, family: str) -> tuple[str, str]:
    if family == "gpt-oss":
        return harmony(text)
    opening, closing = MARKERS[family]
    return tagged(text, opening, closing, inside=family == "deepseek-r1")


def pushed(texts_: list[str], family: str) -> list[Piece]:
    splitter = Splitter(family)
    return [*(piece for text in texts_ for piece in splitter.push(text)), *splitter.flush()]


def of(channel: Channel, pieces: list[Piece]) -> str:
    return "".join(text for its, text in pieces if its == channel)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in pairwise([0, *ends])]


each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
class TestAnySplit:
    @always
    @given(st.data())
    def test_equals_the_whole(self, family: str, data: st.DataObject) -> None:
        text = data.draw(texts(family))
        pieces = pushed(cut(text, data.draw(st.lists(st.integers(0, 200)))), family)

        assert (of("reasoning", pieces), of("answer", pieces)) == whole(text, family)

    @always
    @given(st.data())
    def test_character_by_character_equals_the_whole(
        self, family: str, data: st.DataObject
    ) -> None:
        text = data.draw(texts(family))
        pieces = pushed(list(text), family)

        assert (of("reasoning", pieces), of("answer", pieces)) == separate(text, family)

    @always
    @given(st.data())
    def test_gives_no_empty_pieces_and_joins_neighbours(
        self, family: str, data: st.DataObject
    ) -> None:
        pieces = Splitter(family).push(data.draw(texts(family)))

        assert all(text for _, text in pieces)
        assert all(a != b for (a, _), (b, _) in pairwise(pieces))

    @always
    @given(st.data())
    def test_holds_back_nothing_but_what_may_be_markup(
        self, family: str, data: st.DataObject
    ) -> None:
        # Ordinary text that follows settles all that came before it, unless a header is open.
        splitter = Splitter(family)
        splitter.push(data.draw(texts(family)))
        splitter.push("<|message|>" if family == "gpt-oss" else "")

        assert splitter.push("x")[-1][1].endswith("x")
        assert splitter.push("yz")[-1][1] == "yz"


@each_family
class TestEveryFamily:
    def test_gives_nothing_for_nothing(self, family: str) -> None:
        assert pushed(["", ""], family) == []

    def test_reads_its_own_format_from_one_push(self, family: str) -> None:
        texts_ = {
            "deepseek-r1": "2 + 2.\n</think>\n\n4",
            "qwen3": "<think>\n2 + 2.\n</think>\n\n4",
            "kimi": "◁think▷2 + 2.◁/think▷4",
            "gpt-oss": HARMONY,
        }

        assert Splitter(family).push(texts_[family]) == [("reasoning", "2 + 2."), ("answer", "4")]


class TestThinkTags:
    def test_need_not_open_what_the_prompt_has_opened(self) -> None:
        assert separate("hm</think>4", "deepseek-r1") == ("hm", "4")
        assert separate("<think>hm</think>4", "deepseek-r1") == ("hm", "4")

    @pytest.mark.parametrize("family", ["qwen3", "kimi"])
    def test_are_optional(self, family: str) -> None:
        assert separate("\n 4 \n", family) == ("", "\n 4 \n")

    def test_open_only_at_the_beginning(self) -> None:
        text = "4, as <think>I</think> said"

        assert separate(text, "qwen3") == ("", text)

    def test_close_once(self) -> None:
        assert separate("<think>a</think>b</think><think>c", "qwen3") == ("a", "b</think><think>c")

    def test_may_hold_nothing(self) -> None:
        assert separate("<think>\n\n</think>\n\n4", "qwen3") == ("", "4")

    def test_swallow_the_newlines_beside_them_and_no_others(self) -> None:
        text = " \n<think>\n\n  a\n\nb \n\n</think>\n\n  c\n\n"

        assert separate(text, "qwen3") == ("  a\n\nb ", "  c\n\n")

    @pytest.mark.parametrize("family", ["deepseek-r1", "qwen3"])
    def test_that_never_close_leave_no_answer(self, family: str) -> None:
        assert separate("<think>\nhm\n\n", family) == ("hm\n\n", "")
        assert separate("<think>hm</thi", family) == ("hm</thi", "")

    def test_that_were_cut_off_while_they_opened_are_text(self) -> None:
        assert separate(" <thi", "qwen3") == ("", " <thi")
        assert separate("\n<thi", "deepseek-r1") == ("<thi", "")

    def test_of_one_family_are_text_of_another(self) -> None:
        assert separate("<think>a</think>b", "kimi") == ("", "<think>a</think>b")

    def test_are_given_out_as_early_as_they_can_be(self) -> None:
        splitter = Splitter("qwen3")
        pushes = [" ", "<thi", "nk>", "\n", "a", "\n", "b<", "/", "c", "</think", ">", "\n", "d<"]

        assert [splitter.push(text) for text in pushes] == [
            *([], [], [], [], [("reasoning", "a")], [], [("reasoning", "\nb")]),
            *([], [("reasoning", "</c")], [], [], [], [("answer", "d<")]),
        ]


class TestHarmony:
    def test_sets_two_messages_of_a_kind_apart(self) -> None:
        text = (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
            "<|end|>\n<|start|>assistant<|channel|>commentary<|message|>plan<|end|>"
            "<|start|>assistant<|channel|>final<|message|>done<|return|>"
        )

        assert separate(text, "gpt-oss") == ("a\nb", "plan\ndone")

    @pytest.mark.parametrize(
        "header",
        [
            "<|channel|>commentary to=functions.f <|constrain|>json",
            "<|start|>assistant to=functions.f<|channel|>commentary",
            "<|channel|>analysis to=python code",
            "<|channel|>daydreams",
        ],
    )
    def test_keeps_what_is_not_for_the_reader_out_of_the_answer(self, header: str) -> None:
        assert separate(header + '<|message|>{"a":1}<|call|>', "gpt-oss") == ('{"a":1}', "")

    @pytest.mark.parametrize(
        "header",
        ["<|channel|>final <|constrain|>json", "<|channel|>commentary", "<|start|>assistant"],
    )
    def test_gives_the_reader_what_is_for_the_reader(self, header: str) -> None:
        assert separate(header + "<|message|>4", "gpt-oss") == ("", "4")

    def test_keeps_white_space_inside_of_messages(self) -> None:
        text = "<|channel|>analysis<|message|>\n a \n<|end|>\n<|start|>assistant<|channel|>final"

        assert separate(text + "<|message|> b\n<|return|>\n", "gpt-oss") == ("\n a \n", " b\n")

    def test_begins_a_message_where_the_one_before_has_no_end(self) -> None:
        text = "<|channel|>analysis<|message|>a<|channel|>final<|message|>b"

        assert separate(text, "gpt-oss") == ("a", "b")

    def test_drops_a_header_that_was_cut_off(self) -> None:
        assert separate("<|channel|>analysis<|message|>a<|end|><|start|>assist", "gpt-oss") == (
            *("a", ""),
        )

    def test_without_its_control_tokens_is_answer(self) -> None:
        # What a backend gives that leaves out the text of control tokens.
        text = re.sub(r"<\|\w+\|>", "", HARMONY)

        assert separate(text, "gpt-oss") == ("", "analysis2 + 2.assistantfinal4")

    @pytest.mark.parametrize("text", ["\n 4 \n", " ", "\n"])
    def test_leaves_text_without_any_markup_as_it_is(self, text: str) -> None:
        assert separate(text, "gpt-oss") == ("", text)

    def test_is_given_out_as_early_as_it_can_be(self) -> None:
        splitter = Splitter("gpt-oss")
        pushes = ["<|channel|>", "anal", "ysis", "<|message|>", "a <", "b<|e", "nd|>"]
        pushes += ["<|channel|>", "final<|mess", "age|>4"]

        assert [splitter.push(text) for text in pushes] == [
            *([], [], [], [], [("reasoning", "a ")], [("reasoning", "<b")], [], []),
            *([], [("answer", "4")]),
        ]


class TestUnknownFamilies:
    @pytest.mark.parametrize("family", ["deepseek", "", "QWEN3"])
    def test_are_refused_with_those_that_are_known(self, family: str) -> None:
        message = rf"^reasoning: unknown '{family}'; the families are deepseek-r1, qwen3, "
        with pytest.raises(OptionError, match=message):
            check_family(family)
        with pytest.raises(OptionError, match=message):
            Splitter(family)
