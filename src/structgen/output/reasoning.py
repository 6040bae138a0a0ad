"""Setting a model's reasoning apart from its answer, while the text is still coming.

Owns   the formats in which families of models mark their reasoning.
Holds  how the text is split into pushes makes no difference; no part of a marker is ever given
       out, and neither is anything held back but what may still turn out to be markup.
Used   by `program`, for `reasoning=` and streams of it, and by the server.

    deepseek-r1   the output begins inside the reasoning, whether or not it says `<think>` once
                  more, and `</think>` ends it: DeepSeek-R1 and its distillates, and every model
                  whose template writes `<think>` into the prompt (Qwen3-Thinking-2507)
    qwen3         `<think>` ... `</think>` where the output begins with it, else all is answer
    kimi          the same with `◁think▷` ... `◁/think▷` (Kimi-VL-Thinking)
    gpt-oss       OpenAI's harmony format: messages `<|channel|>analysis<|message|>` ... `<|end|>`

Think tags. White space before the opening tag and newlines beside a tag belong to the tag and are
dropped, as the models' own chat templates do when they read an earlier turn; all else is given
out as it is. Only the first closing tag counts, and nothing but the beginning can open. Reasoning
that is never closed is reasoning, and the answer is empty: newlines at its end stay.

Harmony. Messages of the channel `analysis`, of an unknown channel, and those addressed to a tool
(`to=`) are reasoning: none of these is for the reader. Those of `final`, of `commentary` (a
preamble for the reader) and of no channel are the answer. Two messages of one kind are set apart
by a newline. `<|end|>`, `<|return|>`, `<|call|>` or the start of another message ends a message;
a header that never ends is dropped. White space between messages is dropped, and any other text
outside of them is answer. So text in which a backend left out the control tokens is answer from
beginning to end: nothing in it says where the reasoning ended.

The formats are described by the models' own chat templates and by OpenAI's harmony guide; SGLang
(its reasoning parsers, and the names of the families) reads the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, get_args

from structgen.errors import OptionError
from structgen.events import Channel
from structgen.terms import Term, optional, regex, sequence
from structgen.terms import text as free_text

Family = Literal["deepseek-r1", "qwen3", "gpt-oss", "kimi"]
FAMILIES: tuple[Family, ...] = get_args(Family)

Piece = tuple[Channel, str]


class Tags(NamedTuple):
    """What stands before and behind a model's reasoning.

    inside   the output begins inside the reasoning, opened or not
    """

    opening: str
    closing: str
    inside: bool = False


_TAGS = MappingProxyType(
    {
        "deepseek-r1": Tags("<think>", "</think>", inside=True),
        "qwen3": Tags("<think>", "</think>"),
        "kimi": Tags("◁think▷", "◁/think▷"),
    }
)


def check_family(family: str) -> None:
    """Raise `OptionError` for a family that does not exist."""
    if family not in FAMILIES:
        raise OptionError(
            "reasoning", f"unknown {family!r}; the families are {', '.join(FAMILIES)}"
        )


def tags_of(family: str | None) -> Tags | None:
    """The tags of a family; None for one that has none, and for no family."""
    return None if family is None else _TAGS.get(family)


def reasoned(family: str | None, answer: Term) -> Term:
    """The form of an output whose answer has a form, and whose reasoning is free text.

    A family without tags reasons between control tokens, which no form has: its output is the
    answer only.
    """
    tags = tags_of(family)
    if tags is None:
        return answer
    thought = sequence(free_text(until=tags.closing), tags.closing, regex(r"\n*"))
    return sequence(thought if tags.inside else optional(sequence(tags.opening, thought)), answer)


def separate(text: str, family: str) -> tuple[str, str]:
    """Reasoning and answer of a whole output."""
    splitter = Splitter(family)
    pieces = [*splitter.push(text), *splitter.flush()]
    reasoning = "".join(piece for channel, piece in pieces if channel == "reasoning")
    answer = "".join(piece for channel, piece in pieces if channel == "answer")
    return reasoning, answer


class Splitter:
    """Sets reasoning apart from the answer, text by text. One for each output."""

    def __init__(self, family: str) -> None:
        """Raises `OptionError` for an unknown family; `FAMILIES` has them all."""
        check_family(family)
        self._format: _Format
        if family == "gpt-oss":
            self._format = _Harmony()
        else:
            self._format = _Tags(*_TAGS[family])

    def push(self, text: str) -> list[Piece]:
        """What is certain now, in order: texts that are not empty, neighbours of two channels."""
        return _joined(self._format.push(text))

    def flush(self) -> list[Piece]:
        """What was held back, once the output has ended. Nothing is pushed after it."""
        return _joined(self._format.flush())


class _Format(Protocol):
    def push(self, text: str) -> Iterator[Piece]: ...
    def flush(self) -> Iterator[Piece]: ...


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for channel, text in pieces:
        if joined and text and joined[-1][0] == channel:
            joined[-1] = (channel, joined[-1][1] + text)
        elif text:
            joined.append((channel, text))
    return joined


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0
    )


# ---------------------------------------------------------------- think tags


class _Tags:
    """Reasoning between two tags at the beginning of the output."""

    def __init__(self, opening: str, closing: str, inside: bool) -> None:
        """See `Tags`."""
        self._opening, self._closing, self._inside = opening, closing, inside
        self._part: Literal["start", "reasoning", "answer"] = "start"
        self._after_tag = False
        self._held = ""

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        if self._part == "start":
            self._open()
        if self._part == "reasoning":
            yield "reasoning", self._reasoning()
        if self._part == "answer":
            yield "answer", self._take(len(self._held))

    def flush(self) -> Iterator[Piece]:
        if self._part == "start":
            self._enter("reasoning" if self._inside else "answer", after_tag=self._inside)
        yield "answer" if self._part == "answer" else "reasoning", self._take(len(self._held))

    def _open(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._opening):
            self._held = begun[len(self._opening) :]
            self._enter("reasoning", after_tag=True)
        elif not self._opening.startswith(begun):
            # The prompt ended with the tag, or there is none.
            self._enter("reasoning" if self._inside else "answer", after_tag=self._inside)

    def _reasoning(self) -> str:
        head, closing, tail = self._held.partition(self._closing)
        if closing:
            self._held = head.rstrip("\n")
            text = self._take(len(self._held))
            self._held = tail
            self._enter("answer", after_tag=True)
            return text
        # Newlines are held back too: the closing tag may follow, and they would be part of it.
        certain = len(self._held) - held_back(self._held, (self._closing,))
        return self._take(len(self._held[:certain].rstrip("\n")))

    def _enter(self, part: Literal["reasoning", "answer"], *, after_tag: bool) -> None:
        self._part, self._after_tag = part, after_tag

    def _take(self, length: int) -> str:
        """Take text off what is held, without the newlines that follow a tag."""
        if self._after_tag:
            kept = self._held.lstrip("\n")
            length = max(length - (len(self._held) - len(kept)), 0)
            self._held, self._after_tag = kept, not kept
        text, self._held = self._held[:length], self._held[length:]
        return text


# ---------------------------------------------------------------- harmony


_MARKERS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))


class _Harmony:
    """Messages, each with a header that says for whom it is."""

    def __init__(self) -> None:
        self._part: Literal["outside", "header", "body"] = "outside"
        self._channel: Channel = "answer"
        self._header = ""
        self._held = ""
        # White space outside of messages, before any text: markup if a marker follows.
        self._blank = ""
        self._silent = True
        self._said: set[Channel] = set()
        self._begins = False  # the next text is the first one of its message
        self._marked = False

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        while found := _MARKER.search(self._held):
            yield self._text(self._held[: found.start()])
            self._held = self._held[found.end() :]
            self._mark(found[0])
        certain = len(self._held) - held_back(self._held, _MARKERS)
        yield self._text(self._held[:certain])
        self._held = self._held[certain:]

    def flush(self) -> Iterator[Piece]:
        yield self._text(self._held)
        self._held = ""
        if not self._marked:
            yield "answer", self._blank

    def _mark(self, marker: str) -> None:
        self._marked = True
        if marker in {"<|start|>", "<|channel|>"}:
            self._header = marker if self._part != "header" else self._header + marker
            self._enter("header", "answer")
        elif marker in {"<|end|>", "<|return|>", "<|call|>"}:
            self._enter("outside", "answer")
        elif marker == "<|message|>" and self._part != "body":
            header = self._header if self._part == "header" else ""
            self._enter("body", _addressed(header))
        # Else it has no meaning where it stands. It is a control token all the same, and no text.

    def _enter(self, part: Literal["outside", "header", "body"], channel: Channel) -> None:
        self._part, self._channel, self._begins = part, channel, True
        self._blank, self._silent = "", True

    def _text(self, text: str) -> Piece:
        if self._part == "header":
            self._header += text
            return self._channel, ""
        if self._part == "outside" and self._silent:
            text = self._blank + text
            self._silent = not text.strip()
            self._blank = text if self._silent else ""
            text = "" if self._silent else text
        if text and self._begins:
            text = "\n" + text if self._channel in self._said else text
            self._begins = False
        if text:
            self._said.add(self._channel)
        return self._channel, text


def _addressed(header: str) -> Channel:
    """Whether a message is for the reader. A header is `<|start|>role<|channel|>name to=whom`."""
    name = re.match(r"\s*(\w*)", header.rpartition("<|channel|>")[2])
    channel = name[1] if name and "<|channel|>" in header else ""
    to_tool = re.search(r"\bto=", header) is not None
    return "answer" if channel in {"", "final", "commentary"} and not to_tool else "reasoning"
