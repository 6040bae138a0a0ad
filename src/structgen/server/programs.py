"""`/v1/programs`: programs as endpoints, run at once or told as a stream of events.

Holds  arguments are read by the program's annotations before anything runs. A stream begins with
       what is sure to have begun: until something was computed, an error still has a status.
       A run ends with its call: who leaves cancels the program, and aborts its requests.
Used   by `app`. The events are those of `structgen.events`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from uuid import uuid4

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from structgen.errors import (
    BatchError,
    BudgetError,
    ConstraintError,
    OptionError,
    StateError,
    StructgenError,
    leaves,
)
from structgen.events import (
    LISTENERS,
    BranchClosed,
    BranchOpened,
    CallEnded,
    CallStarted,
    Event,
    ProgramEntered,
    ProgramLeft,
    RunEnded,
    RunStarted,
    TextDelta,
    VariableSet,
)
from structgen.options import did_you_mean
from structgen.output.values import LARGE, json_in_turns, json_of, readable
from structgen.program.program import Program
from structgen.program.result import Result
from structgen.program.tasks import cut, failure_of, named, start
from structgen.server.body import explained
from structgen.server.call import Call
from structgen.server.endpoint import Endpoint
from structgen.server.errors import SERVER, ApiError, api_error, of_validation, unknown_model
from structgen.server.observe.access_log import traceback_of
from structgen.server.openai.replies import Usage
from structgen.server.openai.wire import Body, Bounded, Whole, top_k_of
from structgen.server.sse import EventStream
from structgen.server.tenant import Tenant
from structgen.waiting import TURN

ProgramEvent = (
    RunStarted
    | RunEnded
    | ProgramEntered
    | ProgramLeft
    | BranchOpened
    | BranchClosed
    | CallStarted
    | TextDelta
    | CallEnded
    | VariableSet
)
# What does not show yet that anything was computed.
_OPENING = (
    *(RunStarted, ProgramEntered, BranchOpened, BranchClosed, CallStarted),
    *(ProgramLeft, RunEnded),
)
N = TypeVar("N", int, float)
_log = logging.getLogger("structgen.server")


class ProgramOptions(Bounded, kw_only=True):
    """Default options of the program's generations; what the program itself says comes first."""

    max_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: Whole | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    ignore_eos: bool | None = None
    seed: Whole | None = None
    priority: Whole | None = None


class ProgramBudget(Bounded, kw_only=True):
    """Limits of the run: completion tokens of all its requests, seconds from start to end."""

    tokens: Whole | None = None
    seconds: float | None = None


class ProgramBody(Body, kw_only=True):
    """The body of `POST /v1/programs/{name}`.

    arguments    by name, as the program's `parameters` have them
    cache_salt   divides the cache: what has another salt shares nothing with this
    """

    arguments: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    stream: bool | None = None
    model: str | None = None
    options: ProgramOptions | None = None
    budget: ProgramBudget | None = None
    cache_salt: str | None = None


class ProgramResult(msgspec.Struct, kw_only=True):
    """What came of a run, or the last event of its stream.

    value      what the program returned
    text       all that was said on its first state, the markup of roles included
    variables  of its first state
    omitted    names of variables whose values JSON has no form for; not there if there are none
    """

    id: str
    object: Literal["program.result"] = "program.result"
    created: int
    program: str
    value: Any
    text: str
    variables: dict[str, Any]
    omitted: list[str] | UnsetType = UNSET
    usage: Usage


class ProgramCard(msgspec.Struct, kw_only=True):
    """A program that is served.

    description   the docstring of its function
    parameters    JSON Schema of its arguments
    returns       JSON Schema of its value, where it says
    """

    name: str
    object: Literal["program"] = "program"
    description: str
    parameters: dict[str, Any]
    returns: dict[str, Any] | None


class Programs(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/programs`."""

    object: Literal["list"] = "list"
    data: list[ProgramCard]


# ---------------------------------------------------------------- routes


async def list_programs(call: Call) -> web.StreamResponse:
    """All programs."""
    return call.answer(Programs(data=[_card(each) for each in call.service.programs.values()]))


async def show_program(call: Call) -> web.StreamResponse:
    """One program."""
    return call.answer(_card(_named(call)))


async def run_program(call: Call) -> web.StreamResponse:
    """Run a program."""
    endpoint, body = _named(call), await call.body(ProgramBody)
    try:
        run = _Run(call, endpoint, body)
        with _counted(call):
            try:
                return await (_streamed(run) if run.body.stream else _whole(run))
            except Exception as error:
                raise run.failure(error) from error
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        # Of this task, aiohttp's, it would end the whole server, or the connection without a word.
        raise _exited(call, endpoint.name, error) from error


def _named(call: Call) -> Endpoint:
    name, programs = call.request.match_info["name"], call.service.programs
    if name in programs:
        return programs[name]
    served = ", ".join(programs) or "none"
    raise ApiError(
        404,
        f"there is no program {name!r} here{did_you_mean(name, programs)}; served: {served}",
        code="program_not_found",
    )


def _card(endpoint: Endpoint) -> ProgramCard:
    return ProgramCard(
        name=endpoint.name,
        description=endpoint.description,
        parameters=dict(endpoint.parameters),
        returns=None if endpoint.returns is None else dict(endpoint.returns),
    )


# ---------------------------------------------------------------- a run


class _Run:
    """One run that a client asked for: the program with its options, arguments and limits."""

    def __init__(self, call: Call, endpoint: Endpoint, body: ProgramBody) -> None:
        """Raises `ApiError` and `OptionError`, naming the field, for what cannot be run."""
        self.call, self.name, self.body = call, endpoint.name, body
        self.id = f"run-{uuid4().hex}"
        self.created = int(time.time())
        self.left = False  # the client has
        self.turn = 0.0  # when the others had their last
        self._texts: dict[int, tuple[str, msgspec.Raw]] = {}  # large ones, by their identity
        service = call.service
        if body.model is not None and body.model not in service.names:
            raise unknown_model(body.model, service.names)
        self.arguments = _arguments(endpoint, bytes(body.arguments))
        self.program = self._limited(self._using(endpoint.program))
        self.tenant = Tenant(
            service.engine, call.namespace(body.cache_salt), call.came, call.charge
        )

    def _using(self, program: Program[..., Any]) -> Program[..., Any]:
        """The program with the client's options, and the server's seed if nobody has another."""
        asked = msgspec.structs.asdict(self.body.options or ProgramOptions())
        asked["top_k"] = top_k_of(asked["top_k"])
        given: Any = {name: value for name, value in asked.items() if value is not None}
        self.call.names.update({name: f"options.{name}" for name in given})
        seed = self.call.service.config.seed
        if seed is not None and program.options.get("seed") is None:
            given = {"seed": seed, **given}
        return program.using(**given)

    def _limited(self, program: Program[..., Any]) -> Program[..., Any]:
        """The program within the least of its own limits, the client's and the server's."""
        asked, own = self.body.budget or ProgramBudget(), program.limits
        timeout = self.call.service.config.request_timeout
        tokens = _least(asked.tokens, own.tokens)
        seconds = _least(asked.seconds, own.seconds, timeout)
        # A client that set itself a limit has met it; one that met ours was cut off by us.
        self.asked_seconds = asked.seconds is not None and seconds == asked.seconds
        self.call.names.update(tokens="budget.tokens", seconds="budget.seconds")
        return program.budget(tokens=tokens, seconds=seconds)

    async def answer(self, result: Result[Any]) -> bytes:
        """What came of it, as JSON. Raises `ApiError` for a value that JSON has no form for."""
        try:
            value = await self.written(result.value)
        except TypeError as error:
            raise ApiError(
                500,
                f"the program {self.name} returned a {type(result.value).__name__}, which cannot "
                f"be written as JSON: {error}; let it return text, numbers, lists, dicts, structs "
                "or models",
                type_=SERVER,
                code="value_not_json",
            ) from None
        variables, omitted = dict[str, msgspec.Raw](), list[str]()
        for name, each in result.variables.items():
            data = None if readable(name) != name else await self.written_or_none(each)
            if data is None:
                omitted.append(readable(name))
            else:
                variables[name] = data
            await self.give_turn()
        answer = ProgramResult(
            id=self.id,
            created=self.created,
            program=self.name,
            value=value,
            text=readable(result.text()),
            variables=variables,
            omitted=omitted or UNSET,
            usage=Usage.of(result.usage),
        )
        await asyncio.sleep(0)
        return msgspec.json.encode(answer)

    async def written(self, value: object) -> msgspec.Raw:
        """A value as JSON. Raises `TypeError` for what JSON has no form for."""
        if type(value) is not str or len(value) < LARGE:
            return msgspec.Raw(await json_in_turns(value))
        if id(value) not in self._texts:
            # It is told of as a variable, and may be one at the end, and the value, too.
            self._texts[id(value)] = value, msgspec.Raw(await json_in_turns(value))
        return self._texts[id(value)][1]

    async def written_or_none(self, value: object) -> msgspec.Raw | None:
        """A value as JSON, None for what JSON has no form for."""
        try:
            return await self.written(value)
        except TypeError:
            return None

    async def give_turn(self) -> None:
        """Let others run, if it is time. What is there already is done without any waiting."""
        if time.perf_counter() - self.turn > TURN:
            await asyncio.sleep(0)
            self.turn = time.perf_counter()

    async def event(self, event: Event, began: float) -> bytes:
        """An event as JSON; its time counts from the beginning of the run."""
        changes: dict[str, Any] = {"at": round(event.at - began, 6)}
        if isinstance(event, VariableSet):
            data = await self.written_or_none(event.value)
            changes["value"] = UNSET if data is None else data
        told = msgspec.structs.replace(event, **changes)
        try:
            return msgspec.json.encode(told)
        except UnicodeEncodeError:
            return json_of(told)

    async def send(self, stream: EventStream, data: bytes, event: str) -> None:
        """Send an event, and note where that is how it is found out that the client left."""
        await self.give_turn()
        try:
            await stream.send(data, event)
        except ConnectionResetError:
            self.left = True
            raise

    def failure(self, error: Exception) -> Exception:
        """What an error of the run means to the client."""
        error = next(_errors(error), error)
        if self.left:
            return error
        if isinstance(error, BudgetError):
            return self._exhausted(error)
        # What a program raises of aiohttp's is meant for a client of its own, or for nobody.
        theirs = isinstance(error, web.HTTPException)
        found = None if theirs else api_error(error, self.call.names)
        if found is None or self._is_programs_own(error):
            said = traceback_of(error)
            _log.error("program %s failed in %s\n%s", self.name, self.call.id, said)
            message = readable(f"the program {self.name} raised {named(error)}")
            return ApiError(500, message, type_=SERVER, code="program_failed")
        return found

    def _is_programs_own(self, error: Exception) -> bool:
        """Whether an error is that of a program that uses structgen wrongly, or that fails.

        An option that the client gave no field for is the program's, and so is a constraint.
        """
        match error:
            case OptionError():
                return error.option not in self.call.names
            case ConstraintError():
                return "stop_regex" not in self.call.names
            case StateError() | BatchError():
                return True
        return type(error) is StructgenError

    def _exhausted(self, error: BudgetError) -> ApiError:
        field = f"budget.{error.budget}"
        if error.budget == "seconds" and not self.asked_seconds:
            return ApiError(504, str(error), type_=SERVER, code="timeout")
        return ApiError(400, str(error), param=field, code="budget_exceeded")


def _arguments(endpoint: Endpoint, data: bytes) -> dict[str, Any]:
    """Arguments of a program. Raises `ApiError` naming the one that it does not take."""
    try:
        return endpoint.read(b"{}" if data == b"null" else data)
    except (ValueError, RecursionError) as error:
        said = explained(error, data) if isinstance(error, msgspec.DecodeError) else error
        raise of_validation(said, endpoint.parameters.get("properties", ()), "arguments") from None


def log_exit(error: BaseException) -> None:
    """Log that a task or a callback which nobody waits for wanted to end the process."""
    _log.error("a task of a program wanted to exit; the server goes on\n%s", traceback_of(error))


def _exited(call: Call, name: str, error: BaseException) -> ApiError:
    """What a client is told of a program that ended by what is no error, as if to exit."""
    _log.error("program %s wanted to exit in %s\n%s", name, call.id, traceback_of(error))
    inner = next((each for each in leaves(error) if not isinstance(each, Exception)), error)
    message = f"the program {name} ended by {named(inner)}"
    return ApiError(500, readable(message), type_=SERVER, code="program_failed")


def _least(*limits: N | None) -> N | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _errors(error: BaseException) -> Iterator[Exception]:
    """The errors in a group, or the error itself."""
    return (each for each in leaves(error) if isinstance(each, Exception))


@contextmanager
def _counted(call: Call) -> Iterator[None]:
    """Count what runs in the block as the call's cost, however they end."""

    def listener(event: Event) -> None:
        if isinstance(event, RunEnded):
            call.charge(event.usage)

    token = LISTENERS.set((*LISTENERS.get(), listener))
    try:
        yield
    finally:
        LISTENERS.reset(token)


async def _whole(run: _Run) -> web.StreamResponse:
    # A task of its own: a program may cancel the one it runs in, which must not be the call's.
    task = start(lambda: run.program.run(run.tenant, **run.arguments), "structgen run")
    try:
        await asyncio.wait([task])
    finally:
        run.tenant.leave()
        if not task.done():
            await cut([task])
    if (failure := failure_of(task, "the program")) is not None:
        raise failure
    answer = await run.answer(task.result())
    return web.Response(body=answer, content_type="application/json")


# ---------------------------------------------------------------- as a stream


async def _streamed(run: _Run) -> web.StreamResponse:
    stream = run.call.stream(error_event="error")
    began = time.perf_counter()
    held: list[Event] = []
    shown = False
    async with run.program.stream(run.tenant, **run.arguments) as running:
        try:
            async for event in running:
                held.append(event)
                shown = shown or not _shows_nothing(event)
                if shown:
                    await _tell(run, stream, held, began)
        finally:
            run.tenant.leave()
        answer = await run.answer(running.result)
    await _tell(run, stream, held, began)
    await run.send(stream, answer, "result")
    return await stream.end()


async def _tell(run: _Run, stream: EventStream, held: list[Event], began: float) -> None:
    """Send the events that were held back."""
    for event in held:
        await run.send(stream, await run.event(event, began), _kind(event))
    held.clear()


def _shows_nothing(event: Event) -> bool:
    """Whether a run may still fail before anything of it was computed, after this event."""
    return isinstance(event, _OPENING) or bool(getattr(event, "error", ""))


def _kind(event: Event) -> str:
    return str(type(event).__struct_config__.tag)
