"""A computer without tensors: it fills slots with tags and checks everything that it reads.

The tag of a token is a hash of its namespace and of all tokens up to it: what its keys and values
depend on. The next token and every log-probability are functions of that tag. So whatever the
engine does with caching, chunking or retraction, the output is the one of a ten-line model; and
a slot that holds anything but the tag of its position is a bug of the engine, seen at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from structgen.core.batch import Batch, Picked
from structgen.core.core import Core, Failure, Outcome
from structgen.core.pool import Slots
from structgen.core.promise import PromisedText
from structgen.core.sequence import Candidates, Job
from structgen.core.text import TextStream
from structgen.errors import GenerationError, StructgenError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import Mask, Vocabulary, allow
from structgen.grammar.source import Judge
from structgen.kernels.attention import PADDING_SLOT, Layout
from structgen.request import Delta, Finish, Lineage, Namespace, Regex, Request, Tokens
from structgen.sampling import Sampling, Want

VOCABULARY = 5
TABLE = tuple(bytes([ord("a") + token]) for token in range(VOCABULARY))
PLAIN = Namespace()
NOTHING_ELSE = Want()
POISON = -1  # the tag of keys and values that are not finite; whatever reads them is poisoned too
_MASK = (1 << 62) - 1


@cache
def root_tag(namespace: Namespace) -> int:
    """What the tag of a first token is derived from."""
    return zlib.crc32(repr(namespace).encode()) + 1


def extend(tag: int, token: int) -> int:
    """The tag of a token that stands after the one with `tag`."""
    if tag == POISON:
        return POISON
    mixed = (tag ^ (token + 1)) * 0x9E3779B97F4A7C15 & _MASK
    return mixed ^ mixed >> 29


def path_tags(namespace: Namespace, ids: Sequence[int]) -> list[int]:
    """The tags of a whole path."""
    tags: list[int] = []
    tag = root_tag(namespace)
    for token in ids:
        tag = extend(tag, token)
        tags.append(tag)
    return tags


def next_token(tag: int, banned: Collection[int] = ()) -> int | None:
    """The token after the one with `tag`; None if all are banned."""
    for offset in range(VOCABULARY):
        token = ((tag >> 7) + offset) % VOCABULARY
        if token not in banned:
            return token
    return None


def logprob(tag: int, token: int) -> float:
    """The log-probability of `token` after the one with `tag`; exact in float32."""
    return -float(((tag >> 3) + 7 * token) % 97) / 8


class TagMemory:
    """The pool of a model that does not exist: one tag a slot.

    `roots` of a call: per sequence of the batch the tag that its first token is derived from.
    """

    def __init__(self, slots: int) -> None:
        self.tags = [0] * (slots + 1)

    def compute(
        self,
        batch: Batch,
        roots: Sequence[int],
        *,
        poisoned: Collection[int] = (),
        broken: Collection[int] = (),
        mask: Mask | None = None,
    ) -> Picked:
        """Run a step. Of the sequences in `poisoned` keys and values come out not finite, of
        those in `broken` only the logits.
        """
        tags_t = self._write(batch, roots, poisoned)
        owner_t = np.repeat(np.arange(len(roots)), np.diff(batch.layout.query_start_b1)).tolist()
        broken_r = [owner_t[row] in broken for row in batch.logit_rows_r]
        return self._pick(batch, tags_t, broken_r, mask)

    def lose(self, batch: Batch) -> None:
        """Do what a step that raises may have done: leave rubbish in the slots it writes."""
        for slot in batch.layout.slots_t.tolist():
            self.tags[slot] = 0

    def _write(self, batch: Batch, roots: Sequence[int], poisoned: Collection[int]) -> list[int]:
        layout, tokens_t = batch.layout, batch.tokens_t.tolist()
        slots_t = layout.slots_t.tolist()
        tags_t = [0] * len(tokens_t)
        contexts = [context.tolist() for context in layout.context_b]
        # By position: a row may read what another row of this step writes, but never a later one.
        for position, row, owner in sorted(_rows(layout)):
            before = self.tags[contexts[owner][position - 1]] if position else roots[owner]
            tag = extend(before, tokens_t[row])
            slot = slots_t[row]
            if slot == PADDING_SLOT:
                kept = self.tags[contexts[owner][position]]
                assert kept in {tag, POISON}, f"row {row} relies on a slot with another content"
                tag = kept
            else:
                tag = POISON if owner in poisoned else tag
                self.tags[slot] = tag
            tags_t[row] = tag
        return tags_t

    def _pick(
        self, batch: Batch, tags_t: list[int], broken: list[bool], mask: Mask | None
    ) -> Picked:
        rows = batch.rows
        banned = {edit.row: set(edit.banned_ids.tolist()) for edit in rows.edits}
        for row in np.flatnonzero(rows.mask_row_r >= 0).tolist():
            assert mask is not None
            assert len(mask) == batch.masks
            word = int(mask[rows.mask_row_r[row], 0])
            banned.setdefault(row, set()).update(
                token for token in range(VOCABULARY) if not word >> token & 1
            )
        tokens: list[int] = []
        logprobs: list[float] = []
        top: list[tuple[tuple[int, float], ...]] = []
        further: dict[int, tuple[float, ...]] = {}
        for number, row in enumerate(batch.logit_rows_r.tolist()):
            tag, target = tags_t[row], int(rows.target_r[number])
            drawn = next_token(tag, banned.get(number, ())) if target < 0 else target
            broken[number] = broken[number] or tag == POISON or drawn is None
            tokens.append(drawn or 0)
            logprobs.append(logprob(tag, tokens[-1]))
            likeliest = range(max(0, int(rows.logprobs_r[number])))
            top.append(tuple((token, logprob(tag, token)) for token in likeliest))
            if number in rows.further:
                assert target >= 0, "a row that draws has no targets"
                others = rows.further[number].tolist()
                further[number] = tuple(logprob(tag, token) for token in others)
        return Picked(
            np.array(tokens, np.int64),
            np.array(logprobs, np.float32),
            tuple(top),
            np.array(broken, np.bool_),
            further,
        )


def _rows(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(position, row, sequence) of every row that is not padding."""
    starts = layout.query_start_b1.tolist()
    for owner, context in enumerate(layout.context_b):
        first = len(context) - (starts[owner + 1] - starts[owner])
        for row in range(starts[owner], starts[owner + 1]):
            yield first + row - starts[owner], row, owner


def layout_faults(batch: Batch) -> list[str]:
    """What is wrong with a batch, whatever its slots hold; empty for a good one."""
    layout = batch.layout
    slots = layout.slots_t
    width, end = len(batch.tokens_t), int(layout.query_start_b1[-1])
    faults: list[str] = []
    real = slots[slots != PADDING_SLOT]
    if len(set(real.tolist())) < len(real):
        faults.append(f"two rows write the same slot: {slots}")
    if slots[end:].any() or layout.positions_t[end:].any() or not end <= width == len(slots):
        faults.append(f"padding rows touch slots: {slots[end:]}")
    faults += [
        f"a context holds padding, or a slot twice: {context}"
        for context in layout.context_b
        if PADDING_SLOT in context or len(set(context.tolist())) < len(context)
    ]
    for position, row, owner in _rows(layout):
        if layout.positions_t[row] != position:
            faults.append(f"row {row} is at {position}, not {layout.positions_t[row]}")
        if slots[row] not in {PADDING_SLOT, layout.context_b[owner][position]}:
            faults.append(f"row {row} writes to a slot that its own context does not hold")
    return faults


class Contexts:
    """What batches have said of contexts, to hold it against later ones."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, Slots, list[int]]] = {}

    def faults(self, batch: Batch) -> list[str]:
        """Where this batch, or what has become of older ones, breaks the promise of `origin_b`."""
        layout = batch.layout
        faults = [
            f"a context was {slots} and has become {context}"
            for _, context, slots in self._seen.values()
            if context.tolist() != slots
        ]
        assert layout.origin_b is not None
        if len({id(origin) for origin in layout.origin_b}) < len(layout.context_b):
            faults.append("two contexts have the same origin")
        for origin, context in zip(layout.origin_b, layout.context_b, strict=True):
            slots = context.tolist()
            if (last := self._seen.get(id(origin))) is not None:
                both = min(len(slots), len(last[2]))
                if slots[:both] != last[2][:both]:
                    faults.append(f"a context goes on from {last[2]} as {slots}")
            self._seen[id(origin)] = origin, context, slots
        return faults


class FakeComputer:
    """A computer for the loop; the first `forward` numbered in `failing` (from 1) raises."""

    def __init__(self, slots: int, failing: dict[int, BaseException] | None = None) -> None:
        self.memory = TagMemory(slots)
        self.steps = 0
        self._failing = failing or {}

    def forward(self, batch: Batch) -> Tensor:
        self.steps += 1
        if error := self._failing.get(self.steps):
            self.memory.lose(batch)
            raise error
        return torch.empty(len(batch.logit_rows_r), 0)

    def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
        assert len(logits_rv) == len(batch.logit_rows_r)
        roots = [root_tag(PLAIN)] * len(batch.layout.context_b)
        return self.memory.compute(batch, roots, mask=mask)


class Script(msgspec.Struct, frozen=True):
    """A constraint written down place by place, and a matcher that does as it is told.

    places   the letters that are allowed at each place; a single one is forced
    ends     lengths at which an output may end, besides the whole
    most     how many tokens are forced at once
    breaks   the length at which the matcher gives up; None for never
    """

    places: tuple[str, ...]
    ends: frozenset[int] = frozenset()
    most: int = 99
    breaks: int | None = None

    def begins(self, text: str) -> bool:
        """Whether some text that matches begins so."""
        fits = all(letter in place for letter, place in zip(text, self.places, strict=False))
        return fits and len(text) <= len(self.places)

    def matches_text(self, text: str) -> bool:
        """Whether a text is what the constraint asks for."""
        return self.begins(text) and len(text) in {*self.ends, len(self.places)}

    def ahead(self, length: int) -> list[int]:
        """The tokens that are forced after so many."""
        found: list[int] = []
        for at in range(length, len(self.places)):
            place = self.places[at]
            if len(place) > 1 or at in {*self.ends, self.breaks} or len(found) == self.most:
                break
            found.append(ord(place) - ord("a"))
        return found

    def matches(self, tokens: Sequence[int], tail: str = "") -> bool:
        """What `PromisedText` asks of a grammar."""
        return self.matches_text("".join(TABLE[token].decode() for token in tokens) + tail)

    def matcher(self) -> ScriptedMatcher:
        """A matcher that has accepted nothing yet."""
        return ScriptedMatcher(self)


class ScriptedMatcher:
    """`Matcher` of a `Script`."""

    words = 1

    def __init__(self, script: Script) -> None:
        self._script = script
        self._text = ""

    @property
    def complete(self) -> bool:
        return self._script.matches_text(self._text)

    @property
    def finished(self) -> bool:
        return self.complete and len(self._text) == len(self._script.places)

    def fill(self, row: Mask) -> None:
        self._go_on()
        letters = "" if self.finished else self._script.places[len(self._text)]
        row[:] = 0
        allow(row, [ord(letter) - ord("a") for letter in letters])

    def accept(self, token: int) -> None:
        self._go_on()
        self._text += TABLE[token].decode()
        assert self._script.begins(self._text), "the token is not allowed here"

    def forced(self, limit: int) -> Sequence[int]:
        assert limit > 0, "nothing is asked for"
        self._go_on()
        return self._script.ahead(len(self._text))[:limit]

    def _go_on(self) -> None:
        assert not self.finished, "there is nothing left to ask"
        if len(self._text) == self._script.breaks:
            # A backend may also raise what the engine does not know.
            kind = GenerationError if self._script.breaks % 2 else OverflowError
            raise kind("gave up")


class Strict(msgspec.Struct, frozen=True):
    """A judge that finds fault with texts of an odd length; or who cannot judge them."""

    raises: bool = False

    def fault(self, text: str) -> str | None:
        if len(text) % 2 and self.raises:
            raise OverflowError("too hard")
        return "/: oddness" if len(text) % 2 else None


def job(
    number: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 1,
    end_ids: Collection[int] = (),
    samples: bool = True,
    want: Want = NOTHING_ELSE,
    candidates: Candidates | None = None,
    pattern: str = "",
    script: Script | None = None,
    judge: Judge | None = None,
    jump: bool = True,
    namespace: Namespace = PLAIN,
    priority: int = 0,
    scope: int = 0,
    **sampling: object,
) -> Job:
    """A job for the core, as the engine would make it. `sampling`: more fields of `Sampling`.

    pattern   a regular expression for the whole output; "" for none
    script    the same place by place
    """
    options = Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]  # as given
    grammar: Any = (script or (grammar_of(pattern) if pattern else None)) if samples else None
    kind = partial(PromisedText, grammar) if grammar else TextStream
    return Job(
        id=number,
        request=Request(
            prompt=(Tokens(tuple(prompt), ""),),
            sampling=options,
            constraint=Regex(pattern or "scripted") if grammar else None,
            want=want,
            namespace=namespace,
            lineage=Lineage(scope=scope),
            priority=priority,
        ),
        sampling=options,
        seed=0,
        prompt=np.array(prompt, np.int64),
        end_ids=frozenset(end_ids),
        text=kind(TABLE, options.stop, ()) if samples else None,
        candidates=candidates,
        matcher=grammar.matcher() if grammar else None,
        judge=judge if grammar else None,
        jump=jump,
    )


@cache
def grammar_of(pattern: str) -> Grammar:
    """The grammar of a regular expression over the tokens a to e."""
    return compile_constraint(Regex(pattern), Vocabulary(TABLE, (), VOCABULARY, _encode))


def _encode(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def candidates_from(first: int, *each: Sequence[int]) -> Candidates:
    """Candidates at the positions from `first` on."""
    return Candidates(first, tuple(np.array(ids, np.int64) for ids in each))


class Bench:
    """A core on a bench: steps by hand, a memory of tags, and what came out."""

    def __init__(
        self, slots: int = 64, *, chunk_size: int = 16, max_running: int = 8, radix: bool = True
    ) -> None:
        self.core = Core(slots, chunk_size=chunk_size, max_running=max_running, radix=radix)
        self.memory = TagMemory(slots)
        self.contexts = Contexts()
        self.outcomes: dict[int, list[Outcome]] = {}
        self.batch: Batch | None = None
        self._numbers = 0

    def submit(self, prompt: Sequence[int], **options: object) -> int:
        """Queue a request; returns its number."""
        self._numbers += 1
        self.core.submit(job(self._numbers, prompt, **options))  # type: ignore[arg-type]  # as given
        return self._numbers

    def plan(self) -> Batch:
        """Plan a step, which is then in flight."""
        self.batch = self.core.plan()
        assert self.batch is not None
        assert self.contexts.faults(self.batch) == []
        return self.batch

    def planned(self) -> list[tuple[int, int, int]]:
        """(request, start, count) of the slices of the step in flight."""
        slices = self.core._in_flight or []
        return [(piece.sequence.id, piece.start, piece.count) for piece in slices]

    def land(
        self, *, poisoned: Collection[int] = (), broken: Collection[int] = ()
    ) -> list[Outcome]:
        """Compute and commit the step in flight; the arguments name requests."""
        assert self.batch is not None
        assert layout_faults(self.batch) == []
        slices = self.core._in_flight or []
        ids = [piece.sequence.id for piece in slices]
        picked = self.memory.compute(
            self.batch,
            [root_tag(piece.sequence.request.namespace) for piece in slices],
            poisoned={ids.index(request) for request in poisoned},
            broken={ids.index(request) for request in broken},
            mask=self.core.mask(self.batch),
        )
        return self._keep(self.core.commit(self.batch, picked))

    def crash(self, error: BaseException) -> list[Outcome]:
        """Let the step in flight raise."""
        assert self.batch is not None
        self.memory.lose(self.batch)
        return self._keep(self.core.fail(self.batch, error))

    def step(self) -> list[Outcome]:
        """One whole step."""
        self.plan()
        return self.land()

    def run(self) -> None:
        """Step until there is no work."""
        while self.core.has_work:
            self.step()

    def run_alone(self, prompt: Sequence[int], **options: object) -> list[int]:
        """Submit a request, step until there is no work, and return what it brought."""
        request = self.submit(prompt, **options)
        self.run()
        return self.tokens(request)

    def tokens(self, request: int) -> list[int]:
        """The tokens that a request has brought so far."""
        deltas = [o for o in self.outcomes.get(request, ()) if isinstance(o, Delta)]
        return [token for delta in deltas for token in delta.tokens]

    def end(self, request: int) -> Finish | StructgenError | None:
        """How a request ended; None if it has not (or without a word)."""
        if request not in self.outcomes:
            return None
        last = self.outcomes[request][-1]
        return last.error if isinstance(last, Failure) else last.finish

    def _keep(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.batch = None
        for outcome in outcomes:
            self.outcomes.setdefault(outcome.request, []).append(outcome)
        return outcomes
