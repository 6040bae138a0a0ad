"""What one step adds to the output of a request: tokens told, text made, the end found.

Owns   nothing beyond one commit.
Holds  tokens are told in their order, each once, and none after the one that ends the output; the
       delta has every token and log-probability that is certain to be kept.
Used   by `core`, while it commits.
"""

from __future__ import annotations

from structgen.core.sequence import Sequence
from structgen.core.text import Piece
from structgen.request import Delta, Finish, FinishReason, TokenLogprob


class Output:
    """The output of a sequence, as far as one commit takes it."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._first = not sequence.told
        self._text = ""
        self._piece = Piece(settled=sequence.settled)
        self._reason: FinishReason | None = None
        self._matched: str | int | None = None
        self._ended: TokenLogprob | None = None

    @property
    def ended(self) -> bool:
        """Whether the output has come to its end."""
        return self._reason is not None

    def tell(self, token: int, entry: TokenLogprob | None) -> None:
        """Take in the next token of the output. Nothing is told after the end."""
        sequence, text = self._sequence, self._sequence.job.text
        assert text is not None, "a job that samples nothing has no output"
        assert not self.ended, "the output has ended"
        sequence.tell(token, entry)
        piece = text.push(token, allow_stop=sequence.told >= sequence.sampling.min_tokens)
        if piece.stop is None and (reason := sequence.ending) is not None:
            self._reason = reason
            piece = text.flush(piece)
        self._take(piece)

    def tell_ahead(self) -> None:
        """Take in the tokens that are known and not told, none of which is to be scored."""
        sequence = self._sequence
        while not self.ended and sequence.told < sequence.output_length:
            self.tell(int(sequence.ids[sequence.prompt_length + sequence.told]), None)

    def end(self, token: int, entry: TokenLogprob | None) -> None:
        """The token that ends the output was drawn; it is not part of the text."""
        self._sequence.count_told()
        self._ended = entry
        self.close("stop", token)

    def close(self, reason: FinishReason, matched: int | None = None) -> None:
        """End the output with what was told."""
        text = self._sequence.job.text
        assert text is not None, "a job that samples nothing has no output"
        self._reason, self._matched = reason, matched
        self._take(text.flush())

    def delta(self) -> Delta | None:
        """What there is to say; None if that is nothing."""
        sequence, piece = self._sequence, self._piece
        text = sequence.job.text
        assert text is not None, "a job that samples nothing has no output"
        tokens, logprobs = sequence.let_go(piece.settled)
        first = self._first and (sequence.told or self.ended)
        prompt_logprobs = tuple(sequence.prompt_logprobs) if first else ()
        if not (tokens or self._text or prompt_logprobs or self.ended):
            return None
        return Delta(
            request=sequence.id,
            tokens=tokens,
            text=self._text,
            tail=piece.tail,
            partial=not self.ended and text.partial,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def finish(self) -> Finish:
        """How the output ended."""
        assert self._reason is not None, "the output goes on"
        sequence = self._sequence
        return Finish(
            reason=self._reason,
            matched=self._matched,
            ended=self._ended,
            dropped=self._dropped(),
            complete=self._reason == "stop" or sequence.complete,
            forced=sequence.forced,
            usage=sequence.usage,
        )

    def _dropped(self) -> tuple[int, ...]:
        held = self._sequence.held()
        return (*held, self._matched) if isinstance(self._matched, int) else held

    def _take(self, piece: Piece) -> None:
        if piece.stop is not None:
            self._reason, self._matched = "stop", piece.stop
        self._piece = piece
        self._text += piece.text
        self._sequence.write(piece.text)
