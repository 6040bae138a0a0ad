"""What runs inside `record()` is recorded: in tasks, in threads, in nested blocks."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from structgen.errors import OptionError
from structgen.events import LISTENERS, Event
from structgen.trace import Trace, record
from tests.trace.stories import Story, usage


def run(name: str, calls: int = 1) -> None:
    """A run that tells whoever listens in this context when it begins, as programs do."""
    story = Story(everybody(LISTENERS.get()), name)
    story.start(time.perf_counter(), name)
    for call in range(calls):
        story.call(time.perf_counter(), time.perf_counter(), call, usage=usage(3, 1, 2))
    story.finish(time.perf_counter(), name, prompt=3 * calls, cached=calls, new=2 * calls)


def everybody(listeners: tuple[Callable[[Event], None], ...]) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell


def programs(trace: Trace) -> list[str]:
    return [run.program for run in trace.runs]


class TestRecording:
    def test_hears_the_runs_of_the_block(self) -> None:
        run("before")
        with record() as trace:
            run("inside")
        run("after")

        assert programs(trace) == ["inside"]

    def test_counts_from_its_own_beginning(self) -> None:
        with record() as trace:
            run("one")
        (told,) = trace.runs

        assert told.end is not None
        assert 0 <= told.start <= told.end < 60

    def test_shows_what_still_runs(self) -> None:
        with record() as trace:
            story = Story(everybody(LISTENERS.get()))
            story.start(time.perf_counter())
            during = trace.runs[0].end
            story.finish(time.perf_counter())

        assert during is None
        assert trace.runs[0].end is not None

    def test_adds_up_when_nested(self) -> None:
        with record() as outer:
            run("a")
            with record() as inner:
                run("b")
            run("c")

        assert (programs(outer), programs(inner)) == (["a", "b", "c"], ["b"])

    def test_ends_in_any_order(self) -> None:
        first, second = record(), record()
        one, two = first.__enter__(), second.__enter__()
        first.__exit__(None, None, None)
        run("late")
        second.__exit__(None, None, None)
        run("nobody's")

        assert (programs(one), programs(two)) == ([], ["late"])

    def test_leaves_no_listener_behind_when_the_block_raises(self) -> None:
        before = LISTENERS.get()
        with pytest.raises(ZeroDivisionError), record():
            1 / 0  # noqa: B018 - it raises

        assert LISTENERS.get() == before

    def test_sums_all_runs(self) -> None:
        with record() as trace:
            run("a", calls=2)
            run("b")

        assert trace.usage == usage(9, 3, 6)

    def test_keeps_as_much_text_as_asked_for(self) -> None:
        with record(text_limit=0) as trace:
            story = Story(everybody(LISTENERS.get()))
            story.ask(0, 1)
            story.write(1, 1, "abc")
        (call,) = trace.runs[0].children

        assert getattr(call, "text", None) == ""

    def test_refuses_a_limit_that_is_none(self) -> None:
        with (
            pytest.raises(OptionError, match="text_limit: must be at least 0, got -1"),
            record(text_limit=-1),
        ):
            pass


class TestTasksAndThreads:
    async def test_that_begin_in_the_block_are_heard(self) -> None:
        async def task(name: str) -> None:
            await asyncio.sleep(0)
            run(name)

        with record() as trace:
            await asyncio.gather(task("a"), task("b"))
            await asyncio.to_thread(run, "c")

        assert sorted(programs(trace)) == ["a", "b", "c"]

    async def test_beside_the_block_are_not(self) -> None:
        async def beside() -> None:
            run("beside")

        other = asyncio.create_task(beside())
        with record() as trace:
            await other

        assert programs(trace) == []

    async def test_that_go_on_after_the_block_are_followed_but_start_nothing_new(self) -> None:
        go = asyncio.Event()

        async def task() -> None:
            story = Story(everybody(LISTENERS.get()), "old")
            story.start(time.perf_counter(), "old")
            await go.wait()
            Story(story.tell, "inner").start(time.perf_counter(), "inner", parent="old")
            story.finish(time.perf_counter(), "old")
            run("new")

        with record() as trace:
            going = asyncio.create_task(task())
            await asyncio.sleep(0)
        go.set()
        await going

        assert programs(trace) == ["old"]
        assert trace.runs[0].end is not None
        assert "inner" in str(trace)

    def test_of_many_threads_lose_nothing(self) -> None:
        with record() as trace:
            tell = everybody(LISTENERS.get())

            def work(number: int) -> None:
                for turn in range(20):
                    story = Story(tell, f"{number}.{turn}")
                    story.start(turn)
                    story.call(turn, turn, 1)
                    story.finish(turn, new=1)
                    str(trace)  # read while the others write

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert (len(trace.runs), trace.usage) == (80, usage(new=80))


class TestSaving:
    def test_writes_what_chrome_reads(self, tmp_path: Path) -> None:
        with record() as trace:
            run("saved")
        trace.save(tmp_path / "trace.json")

        written = json.loads((tmp_path / "trace.json").read_text())
        assert {"traceEvents", "displayTimeUnit"} <= written.keys()

    def test_writes_text_that_is_no_unicode(self, tmp_path: Path) -> None:
        with record() as trace:
            story = Story(everybody(LISTENERS.get()))
            story.ask(0, 1, "half \ud83d")
        trace.save(tmp_path / "trace.json")

        written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert "gen half \ud83d" in [event["name"] for event in written]

    @pytest.mark.parametrize(
        ("name", "what"),
        [("trace.html", "ends in '.html'"), ("trace", "has no ending"), ("a.json.gz", "'.gz'")],
    )
    def test_refuses_other_files(self, tmp_path: Path, name: str, what: str) -> None:
        with record() as trace:
            pass

        with pytest.raises(OptionError, match=rf"path: .*{what}; a trace is saved as \.json"):
            trace.save(tmp_path / name)
