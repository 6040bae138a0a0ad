"""The core: a synchronous, clock-free, thread-free state machine around one step.

    submit(job), abort(id)      at any time
    plan() -> Batch | None      when no step is in flight; None if there is no work
    mask(batch)                 while the step runs, if rows of the batch are bound to a mask
    commit(batch, picked)       the step has run: returns what it means for each request
    fail(batch, error)          the step has raised: its requests fail, everybody else goes on

Owns   all sequences, and through `Schedule` the radix trees and the pool.
Holds  between `plan` and `commit` nothing that the step may read is freed or handed out again.
Used   by `engine` (submit, abort, scopes) and `loop` (plan, mask, commit, fail), on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from structgen.core.batch import Batch, Picked, assemble, scored_positions
from structgen.core.output import Output
from structgen.core.pool import Pool
from structgen.core.radix import Ids
from structgen.core.schedule import Schedule, Slice
from structgen.core.sequence import Job, Sequence, Status
from structgen.errors import (
    ContextLengthError,
    InvalidOutputError,
    NumericalError,
    PromptError,
    StepFailedError,
    StructgenError,
)
from structgen.grammar.matcher import Mask
from structgen.request import Delta, Finish, Namespace, TokenLogprob, Usage


class Failure(msgspec.Struct, frozen=True):
    """A request that ends by an error, and what it has cost."""

    request: int
    error: StructgenError
    usage: Usage


Outcome = Delta | Failure


class Totals:
    """Running totals of requests and tokens, for statistics."""

    def __init__(self) -> None:
        self.steps = 0
        self.finished = 0
        self.aborted = 0
        self.failed = 0
        self.generated_tokens = 0
        self.forced_tokens = 0
        self.batch_sequences = 0
        self.batch_max = 0


class Core:
    """What the engine loop drives."""

    def __init__(
        self,
        slots: int,
        *,
        chunk_size: int = 512,
        max_running: int = 64,
        radix: bool = True,
        padded_rows: Callable[[int], int] = int,
    ) -> None:
        """`slots` usable slots; `padded_rows`: from tokens of a step to rows of its batch."""
        self.pool = Pool(slots)
        self.schedule = Schedule(
            self.pool, chunk_size=chunk_size, max_running=max_running, radix=radix
        )
        self.totals = Totals()
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: list[Slice] | None = None
        self._arrivals = 0
        self._padded_rows = padded_rows

    @property
    def has_work(self) -> bool:
        """Whether `plan` would return a batch."""
        return bool(self.schedule.running or self.schedule.waiting)

    @property
    def in_flight(self) -> bool:
        """Whether a batch has been planned and neither committed nor failed."""
        return self._in_flight is not None

    @property
    def admitted(self) -> tuple[int, ...]:
        """Requests of which the last step that was planned is the first to compute something."""
        return tuple(self.schedule.admitted)

    # ------------------------------------------------------------ requests

    def submit(self, job: Job) -> None:
        """Queue a job. Raises `PromptError` or `ContextLengthError` if it could never run,
        `GenerationError` if its constraint cannot be followed.
        """
        if not len(job.prompt):
            raise PromptError("the prompt is empty: it has no token to continue from")
        sequence = Sequence(job, self._arrivals)
        if sequence.max_length > self.pool.total:
            raise ContextLengthError(
                f"{sequence.prompt_length} prompt tokens and up to "
                f"{sequence.max_length - sequence.prompt_length} new ones need "
                f"{sequence.max_length} slots, but the pool has {self.pool.total}; "
                "lower max_tokens, or give the engine more slots"
            )
        if not sequence.jump():
            assert sequence.fault is not None
            raise sequence.fault
        self._arrivals += 1
        self._sequences[job.id] = sequence
        self.schedule.waiting.append(sequence)

    def abort(self, request: int) -> Usage:
        """End a request without a word; returns what it has cost.

        Unknown and finished ones are left alone, and cost nothing more. If the step in flight
        computes it, its slots stay until that step is committed.
        """
        sequence = self._sequences.get(request)
        if sequence is None or sequence.aborted:
            return Usage()
        sequence.aborted = True
        self.totals.aborted += 1
        if sequence.status is Status.WAITING:
            self.schedule.waiting.remove(sequence)
            self._forget(sequence)
        elif not any(piece.sequence is sequence for piece in self._in_flight or ()):
            self._release(sequence)
        return sequence.cost

    def open_scope(self, number: int, namespace: Namespace, ids: Ids) -> None:
        """Keep the cached part of a prefix from eviction; see `Schedule.open_scope`."""
        self.schedule.open_scope(number, namespace, ids)

    def close_scope(self, number: int) -> None:
        """Undo `open_scope`."""
        self.schedule.close_scope(number)

    def flush(self) -> int:
        """Drop everything cached that nobody holds; returns the number of tokens dropped."""
        slots = self.schedule.radix.evict(self.pool.total)
        self.pool.give_back(slots)
        return len(slots)

    # ------------------------------------------------------------ steps

    def plan(self) -> Batch | None:
        """Choose and assemble the next step."""
        assert self._in_flight is None, "the step in flight has not been committed"
        slices = self.schedule.plan()
        if not slices:
            return None
        self.totals.steps += 1
        self.totals.batch_sequences += len(slices)
        self.totals.batch_max = max(self.totals.batch_max, len(slices))
        self._in_flight = slices
        self.pool.launch()
        return assemble(self.totals.steps, slices, self._padded_rows)

    def mask(self, batch: Batch) -> Mask | None:
        """Masks of the tokens that the step in flight draws, for `Batch.masks` rows; once a step.

        A matcher that fails gets a row that allows nothing, so that its request fails alone.
        """
        assert self._in_flight is not None, "no step is in flight"
        assert batch.step == self.totals.steps, "this is not the step in flight"
        bound = [
            (piece.sequence, piece.sequence.matcher)
            for piece in self._in_flight
            if piece.sequence.matcher is not None and samples(piece)
        ]
        if not bound:
            return None
        masks = np.zeros((len(bound), bound[0][1].words), np.int32)
        for row, (sequence, _) in zip(masks, bound, strict=True):
            sequence.bind(row)
        return masks

    def commit(self, batch: Batch, picked: Picked) -> list[Outcome]:
        """Take in the outcome of the step in flight."""
        slices = self._land(batch)
        outcomes: list[Outcome] = []
        row = 0
        for piece in slices:
            sequence = piece.sequence
            rows = range(row, row + len(scored_positions(piece)) + samples(piece))
            row = rows.stop
            broken_r = picked.broken_r[rows.start : rows.stop]
            broken = bool(broken_r.any())
            if sequence.aborted:
                self._release(sequence, trusted=not broken)
            elif broken and (sequence.fault is None or broken_r[:-1].any()):
                outcomes.append(self._break(sequence))
            else:
                # A matcher that failed allowed no token: the last row is broken for that alone, and
                # what was known before may still bring the output to its end.
                sequence.computed = piece.start + piece.count
                if not broken and _tells_of_its_end(piece) and sequence.node is not None:
                    self.schedule.radix.prove(sequence.node)
                outcomes.extend(self._advance(piece, picked, rows, trusted=not broken))
        self.schedule.radix.land()
        return outcomes

    def fail(self, batch: Batch, error: BaseException) -> list[Outcome]:
        """The step in flight has raised: its requests fail, what they published is withdrawn."""
        slices = self._land(batch)
        outcomes: list[Outcome] = []
        self.schedule.retreat(lambda node: node.pending)
        for piece in slices:
            sequence = piece.sequence
            self._release(sequence)
            if not sequence.aborted:
                self.totals.failed += 1
                failure = StepFailedError(
                    f"the step that computed this request failed: {error!r}; "
                    "the engine goes on, so the request can be sent again"
                )
                failure.__cause__ = error
                outcomes.append(Failure(sequence.id, failure, sequence.cost))
        self.pool.give_back(self.schedule.radix.withdraw())
        return outcomes

    def _land(self, batch: Batch) -> list[Slice]:
        slices = self._in_flight
        assert slices is not None, "no step is in flight"
        assert batch.step == self.totals.steps, "this is not the step in flight"
        self._in_flight = None
        self.pool.land()
        return slices

    def _break(self, sequence: Sequence) -> Failure:
        """End a request whose logits gave no token: they are broken, or nothing is allowed."""
        self.totals.failed += 1
        self._release(sequence, trusted=False)
        error = sequence.fault or NumericalError(
            f"the logits at position {sequence.known - 1} are NaN or infinite, or no token is "
            "allowed there; a wider dtype (float32) or fewer bans may help"
        )
        return Failure(sequence.id, error, sequence.cost)

    def _advance(
        self, piece: Slice, picked: Picked, rows: range, *, trusted: bool
    ) -> Iterator[Outcome]:
        sequence = piece.sequence
        output = Output(sequence)
        told, forced = sequence.told, sequence.forced
        sound = self._take_rows(sequence, output, piece, picked, rows)
        self.totals.generated_tokens += sequence.told - told
        self.totals.forced_tokens += sequence.forced - forced
        if not sound:
            if (delta := output.delta()) is not None:
                yield delta
            yield self._break(sequence)
        elif sequence.samples:
            yield from self._report(sequence, output, trusted=trusted)
        elif sequence.computed == sequence.known:
            yield self._end_scoring(sequence)

    def _take_rows(
        self, sequence: Sequence, output: Output, piece: Slice, picked: Picked, rows: range
    ) -> bool:
        """Take in what the logit rows of a slice say; False if the constraint failed."""
        for row, position in zip(rows, scored_positions(piece), strict=False):
            wanted = sequence.wanted_at(position).tolist()
            entries = _entries(wanted, row, picked)
            ahead = sequence.samples and position >= sequence.prompt_length
            sequence.scored([] if ahead else entries)
            if ahead and not output.ended:
                output.tell(wanted[0], entries[0])
        if output.ended or not sequence.samples or sequence.computed < sequence.known:
            return True
        output.tell_ahead()
        if sequence.fault is not None:
            return output.ended
        if not output.ended and not sequence.draws:
            # Nothing could follow the prompt: the only output is the empty one.
            output.close("stop")
        return output.ended or self._take_token(sequence, output, picked, rows[-1])

    def _take_token(self, sequence: Sequence, output: Output, picked: Picked, row: int) -> bool:
        """Take in the token that was drawn, and what is forced after it; False on a fault."""
        token = int(picked.tokens_r[row])
        entry = _entry(token, row, picked) if sequence.wants_logprobs else None
        sequence.append(token)
        if token in sequence.stop_ids and sequence.may_end:
            output.end(token, entry)
            return True
        if not sequence.follow(token):
            return False
        output.tell(token, entry)
        if output.ended:
            return True
        if not sequence.jump():
            return False
        if not sequence.wants_logprobs:
            output.tell_ahead()
        return True

    def _report(self, sequence: Sequence, output: Output, *, trusted: bool) -> Iterator[Outcome]:
        """What a step brought, and how the output ended if it did."""
        delta = output.delta()
        if not output.ended:
            if delta is not None:
                yield delta
            return
        assert delta is not None
        finish = output.finish()
        self._release(sequence, trusted=trusted)
        fault = sequence.verdict() if finish.complete else None
        if finish.reason == "length" and isinstance(fault, InvalidOutputError):
            # "12" of "123" is as whole as the mask can tell; that it would not do is no fault yet.
            finish, fault = msgspec.structs.replace(finish, complete=False), None
        if fault is not None:
            self.totals.failed += 1
            if delta.tokens or delta.text or delta.prompt_logprobs:
                yield delta
            yield Failure(sequence.id, fault, sequence.cost)
            return
        self.totals.finished += 1
        yield msgspec.structs.replace(delta, finish=finish)

    def _end_scoring(self, sequence: Sequence) -> Delta:
        """End a job that samples nothing."""
        self.totals.finished += 1
        self._release(sequence)
        return Delta(
            request=sequence.id,
            prompt_logprobs=tuple(sequence.prompt_logprobs),
            finish=Finish(reason="length", complete=False, usage=sequence.usage),
        )

    def _release(self, sequence: Sequence, *, trusted: bool = True) -> None:
        self.schedule.release(sequence, trusted=trusted)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        sequence.status = Status.FINISHED
        del self._sequences[sequence.id]


def samples(piece: Slice) -> bool:
    """Whether this slice ends with the last known token, and a token is drawn after it."""
    sequence = piece.sequence
    return sequence.draws and piece.start + piece.count == sequence.known


def _tells_of_its_end(piece: Slice) -> bool:
    """Whether there are logits of the last known token, and this slice computes them."""
    sequence = piece.sequence
    tells = sequence.draws or sequence.job.candidates is not None
    return tells and piece.start + piece.count == sequence.known


def _entry(token: int, row: int, picked: Picked) -> TokenLogprob:
    return TokenLogprob(token, float(picked.logprobs_r[row]), picked.top[row])


def _entries(wanted: list[int], row: int, picked: Picked) -> list[TokenLogprob]:
    first = _entry(wanted[0], row, picked)
    if len(wanted) == 1:
        return [first]
    others = zip(wanted[1:], picked.further[row], strict=True)
    return [first, *(TokenLogprob(token, logprob) for token, logprob in others)]
