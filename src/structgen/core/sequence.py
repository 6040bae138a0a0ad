"""A request while the core works on it.

Owns   the request's token ids, the slots of its tokens, and how far both have been computed.
Holds  `computed <= known`; positions below `shared` lie in slots of the radix tree (kept by one
       lock on `node`), those from there up to `allocated` in slots of its own. `shared` may be
       ahead of `computed`: cached tokens that must run again for their logits. Batches refer to
       `slots`: what they have seen of an array is never written to; others are a new array.
Used   by `schedule` and `core` only; it never leaves the core.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b

import msgspec
import numpy as np

from structgen.core.pool import Slots
from structgen.core.radix import Ids, Node
from structgen.core.text import TextStream
from structgen.errors import GenerationError, InvalidOutputError, StructgenError
from structgen.grammar.matcher import Mask, Matcher, allow
from structgen.grammar.source import Judge
from structgen.request import FinishReason, Request, TokenLogprob, Usage
from structgen.sampling import Sampling


class Status(enum.Enum):
    """Where a sequence is on its way; it finishes exactly once."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Candidates(msgspec.Struct, frozen=True):
    """Tokens whose log-probabilities are wanted at positions of a prompt, whatever stands there.

    first   the first such position; the logits of the token before it tell, so it is at least 1
    each    token ids for each position from there to the one behind the last token of the prompt,
            at least one at each
    """

    first: int
    each: tuple[Ids, ...]


class Job(msgspec.Struct, frozen=True):
    """What the core is given: a request whose prompt has been encoded.

    `sampling` has no `None` left (but the seed, for which `seed` stands). `end_ids` are the
    model's own end tokens. `text` turns output ids to text; None for a job that samples nothing
    (priming and scoring), which ends when its last prompt token has been computed.

    `matcher` follows the constraint on the output, and is this job's alone. With `jump`, tokens
    that the constraint leaves no choice about are taken without being drawn. An output that is
    whole is shown to the `judge`, and its job fails where that one finds a fault.

    `candidates` are for such a job, in place of `want.prompt_logprobs`: its last delta has one
    entry of prompt log-probabilities for each of them, position by position.
    """

    id: int
    request: Request
    sampling: Sampling
    seed: int
    prompt: Ids
    end_ids: frozenset[int]
    text: TextStream | None
    candidates: Candidates | None = None
    matcher: Matcher | None = None
    judge: Judge | None = None
    jump: bool = True


class Sequence:
    """One request on its way through the engine."""

    def __init__(self, job: Job, arrival: int) -> None:
        self.job = job
        self.id = job.id
        self.request = job.request
        self.sampling = job.sampling
        self.samples = job.text is not None
        self.arrival = arrival
        self.status = Status.WAITING
        self.aborted = False
        self.passed_over = 0
        self.prompt_length = len(job.prompt)
        self.max_length = self.prompt_length + (job.sampling.max_tokens or 0) * self.samples
        self.ids: Ids = np.empty(self.max_length, np.int64)
        self.ids[: self.prompt_length] = job.prompt
        self.known = self.prompt_length
        self.slots: Slots = np.zeros(self.max_length, np.int64)
        self.node: Node | None = None
        self.shared = 0
        self.computed = 0
        self.allocated = 0
        self.cached = 0
        self.counted = False  # stands in the schedule's counters
        self.resumed = False  # was retracted: its later cache hits are its own work
        self.prompt_logprobs: list[TokenLogprob] = []
        self._first_scored, self.logprob_stop = _scored(job)
        self._scored = 0
        if job.request.want.prompt_logprobs == 0:
            self.scored([TokenLogprob(int(job.prompt[0]), None)])
        self.counts: Counter[int] = Counter()
        self._held: deque[tuple[int, TokenLogprob | None]] = deque()
        self.settled = 0  # tokens of the output that have been reported
        self.stop_ids = frozenset(job.sampling.stop_token_ids)
        if not job.sampling.ignore_eos:
            self.stop_ids |= job.end_ids
        self.matcher = job.matcher
        self.may_end = True  # a stop token that is drawn next ends the output
        self.drawn = self.known  # index behind the last token that was no forced one
        self.told = 0  # tokens of the output whose text has been made
        self.forced = 0  # those of them that were not drawn
        self._written: list[str] = []
        self.fault: StructgenError | None = None  # what kept the next mask from being made

    @property
    def output_length(self) -> int:
        """Tokens of the output so far: drawn, or forced, told or not."""
        return self.known - self.prompt_length

    @property
    def to_compute(self) -> int:
        """Tokens that are known but have no keys and values yet."""
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        """Only the last token that was drawn is still to be computed, and those forced after it."""
        return self.computed >= self.prompt_length and self.drawn <= self.computed + 1 <= self.known

    @property
    def logprob_next(self) -> int:
        """Next position whose log-probabilities are to be found; `logprob_stop` or more: none."""
        return self._first_scored + self._scored

    def wanted_at(self, position: int) -> Ids:
        """The tokens whose log-probabilities are wanted at a position that is scored."""
        candidates = self.job.candidates
        if candidates is None:
            return self.ids[position : position + 1]
        return candidates.each[position - candidates.first]

    def scored(self, entries: list[TokenLogprob]) -> None:
        """What was found of the prompt at the position `logprob_next`; nothing behind it."""
        self.prompt_logprobs += entries
        self._scored += 1

    @property
    def match_limit(self) -> int:
        """How many leading tokens may come from the cache.

        One token at least must run, to give logits; and the token at index i has its
        log-probability in the logits of token i - 1, which must then run too.
        """
        limit = self.known - 1
        if self.logprob_next < self.logprob_stop:
            limit = min(limit, max(self.logprob_next - 1, 0))
        return limit

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached,
            completion_tokens=self.told,
        )

    @property
    def cost(self) -> Usage:
        """What it has cost if it goes no further: nothing before it was begun."""
        return self.usage if self.counted else Usage()

    @property
    def enough(self) -> bool:
        """Whether the output has `min_tokens`."""
        return self.output_length >= self.sampling.min_tokens

    def bind(self, row: Mask) -> None:
        """Write the mask of the token to be drawn next; only for a sequence with a matcher.

        Stop tokens are allowed where the output is complete, and has `min_tokens` or cannot go on;
        elsewhere those with a text are text, and the model's own are not allowed. (Where a matcher
        knows that nothing else is left, the output has ended already: see `ending`.)
        """
        matcher = self.matcher
        assert matcher is not None
        if not self._sound(lambda: matcher.fill(row)):
            row[:] = 0
            return
        self.may_end = matcher.complete and (self.enough or not row.any())
        if self.may_end:
            allow(row, self.stop_ids)

    def follow(self, token: int) -> bool:
        """Tell the matcher which token comes next; False if it cannot go on, and why is `fault`."""
        matcher = self.matcher
        return matcher is None or self._sound(lambda: matcher.accept(token))

    def jump(self) -> bool:
        """Take the tokens that are certain to come next, which thereby are known without a draw.

        False if the matcher cannot go on, and why is `fault`.
        """
        matcher, start, room = self.matcher, self.known, self.max_length - self.known
        if matcher is None or matcher.finished or not room or not self.job.jump:
            return True

        def take() -> None:
            for token in matcher.forced(room):
                matcher.accept(token)
                self._add(token)

        sound = self._sound(take)
        if self.known > start and self.wants_logprobs:
            # The logits that would have been drawn from are scored in place of that.
            if self.logprob_next >= self.logprob_stop:
                self._first_scored = start - self._scored
            self.logprob_stop = self.known
        return sound

    def _sound(self, step: Callable[[], None]) -> bool:
        """Take a step with the matcher; whatever it raises is a fault of this request alone."""
        try:
            step()
        except StructgenError as error:
            self.fault = error
        except Exception as error:  # noqa: BLE001 - a backend's own, which is not for the engine
            self.fault = GenerationError(f"the constraint could not be followed: {error!r}")
            self.fault.__cause__ = error
        return self.fault is None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the output are wanted."""
        want = self.request.want
        return want.logprobs or want.top_logprobs > 0

    @property
    def draws(self) -> bool:
        """Whether a token is to be drawn after the last known one."""
        over = self.known == self.max_length or (self.matcher is not None and self.matcher.finished)
        return self.samples and not over

    @property
    def complete(self) -> bool:
        """Whether all that was told is whole under the constraint; False where there is none."""
        return (
            self.matcher is not None and self.matcher.complete and self.told == self.output_length
        )

    @property
    def ending(self) -> FinishReason | None:
        """Why the output ends with the last token told, if it was no stop; None if it goes on."""
        whole = self.told == self.output_length
        if whole and self.matcher is not None and self.matcher.finished:
            return "stop"
        return "length" if self.prompt_length + self.told == self.max_length else None

    def append(self, token: int) -> None:
        """Add a token that was drawn."""
        self._add(token)
        self.drawn = self.known

    def _add(self, token: int) -> None:
        self.ids[self.known] = token
        self.known += 1
        self.counts[token] += 1

    def write(self, text: str) -> None:
        """Keep text of the output, if it is to be judged in the end."""
        if self.job.judge is not None:
            self._written.append(text)

    def verdict(self) -> StructgenError | None:
        """What is wrong with the whole text, if anybody judges it."""
        if self.job.judge is None:
            return None
        text = "".join(self._written)
        try:
            fault = self.job.judge.fault(text)
        except Exception as error:  # noqa: BLE001 - as in `_sound`
            failure = GenerationError(f"the final check of the output failed: {error!r}")
            failure.__cause__ = error
            return failure
        if fault is None:
            return None
        return InvalidOutputError(f"the output does not keep its constraint: {fault}", text)

    def tell(self, token: int, entry: TokenLogprob | None) -> None:
        """Take the next token into the text, though it may be that a stop string cuts it off."""
        self.count_told()
        self._held.append((token, entry))

    def count_told(self) -> None:
        """The next token of the output is told."""
        self.forced += self.prompt_length + self.told >= self.drawn
        self.told += 1

    def let_go(self, settled: int) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Tokens to report now, with their log-probabilities: up to the first `settled` in all."""
        ready = [self._held.popleft() for _ in range(settled - self.settled)]
        self.settled = settled
        tokens = tuple(token for token, _ in ready)
        return tokens, tuple(entry for _, entry in ready if entry is not None)

    def held(self) -> tuple[int, ...]:
        """Tokens that were told and not reported: at the end, those that a stop has cut off."""
        return tuple(token for token, _ in self._held)

    def replace_slots(self, slots: Slots) -> None:
        """Put others in place of the first ones."""
        if self.computed:
            self.slots = self.slots.copy()
        self.slots[: len(slots)] = slots

    def forget_slots(self) -> None:
        """Give up all of them; the sequence starts anew, if it does."""
        self.slots = np.zeros(self.max_length, np.int64)
        self.shared = self.computed = self.allocated = 0

    def own_slots(self) -> Slots:
        """The slots that belong to this sequence alone."""
        return self.slots[self.shared : self.allocated]


def _scored(job: Job) -> tuple[int, int]:
    """The positions that a job has scored: the first, and the one behind the last."""
    length, start = len(job.prompt), job.request.want.prompt_logprobs
    candidates = job.candidates
    if candidates is None:
        return length if start is None else start, length
    assert job.text is None, "candidates are for jobs that sample nothing"
    assert start is None, "a job scores its prompt or candidates"
    assert 1 <= candidates.first <= length, "there is a token before each candidate"
    assert len(candidates.each) == length + 1 - candidates.first, "a position is left out"
    assert all(ids.size for ids in candidates.each), "a position is without candidates"
    return candidates.first, length + 1


def seed_of(seed: int, number: int) -> int:
    """Seed of the n-th request of an engine with `seed`, where the request has none of its own."""
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
