"""Token ids to text, one token at a time: UTF-8 across tokens, stops, what is kept.

Owns   the bytes of an unfinished character and the text that may be the beginning of a stop.
Holds  the texts of all pieces, joined, are the text of all kept tokens plus the tail; no piece
       holds part of a character; no text that a stop cut off was ever given out.
Used   by `core`, one `TextStream` a request.

Characters. The bytes of all tokens together are decoded as UTF-8. An unfinished character, at
most three bytes, is held back until it is finished or proves invalid. Invalid bytes become U+FFFD
exactly as `bytes.decode("utf-8", errors="replace")` would have it for the whole output, and so do
bytes left dangling when the output ends. Nothing is ever concluded from a U+FFFD in the text: a
model may write one.

Stops. A stop is a stop string or a text that a stop pattern matches. The output ends before the
stop that is complete first; of several that are complete at the same character, before the longest.
That rule looks at characters only, so how the text was split into tokens makes no difference. Text
is held back while it is the beginning of a stop, and no longer; what still is one when the output
ends (of a pattern `a[^b]*b` everything since the first `a`) is given out then. A stop counts only
if the token that completes it was pushed with `allow_stop`; one that completes earlier is passed
over as ordinary text, for good, though its end may still be the beginning of another.

Kept tokens. Where a stop begins inside a token, or inside a character whose bytes began in an
earlier token, those tokens are dropped and the rest of their text before the stop is the `tail`.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence

import msgspec

from structgen.grammar.automaton import Search, automaton_of


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one push or flush brought.

    text      to be given out now
    settled   how many tokens, counted from the first, are certain to be kept whatever follows;
              with a stop or after a flush: how many are kept
    stop      the stop that ended the output: a stop string, or what a pattern matched
    tail      the end of the whole text, if a stop cut the token it came from: text of the
              settled tokens + tail == all text given out. May reach back into earlier pieces.
    """

    text: str = ""
    settled: int = 0
    stop: str | None = None
    tail: str = ""


class StopStrings:
    """An automaton that finds the first of several strings to be completed.

    Construction and search are those of Aho and Corasick, "Efficient string matching: an aid to
    bibliographic search", CACM 1975. A node stands for the longest end of the text so far that
    begins a stop; node 0 for none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._found: list[str | None] = [None]
        self._held = [0]
        for stop in stops:
            self._insert(stop)
        self._first = frozenset(self._next[0])
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, start=1):
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._found.append(None)
                self._held.append(depth)
            node = self._next[node][character]
        self._found[node] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            fail = self._fail[node]
            # A node's own stop is longer than any that ends at the same character.
            self._found[node] = self._found[node] or self._found[fail]
            if not self._next[node]:
                # A whole stop and the beginning of no other: if it was passed over, only a
                # shorter end of it can still begin one.
                self._held[node] = self._held[fail]
            for character, child in self._next[node].items():
                self._fail[child] = self.step(fail, character) if node else 0
                queue.append(child)

    def step(self, node: int, character: str) -> int:
        """The node after one more character."""
        following = self._next
        while node and character not in following[node]:
            node = self._fail[node]
        return following[node].get(character, 0)

    def scan(self, node: int, text: str, *, allow: bool) -> tuple[int, int, str | None]:
        """Read on from `node`; returns (node, characters read, stop), ending early at a stop."""
        if not node and self._first.isdisjoint(text):
            return 0, len(text), None
        for read, character in enumerate(text, start=1):
            node = self.step(node, character)
            if allow and (stop := self._found[node]) is not None:
                return node, read, stop
        return node, len(text), None

    def held(self, node: int) -> int:
        """How many characters at the end of the text may begin a stop that is not complete."""
        return self._held[node]


class TextStream:
    """The text of one output, as its tokens arrive.

    token_bytes          the bytes of every token by id; b"" for special tokens
    stops                stop strings; none may be empty
    patterns             stop patterns; raises `ConstraintError` for one that is refused
    strips_first_space   a text loses one leading space (SentencePiece)
    at_start             the output begins a text; False if it continues one, which loses nothing
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stops: Sequence[str] = (),
        patterns: Sequence[str] = (),
        *,
        strips_first_space: bool = False,
        at_start: bool = False,
    ) -> None:
        self._table = token_bytes
        self._stops = StopStrings(stops) if stops else None
        self._search = Search(automaton_of(patterns)) if patterns else None
        self._stoppable = bool(stops or patterns)
        self._strip = strips_first_space and at_start
        self._partial = b""
        self._pushed = 0
        self._allowed = True
        self._node = 0
        # Of the text since the last settled token: all of it, and how much has been given out.
        self._recent = ""
        self._given = 0
        # Where tokens end that end a character too: (length of the whole text, tokens so far),
        # ascending; the first is the last settled token, where `_recent` begins.
        self._marks = deque([(0, 0)])

    @property
    def partial(self) -> bool:
        """Whether the text given out and the settled tokens end at different places."""
        return self._given > 0 if self._stoppable else bool(self._partial)

    def push(self, token: int, *, allow_stop: bool = True) -> Piece:
        """Add a token of the output. Nothing may follow a stop or a flush.

        allow_stop   whether a stop that this token completes ends the output
        """
        self._pushed += 1
        data = self._table[token]
        if self._partial:
            data = self._partial + data
        text, read = utf_8_decode(data, "replace", False)
        self._partial = data[read:]
        if self._strip and text:
            text = text.removeprefix(" ")
            self._strip = False
        if not self._stoppable:
            return Piece(text, self._pushed)
        self._allowed = allow_stop
        return self._advance(text)

    def flush(self, before: Piece | None = None) -> Piece:
        """End the output: give out what was held back. All tokens are kept.

        before   the piece of the last push, if it was not sent: the result then contains it

        An unfinished character becomes U+FFFD, which might in theory complete a stop.
        """
        text, _ = utf_8_decode(self._partial, "replace", True)
        self._partial = b""
        if self._stoppable:
            piece = self._advance(text)
            rest = self._recent[self._given :]
            if piece.stop is None:
                piece = Piece(piece.text + rest, self._pushed)
        else:
            piece = Piece(text, self._pushed)
        if before is None:
            return piece
        return msgspec.structs.replace(piece, text=before.text + piece.text)

    def _advance(self, text: str) -> Piece:
        """Take in text that the last token finished."""
        read, stop = self._read(text)
        if stop:
            return self._cut(len(self._recent) + read - stop, text[:read])
        held = self._stops.held(self._node) if self._stops is not None else 0
        if self._search is not None:
            held = max(held, self._search.held)
        self._recent += text
        length = self._marks[0][0] + len(self._recent)
        if not self._partial:
            self._marks.append((length, self._pushed))
        free = len(self._recent) - held
        piece_text = self._recent[self._given : free]
        self._given = free
        self._settle(length - held)
        return Piece(piece_text, self._marks[0][1])

    def _read(self, text: str) -> tuple[int, int]:
        """Look for stops; how much was read, and the length of the stop that ends there or 0."""
        read, length = len(text), 0
        if self._stops is not None:
            self._node, read, stop = self._stops.scan(self._node, text, allow=self._allowed)
            length = len(stop or "")
        if self._search is not None:
            sooner, match = self._search.scan(text[:read], allow=self._allowed)
            if match and (sooner < read or match > length):
                read, length = sooner, match
        return read, length

    def _cut(self, at: int, text: str) -> Piece:
        """End the output before the stop that begins at index `at` of the recent text."""
        self._recent += text
        given, stop = self._recent[self._given : at], self._recent[at:]
        dropped = self._settle(self._marks[0][0] + at)
        return Piece(given, self._marks[0][1], stop, self._recent[: at - dropped])

    def _settle(self, length: int) -> int:
        """Settle the tokens that end within the first `length` characters of the whole text.

        Returns by how much the front of `_recent` moved.
        """
        marks, start = self._marks, self._marks[0][0]
        while len(marks) > 1 and marks[1][0] <= length:
            marks.popleft()
        moved = marks[0][0] - start
        if moved:
            self._recent = self._recent[moved:]
            self._given -= moved
        return moved
