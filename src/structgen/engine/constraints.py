"""The constraints of an engine's requests: which it takes, and their grammars, compiled once.

Owns   the grammars that were compiled lately, the compiling that is under way, and the tasks that
       do it. Compiling runs in threads, few at a time; the event loop only waits.
Holds  a constraint is compiled once however many requests bring it at the same time; a request
       that is cancelled meanwhile leaves nothing behind, and if it was the only one that wanted
       the grammar, the grammar is dropped. A constraint that is refused fails its own requests.
Used   by `engine`.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable

import anyio.to_thread

from structgen.engine.loop import outlast
from structgen.errors import ConstraintError, EngineClosedError, OptionError
from structgen.grammar.compiler import KINDS, Grammar, compile_constraint, refusal
from structgen.grammar.matcher import Vocabulary
from structgen.models.checkpoint import Checkpoint
from structgen.request import Constraint, Request

MOST_KEPT = 2_000_000  # size of the grammars that are kept for later requests, about 50 MB
COMPILING_AT_ONCE = 2  # threads; what is compiled cannot be interrupted


class Constraints:
    """Compiles and keeps the grammars of one engine."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        compiling: Callable[[Constraint, Vocabulary], Grammar] = compile_constraint,
    ) -> None:
        """`compiling` is called in threads."""
        self._vocabulary, self._compile = vocabulary, compiling
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._size = 0
        self._under_way: dict[Constraint, _Compiling] = {}
        self._places = asyncio.Semaphore(COMPILING_AT_ONCE)
        self._closed = False

    async def grammar(self, request: Request) -> Grammar | None:
        """The grammar of a request's constraint, None if it has none.

        Raises `ConstraintError` for a constraint that cannot be enforced.
        """
        if request.constraint is None:
            return None
        constraint = _key(request.constraint)
        if (kept := self._kept.get(constraint)) is not None:
            self._kept.move_to_end(constraint)
            return kept
        found = self._under_way.get(constraint)
        if found is None:
            found = self._under_way[constraint] = _Compiling()
            found.task = asyncio.create_task(
                self._run(constraint, found), name="structgen compiles a constraint"
            )
        found.waiting += 1
        try:
            outcome = await asyncio.shield(found.task)
        finally:
            found.waiting -= 1
        if isinstance(outcome, ConstraintError):
            # One error of its own for each request: a traceback belongs to one task.
            raise ConstraintError(str(outcome))
        if outcome is None:
            raise EngineClosedError("the engine was closed while the constraint was compiled")
        return outcome

    async def close(self) -> None:
        """Wait for what is being compiled: a thread must not outlive the engine."""
        self._closed = True
        await outlast(asyncio.gather(*(each.task for each in self._under_way.values())))
        self._kept.clear()

    async def _run(
        self, constraint: Constraint, compiling: _Compiling
    ) -> Grammar | ConstraintError | None:
        """Compile when there is a place; None if nobody wants it any more."""
        try:
            async with self._places:
                if self._closed or not compiling.waiting:
                    return None
                grammar = await anyio.to_thread.run_sync(
                    self._compile, constraint, self._vocabulary
                )
        except ConstraintError as error:
            return error
        finally:
            del self._under_way[constraint]
        if compiling.waiting and not self._closed:
            self._keep(constraint, grammar)
        return grammar

    def _keep(self, constraint: Constraint, grammar: Grammar) -> None:
        """Keep a grammar for later requests; those that were used longest ago make room."""
        self._kept[constraint] = grammar
        self._size += grammar.size
        while self._size > MOST_KEPT:
            _, dropped = self._kept.popitem(last=False)
            self._size -= dropped.size


class _Compiling:
    """A constraint that is being compiled, and how many requests wait for it."""

    task: asyncio.Task[Grammar | ConstraintError | None]

    def __init__(self) -> None:
        self.waiting = 0


def vocabulary_of(checkpoint: Checkpoint, size: int) -> Vocabulary:
    """The tokens of a model as grammars see them; `size` logits.

    Takes 0.2 s for 50,000 tokens and holds the interpreter lock, so it is part of loading.
    """
    tokenizer = checkpoint.tokenizer
    textless = tokenizer.control_ids | set(checkpoint.defaults.end_ids)
    encode = functools.partial(tokenizer.encode, start=False)
    return Vocabulary(tokenizer.token_bytes, textless, size, encode)


def _key(constraint: Constraint) -> Constraint:
    """The constraint, which can be looked up. Raises `ConstraintError` for what is none."""
    try:
        hash(constraint)
    except TypeError:
        raise ConstraintError(f"{constraint!r:.200} is not made of strings") from None
    return constraint


def check(request: Request) -> None:
    """Refuse a constraint of an unknown kind, and options that contradict it, before any work."""
    if request.constraint is None:
        return
    if type(request.constraint).__struct_config__.tag not in KINDS:
        raise refusal(request.constraint)
    if request.sampling.ignore_eos:
        raise OptionError(
            "ignore_eos",
            "with a constraint the end tokens end the output where it is complete, and stand "
            "nowhere else; drop ignore_eos, or let the pattern have no end and use max_tokens",
        )
