"""Programs run from code that is not async."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from typing import Any, Self

import anyio.to_thread
import pytest

from structgen.backend import Backend, Capabilities
from structgen.errors import EngineClosedError, EngineDiedError, EngineError, StateError
from structgen.program.blocking import Blocked, blocking, run_sync
from structgen.program.state import State
from structgen.testing import ScriptedBackend
from tests.program.bodies import run

pytestmark = pytest.mark.timeout(20)

NAME: ContextVar[str] = ContextVar("name", default="")


class Opened(ScriptedBackend):
    """A backend that has to be opened, once, like an engine."""

    def __init__(self, replies: str = "abcdefgh", **options: Any) -> None:
        super().__init__(replies, **options)
        self.entered = self.open = False
        self.opener = ""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.reason: BaseException | None = None
        self.refuses: Exception | None = None
        self.fails_to_close: Exception | None = None

    async def __aenter__(self) -> Self:
        if self.entered:
            raise EngineError("this engine has been opened before; make a new one")
        self.entered, self.opener = True, NAME.get()
        await anyio.to_thread.run_sync(lambda: None)
        if self.refuses is not None:
            raise self.refuses
        self.open, self.loop = True, asyncio.get_running_loop()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert (asyncio.get_running_loop() is self.loop, task.cancelling()) == (True, 0)
        await anyio.to_thread.run_sync(lambda: None)
        self.open, self.reason = False, error
        if self.fails_to_close is not None:
            raise self.fails_to_close

    @property
    def capabilities(self) -> Capabilities:
        if not self.open:
            raise EngineClosedError("the engine is not open")
        return super().capabilities


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread outlives a test."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    for thread in left:
        if thread.name == "AnyIO worker thread":
            thread.join(5)  # told to end with its loop; anyio does not wait for that
    assert {thread for thread in left if thread.is_alive()} == set()
    assert "structgen blocking" not in {thread.name for thread in left}


def saying(text: str) -> Any:
    """A program that appends a text, generates, and returns all of it."""

    async def body(s: State) -> str:
        s += text
        await s.gen("x")
        return s.text()

    return lambda backend: run(body, backend)


async def forever(_backend: Backend) -> None:
    await asyncio.Event().wait()


class TestRunningAProgram:
    def test_returns_what_it_returns(self) -> None:
        assert run_sync(saying("x"), ScriptedBackend("ab")).value == "xab"

    def test_opens_the_engine_for_the_call_and_closes_it(self) -> None:
        engine = Opened()

        result = run_sync(saying("x"), engine)

        assert result.value == "xabcdefgh"
        assert (engine.entered, engine.open) == (True, False)
        assert engine.loop is not None
        assert engine.loop.is_closed()

    def test_raises_what_it_raises_and_closes_the_engine(self) -> None:
        engine = Opened()

        async def fail(_backend: Backend) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            run_sync(fail, engine)

        assert not engine.open
        assert engine.reason is caught.value

    def test_raises_what_opening_raises(self) -> None:
        engine = Opened()
        engine.refuses = ValueError("no model")

        with pytest.raises(ValueError, match="no model"):
            run_sync(saying("x"), engine)

        assert not engine.open

    def test_raises_what_closing_raises(self) -> None:
        engine = Opened()
        engine.fails_to_close = EngineDiedError("the engine loop ended by an error")

        with pytest.raises(EngineDiedError):
            run_sync(saying("x"), engine)

    def test_twice_on_one_engine_says_what_to_write(self) -> None:
        engine = Opened()
        run_sync(saying("x"), engine)

        with pytest.raises(EngineError, match="opened before") as caught:
            run_sync(saying("x"), engine)

        assert "keep it for several, write `with blocking(Engine" in caught.value.__notes__[0]

    def test_keeps_context_variables(self) -> None:
        async def name(_backend: Backend) -> str:
            return NAME.get()

        NAME.set("Ada")
        engine = Opened()

        assert run_sync(name, engine) == "Ada"
        assert engine.opener == "Ada"

    def test_ends_the_tasks_that_it_left_behind(self) -> None:
        tasks: list[asyncio.Task[None]] = []

        async def leave(backend: Backend) -> None:
            tasks.append(asyncio.create_task(forever(backend)))
            await asyncio.sleep(0)

        run_sync(leave, ScriptedBackend())

        assert tasks[0].cancelled()

    def test_that_ends_the_process_says_so_to_the_caller(self) -> None:
        async def leave(_backend: Backend) -> None:
            raise SystemExit(3)

        with pytest.raises(SystemExit) as caught:
            run_sync(leave, Opened())

        assert caught.value.code == 3


class TestWhereALoopRuns:
    async def test_works_as_in_a_notebook(self) -> None:
        engine = Opened()

        result = run_sync(saying("x"), engine)

        assert result.value == "xabcdefgh"
        assert engine.loop is not asyncio.get_running_loop()

    async def test_refuses_an_engine_that_is_open_there(self) -> None:
        async with Opened() as engine:
            with pytest.raises(EngineError, match="open already, on another event loop") as caught:
                run_sync(saying("x"), engine)

        assert "write `await program.run(engine, ...)`" in str(caught.value)
        assert "with blocking(Engine(...)) as engine:" in str(caught.value)

    def test_inside_of_a_program_is_refused(self) -> None:
        async def inner(backend: Backend) -> Any:
            return run_sync(saying("x"), backend)

        async def outer(_backend: Backend) -> Any:
            return run_sync(inner, engine)

        with (
            blocking(Opened()) as engine,
            pytest.raises(StateError, match=r"write `await program\.run\(backend, \.\.\.\)` there"),
        ):
            run_sync(outer, engine)


class TestKeepingAnEngineOpen:
    def test_serves_many_calls_on_one_loop(self) -> None:
        with blocking(Opened()) as engine:
            texts = [run_sync(saying(text), engine).value for text in "abc"]
            loops = {engine.run(_loop) for _ in range(3)}

        assert texts == ["aabcdefgh", "babcdefgh", "cabcdefgh"]
        assert len(loops) == 1

    def test_takes_a_backend_that_needs_no_opening(self) -> None:
        with blocking(ScriptedBackend("ab")) as engine:
            assert run_sync(saying("x"), engine).value == "xab"

    def test_serves_many_threads_at_once(self) -> None:
        together = asyncio.Event()
        names: list[str] = []
        live = 0

        async def meet(_backend: Backend) -> None:
            nonlocal live
            live += 1
            if live == 5:
                together.set()
            await together.wait()
            names.append(NAME.get())

        def call(name: str) -> None:
            NAME.set(name)
            engine.run(meet)

        with blocking(Opened()) as engine:
            threads = [threading.Thread(target=call, args=(name,)) for name in "abcde"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert sorted(names) == list("abcde")

    def test_survives_a_program_that_fails(self) -> None:
        async def fail(_backend: Backend) -> None:
            raise SystemExit

        with blocking(Opened()) as engine:
            with pytest.raises(SystemExit):
                engine.run(fail)

            assert run_sync(saying("x"), engine).value == "xabcdefgh"

    def test_ends_with_its_block(self) -> None:
        backend = Opened()
        with blocking(backend) as engine:
            pass

        assert not backend.open
        with pytest.raises(EngineClosedError, match="use it inside `with blocking"):
            engine.run(forever)

    def test_begins_with_its_block(self) -> None:
        with pytest.raises(EngineClosedError, match="use it inside `with blocking"):
            blocking(Opened()).run(forever)

    def test_is_entered_once(self) -> None:
        with (
            blocking(Opened()) as engine,
            pytest.raises(StateError, match="entered before; call blocking"),
            engine,
        ):
            pass

    def test_tells_threads_that_wait_when_it_is_left(self) -> None:
        backend, started, errors = Opened(), threading.Event(), list[BaseException]()
        open_at_the_end = False

        async def wait(_backend: Backend) -> None:
            nonlocal open_at_the_end
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                open_at_the_end = backend.open

        def call() -> None:
            try:
                engine.run(wait)
            except EngineClosedError as error:
                errors.append(error)

        with blocking(backend) as engine:
            thread = threading.Thread(target=call)
            thread.start()
            started.wait()
        thread.join()

        assert open_at_the_end
        assert "was left while this program ran" in str(errors[0])

    def test_closes_with_the_error_of_the_block(self) -> None:
        backend = Opened()

        with pytest.raises(ZeroDivisionError) as caught, blocking(backend):
            raise ZeroDivisionError

        assert backend.reason is caught.value


async def _loop(_backend: Backend) -> int:
    return id(asyncio.get_running_loop())


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever runs these tests made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """What Ctrl-C does."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.usefixtures("interrupts")
class TestCtrlC:
    def test_cancels_the_program_and_waits_for_it(self) -> None:
        engine, cleaned = Opened(), False

        async def program(_backend: Backend) -> None:
            nonlocal cleaned
            interrupt()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned = True

        with pytest.raises(KeyboardInterrupt):
            run_sync(program, engine)

        assert (cleaned, engine.open) == (True, False)

    def test_aborts_the_requests_of_the_program(self) -> None:
        engine = Opened(latency=60, fail=lambda _: interrupt())

        with pytest.raises(KeyboardInterrupt):
            run_sync(saying("x"), engine)

        assert engine.running == 0

    def test_while_the_engine_opens_stops_that(self) -> None:
        class Slow(Opened):
            async def __aenter__(self) -> Self:
                interrupt()
                await asyncio.Event().wait()
                raise AssertionError

        engine = Slow()

        with pytest.raises(KeyboardInterrupt):
            run_sync(saying("x"), engine)

        assert not engine.open

    def test_leaves_the_engine_of_a_block_in_use(self) -> None:
        cleaned = False

        async def program(_backend: Backend) -> None:
            nonlocal cleaned
            interrupt()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned = True

        with blocking(Opened()) as engine:
            with pytest.raises(KeyboardInterrupt):
                engine.run(program)

            assert cleaned
            assert run_sync(saying("x"), engine).value == "xabcdefgh"


class TestALoopThatDies:
    def test_ends_every_call(self) -> None:
        def die() -> None:
            raise SystemExit

        async def program(_backend: Backend) -> None:
            asyncio.get_running_loop().call_soon(die)
            await asyncio.Event().wait()

        backend, errors = Opened(), list[str]()

        def work() -> None:
            with blocking(backend) as engine:
                for each in (program, forever):
                    try:
                        engine.run(each)
                    except EngineClosedError as error:
                        errors.append(str(error))

        with pytest.raises(SystemExit):
            work()
        assert "was left while this program ran" in errors[0]
        assert "this backend is not open" in errors[1]
        assert not backend.open


class TestAThreadThatStartsTooLate:
    @pytest.mark.parametrize("stop", [Blocked._close, Blocked._stop], ids=["closed", "stopped"])
    def test_opens_nothing(self, stop: Any) -> None:
        backend = Opened()
        engine = blocking(backend)
        engine._scope, engine._context = backend, copy_context()
        stop(engine)

        engine._thread.start()
        engine._thread.join(5)

        assert not engine._thread.is_alive()
        assert not backend.entered


class TestACallThatWasNeverSent:
    def test_is_not_waited_for_when_it_is_withdrawn(self) -> None:
        outcome: Future[None] = Future()

        with blocking(Opened()) as engine:
            engine._withdraw(outcome)

        assert isinstance(outcome.exception(), asyncio.CancelledError)


class TestAThreadThatCannotStart:
    def test_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        engine = Blocked(ScriptedBackend())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                engine.__enter__()

        with pytest.raises(EngineClosedError):
            engine.run(forever)


def accepts_any_coroutine(backend: Backend) -> Coroutine[Any, Any, int]:
    """For the type checker: what `run_sync` takes, and that it returns what that returns."""

    async def number() -> int:
        return 1

    del backend
    return number()


def test_returns_the_type_of_the_program() -> None:
    number: int = run_sync(accepts_any_coroutine, ScriptedBackend())

    assert number == 1
