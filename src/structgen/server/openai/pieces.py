"""What a choice of an answer becomes, delta by delta: content, reasoning, tool calls, its end.

Holds  both forms of an answer are made of the same pieces: a stream sends each as it comes, and
       an answer in one piece is all of them joined.
Used   by both generating routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from structgen.output.reasoning import Family, Splitter
from structgen.request import Delta, Finish, TokenLogprob


class ToolPiece(msgspec.Struct, frozen=True):
    """The next piece of a tool call.

    index       of the call in its choice
    id, name    of the call, in its first piece; "" in the others
    arguments   the next piece of the JSON text of its arguments
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ToolReader(Protocol):
    """Finds tool calls in the text of one choice, while it is still being written."""

    def push(self, text: str) -> tuple[str, list[ToolPiece]]:
        """More text; returns what of it is content, and what belongs to calls."""
        ...

    def flush(self) -> tuple[str, list[ToolPiece]]:
        """What was held back, once the output has ended."""
        ...


class Piece(msgspec.Struct, frozen=True):
    """What a delta adds to a choice.

    tokens   all that were drawn: also those of the end, whether or not their text is kept
    """

    content: str = ""
    reasoning: str = ""
    tools: tuple[ToolPiece, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None

    def __bool__(self) -> bool:
        """Whether there is something to tell; tokens alone wait for their text."""
        told = (self.content, self.reasoning, self.tools, self.logprobs, self.prompt_logprobs)
        return any(told) or self.finish is not None


class ChoiceReader:
    """Reads one choice.

    called    whether it has called a tool
    """

    def __init__(
        self,
        reasoning: Family | None = None,
        tools: ToolReader | None = None,
        *,
        keep_stop: bool = False,
    ) -> None:
        """`keep_stop`: a stop string that ended the text is a part of it."""
        self._splitter = Splitter(reasoning) if reasoning else None
        self._tools, self._keep_stop = tools, keep_stop
        self.called = False

    def read(self, delta: Delta) -> Piece:
        """What a delta adds; the last one brings what was held back."""
        text, finish = delta.text, delta.finish
        if finish is not None and self._keep_stop and isinstance(finish.matched, str):
            text += finish.matched
        reasoning, content = self._split(text, last=finish is not None)
        tools: Sequence[ToolPiece] = ()
        if self._tools is not None:
            content, tools = self._called(self._tools, content, last=finish is not None)
        return Piece(
            content=content,
            reasoning=reasoning,
            tools=tuple(tools),
            tokens=delta.tokens if finish is None else (*delta.tokens, *finish.dropped),
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            finish=finish,
        )

    def _split(self, text: str, *, last: bool) -> tuple[str, str]:
        """Reasoning and answer."""
        if self._splitter is None:
            return "", text
        pieces = self._splitter.push(text)
        if last:
            pieces += self._splitter.flush()
        reasoning = "".join(text for channel, text in pieces if channel == "reasoning")
        return reasoning, "".join(text for channel, text in pieces if channel == "answer")

    def _called(
        self, tools: ToolReader, text: str, *, last: bool
    ) -> tuple[str, Sequence[ToolPiece]]:
        content, found = tools.push(text)
        if last:
            rest, more = tools.flush()
            content, found = content + rest, [*found, *more]
        self.called = self.called or bool(found)
        return content, found
