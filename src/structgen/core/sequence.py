"""A request while the core works on it.

Owns   the request's token ids, the slots of its tokens, and how far both have been computed.
Holds  `computed <= known`; positions below `shared` lie in slots of the radix tree (kept by one
       lock on `node`), those from there up to `allocated` in slots of its own. `shared` may be
       ahead of `computed`: cached tokens that must run again for their logits.
Used   by `schedule` and `core` only; it never leaves the core.
"""

from __future__ import annotations

import enum
from collections import Counter, deque

import msgspec
import numpy as np

from structgen.core.pool import Slots
from structgen.core.radix import Ids, Node
from structgen.core.text import TextStream
from structgen.request import Request, TokenLogprob, Usage
from structgen.sampling import Sampling


class Status(enum.Enum):
    """Where a sequence is on its way; it finishes exactly once."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Job(msgspec.Struct, frozen=True):
    """What the core is given: a request whose prompt has been encoded.

    `sampling` has no `None` left (but the seed, for which `seed` stands). `end_ids` are the
    model's own end tokens. `text` turns output ids to text; None for a job that samples nothing
    (priming and scoring), which ends when its last prompt token has been computed.
    """

    id: int
    request: Request
    sampling: Sampling
    seed: int
    prompt: Ids
    end_ids: frozenset[int]
    text: TextStream | None


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
        if job.request.want.prompt_logprobs == 0:
            self.prompt_logprobs.append(TokenLogprob(int(job.prompt[0]), None))
        self.counts: Counter[int] = Counter()
        self._held: deque[tuple[int, TokenLogprob | None]] = deque()
        self._let_go = 0
        self.stop_ids = frozenset(job.sampling.stop_token_ids)
        if not job.sampling.ignore_eos:
            self.stop_ids |= job.end_ids

    @property
    def output_length(self) -> int:
        """Tokens sampled so far."""
        return self.known - self.prompt_length

    @property
    def to_compute(self) -> int:
        """Tokens that are known but have no keys and values yet."""
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        """Only the last sampled token is still to be computed."""
        return self.computed >= self.prompt_length and self.to_compute == 1

    @property
    def logprob_next(self) -> int:
        """Next prompt index whose log-probability is to be found; the prompt's length for none."""
        start = self.request.want.prompt_logprobs
        return self.prompt_length if start is None else start + len(self.prompt_logprobs)

    @property
    def match_limit(self) -> int:
        """How many leading tokens may come from the cache.

        One token at least must run, to give logits; and the token at index i has its
        log-probability in the logits of token i - 1, which must then run too.
        """
        limit = self.known - 1
        if self.output_length == 0 and self.logprob_next < self.prompt_length:
            limit = min(limit, max(self.logprob_next - 1, 0))
        return limit

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached,
            completion_tokens=self.output_length,
        )

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.ids[self.known] = token
        self.known += 1
        self.counts[token] += 1

    def hold(self, token: int, entry: TokenLogprob | None) -> None:
        """Keep a sampled token back until it is certain that no stop string cuts it off."""
        self._held.append((token, entry))

    def let_go(self, settled: int) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Tokens to report now, with their log-probabilities: up to the first `settled` in all."""
        ready = [self._held.popleft() for _ in range(settled - self._let_go)]
        self._let_go = settled
        tokens = tuple(token for token, _ in ready)
        return tokens, tuple(entry for _, entry in ready if entry is not None)

    def own_slots(self) -> Slots:
        """The slots that belong to this sequence alone."""
        return self.slots[self.shared : self.allocated]
