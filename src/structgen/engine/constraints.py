"""The constraints of an engine's requests: which it takes, and their grammars, compiled once.

Owns   the grammars that were compiled lately, the compiling that is under way, and the tasks and
       threads that do it. The event loop only waits.
Holds  a constraint is compiled once however many requests bring it at the same time; a request
       that is cancelled meanwhile leaves nothing behind, and if it was the only one that wanted
       the grammar, the grammar is dropped. A constraint that is refused, that takes too long or
       that breaks the compiler fails its own requests; what others keep from being compiled is no
       fault of it, and may be asked for again. At most four threads compile at a time: two that
       are waited for, and two that were given up, since no thread can be stopped. No two of them
       have the same constraint: who sends one again and again takes one of these places, not all.
       While they do, whoever holds the interpreter lock gives it up after half a millisecond:
       the thread that computes a step takes it hundreds of times.
Used   by `engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

from structgen.errors import ConstraintError, EngineClosedError, OverloadedError
from structgen.grammar.compiler import KINDS, Grammar, compile_constraint, refusal
from structgen.grammar.matcher import Vocabulary
from structgen.models.checkpoint import Checkpoint
from structgen.options import in_words
from structgen.request import Constraint, Request
from structgen.waiting import outlast

MOST_KEPT = 2_000_000  # size of the grammars that are kept for later requests, about 50 MB
COMPILING_AT_ONCE = 2  # threads; what is compiled cannot be interrupted
MOST_STUCK = 2  # threads that went on after their time; while there are so many, none begins
COMPILE_SECONDS = 10.0
BRISK = 0.0005  # seconds

Compiling = Callable[[Constraint, Vocabulary], Grammar]
Refusal = ConstraintError | OverloadedError


class Constraints:
    """Compiles and keeps the grammars of one engine."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        compiling: Compiling = compile_constraint,
        seconds: float = COMPILE_SECONDS,
    ) -> None:
        """`compiling` is called in threads; `seconds` bound the wait for one, queue and all."""
        self._vocabulary, self._compile, self._seconds = vocabulary, compiling, seconds
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._size = 0
        # With those that are kept elsewhere: by `Compiled`, or by requests that run.
        self._alive: WeakValueDictionary[Constraint, Grammar] = WeakValueDictionary()
        self._under_way: dict[Constraint, _Compiling] = {}
        self._places = asyncio.Semaphore(COMPILING_AT_ONCE)
        self._turns = _Turns()
        # Whose threads went on after their time, and what was said of them.
        self._going_on: dict[Constraint, Refusal] = {}
        self._closed = False

    async def grammar(self, request: Request) -> Grammar | None:
        """The grammar of a request's constraint, None if it has none. Errors as in `compiled`."""
        return None if request.constraint is None else await self.compiled(request.constraint)

    async def compiled(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        Raises `ConstraintError` for a constraint that cannot be enforced, or not be compiled in
        time, `OverloadedError` where others keep it from being compiled.
        """
        constraint = _key(constraint)
        if (kept := self._alive.get(constraint)) is not None:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
            return kept
        found = self._under_way.get(constraint)
        if found is None:
            self._check_going_on(constraint)
            found = self._under_way[constraint] = _Compiling()
            found.task = asyncio.create_task(
                self._run(constraint, found), name="structgen compiles a constraint"
            )
        found.waiting += 1
        try:
            outcome = await asyncio.shield(found.task)
        finally:
            found.waiting -= 1
        if isinstance(outcome, Refusal):
            raise _again(outcome)
        if outcome is None:
            raise EngineClosedError("the engine was closed while the constraint was compiled")
        return outcome

    async def close(self) -> None:
        """Wait for what is being compiled: a thread must not outlive the engine.

        Those that were given up before are left: they hold the vocabulary, and not the model.
        """
        self._closed = True
        await outlast(asyncio.gather(*(each.task for each in self._under_way.values())))
        self._turns.restore()
        self._kept.clear()

    async def _run(self, constraint: Constraint, compiling: _Compiling) -> Grammar | Refusal | None:
        """Compile when there is a place; None if nobody wants it any more."""
        begun: asyncio.Future[Grammar] | None = None
        began = 0.0
        try:
            async with asyncio.timeout(self._seconds), self._places:
                if self._closed or not compiling.waiting:
                    return None
                self._check_going_on(constraint)
                began = asyncio.get_running_loop().time()
                begun = _in_thread(functools.partial(self._compile, constraint, self._vocabulary))
                self._turns.shorten(begun)
                # Shielded: it goes on whether or not somebody waits.
                grammar = await asyncio.shield(begun)
        except (ConstraintError, OverloadedError) as error:
            return error
        except TimeoutError:
            return self._late(constraint, begun, began)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to these requests
            broken = ConstraintError(
                f"{in_words(constraint)} broke the compiler: {error!r:.300}; a simpler one may do"
            )
            broken.__cause__ = error
            return broken
        finally:
            del self._under_way[constraint]
        if not compiling.waiting:
            return None
        if not self._closed:
            self._keep(constraint, grammar)
        return grammar

    @property
    def _stuck(self) -> int:
        """How many threads went on after their time, and cannot be stopped."""
        return len(self._going_on)

    def _check_going_on(self, constraint: Constraint) -> None:
        """Begin nothing that still goes on, and nothing while too many threads do."""
        if (said := self._going_on.get(constraint)) is not None:
            raise _again(said)
        if self._stuck >= MOST_STUCK:
            raise OverloadedError(
                f"{in_words(constraint)}: nothing new is compiled at the moment, because "
                f"{self._stuck} constraints that came before take more than {self._seconds:g} s "
                "and cannot be stopped; try again later"
            )

    def _late(
        self, constraint: Constraint, begun: asyncio.Future[Grammar] | None, began: float
    ) -> Refusal:
        """The error for a constraint whose time is over. Its thread, if it has one, goes on.

        began   when the thread did, if it has one, in the event loop's seconds
        """
        named, limit = in_words(constraint), f"{self._seconds:g} s (the engine's compile_timeout)"
        said: Refusal = OverloadedError(
            f"{named} was not compiled within {limit}, because others were; try again"
        )
        if begun is None:
            return said
        if asyncio.get_running_loop().time() - began >= self._seconds / 2:
            said = ConstraintError(f"{named} takes longer to compile than {limit}; simplify it")
        self._going_on[constraint] = said
        begun.add_done_callback(functools.partial(self._ended, constraint))
        return said

    def _ended(self, constraint: Constraint, begun: asyncio.Future[Grammar]) -> None:
        said = self._going_on.pop(constraint)
        # A failure is looked at in any case, or asyncio would report it as lost.
        if begun.cancelled() or begun.exception() is not None or self._closed:
            return
        if isinstance(said, OverloadedError):  # who was told to try again finds it
            self._keep(constraint, begun.result())

    def _keep(self, constraint: Constraint, grammar: Grammar) -> None:
        """Keep a grammar for later requests; those that were used longest ago make room."""
        self._alive[constraint] = grammar
        self._kept[constraint] = grammar
        self._size += grammar.size
        while self._size > MOST_KEPT:
            _, dropped = self._kept.popitem(last=False)
            self._size -= dropped.size


class _Compiling:
    """A constraint that is being compiled, and how many requests wait for it."""

    task: asyncio.Task[Grammar | Refusal | None]

    def __init__(self) -> None:
        self.waiting = 0


class _Turns:
    """How long one thread may keep the interpreter lock from the others: less while we compile."""

    def __init__(self) -> None:
        self._compiling = 0
        self._usual: float | None = None

    def shorten(self, until: asyncio.Future[Grammar]) -> None:
        """Shorten the turns, until this and all that came before it are done."""
        self._compiling += 1
        interval = sys.getswitchinterval()
        if interval > BRISK:  # if not, another engine shortened them, and will restore them
            self._usual = interval
            sys.setswitchinterval(BRISK)
        until.add_done_callback(self._ended)

    def restore(self) -> None:
        """Give back what there was, if it was changed."""
        if self._usual is not None:
            sys.setswitchinterval(self._usual)
            self._usual = None

    def _ended(self, _: object) -> None:
        self._compiling -= 1
        if not self._compiling:
            self.restore()


def _in_thread(compiling: Callable[[], Grammar]) -> asyncio.Future[Grammar]:
    """Compile in a thread of its own, which nothing waits for when the process ends."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Grammar] = loop.create_future()

    def settle(grammar: Grammar | None, error: BaseException | None) -> None:
        if made.done():
            return
        if grammar is not None:
            made.set_result(grammar)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            made.set_exception(error)
        else:
            # A Rust panic, say. A future refuses StopIteration, and what is no Exception would
            # pass by all who wait and end the loop.
            made.set_exception(RuntimeError(repr(error)))

    def run() -> None:
        grammar, failure = None, None
        try:
            grammar = compiling()
        except BaseException as error:  # noqa: BLE001 - it is handed over
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
            loop.call_soon_threadsafe(settle, grammar, failure)

    threading.Thread(target=run, name="structgen compiling", daemon=True).start()
    return made


def _again(said: Refusal) -> Refusal:
    """The same error for one more request: a traceback belongs to one task."""
    found = type(said)(str(said))
    found.__cause__ = said.__cause__
    return found


def vocabulary_of(checkpoint: Checkpoint, size: int) -> Vocabulary:
    """The tokens of a model as grammars see them; `size` logits.

    Takes 0.2 s for 50,000 tokens and holds the interpreter lock, so it is part of loading.
    """
    tokenizer = checkpoint.tokenizer
    textless = tokenizer.control_ids | set(checkpoint.defaults.end_ids)
    encode = functools.partial(tokenizer.encode, start=False)
    markers = checkpoint.markers
    return Vocabulary(tokenizer.token_bytes, textless, size, encode, markers=markers)


def _key(constraint: Constraint) -> Constraint:
    """The constraint, which can be looked up. Raises `ConstraintError` for what is none."""
    try:
        hash(constraint)
    except TypeError:
        raise ConstraintError(f"{constraint!r:.200} is not made of strings") from None
    except RecursionError:
        raise ConstraintError("the constraint is nested too deeply; nest less") from None
    return constraint


def check_kind(constraint: Constraint) -> None:
    """Refuse a constraint of a kind that there is no grammar for."""
    if type(constraint).__struct_config__.tag not in KINDS:
        raise refusal(constraint)
