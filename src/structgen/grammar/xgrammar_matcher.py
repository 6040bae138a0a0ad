"""The adapter to the second grammar backend, xgrammar: its automata are compiled ahead of requests.

`gate` says which schemas it masks exactly, and writes them for this module. Its masks take as long
as llguidance's, about 10 us; no state is derived while a request waits.

Owns   what xgrammar is told about a vocabulary, and what it gets wrong about bytes.
Holds  as `matcher`. xgrammar takes any three bytes that look like a character of UTF-8 for one;
       those of surrogates are no text, so a mask leaves them out.
Used   by `compiler`, in threads: the library takes 2 s to import, the vocabulary 0.1 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from structgen.errors import ConstraintError, GenerationError
from structgen.grammar.forced import CONTEXT, Written
from structgen.grammar.matcher import Mask, Vocabulary

MOST_SPACES = 2  # characters of white space between tokens, as in `schema`

# Behind the first byte, the second ones of a surrogate.
_SURROGATE, _SECOND = 0xED, range(0xA0, 0xC0)


class Compiler:
    """Compiles schemas for one vocabulary; any thread may."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar  # noqa: PLC0415 - takes a second, and few schemas come here

        # As `Vocabulary` does it: no token without text is ever allowed, the library's own end
        # token is behind all of the model's, and it never comes into it.
        tokens = [b"" if _has_surrogate(data) else data for data in vocabulary.tokens]
        info = xgrammar.TokenizerInfo(
            [*tokens, b""],
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size + 1,
            stop_token_ids=[vocabulary.end],
        )
        self.vocabulary = vocabulary
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        seconds = [bool(data) and data[0] in _SECOND for data in vocabulary.tokens]
        bits = np.array(seconds + [False] * (32 * vocabulary.words - vocabulary.size))
        known = np.array([bool(data) for data in tokens] + [False] * (len(bits) - len(tokens)))
        # What masks may allow; the second row, behind the first byte of a surrogate.
        self.text: tuple[Mask, Mask] = (_packed(known), _packed(known & ~bits))

    def compiled(self, schema: str, separators: tuple[str, str] | None) -> Automaton:
        """The automaton of a schema that `gate` gave out; 10 ms, or up to 0.3 s for large ones.

        Raises `ConstraintError` if the library refuses it.
        """
        layout: dict[str, Any] = {"any_whitespace": True, "max_whitespace_cnt": MOST_SPACES}
        if separators is not None:
            layout = {"any_whitespace": False, "separators": separators}
        try:
            found = self._compiler.compile_json_schema(schema, strict_mode=True, **layout)
        except RuntimeError as error:
            raise ConstraintError(f"JSON schema {schema!r:.200}: {error!s:.300}") from None
        return Automaton(self, found, self._library.GrammarMatcher)


class Automaton:
    """A compiled schema, shared by all requests with it."""

    def __init__(self, compiler: Compiler, compiled: Any, following: Any) -> None:  # noqa: ANN401 - the library has no types
        self._compiler, self._compiled, self._following = compiler, compiled, following
        self.bytes: int = compiled.memory_size_bytes

    def matcher(self) -> XgrammarMatcher:
        """A matcher that has accepted nothing yet."""
        return XgrammarMatcher(self._following(self._compiled), self._compiler)


class XgrammarMatcher:
    """`Matcher` by xgrammar."""

    def __init__(self, state: Any, compiler: Compiler) -> None:  # noqa: ANN401 - the library has no types
        """`state` is this matcher's alone."""
        self._state, self._text = state, compiler.text
        self._vocabulary = compiler.vocabulary
        self._row = np.zeros((1, -(-(self._vocabulary.size + 1) // 32)), np.int32)
        self._recent: deque[int] = deque(maxlen=CONTEXT)
        self._spelling = self._vocabulary.spelling
        self.words = self._vocabulary.words
        self._look(b"")

    def fill(self, row: Mask) -> None:
        """See `Matcher`."""
        if self.finished:
            row[:] = 0
        else:
            self._compute(self._state, row, half=self._half)

    def accept(self, token: int) -> None:
        """See `Matcher`."""
        if not self._taken(token):
            raise GenerationError(
                f"the constraint could not be followed any further: token {token} is not allowed"
            )

    def forced(self, limit: int) -> Sequence[int]:
        """See `Matcher`."""
        if self._spelling is None or self.complete:
            return ()
        data = self._state.find_jump_forward_string().encode()
        return self._spelling.certain(self._recent, data, self._ahead)[:limit]

    def _ahead(self, written: Written) -> Mask | None:
        """The mask behind some text."""
        ahead = self._state.fork()
        if not ahead.accept_string(written.text):
            return None
        allowed = np.zeros(self.words, np.int32)
        self._compute(ahead, allowed, half=False)
        return allowed

    def try_all(self, tokens: Sequence[int]) -> int:
        """Accept tokens for as long as they are allowed; how many were."""
        for count, token in enumerate(tokens):
            if not self._taken(token):
                return count
        return len(tokens)

    def _taken(self, token: int) -> bool:
        """Whether a token was allowed, and is accepted now."""
        if self.finished or not 0 <= token < self._vocabulary.size:
            return False
        # The library has complaints about tokens without text that go to the console.
        if not int(self._text[self._half][token >> 5]) >> (token & 31) & 1:
            return False
        if not self._state.accept_token(token):
            return False
        self._recent.append(token)
        self._look(self._vocabulary.tokens[token])
        return True

    def _compute(self, state: Any, row: Mask, *, half: bool) -> None:  # noqa: ANN401 - as above
        if not state.fill_next_token_bitmask(self._row, 0):
            self._row[:] = -1  # all tokens, and so said
        np.bitwise_and(self._row[0, : row.size], self._text[half], out=row)

    def _look(self, last: bytes) -> None:
        self._half = last.endswith(bytes([_SURROGATE]))
        self.complete: bool = self._state.is_completed()
        self.finished = False
        if self.complete:
            row = np.zeros(self.words, np.int32)
            self._compute(self._state, row, half=False)
            self.finished = not row.any()


def _has_surrogate(data: bytes) -> bool:
    """Whether some bytes of a token spell a surrogate, or a part of one."""
    return any(one == _SURROGATE and other in _SECOND for one, other in pairwise(data))


def _packed(bits: np.ndarray[Any, np.dtype[np.bool_]]) -> Mask:
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
