"""Following a constraint token by token: what may come next, and whether it is complete.

Owns   the seam to the grammar backends (`Matcher`) and the adapter to the one in use, llguidance
       (Microsoft; its token trie and its lazily derived automata do the work here).
Holds  a token is in the mask if and only if the text so far and its bytes begin a text that the
       constraint matches; a token without text - control tokens, end tokens - never is, but for
       those that stand for a text which the constraint itself has written out (`markers`).
Used   by `core`, which asks for one mask a step and says which token was drawn.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from structgen.errors import GenerationError
from structgen.grammar.characters import LAST, Ranges, union
from structgen.grammar.forced import CONTEXT, MOST_FORCED, Encode, Spelling, Written

Mask = NDArray[np.int32]
Derived = TypeVar("Derived")

# What one mask or one token may cost, because the event loop waits for it. The backend looks for
# each item that it adds among those of its row, and a text that can be read in many ways makes the
# rows grow with its length. Of 49,000 tokens a mask of `root ::= root root | [a-z]` took 130 ms
# before 230 characters; with these it took 26 ms of processor time at worst, then the request
# ended. A mask of Python needs more than 2,000 items and less than 5,000, and takes 1 ms.
LIMITS = LLParserLimits(max_items_in_row=500, step_max_items=5_000, verbose_errors=False)
# JSON has its brackets where a value begins and ends, so its rows grow with the schema - 500 keys
# that may come next are 500 items, each looked for once - and hardly with the text.
WIDE_LIMITS = LLParserLimits(verbose_errors=False)

# Where a pattern allows all texts of one of these, its tokens are allowed without a look at each of
# them: for `[a-z ]{400}` a mask takes 50 us and not 650.
_SLICES = (
    r"[a-z]{1,20}",
    r"[A-Za-z]{1,20}",
    r"[a-z ]{1,20}",
    r"[A-Za-z ]{1,20}",
    r'[^"\\\x00-\x1f\x7f]{1,30}',
    r"[^\n]{1,40}",
)

# The code points whose UTF-8 begins with each byte from 0xC2 on.
_LEADS = MappingProxyType(
    {0xC0 + n: (n << 6, (n << 6) + 0x3F) for n in range(2, 32)}
    | {0xE0 + n: (max(n << 12, 0x800), (n << 12) + 0xFFF) for n in range(16)}
    | {0xF0 + n: (max(n << 18, 0x10000), min((n << 18) + 0x3FFFF, LAST)) for n in range(5)}
)


class Matcher(Protocol):
    """One output on its way through a constraint. Every request has its own."""

    @property
    def words(self) -> int:
        """Width of a mask: 32 tokens a word."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the output may end here: all of it matches."""
        ...

    @property
    def finished(self) -> bool:
        """Whether it must end here: it is complete, and nothing could follow."""
        ...

    def fill(self, row: Mask) -> None:
        """Write the mask of the next token: bit i of word w allows token 32 * w + i.

        End tokens are not for the matcher to allow. Raises `GenerationError` if the backend has
        to give up.
        """
        ...

    def accept(self, token: int) -> None:
        """Take a token that the mask allows. Raises `GenerationError` for any other."""
        ...

    def forced(self, limit: int) -> Sequence[int]:
        """The tokens that are certain to come next, `limit` at most; none is taken.

        In the spelling that the tokenizer has for the whole text, and only as far as no longer
        token might span its end: what a model that knows the form would have written. Raises
        `GenerationError` if the backend has to give up.
        """
        ...


def allow(row: Mask, tokens: Collection[int]) -> None:
    """Set the bits of tokens in a mask."""
    words = row.view(np.uint32)
    for token in tokens:
        if token < 32 * row.size:
            words[token >> 5] |= np.uint32(1 << (token & 31))


def _has(row: Mask, token: int) -> bool:
    return bool(int(row[token >> 5]) >> (token & 31) & 1)


class Vocabulary:
    """The tokens of a model as the backend sees them; built once, then shared by all threads.

    size      number of logits
    tokens    the bytes of each, b"" for tokens without text
    words     width of a mask
    text      the mask of all tokens that have a text
    spelled   the characters that there are tokens for: whoever begins one can finish it
    markers   from spellings to control tokens that may stand for them, where a constraint has them
    shown     the bytes that each token of an output under a constraint stands for
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        textless: Collection[int],
        size: int,
        encode: Encode | None = None,
        *,
        markers: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Index a vocabulary.

        token_bytes   the bytes of every token by id; b"" for tokens without text
        textless      ids that are never part of a text, whatever their bytes: control tokens, and
                      tokens that end an output
        size          number of logits; ids from there on do not exist
        encode        the tokenizer's, for text inside of a text; without it nothing is forced
        markers       some of the textless ones, by their spelling
        """
        tokens = [data if n not in textless else b"" for n, data in enumerate(token_bytes[:size])]
        tokens += [b""] * (size - len(tokens))
        self.size = size
        self.tokens = tuple(tokens)
        self.words = -(-size // 32)
        # An end token of the backend's own, behind all others: which of the model's tokens may
        # end an output is decided elsewhere.
        self.end = size
        self.spelled = _spelled(tokens)
        self._encode = encode
        self.markers = {text: token for text, token in markers.items() if token < size}
        self.shown: list[bytes] = list(token_bytes)
        for spelling, token in self.markers.items():
            tokens[token] = self.shown[token] = spelling.encode()
        self._letters: dict[int, Letters] = {}
        self.backend = LLTokenizer(
            TokenizerWrapper(_Tokens([*tokens, b""], self.end, self.markers.values())),
            n_vocab=size + 1,
            slices=list(_SLICES),
        )
        text = np.array([bool(data) for data in tokens] + [False] * (32 * self.words - size))
        self.text: Mask = np.packbits(text, bitorder="little").view("<i4").astype(np.int32)
        self._derived: dict[object, Any] = {}
        self._lock = threading.Lock()

    def derived(self, make: Callable[[Vocabulary], Derived]) -> Derived:
        """What is made of the vocabulary, once, and then kept with it; other threads wait."""
        with self._lock:
            if make not in self._derived:
                self._derived[make] = make(self)
            found: Derived = self._derived[make]
            return found

    @property
    def spelling(self) -> Spelling | None:
        """How the tokenizer writes forced text; None without one. Takes 0.2 s the first time."""
        return self.derived(Vocabulary._spelling)

    def _spelling(self) -> Spelling | None:
        return None if self._encode is None else Spelling(self.tokens, self._encode)

    def letters(self, marker: str) -> Letters:
        """The tokens that a marker can be spelled with, letter by letter."""
        token = self.markers[marker]
        if token not in self._letters:
            self._letters[token] = Letters(self.tokens, marker.encode(), token)
        return self._letters[token]

    def at_hand(self, make: Callable[[Vocabulary], Derived]) -> Derived | None:
        """The same if it has been made already, None if not."""
        return self._derived.get(make)


@functools.cache
def byte_vocabulary() -> Vocabulary:
    """One token a byte: for texts that no model wrote."""
    return Vocabulary([bytes([byte]) for byte in range(256)], (), 256)


def _spelled(tokens: Sequence[bytes]) -> Ranges:
    """Characters that are a token, or whose bytes all are tokens."""
    single = {data[0] for data in tokens if len(data) == 1}
    found = [(byte, byte) for byte in single if byte < 0x80]
    if single.issuperset(range(0x80, 0xC0)):
        found += [scope for lead, scope in _LEADS.items() if lead in single]
    for data in tokens:
        if 1 < len(data) <= 4:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                continue
            if len(text) == 1:
                found.append((ord(text), ord(text)))
    return union(found)


class _Tokens:
    """What the backend reads a vocabulary from."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end: int, markers: Collection[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = [end, *markers]

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("masks are made of bytes; nothing is to be tokenized")


class Letters:
    """The letters of a marker.

    first   tokens that its text begins with, the shortest first
    row     the marker, these, and tokens that begin with its text and go beyond
    """

    def __init__(self, tokens: Sequence[bytes], text: bytes, marker: int) -> None:
        self.text = text
        self.first = [token for token, data in enumerate(tokens) if data and text.startswith(data)]
        self.first.sort(key=lambda token: len(tokens[token]))
        beyond = [token for token, data in enumerate(tokens) if data.startswith(text)]
        self.row: Mask = np.zeros(-(-len(tokens) // 32), np.int32)
        allow(self.row, [marker, *self.first, *beyond])


class GuidanceMatcher:
    """`Matcher` by llguidance."""

    def __init__(self, state: LLMatcher, vocabulary: Vocabulary, *, marked: bool = False) -> None:
        """`state` is this matcher's alone; `marked`: its constraint has markers in it."""
        self._state, self._vocabulary, self._marked = state, vocabulary, marked
        self._markers = frozenset(vocabulary.markers.values()) if marked else frozenset[int]()
        self._row = np.zeros(-(-(vocabulary.size + 1) // 32), np.int32)
        self._filled = False  # the row is that of the next token
        self._recent: deque[int] = deque(maxlen=CONTEXT)
        self._spelling = vocabulary.spelling
        self._certain, self._taken = b"", 0  # what is certain to come, and how much of it came
        self.words = vocabulary.words
        self._look()

    def fill(self, row: Mask) -> None:
        """See `Matcher`."""
        if self.finished:
            row[:] = 0
            return
        if not self._filled:
            self._compute(self._state)
        np.bitwise_and(self._row[: row.size], self._vocabulary.text, out=row)

    def accept(self, token: int) -> None:
        """See `Matcher`."""
        self._consume([token])
        self._remember(self._recent, (token,))
        if self._certain:
            data = self._vocabulary.tokens[token]
            same = self._certain.startswith(data, self._taken)
            self._taken += len(data)
            if not same or not data:
                self._certain = b""
        self._look()

    def forced(self, limit: int) -> Sequence[int]:
        """See `Matcher`."""
        spelling = self._spelling
        if spelling is None or self.finished:
            return ()
        if not self._marked:
            return spelling.certain(self._recent, self._coming(), self._ahead)[:limit]
        found: list[int] = []
        recent = self._recent.copy()
        while len(found) < limit and not self._state.is_stopped():
            data = self._state.compute_ff_bytes()
            piece = spelling.certain(recent, data, self._ahead) if data else self._certain_marker()
            if not piece:
                break
            self._consume(piece)
            self._remember(recent, piece)
            found += piece
        self._take_back(len(found))
        return found[:limit]

    def _coming(self) -> bytes:
        """The bytes that are certain to come next; of many, as many as are looked at."""
        # The backend looks for all of them each time: 10 ms for 100,000.
        if len(self._certain) - self._taken < MOST_FORCED:
            self._certain, self._taken = self._state.compute_ff_bytes(), 0
        return self._certain[self._taken : self._taken + MOST_FORCED]

    def follow_certain(self) -> None:
        """Go on as far as what comes next is certain, if that is far.

        What the backend works out on the way it keeps for all that follow the same constraint: for
        100,000 characters it takes 0.2 s the first time. Raises `GenerationError` if it gives up.
        """
        certain = self._state.compute_ff_bytes().decode(errors="replace")
        if len(certain) <= MOST_FORCED:
            return  # soon worked out whenever it is asked for
        self._filled = False
        self._state.try_consume_tokens(self._vocabulary.backend.greedy_tokenize(certain))
        if self._state.is_error():
            raise self._failure(self._state)
        self._look()

    def _ahead(self, written: Written) -> Mask:
        """The mask behind some text."""
        # There and back again: a copy of the state would have to derive anew what this one knows.
        self._consume(written.ids)
        self._row[:] = 0
        marker: Sequence[int] = ()
        if not self._state.is_stopped():
            self._compute(self._state)
            marker = self._certain_marker() if self._marked else ()
        self._take_back(len(written.ids))
        allowed = self._row[: self._vocabulary.words] & self._vocabulary.text
        if marker:
            allowed[:] = 0  # no other token reaches over the border of one that is a text by itself
        return allowed

    def _certain_marker(self) -> Sequence[int]:
        """The marker that is certain to come next, if its text is; none is taken."""
        if self._state.is_accepting():
            return ()
        if not self._filled:
            self._compute(self._state)
        allowed = self._row[: self._vocabulary.words] & self._vocabulary.text
        for spelling, marker in self._vocabulary.markers.items():
            if not _has(allowed, marker):
                continue
            letters = self._vocabulary.letters(spelling)
            if (allowed & ~letters.row).any():
                return ()
            first = next((token for token in letters.first if _has(allowed, token)), marker)
            if first == marker or self._goes_on(first, letters.text):
                return (marker,)
        return ()

    def _goes_on(self, first: int, text: bytes) -> bool:
        """Whether a text is certain to be what its first token begins."""
        rest = text[len(self._vocabulary.tokens[first]) :]
        self._consume([first])
        certain = self._state.compute_ff_bytes().startswith(rest)
        self._take_back(1)
        return certain

    def _consume(self, tokens: Sequence[int]) -> None:
        self._filled = False
        if not self._state.consume_tokens(list(tokens)):
            raise self._failure(self._state)

    def _take_back(self, count: int) -> None:
        self._filled = False
        if count and not self._state.rollback(count):
            raise self._failure(self._state)

    def _remember(self, recent: deque[int], tokens: Sequence[int]) -> None:
        """Add tokens to those that text behind them is encoded with: none before a marker is."""
        for token in tokens:
            if token in self._markers:
                recent.clear()
            else:
                recent.append(token)

    def try_all(self, tokens: Sequence[int]) -> int:
        """Accept tokens for as long as they are allowed; how many were.

        Raises `GenerationError` if the backend has to give up.
        """
        for count, token in enumerate(tokens):
            if self.finished:
                return count
            self._compute(self._state)  # with a mask, the backend counts its steps anew
            self._filled = False
            self._certain = b""
            taken = self._state.try_consume_tokens([token])
            if self._state.is_error():
                raise self._failure(self._state)
            if not taken:
                return count
            self._remember(self._recent, (token,))
            self._look()
        return len(tokens)

    def _compute(self, state: LLMatcher) -> None:
        state.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        if state.is_error():
            raise self._failure(state)
        self._filled = True

    def _look(self) -> None:
        self.complete: bool = self._state.is_accepting()
        self.finished: bool = self.complete and self._state.is_stopped()

    @staticmethod
    def _failure(state: LLMatcher) -> GenerationError:
        reason = state.get_error().strip().partition("\n")[0]
        return GenerationError(
            f"the constraint could not be followed any further: {reason}; a simpler pattern, with "
            "fewer repeats inside repeats, may help"
        )
