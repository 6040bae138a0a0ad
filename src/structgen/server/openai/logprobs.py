"""Log-probabilities in the forms of the two routes.

Used by both generating routes.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from structgen.models.tokenizer import Tokenizer
from structgen.request import TokenLogprob
from structgen.server.openai.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    TopLogprob,
)

T = TypeVar("T")
_LEAST = -9999.0  # JSON has no infinity; OpenAI writes this for what cannot be drawn
_incremental = getincrementaldecoder("utf-8")


class Speller:
    """How tokens are written: control tokens by their markup, all others by their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._table = tokenizer.token_bytes
        spelled = ((tokenizer.token_id(text), text) for text in tokenizer.control_spellings)
        self._control = {token: text.encode() for token, text in spelled if token is not None}

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, or of its markup."""
        return self._table[token] or self._control.get(token, b"")

    def text_of(self, token: int) -> str:
        """The same as text; bytes that are no whole character become U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    def name_of(self, token: int) -> str:
        r"""The same, with such bytes as OpenAI wrote them, `bytes:\xf0\x9f`: they stay apart."""
        spelled = self.bytes_of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def written(self, token: int) -> bytes:
        """What a token adds to a text: nothing, where it is a control token."""
        return self._table[token]


def chat_logprobs(speller: Speller, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """The form of `/v1/chat/completions`."""
    return ChatLogprobs([_chat_logprob(speller, entry) for entry in entries])


def written_logprobs(speller: Speller, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """The same as JSON, entry by entry, for an answer that has many of them."""
    return ChatLogprobs([as_json(_chat_logprob(speller, entry)) for entry in entries])


def _chat_logprob(speller: Speller, entry: TokenLogprob) -> ChatLogprob:
    top = [
        TopLogprob(speller.text_of(token), _finite(p), list(speller.bytes_of(token)))
        for token, p in entry.top
    ]
    spelled = list(speller.bytes_of(entry.token))
    return ChatLogprob(speller.text_of(entry.token), _finite(entry.logprob), spelled, top)


def as_json(part: T) -> T:
    """A part of an answer as the JSON that it becomes.

    An answer of a hundred thousand parts is then written in a moment, in which nothing else runs;
    and as bytes they are nothing to the collector of garbage, which would stop all threads.
    """
    return cast("T", msgspec.Raw(msgspec.json.encode(part)))


class CompletionSpelling:
    """The form of `/v1/completions`, of one text whose tokens come little by little."""

    def __init__(self, speller: Speller, start: int = 0, *, begins: bool = False) -> None:
        """The first token stands at the character `start` of the choice's text.

        begins   it begins a text, of which some tokenizers strip a space
        """
        self._speller, self._at = speller, start
        self._strips = begins and speller.tokenizer.strips_first_space
        self._decoder = _incremental("replace")

    def of(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """The next tokens. A character of several tokens counts where its last one ends."""
        found = CompletionLogprobs([], [], [], [])
        for entry in entries:
            found.tokens.append(self._speller.name_of(entry.token))
            found.text_offset.append(self._at)
            self._advance(entry.token)
            known = None if entry.logprob is None else _finite(entry.logprob)
            found.token_logprobs.append(known)
            found.top_logprobs.append(None if known is None else self._top(entry, known))
        return found

    def _advance(self, token: int) -> None:
        text = self._decoder.decode(self._speller.written(token))
        if self._strips and text:
            text, self._strips = text.removeprefix(" "), False
        self._at += len(text)

    def _top(self, entry: TokenLogprob, known: float) -> dict[str, float]:
        """The likeliest tokens, and the token itself, by their names; best first.

        Whoever asks whether the token is the likeliest compares it with the largest of these: so
        its own value is exactly the one that it has for itself. Of tokens that are spelled alike,
        as some vocabularies have them, the likelier one counts.
        """
        found: dict[str, float] = {}
        for token, logprob in entry.top:
            value = known if token == entry.token else _finite(logprob)
            found.setdefault(self._speller.name_of(token), value)
        found.setdefault(self._speller.name_of(entry.token), known)
        return found


def _finite(logprob: float | None) -> float:
    return max(_LEAST, logprob or 0.0)
