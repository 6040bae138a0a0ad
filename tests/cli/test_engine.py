"""Opening an engine from the command line."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from structgen.cli.engine import open_engine, run_guarded_loop, without_collections
from structgen.engine.engine import Engine


class TestImportingWithoutCollections:
    def test_ends_with_the_block_however_that_ends(self) -> None:
        inside: list[bool] = []

        def fail() -> None:
            with without_collections():
                inside.append(gc.isenabled())
                raise ImportError

        with pytest.raises(ImportError):
            fail()

        assert inside == [False]
        assert gc.isenabled()

    def test_leaves_a_collector_off_that_was_off(self) -> None:
        gc.disable()
        try:
            with without_collections():
                pass

            assert not gc.isenabled()
        finally:
            gc.enable()


class TestAnEngine:
    def test_is_called_what_it_was_asked_for_and_not_where_it_lies(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "model.gguf"
        monkeypatch.setattr("structgen.cli.fetching.locate", lambda _: file)

        engine = open_engine("smollm2-135m")

        assert isinstance(engine, Engine)
        assert engine.model == "smollm2-135m"


@pytest.fixture
def pressable() -> Iterator[None]:
    """Ctrl-C ends the process, as it does in a terminal; whoever runs tests may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestAGuardedLoop:
    async def leave(self) -> None:
        sys.exit(3)

    def test_goes_on_where_a_task_or_a_callback_exits(self) -> None:
        told: list[BaseException] = []

        async def main() -> str:
            with pytest.raises(SystemExit):
                await asyncio.create_task(self.leave())
            asyncio.get_running_loop().call_soon(sys.exit, 4)
            await asyncio.sleep(0)
            return "its end"

        assert run_guarded_loop(main(), told.append) == "its end"
        assert [error.args for error in told] == [(3,), (4,)]

    def test_ends_by_an_exit_of_its_own(self) -> None:
        told: list[BaseException] = []

        with pytest.raises(SystemExit):
            run_guarded_loop(self.leave(), told.append)

        assert told == []

    @pytest.mark.parametrize("heard", [False, True])
    @pytest.mark.usefixtures("pressable")
    def test_ends_by_ctrl_c_unless_the_loop_takes_that_as_a_signal(self, heard: bool) -> None:
        told: list[BaseException] = []

        async def interrupted() -> None:
            raise KeyboardInterrupt

        async def main() -> str:
            if heard:
                asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
            with pytest.raises(KeyboardInterrupt):
                await asyncio.create_task(interrupted())
            return "its end"

        if heard:
            assert run_guarded_loop(main(), told.append) == "its end"
        else:
            with pytest.raises(KeyboardInterrupt):
                run_guarded_loop(main(), told.append)
        assert len(told) == heard
