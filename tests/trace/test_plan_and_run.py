"""What a plan says beforehand is true of the run: an oracle for prefixes and names."""

from __future__ import annotations

import asyncio
import itertools
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from structgen import Backend, State, program
from structgen.examples.tips import tips
from structgen.testing import ScriptedBackend
from structgen.trace import Trace, record, trace_plan
from structgen.trace.chrome import chrome_trace
from structgen.trace.spans import BranchSpan, CallSpan, FrameSpan, RunSpan, walk
from tests.trace.sources import load

HEAD = """
INTRO = "Hi. "

async def more(state, flag):
    state += "more "
    if flag:
        return
    await state.gen("m")
    state += "end "

async def greet(state):
    state += "greet "
    return 1

@program
async def other(state):
    state += "other "
    with state.var_scope("o"):
        await state.gen("p")

@program
async def p(s: State, flag: bool, number: int) -> None:
"""
SIMPLE = [
    "s += 'a '",
    "s += INTRO",
    "s += f'{INTRO}{number} '",
    "s.append('b ')",
    "s.user('c')",
    "s.user(f'd {flag}')",
    "s['v'] = number",
    "number += 1",
    "await s.gen('x') if s.text() else None",
    "await more(s, flag)",
    "await greet(s)",
    "await other(s)",
    "t = s; t += 'alias '",
    "for b in s.fork(2): b += 'branch '",
    "f = s.fork(2); f += 'f '; await f.join('append')",
    "f = s.fork(2); [await b.gen('y') for b in f] if s.text() else None; await f.join()",
    "if flag: return",
    "if number > 1: s += 'big '",
    "if not s.text(): s += 'first '",
    "(lambda: s.append('lambda '))()",
    "[s.append(c) for c in 'xyz'[:number]]",
    "flag and s.append('flag ')",
    "hold = [s]; hold[0] += 'held '",
]
BLOCKS = [
    "if flag:",
    "for _ in range(number):",
    "with s.using(temperature=0):",
    "with s.var_scope('w'):",
    "try:",
    "while number < 3:\n    number += 1",
]


def block(head: str, body: list[str]) -> str:
    inside = textwrap.indent("\n".join(body or ["pass"]), "    ")
    tail = "\nfinally:\n    pass" if head == "try:" else ""
    return f"{head}\n{inside}{tail}"


STATEMENTS = st.recursive(
    st.sampled_from(SIMPLE),
    lambda inner: st.builds(block, st.sampled_from(BLOCKS), st.lists(inner, max_size=3)),
    max_leaves=6,
)
COUNT = itertools.count()


@given(
    body=st.lists(STATEMENTS, min_size=1, max_size=6), flag=st.booleans(), number=st.integers(0, 3)
)
@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_plan_is_true_of_every_run(
    tmp_path: Path, body: list[str], flag: bool, number: int
) -> None:
    text = HEAD + textwrap.indent("\n".join(body), "    ")
    module = load(tmp_path, text, f"sample_{next(COUNT)}")
    plan = trace_plan(module.p)

    async def run() -> Trace:
        with record() as trace:
            result = await module.p.run(ScriptedBackend("ok "), flag, number)
        assert result.text().startswith(plan.prefix)
        return trace

    trace = asyncio.run(run())

    spans = [each.span for each in walk(trace.runs)]
    named = {span.name for span in spans if isinstance(span, CallSpan)}
    assert named <= set(plan.names)
    assert all(span.end is not None for span in spans)


@pytest.fixture(scope="module")
def recorded() -> Trace:
    """The example, run on a backend without a model."""

    async def run() -> Trace:
        with record() as trace:
            await tips.run(ScriptedBackend("Because it helps."), count=2)
        return trace

    return asyncio.run(run())


class TestTheTraceOfTheExample:
    def test_has_what_its_plan_has(self, recorded: Trace) -> None:
        placed = walk(recorded.runs)
        calls = [each.span.name for each in placed if isinstance(each.span, CallSpan)]
        branches = [each.span.branch for each in placed if isinstance(each.span, BranchSpan)]

        assert calls == ["opening", "reason", "reason", "summary"]
        assert tuple(dict.fromkeys(calls)) == trace_plan(tips).names
        assert branches == [(0,), (1,)]

    def test_has_calls_inside_their_branches(self, recorded: Trace) -> None:
        placed = walk(recorded.runs)
        reasons = [
            each
            for each in placed
            if isinstance(each.span, CallSpan) and each.span.name == "reason"
        ]

        assert all(isinstance(placed[each.parent].span, BranchSpan) for each in reasons)

    def test_has_times_in_order(self, recorded: Trace) -> None:
        placed = walk(recorded.runs)

        for each in placed:
            assert each.span.end is not None
            assert each.span.start <= each.span.end
            if each.parent >= 0:
                assert placed[each.parent].span.start <= each.span.start

    def test_counts_the_tokens_of_its_calls(self, recorded: Trace) -> None:
        calls = [each.span for each in walk(recorded.runs) if isinstance(each.span, CallSpan)]

        assert recorded.usage == sum((call.usage for call in calls[1:]), calls[0].usage)
        assert all(call.text == "Because it helps."[: len(call.text)] for call in calls)

    def test_is_one_run_of_one_program(self, recorded: Trace) -> None:
        (run,) = recorded.runs

        assert isinstance(run, RunSpan)
        assert [type(child) for child in run.children] == [FrameSpan]


@program
async def judge(s: State, text: str) -> str:
    s += text
    return await s.gen("verdict")


@program
async def panel(s: State, backend: Backend) -> list[str]:
    s += "Who is right? "

    async def ask(branch: State, index: int) -> str:
        await branch.gen("draft")
        return (await judge.run(backend, f"draft {index}")).value

    async with s.fork(2) as branches:
        return await branches.map(ask)


class TestRunsInARun:
    def test_are_under_the_branches_that_started_them(self) -> None:
        async def run() -> Trace:
            with record() as trace:
                backend = ScriptedBackend("yes")
                await panel.run(backend, backend)
            return trace

        trace = asyncio.run(run())

        placed = walk(trace.runs)
        inner = [p for p in placed if isinstance(p.span, RunSpan) and p.parent >= 0]
        homes = [placed[each.parent].span for each in inner]
        assert [getattr(home, "branch", None) for home in homes] == [(0,), (1,)]
        assert trace.usage.completion_tokens == 4 * len(("y", "e", "s", "end"))


class TestSamples:
    def test_are_calls_at_the_same_time_on_lanes_of_their_own(self) -> None:
        @program
        async def three(s: State) -> None:
            s += "x"
            await s.gen("x", n=3)

        async def run() -> Trace:
            with record() as trace:
                await three.run(ScriptedBackend("yes"))
            return trace

        trace = asyncio.run(run())

        events = chrome_trace(trace)["traceEvents"]
        lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
        assert lanes == ["main", "main (2)", "main (3)"]
