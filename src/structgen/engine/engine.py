"""The engine: a model in this process, shared by every coroutine that awaits it.

Owns   the streams, the encoder, and the loop task; the core owns everything about requests.
Holds  whatever a caller does - cancel, break, raise, forget - its request ends with its scope,
       and leaving the engine ends everything that it started.
Used   by programs (as a `Backend`), by applications (embedded), by the server.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, Self, Unpack, cast, get_origin, overload

import anyio.to_thread
import torch

from structgen.backend import Capabilities
from structgen.chat import Chat
from structgen.core.core import Core, Failure, Outcome
from structgen.core.promise import PromisedText
from structgen.core.radix import Ids
from structgen.core.sequence import Candidates, Job, seed_of
from structgen.core.text import TextStream
from structgen.engine.admission import SLOW_STOP_CHARACTERS, check, check_queue
from structgen.engine.compiled import Compiled
from structgen.engine.config import EngineOptions, config_from
from structgen.engine.constraints import Constraints, check_kind
from structgen.engine.encode import Encoder, PromptLike, parts_from
from structgen.engine.loading import Loaded, load
from structgen.engine.loop import Loop, Waits
from structgen.engine.observe import LagMeter, Statistics, snapshot
from structgen.engine.score import score
from structgen.engine.stream import DeltaStream, Mailbox
from structgen.errors import (
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
)
from structgen.grammar.automaton import is_slow
from structgen.grammar.compiler import KINDS, Grammar
from structgen.models.linear import padded_rows
from structgen.options import ConstraintLike, GenOptions, constraint_of, request_from
from structgen.request import (
    Completion,
    JsonSchema,
    Lineage,
    Namespace,
    Prompt,
    Request,
    Scores,
    Tokens,
    Usage,
    join_deltas,
)
from structgen.sampling import ModelDefaults
from structgen.schemas import SchemaLike
from structgen.waiting import outlast


class Engine:
    """A language model and everything that runs it, as an async context manager.

        async with Engine("smollm2-135m") as engine:
            completion = await engine.generate("1, 2, 3,", max_tokens=8, temperature=0)

    `model` is a known name, a directory in Hugging Face format, a .gguf file or a hub id.
    Options and their defaults: `EngineConfig`. Prompts are a string (ordinary text), a list of
    messages (rendered by the model's chat template, the assistant's turn open), a list of token
    ids, or prompt parts.

    Raises, where it is entered, `ModelError` for a model that cannot be loaded, and
    `OptionError` at once for an option that cannot be used.
    """

    _load = staticmethod(load)  # tests load with kernels of their own, see there

    def __init__(
        self, model: str | Path = "smollm2-135m", **options: Unpack[EngineOptions]
    ) -> None:
        self.model = str(model)
        self._source = model  # a `Path` is never a name
        self.config = config_from(options)
        self._loaded: Loaded | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        self._numbers = itertools.count(1)
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._waits = Waits()
        self._scopes = itertools.count(1)
        self._lag = LagMeter()
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None
        self._entered = self._open = False

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        if self._entered:
            raise EngineError("this engine has been opened before; make a new one")
        self._entered = True
        loading = asyncio.ensure_future(
            anyio.to_thread.run_sync(self._load, self._source, self.config)
        )
        try:
            await outlast(loading)  # a thread cannot be stopped, and must not be left behind
            loaded = loading.result()
        except BaseException:
            self._entered = False
            raise
        self._loaded = loaded
        self._event_loop = asyncio.get_running_loop()
        self._encoder = Encoder(loaded.checkpoint.tokenizer)
        self._constraints = Constraints(loaded.vocabulary, seconds=self.config.compile_timeout)
        self._core = Core(
            loaded.slots,
            chunk_size=self.config.chunk_size,
            max_running=self.config.max_running,
            radix=self.config.radix,
            padded_rows=padded_rows,
        )
        self._loop = Loop(
            self._core,
            loaded.runner,
            self._deliver,
            waits=self._waits,
            threads=self.config.threads or torch.get_num_threads(),
            worker=self.config.worker,
        )
        self._open = True
        self._tasks = [
            asyncio.create_task(self._drive(), name="structgen engine loop"),
            asyncio.create_task(self._lag.run(self._loop.busy), name="structgen lag meter"),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open = False
        drive, meter = self._tasks
        meter.cancel()
        closing = asyncio.ensure_future(self._constraints.close())
        try:
            try:
                await self._loop.stop(drive)
                await outlast(meter)
            finally:
                await outlast(closing)
        finally:
            self._fail_all(EngineClosedError("the engine was closed while this request ran"))
            # Whoever keeps the engine, or a stream of it, must not keep the weights.
            self._loaded = None
            del self._loop
        if self._error is not None and error is None:
            raise EngineDiedError("the engine loop ended by an error") from self._error

    async def _drive(self) -> None:
        try:
            await self._loop.run()
        except BaseException as error:
            # Whatever it was: who waits for a request must not wait for ever.
            self._error = error
            died = EngineDiedError(f"the engine loop ended by an error: {error!r}")
            died.__cause__ = error
            self._fail_all(died)
            if not isinstance(error, Exception):
                raise

    # ------------------------------------------------------------ what it is

    @property
    def capabilities(self) -> Capabilities:
        """What programs can ask of this engine."""
        loaded = self._ready()
        return Capabilities(
            tokens=True,
            tokenizer=loaded.checkpoint.tokenizer.fingerprint,
            logprobs=True,
            score=True,
            primes=True,
            stop_regex=True,
            constraints=KINDS,
            max_context=loaded.max_context,
        )

    @property
    def chat(self) -> Chat | None:
        """The model's chat template, None if it has none."""
        return self._ready().checkpoint.chat

    @property
    def defaults(self) -> ModelDefaults:
        """Sampling defaults and end tokens, from the model's files."""
        return self._ready().checkpoint.defaults

    @property
    def loaded(self) -> Loaded:
        """The model: checkpoint, runner, dtype, number of slots, context length."""
        return self._ready()

    def statistics(self) -> Statistics:
        """A frozen snapshot of counters and gauges."""
        self._ready()
        return snapshot(self._core, self._lag, stalled=self._loop.stalled)

    def flush_cache(self) -> int:
        """Drop every cached prefix that no request or scope holds; returns tokens dropped."""
        self._ready()
        return self._core.flush()

    # ------------------------------------------------------------ generating

    @overload
    def generate(self, prompt: Request, /) -> DeltaStream: ...
    @overload
    def generate(
        self, prompt: PromptLike, /, **options: Unpack[GenOptions]
    ) -> Coroutine[Any, Any, Completion]: ...
    def generate(
        self, prompt: Request | PromptLike, /, **options: Unpack[GenOptions]
    ) -> DeltaStream | Coroutine[Any, Any, Completion]:
        """Generate from a prompt: `completion = await engine.generate("...", max_tokens=9)`.

        With a `Request` (as programs and servers send) it is the stream of its deltas instead:
        `async with engine.generate(request) as deltas`.

        Raises `PromptError`, `OptionError`, `ConstraintError`, `TemplateError` or
        `UnsupportedError` before any work, `GenerationError` if the request fails later.
        """
        if isinstance(prompt, Request):
            if options:
                raise TypeError(
                    f"a Request has its options inside; {', '.join(options)} cannot come on top"
                )
            return self._stream(prompt)
        return self._complete(request_from(self._prompt(prompt), options))

    def stream(self, prompt: PromptLike, /, **options: Unpack[GenOptions]) -> DeltaStream:
        """The deltas of a generation as they come: `async with engine.stream("...") as deltas`.

        Leaving the block aborts what is still running. Errors as in `generate`.
        """
        return self._stream(request_from(self._prompt(prompt), options))

    async def compile(self, constraint: ConstraintLike | SchemaLike, /) -> Compiled:
        """Compile a constraint ahead of its use: `await engine.compile(Regex("a+"))`.

        The result can be given to any generating call as `constraint=`, and asked what it accepts.
        Takes a constraint, a term, or a schema as `JsonSchema` does: a dict, a type, JSON text.

        Raises `OptionError` for anything else, `ConstraintError` for what cannot be enforced,
        `OverloadedError` where others keep it from being compiled in time.
        """
        # `list[int]` is no type, and has an origin.
        is_schema = isinstance(constraint, str | bool | Mapping | type | UnionType)
        if is_schema or get_origin(constraint) is not None:
            constraint = JsonSchema(cast("SchemaLike", constraint))
        spec = constraint_of(constraint)
        self._check_loop()
        check_kind(spec)
        return Compiled(spec, await self._constraints.compiled(spec))

    async def score(
        self,
        prompt: PromptLike,
        continuations: Sequence[str],
        /,
        *,
        lineage: Lineage = Lineage(),
        namespace: Namespace = Namespace(),
    ) -> Scores:
        """Exact log-probabilities of each continuation after the prompt; see `Backend.score`.

        What does not fit the context or the pool is refused before any work.
        """
        request = Request(prompt=self._prompt(prompt), lineage=lineage, namespace=namespace)
        before, read = await self._encode(request), functools.partial(self._read, request)
        check_queue(self._core.schedule, self.config, len(before))
        return await score(before, continuations, self._encoder, self._ready(), read)

    async def encode(self, prompt: PromptLike, /) -> tuple[int, ...]:
        """The token ids that a prompt is sent as. Errors as in `generate`."""
        ids = await self._encode(Request(prompt=self._prompt(prompt)))
        return tuple(ids.tolist())

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of token ids; special tokens have none. `PromptError` for one that is unknown.

        What is no whole character, as at the end of a part of a text, becomes U+FFFD.
        """
        parts = (Tokens(tuple(ids), ""),)
        return self._ready().checkpoint.tokenizer.decode(self._encoder.encode(parts).tolist())

    async def prime(
        self,
        prompt: PromptLike,
        /,
        *,
        lineage: Lineage = Lineage(),
        namespace: Namespace = Namespace(),
    ) -> Usage:
        """Compute the prompt's keys and values, so that later requests find them cached."""
        request = Request(prompt=self._prompt(prompt), lineage=lineage, namespace=namespace)
        async with self._read(request, await self._encode(request)) as deltas:
            return (await _joined(deltas)).usage

    @asynccontextmanager
    async def scope(
        self, prefix: PromptLike, /, *, namespace: Namespace = Namespace()
    ) -> AsyncIterator[int]:
        """A fork scope: while it is open the prefix stays in the cache. Yields the scope's id.

        Requests whose lineage names the scope extend what it keeps, up to the whole prefix.
        Under pressure the engine gives up pins before it lets a request wait for ever.
        """
        ids = await self._encode(Request(prompt=self._prompt(prefix), namespace=namespace))
        number = next(self._scopes)
        self._core.open_scope(number, namespace, ids)
        try:
            yield number
        finally:
            self._core.close_scope(number)

    # ------------------------------------------------------------ requests

    def _stream(self, request: Request) -> DeltaStream:
        async def submit(mailbox: Mailbox) -> int:
            self._check(request)
            grammar = await self._grammar(request)
            if grammar is not None:
                mailbox.enforced, mailbox.finder = grammar.path, grammar.source.finder
            made = await self._text_stream(request, grammar)
            text = None if request.sampling.max_tokens == 0 else made
            ids = await self._encode(request)
            return self._submit(request, ids, mailbox, text, grammar=grammar)

        return DeltaStream(submit, self._abandon, self._abandon_from_anywhere)

    async def _complete(self, request: Request) -> Completion:
        async with self._stream(request) as deltas:
            return await _joined(deltas, self._ready().checkpoint.tokenizer.fingerprint)

    def _read(self, request: Request, ids: Ids, wanted: Candidates | None = None) -> DeltaStream:
        """The stream of a request that samples nothing."""

        async def submit(mailbox: Mailbox) -> int:
            return self._submit(request, ids, mailbox, None, wanted)

        return DeltaStream(submit, self._abandon, self._abandon_from_anywhere)

    def _submit(
        self,
        request: Request,
        ids: Ids,
        mailbox: Mailbox,
        text: TextStream | None,
        candidates: Candidates | None = None,
        *,
        grammar: Grammar | None = None,
    ) -> int:
        """Hand a request to the core; `text` is None if it samples nothing."""
        loaded = self._ready()  # it may have been closed while a long prompt was encoded
        number = next(self._numbers)
        sampling = loaded.checkpoint.defaults.fill(request.sampling)
        job = Job(
            id=number,
            request=request,
            sampling=sampling,
            seed=seed_of(self.config.seed, number) if sampling.seed is None else sampling.seed,
            prompt=ids,
            end_ids=frozenset(loaded.checkpoint.defaults.end_ids),
            text=text,
            candidates=candidates,
            matcher=None if grammar is None else grammar.matcher(),
            judge=None if grammar is None else grammar.source.judge,
            jump=self.config.jump_forward,
        )
        total = len(ids) + (sampling.max_tokens or 0) * (text is not None)
        if total > loaded.max_context:
            raise ContextLengthError(
                f"{len(ids)} prompt tokens and max_tokens={total - len(ids)} make {total}, more "
                f"than the context of {loaded.max_context}; shorten the prompt or lower max_tokens"
            )
        if candidates is None:  # the jobs of one call of `score` were let in together
            check_queue(self._core.schedule, self.config, len(ids))
        self._core.submit(job)
        self._mailboxes[number] = mailbox
        self._waits.arrive(number)
        if request.deadline is not None:
            self._timers[number] = self._event_loop.call_later(
                request.deadline, self._expire, number, request.deadline
            )
        self._loop.wake()
        return number

    def _check(self, request: Request) -> None:
        """Refuse what this engine cannot do, before any work."""
        check(request, self._check_loop(), self.model)

    def _check_loop(self) -> Loaded:
        loaded = self._ready()
        if asyncio.get_running_loop() is not self._event_loop:
            raise EngineError(
                "this engine was opened on another event loop; await it there, or open one here"
            )
        return loaded

    async def _grammar(self, request: Request) -> Grammar | None:
        try:
            async with asyncio.timeout(request.deadline):
                return await self._constraints.grammar(request)
        except TimeoutError:
            raise _late(request.deadline or 0.0) from None

    async def _encode(self, request: Request) -> Ids:
        """The ids of a request's prompt; refuses what this engine cannot do."""
        self._check(request)
        return await self._encoder.encoded(request.prompt, self._ready().max_context)

    async def _text_stream(self, request: Request, grammar: Grammar | None) -> TextStream:
        """What cuts the output; made before any other work, since it refuses patterns."""
        loaded, sampling = self._ready(), request.sampling
        bound = grammar is not None
        table = loaded.vocabulary.shown if bound else loaded.checkpoint.tokenizer.token_bytes
        kind = TextStream if grammar is None else functools.partial(PromisedText, grammar)
        stream = functools.partial(kind, table, sampling.stop, sampling.stop_regex)
        if sum(map(len, sampling.stop)) > SLOW_STOP_CHARACTERS or is_slow(sampling.stop_regex):
            return await anyio.to_thread.run_sync(stream)
        return stream()

    def _prompt(self, prompt: PromptLike) -> Prompt:
        return parts_from(prompt, self._ready().checkpoint.chat)

    # ------------------------------------------------------------ the loop's side

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            mailbox = self._mailboxes.get(outcome.request)
            if mailbox is None:
                continue
            if isinstance(outcome, Failure):
                mailbox.usage = outcome.usage
                mailbox.fail(outcome.error)
            else:
                mailbox.push(outcome)

    def _abandon(self, request: int) -> None:
        mailbox = self._mailboxes.pop(request, None)
        self._waits.forget(request)
        if timer := self._timers.pop(request, None):
            timer.cancel()
        spent = self._core.abort(request)
        if mailbox is not None:
            mailbox.usage += spent

    def _abandon_from_anywhere(self, request: int) -> None:
        if self._open:
            self._event_loop.call_soon_threadsafe(self._abandon, request)

    def _expire(self, request: int, deadline: float) -> None:
        mailbox = self._mailboxes.get(request)
        if mailbox is not None and not mailbox.finished:
            mailbox.fail(_late(deadline))
            mailbox.usage = self._core.abort(request)

    def _fail_all(self, error: EngineError) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        for timer in self._timers.values():
            timer.cancel()
        self._mailboxes.clear()
        self._timers.clear()

    def _ready(self) -> Loaded:
        if self._error is not None:
            raise EngineDiedError("the engine loop ended by an error") from self._error
        if not self._open or self._loaded is None:
            raise EngineClosedError(
                "the engine is not open; use it inside `async with Engine(...) as engine:`"
            )
        return self._loaded


async def _joined(deltas: DeltaStream, tokenizer: str = "") -> Completion:
    return join_deltas([delta async for delta in deltas], tokenizer)


def _late(deadline: float) -> DeadlineError:
    return DeadlineError(f"not finished within its deadline of {deadline:g} s")
