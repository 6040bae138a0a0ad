"""The text of an output that is bound to a constraint: no stop may break what that promises.

Holds  an output that a stop ends is complete under its constraint. Where it would not be, the stop
       is passed over: `stop="."` does not cut the number `[0-9]+\\.[0-9]+` in half.
Used   by `engine`, which gives it to `core` as the job's `TextStream`.
"""

from __future__ import annotations

from collections.abc import Sequence

from structgen.core.text import Piece, TextStream
from structgen.grammar.compiler import Grammar


class PromisedText(TextStream):
    """The text of an output that is bound to a constraint.

    A stop counts only where what stands before it is complete; elsewhere it is text like any
    other. So an output that a stop ends keeps what the constraint promises.
    """

    def __init__(
        self,
        grammar: Grammar,
        table: Sequence[bytes],
        stops: Sequence[str],
        patterns: Sequence[str],
    ) -> None:
        """`table`, `stops` and `patterns` are those of `TextStream`."""
        super().__init__(table, stops, patterns)
        self._grammar = grammar
        self._given_by = table, stops, patterns
        self._told: list[tuple[int, bool]] = []

    def push(self, token: int, *, allow_stop: bool = True) -> Piece:
        """Add a token; see `TextStream.push`."""
        piece = super().push(token, allow_stop=allow_stop)
        self._told.append((token, allow_stop))
        if piece.stop is None:
            return piece
        kept = [each for each, _ in self._told[: piece.settled]]
        if self._grammar.matches(kept, piece.tail):
            return piece
        # Stops that do not count are rare, so it is enough to begin again and read past this one.
        self._told[-1] = token, False
        super().__init__(*self._given_by)
        for each, allowed in self._told:
            piece = super().push(each, allow_stop=allowed)
        return piece
