"""Text to token ids and back, with control tokens kept apart from text.

Owns   one `tokenizers` library object (two where a text's first token is spelled differently),
       the table of control tokens, and the bytes of every token.
Holds  `encode` never returns a control token, whatever the text spells, and returns exactly what
       the library returns for text that spells none. Nothing is ever added around a text.
Used   by the engine (prompts, detokeniser, grammars) and by `checkpoint`.

Control tokens are the added tokens that the checkpoint flags as special and those, flagged or
not, that its chat template writes. Nothing changes after construction, and the library releases
the interpreter lock: any thread may encode.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import msgspec
import tokenizers

from structgen.errors import CheckpointError
from structgen.models import tokenizer_json
from structgen.models.tokenizer_json import AddedToken

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2, 2019).

    Printable Latin-1 characters stand for themselves, the other bytes for those from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


# What `str.translate` needs to turn a piece into its bytes; Latin-1 characters that stand for no
# byte become one that Latin-1 cannot encode.
_BYTE_OF = dict.fromkeys(range(128, 256), "\uffff") | {
    ord(character): chr(byte) for character, byte in byte_alphabet().items()
}


class Tokenizer:
    """The tokenizer of one checkpoint.

    vocab_size           ids are below it; some may be holes
    special_ids          tokens that are never part of the text (flagged special in the files)
    control_ids          the same and those that only the chat template may write
    control_spellings    how those are spelled
    bos_id               the token that the tokenizer itself puts before every text, if any
    start_id             the token that stands for the beginning of a text: `bos_id`, or the one
                         that the files name as BOS though it is not put there; None for neither
    strips_first_space   a decoded text drops one leading space (SentencePiece)
    prefixed_throughout  a space is put before the text after a control token, too, and not only
                         before the first (SentencePiece of Llama 2)
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        source: str,
        control: Collection[str] = (),
        size: int = 0,
        add_bos: bool | None = None,
        bos_token: str | None = None,
    ) -> None:
        """Build from the content of a `tokenizer.json`.

        source      where it came from, for messages
        control     spellings that are control tokens although not flagged special
        size        number of ids the model knows, if that is more than the vocabulary has
        add_bos     True or False overrides what the definition adds before a text
        bos_token   spelling of the token that `add_bos` adds

        Raises `CheckpointError` naming the part that is damaged or not supported.
        """
        self._source = source
        try:
            self._added = msgspec.convert(definition.get("added_tokens") or [], list[AddedToken])
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{source}: added_tokens: {error}") from None
        self._model: Mapping[str, Any] = definition.get("model") or {}
        self._vocabulary = tokenizer_json.vocabulary(self._model, source)
        self._family = tokenizer_json.family(definition.get("decoder"), source)
        controls = [
            token
            for token in self._added
            if token.special or (token.content in control and not token.content.isspace())
        ]
        self._controls = {token.content: token for token in controls}
        self.control_ids = frozenset(token.id for token in controls)
        self.special_ids = frozenset(token.id for token in controls if token.special)
        self._markup = _markup_pattern(controls)
        plain = tokenizer_json.with_control(definition, self.control_ids)
        self._library = self._loaded(plain)
        continuing, self.prefixed_throughout = tokenizer_json.without_prefix(plain)
        self._continuing = self._loaded(continuing) if continuing else self._library
        self._check_ids()
        self.bos_id = self._bos_id(add_bos, bos_token)
        named = self.token_id(bos_token) if bos_token is not None else None
        self.start_id = named if self.bos_id is None else self.bos_id
        ids = [*self._vocabulary.values(), *(token.id for token in self._added)]
        self.vocab_size = max(size, max(ids, default=-1) + 1)
        self.strips_first_space = tokenizer_json.strips_first_space(definition.get("decoder"))
        self._respelled = {token.id: self._spelled_out(token) for token in controls}
        self._reachable = self.control_ids - tokenizer_json.unknown_ids(
            self._model, self._vocabulary
        )

    @property
    def control_spellings(self) -> tuple[str, ...]:
        """How the control tokens are spelled, longest first."""
        return tuple(sorted(self._controls, key=len, reverse=True))

    @property
    def whole_controls(self) -> dict[str, int]:
        """The control tokens that are their spelling and nothing around it, by that spelling."""
        controls = self._controls.values()
        return {each.content: each.id for each in controls if not (each.lstrip or each.rstrip)}

    # ---------------------------------------------------------------- text to ids

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of ordinary text; no control token is recognised and nothing is added.

        `start=False`: the text continues another, so that no space is put before it.
        """
        if not text:
            return []
        library = self._library if start else self._continuing
        # Unlike `encode`, it lets other threads run meanwhile, and counts no offsets: 40 % faster.
        ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._reachable.isdisjoint(ids):
            return ids
        # A vocabulary can contain a control token as an ordinary piece, too, that merges reach.
        return [piece for token in ids for piece in self._respelled.get(token, (token,))]

    def encode_control(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of template markup: control tokens are recognised, nothing is added."""
        return self.encode_sections(self.sections(text), start=start)

    def sections(self, markup: str) -> list[int | str]:
        """Template markup as control token ids and the ordinary text between them."""
        found: list[int | str] = []
        at = 0
        for match in self._markup.finditer(markup):
            token = self._controls[match[0]]
            before = markup[at : match.start()]
            found += [before.rstrip() if token.lstrip else before, token.id]
            at = match.end()
            if token.rstrip:
                at = len(markup) - len(markup[at:].lstrip())
        found.append(markup[at:])
        return [section for section in found if section != ""]

    def encode_sections(self, sections: Sequence[int | str], *, start: bool = True) -> list[int]:
        """Ids of control tokens and ordinary texts in a row, as the library spells them."""
        ids: list[int] = []
        for section in sections:
            if isinstance(section, str):
                ids += self.encode(section, start=start)
                start = False
            else:
                ids.append(section)
                start = self.prefixed_throughout
        return ids

    # ---------------------------------------------------------------- ids to text

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens are skipped, broken UTF-8 becomes U+FFFD."""
        table = self.token_bytes
        text = b"".join([table[token] for token in ids]).decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token by id; b"" for special tokens and for holes."""
        table = [b""] * self.vocab_size
        spell = _spell_bytes if self._family == tokenizer_json.BYTE_LEVEL else _spell_piece
        for piece, token in self._vocabulary.items():
            table[token] = spell(piece)
        for added in self._added:
            table[added.id] = b"" if added.special else added.content.encode()
        return table

    @cached_property
    def fingerprint(self) -> str:
        """Names the vocabulary, merges and added tokens: equal if and only if ids mean the same."""
        pieces = [""] * self.vocab_size
        for piece, token in self._vocabulary.items():
            pieces[token] = piece
        while pieces and not pieces[-1]:
            pieces.pop()  # the size that the model pads to is not part of what ids mean
        merges = self._model.get("merges") or ()
        joined = (merge if isinstance(merge, str) else " ".join(merge) for merge in merges)
        added = sorted((token.id, token.content, token.special) for token in self._added)
        digest = blake2b(digest_size=16)
        for part in ("\0".join(pieces), "\n".join(joined), repr(added)):
            digest.update(part.encode() + b"\1")
        return digest.hexdigest()

    # ---------------------------------------------------------------- construction

    def token_id(self, spelling: str) -> int | None:
        """The id of the token that is spelled so, None if there is none."""
        token: int | None = self._library.token_to_id(spelling)
        return token

    def _loaded(self, definition: Mapping[str, Any]) -> tokenizers.Tokenizer:
        try:
            library = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(definition))
        except Exception as error:  # noqa: BLE001 - the library raises bare `Exception`
            raise CheckpointError(f"{self._source}: {error}") from None
        # Every control token is flagged special in `definition`, so that this leaves out all.
        library.encode_special_tokens = True
        return library

    def _check_ids(self) -> None:
        for token in self._added:
            if (actual := self._library.token_to_id(token.content)) != token.id:
                raise CheckpointError(
                    f"{self._source}: the added token {token.content!r} has id {token.id}, but "
                    f"the vocabulary makes it {actual}"
                )

    def _bos_id(self, add_bos: bool | None, bos_token: str | None) -> int | None:
        if add_bos is False:
            return None
        if add_bos is True and bos_token is not None:
            token = self.token_id(bos_token)
            if token is None:
                raise CheckpointError(f"{self._source}: the token {bos_token!r} is not in it")
            return token
        bare: list[int] = self._library.encode("a", add_special_tokens=False).ids
        full: list[int] = self._library.encode("a", add_special_tokens=True).ids
        before = next(
            (n for n in range(len(full)) if full[n : n + len(bare)] == bare), len(full) - len(bare)
        )
        if before > 1:
            raise CheckpointError(
                f"{self._source}: {before} tokens are put before every text; one is supported"
            )
        return full[0] if before else None

    def _spelled_out(self, token: AddedToken) -> tuple[int, ...]:
        ids = [
            piece
            for character in token.content
            for piece in self._continuing.encode(character, add_special_tokens=False).ids
        ]
        return tuple(piece for piece in ids if piece not in self.control_ids)


def _spell_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()  # plain text in a byte-level vocabulary, as added tokens are


def _spell_piece(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE_MARK, " ").encode()


def _markup_pattern(controls: Iterable[AddedToken]) -> re.Pattern[str]:
    """Finds control tokens, the longest of those that begin at one place."""
    longest_first = sorted(controls, key=lambda token: len(token.content), reverse=True)
    spellings = [
        rf"(?<!\w){re.escape(token.content)}(?!\w)"
        if token.single_word
        else re.escape(token.content)
        for token in longest_first
    ]
    return re.compile("|".join(spellings) or r"(?!)")
