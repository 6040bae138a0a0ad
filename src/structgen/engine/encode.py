"""Prompt parts to token ids: the one place where text meets the tokenizer.

Owns   the seam policy. Two texts that follow each other, and a text that follows tokens, are
       encoded apart: a prompt that extends another in parts extends it in ids too, and the radix
       tree finds it. Markup and the text beside it are encoded together, because that is how the
       model was trained to read them: the ids of a chat are those of its whole rendering.
Holds  `Text` never becomes a control token, whatever it spells; only `Control` does. The event
       loop is not held up: long texts are encoded in a thread, and many parts in turns.
Used   by `engine`. Only `ids_of` runs in another thread; it changes nothing here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

import anyio.to_thread
import msgspec
import numpy as np

from structgen.chat import Chat, Message, Turn, turns_from
from structgen.core.radix import NO_IDS, Ids
from structgen.errors import (
    ContextLengthError,
    PromptError,
    TemplateError,
    UnsupportedError,
)
from structgen.models.tokenizer import Tokenizer
from structgen.request import Control, Image, Part, Prompt, Text, Tokens
from structgen.waiting import in_turns

BLOCKING_CHARACTERS = 8_192  # more than this is encoded in a thread: some 10 ms of work
CACHED_CHARACTERS = 8_000_000  # texts whose ids are remembered, in all

PromptLike = str | Prompt | Sequence[int] | Sequence[Message] | Sequence[dict[str, str]]


class Stretch(msgspec.Struct, frozen=True):
    """Text to encode in one go. `start`: it begins a text, which SentencePiece marks by a space."""

    text: str
    start: bool


class Encoder:
    """Encodes parts, remembering the ids of recent texts.

    Branches of a program send the same long prefix again and again; its texts are looked up,
    not encoded again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[Stretch, Ids] = OrderedDict()
        self._cached = 0
        spellings = (*tokenizer.token_bytes, *tokenizer.control_spellings)
        self._longest_token = max(map(len, spellings), default=1)

    def slow_texts(self, pieces: Sequence[Stretch | Ids]) -> list[Stretch]:
        """The texts that would disturb an event loop if they were encoded on it; mostly none.

        They are for `ids_of`, in a thread.
        """
        texts = [piece for piece in pieces if isinstance(piece, Stretch)]
        if sum(len(each.text) for each in texts) <= BLOCKING_CHARACTERS:
            return []
        fresh = [each for each in dict.fromkeys(texts) if each not in self._cache]
        return fresh if sum(len(each.text) for each in fresh) > BLOCKING_CHARACTERS else []

    def ids_of(self, texts: Sequence[Stretch]) -> dict[Stretch, Ids]:
        """Encode texts, without a look at what is remembered; may run in any thread."""
        return {each: self._fresh(each) for each in texts}

    def fewest_tokens(self, parts: Prompt) -> int:
        """A lower bound on the number of tokens, found without encoding."""
        ids = characters = 0
        for part in parts:
            if isinstance(part, Tokens):
                ids += len(part.ids)
            elif not isinstance(part, Image):
                characters += len(part.text)
        return ids + characters // self._longest_token

    def encode(self, parts: Prompt) -> Ids:
        """Ids of a prompt; a tokenizer that begins texts with a BOS token gets its one BOS.

        Raises `PromptError` for ids of another vocabulary and for text that is not Unicode,
        `UnsupportedError` for images.
        """
        return self._joined(parts, [self._ids(each, {}) for each in self.pieces(parts)])

    async def encoded(self, parts: Prompt, limit: int) -> Ids:
        """The same, while other tasks have their turns.

        Raises also `ContextLengthError`, for a prompt that has certainly more tokens than `limit`.
        """
        fewest = self.fewest_tokens(parts)
        if fewest > limit:
            raise ContextLengthError(
                f"the prompt has at least {fewest} tokens, more than the context of {limit}"
            )
        pieces, known = await in_turns(self.pieces(parts)), dict[Stretch, Ids]()
        if slow := self.slow_texts(pieces):
            known = await anyio.to_thread.run_sync(self.ids_of, slow)
        return self._joined(parts, await in_turns(self._ids(each, known) for each in pieces))

    def continuation(self, text: str) -> Ids:
        """Ids of a text that continues another one."""
        return self._fresh(Stretch(text, start=False))

    def pieces(self, parts: Prompt) -> Iterator[Stretch | Ids]:
        """Split a prompt into texts to encode and ids that are known."""
        texts: list[str] = []  # of the stretch that the next section may still belong to
        starts = start = True
        before: type | None = None
        for part in parts:
            joins = Control in {before, type(part)}
            for section in self._sections(part):
                if isinstance(section, str) and (not section or (joins and texts)):
                    texts += [section] if section else ()
                    continue
                if texts:
                    yield Stretch("".join(texts), starts)
                    texts.clear()
                if isinstance(section, str):
                    texts.append(section)
                    starts, start = start, False
                else:
                    yield np.array(section, np.int64, ndmin=1)
                    start = isinstance(section, int) and self._tokenizer.prefixed_throughout
            before = type(part)
        if texts:
            yield Stretch("".join(texts), starts)

    def _sections(self, part: Part) -> list[int | str] | list[str] | list[Ids]:
        """A part as control tokens (int), text (str) and given ids, in order."""
        match part:
            case Text():
                return [part.text]
            case Control():
                return self._tokenizer.sections(part.text)
            case Tokens():
                return [self._checked(part)]
            case Image():
                raise UnsupportedError(
                    "this model sees no images; describe the image in text instead"
                )
            case _:
                assert_never(part)

    def _joined(self, parts: Prompt, pieces: Sequence[Ids]) -> Ids:
        ids = np.concatenate([NO_IDS, *pieces])
        bos = self._tokenizer.bos_id
        given = bool(parts) and isinstance(parts[0], Tokens)
        if bos is not None and ids.size and ids[0] != bos and not given:
            ids = np.concatenate([np.array([bos], np.int64), ids])
        return ids

    def _ids(self, piece: Stretch | Ids, known: Mapping[Stretch, Ids]) -> Ids:
        """Ids of a piece; `known` is what `ids_of` has found."""
        if not isinstance(piece, Stretch):
            return piece
        ids = self._cache.get(piece)
        if ids is None:
            ids = known[piece] if piece in known else self._fresh(piece)
            self._remember(piece, ids)
        return ids

    def _fresh(self, stretch: Stretch) -> Ids:
        try:
            stretch.text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prompt is not text: {error.object[error.start]!r} at character "
                f"{error.start} is half of a surrogate pair; decode its source as UTF-8"
            ) from None
        found = self._tokenizer.encode(stretch.text, start=stretch.start)
        return np.array(found, np.int64)

    def _remember(self, stretch: Stretch, ids: Ids) -> None:
        if len(stretch.text) > CACHED_CHARACTERS // 4 or stretch in self._cache:
            return
        self._cache[stretch] = ids
        self._cached += len(stretch.text)
        while self._cached > CACHED_CHARACTERS:
            dropped, _ = self._cache.popitem(last=False)
            self._cached -= len(dropped.text)

    def _checked(self, part: Tokens) -> Ids:
        tokenizer = self._tokenizer
        if part.tokenizer not in {"", tokenizer.fingerprint}:
            raise PromptError(
                "the prompt holds tokens of another model's tokenizer; send them as text"
            )
        ids = np.array(part.ids) if len(part.ids) else NO_IDS
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise PromptError("prompt tokens: expected whole numbers that fit in 64 bits")
        if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
            bad = int(ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0])
            raise PromptError(
                f"prompt token {bad} is not in the vocabulary of {tokenizer.vocab_size}"
            )
        return ids.astype(np.int64)


def parts_from(prompt: PromptLike, chat: Chat | None) -> Prompt:
    """The parts of a prompt in any of its forms; messages are rendered, their answer opened.

    Raises `TypeError` for what is no prompt, `TemplateError` where messages cannot be rendered.
    """
    if isinstance(prompt, str):
        return (Text(prompt),) if prompt else ()
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise TypeError(
            "a prompt is a string, or a list of messages, of token ids or of prompt parts, "
            f"not {type(prompt).__name__}"
        )
    given: Sequence[Any] = prompt
    if all(isinstance(each, Part) for each in given):
        return tuple(given)
    if all(isinstance(each, int) and not isinstance(each, bool) for each in given):
        return (Tokens(tuple(given), ""),)
    if chat is None:
        raise TemplateError(
            "the model has no chat template; give the engine one with the option "
            "chat_template=FILE, or send text instead of messages"
        )
    return chat.render([*turns_from(given), Turn("assistant", (), open=True)]).parts
