"""The picture of a program from its source: what it says, in the order in which it says it."""

from __future__ import annotations

import functools
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from structgen.errors import OptionError
from structgen.examples import tips as example
from structgen.trace import Plan, trace_plan
from structgen.trace.steps import Constant, Fork, Gen, Hole, Select, Template, Turn, every
from tests.trace.sources import load


def plan_of(folder: Path, text: str, name: str = "p") -> Plan:
    return trace_plan(getattr(load(folder, text), name))


def tree_of(folder: Path, body: str, parameters: str = "") -> list[str]:
    """The lines of the plan of a program with this body, without the first."""
    head = f"@program\nasync def p(s{parameters}):\n"
    text = head + textwrap.indent(textwrap.dedent(body), "    ")
    return str(plan_of(folder, text)).splitlines()[1:]


JUDGE = r"""
@program
async def p(s, essay):
    s += system("You are a helpful assistant.")
    s += user(essay)
    s += assistant(gen("score", regex=r"[-+]?[0-9]*\.?[0-9]+"))
"""
JUDGE_TREE = r"""
program p(essay)
├─ system: 'You are a helpful assistant.'
├─ user: '{essay}'
└─ assistant: gen score regex='[-+]?[0-9]*\\.?[0-9]+'
"""

TIPS = r"""
@program
async def p(s):
    s += assistant("Two tips.\n\n")
    async with s.fork(2) as forks:
        for i, f in enumerate(forks):
            f += assistant(f"Expand tip {i+1}:\n" + gen("detail", max_tokens=256, stop="\n\n"))
    s += assistant("Tip 1:" + forks[0]["detail"] + "\n")
    s += assistant("Tip 2:" + forks[1]["detail"] + "\n")
    s += assistant("To summarize:\n" + gen("summary", max_tokens=512))
"""
TIPS_TREE = r"""
program p()
├─ assistant: 'Two tips.\n\n'
├─ fork 2
│  └─ assistant
│     ├─ 'Expand tip {i + 1}:\n'
│     └─ gen detail max_tokens=256, stop='\n\n'
├─ assistant: 'Tip 1:{forks[0]['detail']}\n'
├─ assistant: 'Tip 2:{forks[1]['detail']}\n'
└─ assistant
   ├─ 'To summarize:\n'
   └─ gen summary max_tokens=512
"""

NATIVE_TIPS = r"""
@program
async def p(s: State) -> str:
    s.assistant("Two tips.\n\n")

    async def expand(f: State, i: int) -> str:
        with f.assistant():
            f += f"Expand tip {i + 1}:\n"
            return await f.gen(max_tokens=256, stop="\n\n")

    first, second = await asyncio.gather(*(expand(f, i) for i, f in enumerate(s.fork(2))))
    s.assistant(f"Tip 1:{first}\n")
    s.assistant(f"Tip 2:{second}\n")
    with s.assistant():
        s += "To summarize:\n"
        return await s.gen("summary", max_tokens=512)
"""
NATIVE_TIPS_TREE = r"""
program p()
├─ assistant: 'Two tips.\n\n'
├─ fork 2
│  └─ assistant
│     ├─ 'Expand tip {i + 1}:\n'
│     └─ gen max_tokens=256, stop='\n\n'
├─ assistant: 'Tip 1:{first}\n'
├─ assistant: 'Tip 2:{second}\n'
└─ assistant
   ├─ 'To summarize:\n'
   └─ gen summary max_tokens=512
"""

ENCODING = r"""
@program
async def p(s, question, contexts):
    s += user("Please memorize these statements.\n")
    forks = s.fork(len(contexts))
    forks += lambda i: f"Statement {i}: " + contexts[i] + "\n"
    await forks.join("append")
    s += assistant("Question: " + question + "\nAnswer:" + gen("answer"))
"""
ENCODING_TREE = r"""
program p(question, contexts)
├─ user: 'Please memorize these statements.\n'
├─ fork {len(contexts)}
│  └─ 'Statement {i}: {contexts[i]}\n'
├─ join append
└─ assistant
   ├─ 'Question: {question}\nAnswer:'
   └─ gen answer
"""

TOOL_USE = r"""
@program
async def p(s, lhs, rhs):
    s += f"What is the product of {lhs} and {rhs}?\n"
    s += "Answer: The answer is calculate(" + gen("expression", stop=")") + ") = "
    await s
    with s.var_scope("answer"):
        s += calculate(s["expression"])
"""
TOOL_USE_TREE = r"""
program p(lhs, rhs)
├─ 'What is the product of {lhs} and {rhs}?\n'
├─ 'Answer: The answer is calculate('
├─ gen expression stop=')'
├─ ') = '
└─ scope answer
   └─ '{calculate(s['expression'])}'
"""

AGENT = r"""
@program
async def p(s, task):
    s += "Tools: search, calculator\n\n"
    s += f"Task: {task}\n"
    for step in range(5):
        s += "Thought: " + gen("thought", max_tokens=50, stop="\n")
        s += "\nAction: " + select("action", choices=["search", "calculator", "finish"])
        await s
        if s["action"] == "finish":
            break
        s += "\nInput: " + gen("input", max_tokens=100, regex=r"\{.*?\}")
        await s
        s += f"\nObservation: {await execute_tool(s['action'], s['input'])}\n"
    s += "Answer: " + gen("answer", max_tokens=200)
"""
AGENT_TREE = r"""
program p(task)
├─ 'Tools: search, calculator\n\n'
├─ 'Task: {task}\n'
├─ for step in range(5)
│  ├─ 'Thought: '
│  ├─ gen thought max_tokens=50, stop='\n'
│  ├─ '\nAction: '
│  ├─ select action of 'search', 'calculator', 'finish'
│  ├─ python: if s['action'] == 'finish': break
│  ├─ '\nInput: '
│  ├─ gen input max_tokens=100, regex='\\{.*?\\}'
│  └─ '\nObservation: {await execute_tool(s['action'], s['input'])}\n'
├─ 'Answer: '
└─ gen answer max_tokens=200
"""

SEEDS = {
    "judge": (JUDGE, JUDGE_TREE, ("score",)),
    "tips": (TIPS, TIPS_TREE, ("detail", "summary")),
    "tips, native": (NATIVE_TIPS, NATIVE_TIPS_TREE, ("summary",)),
    "parallel encoding": (ENCODING, ENCODING_TREE, ("answer",)),
    "tool use": (TOOL_USE, TOOL_USE_TREE, ("expression", "answer")),
    "agent": (AGENT, AGENT_TREE, ("thought", "action", "input", "answer")),
}


@pytest.mark.parametrize(("text", "tree", "names"), SEEDS.values(), ids=SEEDS.keys())
class TestTheFivePrograms:
    def test_are_drawn(self, tmp_path: Path, text: str, tree: str, names: tuple[str, ...]) -> None:
        plan = plan_of(tmp_path, text)

        assert f"\n{plan}\n" == tree
        assert plan.names == names
        assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


class TestAPlan:
    def test_runs_nothing(self, tmp_path: Path) -> None:
        module = load(
            tmp_path,
            """
            RAN = []
            class Loud(str):
                def __repr__(self): RAN.append("repr"); return ""
                def __str__(self): RAN.append("str"); return ""
                def __format__(self, spec): RAN.append("format"); return ""
                def __eq__(self, other): RAN.append("eq"); return True
                def __hash__(self): RAN.append("hash"); return 1
                def __getattr__(self, name): RAN.append(name); raise AttributeError(name)
            LOUD = Loud("loud")
            def shout(*_): RAN.append("shout")
            @program
            async def p(s: State, x=shout()):
                shout(s)
                s += f"{shout()} {LOUD}" + LOUD + LOUD.name
                await LOUD(s)
                for _ in [shout()]:
                    await s.gen(shout(), stop=LOUD)
            """,
        )
        before = list(module.RAN)

        str(trace_plan(module.p))

        assert module.RAN == before == ["shout"]

    def test_is_of_a_plain_coroutine_function_too(self, tmp_path: Path) -> None:
        assert plan_of(tmp_path, "async def p(s, x): s += 'a'").steps == (Constant("a"),)

    def test_of_a_bound_or_partial_program_is_that_of_its_function(self, tmp_path: Path) -> None:
        module = load(
            tmp_path,
            """
            class Bot:
                @program
                async def p(self, s: State, x): self.greet(s)
                def greet(self, state): state += "hello"
            """,
        )

        assert trace_plan(module.Bot().p).steps == (Constant("hello"),)
        assert trace_plan(functools.partial(module.Bot.p.function, module.Bot())).parameters == (
            "x",
        )

    def test_is_that_of_the_example(self) -> None:
        plan = trace_plan(example.tips)

        assert plan.names == ("opening", "reason", "summary")
        assert [step.count for step in plan.steps if isinstance(step, Fork)] == [
            Hole("len(chosen)")
        ]

    def test_keeps_strings_exactly_as_the_source_spells_them(self, tmp_path: Path) -> None:
        head = "class A:\n    @program\n    async def p(self, s: State):\n"
        text = head + '        s += """one\n  two\n"""\n'

        assert trace_plan(load(tmp_path, text).A.p).prefix == "one\n  two\n"

        assert trace_plan(load(tmp_path, text).A.p).prefix == "one\n  two\n"

    def test_has_lines_that_fit(self, tmp_path: Path) -> None:
        lines = tree_of(tmp_path, f"s += '{'long ' * 50}'")

        assert 90 < max(map(len, lines)) <= 100


class TestWhatHasNoPlan:
    def test_is_a_program_without_source(self) -> None:
        names: dict[str, Any] = {}
        exec("async def p(s): pass", names)

        with pytest.raises(OptionError, match=r"program: the source of 'p' cannot be found .*exec"):
            trace_plan(names["p"])

    def test_is_a_file_that_has_changed(self, tmp_path: Path) -> None:
        module = load(tmp_path, "@program\nasync def p(s): pass")
        (tmp_path / "sample.py").write_text("\n\nx = 1\n")

        with pytest.raises(OptionError, match=r"sample\.py has changed since 'p' was imported"):
            trace_plan(module.p)

    def test_is_a_function_that_is_no_coroutine(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="'p' is a plain function"):
            plan_of(tmp_path, "def p(s): pass")

    def test_is_a_coroutine_without_a_state(self, tmp_path: Path) -> None:
        with pytest.raises(
            OptionError, match=r"'p' takes no State: write `async def p\(s: State\)`"
        ):
            plan_of(tmp_path, "async def p(): pass")

    @pytest.mark.parametrize("thing", [None, 3, "tips", int, example])
    def test_is_anything_else(self, thing: object) -> None:
        with pytest.raises(TypeError, match="trace_plan takes a program, got"):
            trace_plan(thing)


class TestCalls:
    def test_have_their_options(self, tmp_path: Path) -> None:
        plan = plan_of(
            tmp_path,
            """
            STOPS = ("a", "b")
            @program
            async def p(s, limit, **more):
                await s.gen("x", max_tokens=limit, temperature=-0.5, stop=STOPS, type=int, **more)
            """,
        )

        (gen,) = plan.steps
        assert isinstance(gen, Gen)
        assert gen.options == (
            ("max_tokens", Hole("limit")),
            ("temperature", -0.5),
            ("stop", ("a", "b")),
            ("type", Hole("int")),
            ("**", Hole("more")),
        )

    @pytest.mark.parametrize(
        ("call", "choices"),
        [
            ("s.select('x', ['a', 'b'])", ("a", "b")),
            ("s.select('x', choices=('a', 'b'))", ("a", "b")),
            ("s.gen('x', choices=['a'])", ("a",)),
            ("s.select('x', LIST)", ("u", "v")),
            ("s.select('x', choices=options)", Hole("options")),
        ],
    )
    def test_of_select_have_their_choices(self, tmp_path: Path, call: str, choices: Any) -> None:
        text = f"LIST = ['u', 'v']\n@program\nasync def p(s, options): await {call}"

        assert plan_of(tmp_path, text).steps == (Select("x", choices),)

    @pytest.mark.parametrize(
        ("call", "line"),
        [
            ("s.call([weather, kit.clock])", "call of weather, kit.clock"),
            ("s.call(tools=(weather,), name='w')", "call w of weather"),
            ("s.call(tools, 'w', parallel=True)", "call w of {tools} parallel=True"),
        ],
    )
    def test_of_tools_name_the_functions(self, tmp_path: Path, call: str, line: str) -> None:
        text = f"@program\nasync def p(s, tools, kit, weather):\n    await {call}\n"

        (step,) = plan_of(tmp_path, text).steps

        assert str(step) == line

    def test_may_have_names_that_are_made(self, tmp_path: Path) -> None:
        body = "for i in range(3): await s.gen(f'tip_{i}')"

        assert tree_of(tmp_path, body) == ["└─ for i in range(3)", "   └─ gen {f'tip_{i}'}"]

    @pytest.mark.parametrize(
        ("body", "line"),
        [
            ("await s.prime()", "prime"),
            ("s['x'] = await tool()", "set x = await tool()"),
            ("s['x'] = 'text'", "set x = 'text'"),
            ("s.image(x)", "python: s.image(x) (given the state)"),
            (
                "print(s.text(), s['x'], s.meta('x'))",
                "python: print(s.text(), s['x'], s.meta('x'))",
            ),
            ("call = s.gen\nawait call('x')", "gen x"),
            ("return await s.gen('x')", "gen x"),
            ("a = b = await s.gen('x')", "gen x"),
            ("if (x := await s.gen('x')): pass", "gen x"),
            ("import structgen as sg\ns += sg.user('a')", "user: 'a'"),
            ("from asyncio import sleep\nawait sleep(0)", "python: await sleep(0)"),
        ],
    )
    def test_are_one_line_each(self, tmp_path: Path, body: str, line: str) -> None:
        assert tree_of(tmp_path, body) == [f"└─ {line}"]

    def test_that_settle_add_nothing(self, tmp_path: Path) -> None:
        body = "s += 'a'\nawait s\nawait s.settle()\nf = s.fork(2)\nawait asyncio.gather(*f)"

        assert tree_of(tmp_path, body) == ["├─ 'a'", "└─ fork 2"]

    def test_stream(self, tmp_path: Path) -> None:
        body = """
        async with s.stream("x", max_tokens=5) as pieces:
            async for piece in pieces:
                print(piece)
        s += "."
        """

        assert tree_of(tmp_path, body) == [
            "├─ stream x max_tokens=5",
            "├─ python: for piece in pieces: print(piece)",
            "└─ '.'",
        ]


class TestText:
    def test_is_a_template_where_it_has_holes(self, tmp_path: Path) -> None:
        plan = plan_of(
            tmp_path, "@program\nasync def p(s, x): s += 'a' + x + f'{x!r}b' + 'c' + str(1)"
        )

        assert plan.steps == (Template(("a", Hole("x"), Hole("x"), "bc", Hole("str(1)"))),)

    def test_of_globals_and_names_that_are_set_once_is_known(self, tmp_path: Path) -> None:
        text = """
        INTRO, YEAR = "Hello ", 2024
        @program
        async def p(s):
            who = "you"
            s += INTRO + f"{who} of {YEAR}"
        """

        assert plan_of(tmp_path, text).steps[-1] == Constant("Hello you of 2024")

    def test_of_names_that_change_is_not(self, tmp_path: Path) -> None:
        body = "who = 'you'\ns += who\nwho = 'me'\ns += who\nn = 1\nn += 1\ns += f'{n}'"

        assert [line for line in tree_of(tmp_path, body) if "python" not in line] == [
            "├─ '{who}'",
            "├─ '{who}'",
            "└─ '{n}'",
        ]

    def test_of_a_closure_is_known(self, tmp_path: Path) -> None:
        text = """
        def make(intro):
            @program
            async def p(s): s += intro
            return p
        p = make("Hello")
        """

        assert plan_of(tmp_path, text).prefix == "Hello"

    def test_may_be_put_together_before_it_is_said(self, tmp_path: Path) -> None:
        body = """
        turn = user("a") + assistant("b" + gen("x"))
        s += turn
        """

        assert tree_of(tmp_path, body) == [
            "├─ user: 'a'",
            "└─ assistant",
            "   ├─ 'b'",
            "   └─ gen x",
        ]

    def test_may_come_from_a_function(self, tmp_path: Path) -> None:
        body = """
        def ask(name):
            return user("?") + assistant(gen(name))
        s += ask("x")
        """

        assert tree_of(tmp_path, body) == ["├─ user: '?'", "└─ assistant: gen {name}"]

    def test_may_be_one_of_two(self, tmp_path: Path) -> None:
        body = "s += gen('x') if flag else 'no'"

        assert tree_of(tmp_path, body, ", flag") == [
            "├─ if flag",
            "│  └─ gen x",
            "└─ else",
            "   └─ 'no'",
        ]

    def test_comes_after_what_it_awaits(self, tmp_path: Path) -> None:
        body = "s += f\"a {await s.gen('x')}\""

        assert tree_of(tmp_path, body) == ["├─ gen x", "└─ 'a {await s.gen('x')}'"]

    def test_with_reasoning_apart_is_what_it_wraps(self, tmp_path: Path) -> None:
        body = "s += assistant(separate_reasoning(gen('x'), 'qwen3'))"

        assert tree_of(tmp_path, body) == ["└─ assistant: gen x"]

    def test_in_marks_has_them(self, tmp_path: Path) -> None:
        body = "s += user_begin() + 'a' + user_end()"

        assert tree_of(tmp_path, body) == ["├─ user begins", "├─ 'a'", "└─ user ends"]

    def test_of_somebody_elses_gen_is_a_hole(self, tmp_path: Path) -> None:
        text = "def gen(x): ...\n@program\nasync def p(s): s += gen('x')"

        assert plan_of(tmp_path, text).steps == (Template((Hole("gen('x')"),)),)


TASK_GROUP = """
async with asyncio.TaskGroup() as group:
    for b in s.fork(3):
        group.create_task(b.gen("x"))
"""
START_SOON = """
async def go(b):
    await b.gen("x")
async with anyio.create_task_group() as group:
    for b in s.fork(3):
        group.start_soon(go, b)
"""


class TestForks:
    @pytest.mark.parametrize(
        "body",
        [
            "for b in s.fork(3): await b.gen('x')",
            "f = s.fork(3)\nfor i in range(3): await f[i].gen('x')",
            "f = s.fork(3)\nfor i, b in enumerate(f): b += gen('x')",
            "f = s.fork(3)\nfor b, t in zip(f, 'abc'): b += gen('x')",
            "f = s.fork(3)\nf += gen('x')",
            "f = s.fork(3)\nf += lambda i: gen('x')",
            "f = s.fork(n=3)\nawait asyncio.gather(*[b.gen('x') for b in f])",
            "await asyncio.gather(*(b.gen('x') for b in s.fork(3)))",
            "async def go(b): await b.gen('x')\nawait asyncio.gather(*map(go, s.fork(3)))",
            "async def go(b, i): await b.gen('x')\nasync with s.fork(3) as f: await f.map(go)",
            "f = s.fork(3)\nasync with f: await f.map(lambda b, i: b.gen('x'))",
            TASK_GROUP,
            START_SOON,
            "bs = list(s.fork(3))\nfor b in bs: await b.gen('x')",
            "a, b, c = s.fork(3)\nfor t in (a,): pass\nf = s.fork(3)\n" + "f[:] += gen('x')",
        ],
    )
    def test_have_what_each_branch_does(self, tmp_path: Path, body: str) -> None:
        fork, gen = tree_of(tmp_path, body)[-2:]

        assert (fork[-6:], gen[-8:]) == ("fork 3", "└─ gen x")
        assert gen.index("└") == fork.index("fork")

    def test_have_what_one_branch_does(self, tmp_path: Path) -> None:
        body = """
        a, b = s.fork(2)
        a += "A"
        b += "B"
        await a.gen("x")
        f = s.fork(2)
        await f[1].gen("y")
        f[-1] += "z"
        """

        assert tree_of(tmp_path, body) == [
            "├─ fork 2",
            "│  ├─ branch 0",
            "│  │  ├─ 'A'",
            "│  │  └─ gen x",
            "│  └─ branch 1",
            "│     └─ 'B'",
            "└─ fork 2",
            "   ├─ branch 1",
            "   │  └─ gen y",
            "   └─ branch -1",
            "      └─ 'z'",
        ]

    def test_of_one_are_that_branch(self, tmp_path: Path) -> None:
        body = "c = s.copy()\nawait c.gen('x')\nasync with s.fork(1) as (d,): await d.gen('y')"

        assert tree_of(tmp_path, body) == [
            "├─ fork 1",
            "│  └─ gen x",
            "└─ fork 1",
            "   └─ gen y",
        ]

    def test_count_what_is_known(self, tmp_path: Path) -> None:
        text = """
        TOPICS = ("a", "b", "c")
        @program
        async def p(s):
            n = 4
            s.fork(len(TOPICS)); s.fork(n)
        """

        forks = [step for step in plan_of(tmp_path, text).steps if isinstance(step, Fork)]

        assert [fork.count for fork in forks] == [3, 4]

    def test_keep_apart_what_the_parent_says_for_each_branch(self, tmp_path: Path) -> None:
        body = """
        async with s.fork(2) as forks:
            for i, f in enumerate(forks):
                f += gen("x")
                if i:
                    f += "again"
        for f in forks:
            s += f["x"]
        """

        assert tree_of(tmp_path, body) == [
            "├─ fork 2",
            "│  ├─ gen x",
            "│  └─ if i",
            "│     └─ 'again'",
            "└─ for f in forks",
            "   └─ '{f['x']}'",
        ]

    def test_in_forks_are_in_them(self, tmp_path: Path) -> None:
        body = """
        async def grow(b, depth):
            await b.gen("thought")
            if depth:
                async with b.fork(3) as more:
                    await more.map(lambda c, i: grow(c, depth - 1))
        await grow(s, 2)
        """

        assert tree_of(tmp_path, body) == [
            "├─ gen thought",
            "└─ if depth",
            "   └─ fork 3",
            "      └─ program grow (recursive)",
        ]

    @pytest.mark.parametrize(
        ("method", "more"),
        [
            ("race", ""),
            ("vote", ", key=lambda value: value.strip()"),
            ("best_of", ", lambda b, value: len(value)"),
        ],
    )
    def test_that_may_be_cut_off_say_so(self, tmp_path: Path, method: str, more: str) -> None:
        body = f"""
        async def draft(b, i):
            return await b.gen("x")
        async with s.fork(2) as f:
            await f.{method}(draft{more})
        """

        assert tree_of(tmp_path, body) == ["└─ fork 2", f"   └─ {method}", "      └─ gen x"]


class TestBlocks:
    def test_of_python_around_steps_are_shown(self, tmp_path: Path) -> None:
        body = """
        try:
            async with asyncio.timeout(2):
                await s.gen("x")
        except TimeoutError:
            s += "short"
        else:
            s += "long"
        finally:
            print("done")
        while not s["x"]:
            await s.gen("x")
        match s["x"]:
            case "a" | "b":
                s += "c"
            case _:
                pass
        """

        assert tree_of(tmp_path, body) == [
            "├─ try",
            "│  └─ async with asyncio.timeout(2)",
            "│     └─ gen x",
            "├─ except TimeoutError",
            "│  └─ 'short'",
            "├─ else",
            "│  └─ 'long'",
            "├─ python: finally: print('done')",
            "├─ while not s['x']",
            "│  └─ gen x",
            "└─ match s['x']",
            "   └─ case 'a' | 'b'",
            "      └─ 'c'",
        ]

    def test_of_python_alone_are_one_line(self, tmp_path: Path) -> None:
        body = "for x in xs:\n    if x: print(x)\n    y = x"

        assert tree_of(tmp_path, body, ", xs") == ["└─ python: for x in xs: ..."]

    def test_chain_conditions(self, tmp_path: Path) -> None:
        body = """
        if a == 1: s += "1"
        elif a == 2: s += "2"
        else: s += "3"
        """

        assert tree_of(tmp_path, body, ", a") == [
            "├─ if a == 1",
            "│  └─ '1'",
            "├─ else if a == 2",
            "│  └─ '2'",
            "└─ else",
            "   └─ '3'",
        ]

    def test_of_the_language_are_shown(self, tmp_path: Path) -> None:
        body = """
        with s.using(temperature=0):
            with s.var_scope("all"), s.assistant():
                s += "a"
                await s.gen("x")
        """

        assert tree_of(tmp_path, body) == [
            "└─ using temperature=0",
            "   └─ scope all",
            "      └─ assistant",
            "         ├─ 'a'",
            "         └─ gen x",
        ]

    def test_that_call_back_may_run_or_not(self, tmp_path: Path) -> None:
        body = "await with_retries(lambda: s.gen('x'), 3)"

        assert tree_of(tmp_path, body) == ["└─ with_retries(...)", "   └─ gen x"]

    def test_after_a_return_are_not_read(self, tmp_path: Path) -> None:
        assert tree_of(tmp_path, "s += 'a'\nreturn\ns += 'b'") == ["├─ 'a'", "└─ python: return"]


INLINE = """
@program
async def third(s): s += "third"

@program
async def second(s, x):
    s += "second"
    await third(s)
    await p(s)

@program
async def p(s):
    await second(s, x=1)
    await second.using(temperature=0)(s, 2)
"""


class TestOtherPrograms:
    def test_are_read_one_level_deep(self, tmp_path: Path) -> None:
        assert str(plan_of(tmp_path, INLINE)).splitlines()[1:] == [
            "├─ program second",
            "│  ├─ 'second'",
            "│  ├─ program third (see its own plan)",
            "│  └─ program p (recursive)",
            "└─ program second",
            "   ├─ 'second'",
            "   ├─ program third (see its own plan)",
            "   └─ program p (recursive)",
        ]

    def test_without_source_are_named(self, tmp_path: Path) -> None:
        module = load(tmp_path, "@program\nasync def p(s): await other(s)")
        names = vars(module).copy()
        exec("@program\nasync def other(s): ...", names)
        vars(module)["other"] = names["other"]

        assert str(trace_plan(module.p)).splitlines()[1:] == ["└─ program other (without source)"]

    def test_that_are_started_anew_are_python(self, tmp_path: Path) -> None:
        text = "@program\nasync def q(s): ...\n@program\nasync def p(s, e): await q.run(e)"

        assert str(plan_of(tmp_path, text)).splitlines()[1:] == ["└─ python: await q.run(e)"]

    def test_that_are_written_inside_are_read(self, tmp_path: Path) -> None:
        body = """
        @program
        async def inner(state): state += "x"
        await inner(s)
        """

        assert tree_of(tmp_path, body) == ["└─ program inner", "   └─ 'x'"]

    def test_may_be_methods(self, tmp_path: Path) -> None:
        module = load(
            tmp_path,
            """
            class Bot:
                @program
                async def p(self, s: State): await self.end(s)
                @program
                async def end(self, s: State): s += "end"
            """,
        )

        assert trace_plan(module.Bot().p).names == ()
        assert str(trace_plan(module.Bot().p)).splitlines()[1:] == ["└─ program end", "   └─ 'end'"]

    def test_and_functions_do_not_explode(self, tmp_path: Path) -> None:
        text = "".join(f"async def f{i}(s):\n    await f{i + 1}(s)\n" for i in range(30))
        text += "async def f30(s): s += 'end'\n@program\nasync def p(s): await f0(s)"

        shown = str(plan_of(tmp_path, text)).splitlines()[1:]

        assert shown == ["└─ program f8 (not followed further)"]


class TestPythonThatIsGivenTheState:
    @pytest.mark.parametrize(
        "statement",
        [
            "helper(s)",
            "await helper(1, state=s)",
            "box.s = s",
            "box['s'] = [s]",
            "box['f'] = lambda: s.append('x')",
            "helper([b for b in s.fork(2)])",
            "helper(s.fork(2))",
            "s.unknown()",
        ],
    )
    def test_is_marked(self, tmp_path: Path, statement: str) -> None:
        assert any("(given the state)" in line for line in tree_of(tmp_path, statement, ", box"))

    @pytest.mark.parametrize(
        "statement",
        [
            "helper(s['x'])",
            "'x' in s",
            "print(s)",
            "x = s.text()",
            "len(s.fork(2))",
            "n = s.branch",
        ],
    )
    def test_is_not_what_reads(self, tmp_path: Path, statement: str) -> None:
        assert not any("given" in line for line in tree_of(tmp_path, statement))


class TestThePrefix:
    @pytest.mark.parametrize(
        ("body", "prefix"),
        [
            ("s += 'a'\ns += 'b'\nawait s.gen('x')\ns += 'c'", "ab"),
            ("s += 'a' + x + 'b'", "a"),
            ("s += f'a{x}'\ns += 'b'", "a"),
            ("s += x + 'b'", ""),
            ("s += 'a'\nif x:\n    s += 'b'\ns += 'c'", "a"),
            ("s += 'a'\nif x: return\ns += 'b'", "a"),
            ("s += 'a'\nfor _ in x:\n    s += 'b'\ns += 'c'", "a"),
            ("s += 'a'\nwith x:\n    s += 'b'", "a"),
            ("s += 'a'\ntry:\n    s += 'b'\nexcept E: pass", "a"),
            ("s += 'a'\nhelper(s)\ns += 'b'", "a"),
            ("s += 'a'\nx.s = s\ns += 'b'", "a"),
            ("s += 'a'\nx['f'] = lambda: s.append('!')\nx['f']()\ns += 'b'", "a"),
            ("s += 'a'\nprint(x)\ny = x + 1\ns += 'b'", "ab"),
            ("s += 'a'\ns['v'] = x\nawait s\nawait s.prime()\ns += 'b'", "ab"),
            ("s += 'a'\nf = s.fork(2)\nf += 'b'\nawait f.join()\ns += 'c'", "ac"),
            ("s += 'a'\nf = s.fork(2)\nf += 'b'\nawait f.join('append')\ns += 'c'", "a"),
            ("s += 'a'\nawait s.fork(2).join(x)\ns += 'c'", "a"),
            ("with s.using(temperature=0), s.var_scope('v'):\n    s += 'a'\ns += 'b'", "ab"),
            ("with s.var_scope('v'):\n    s += 'a'\n    if x: return\ns += 'b'", "a"),
            (
                "async def say(t):\n    t += 'b'\n    return 1\ns += 'a'\nawait say(s)\ns += 'c'",
                "abc",
            ),
            ("async def say(t):\n    if x: return\n    t += 'b'\ns += 'a'\nawait say(s)", "a"),
            ("await other(s)\ns += 'b'", "ob"),
            ("await ended(s)\ns += 'b'", ""),
            ("s += 'a'\ns.user('b')\ns += 'c'", "a"),
            ("s.user('b')", ""),
            ("s += 'a'\nawait s.select('y', ['b'])\ns += 'c'", "a"),
            ("t = s\nt += 'a'\ns += 'b'", "ab"),
            ("s += 'a'\ns.discard()\ns += 'b'", "a"),
            ("x and s.append('a')\ns += 'b'", ""),
        ],
    )
    def test_is_what_every_run_begins_with(self, tmp_path: Path, body: str, prefix: str) -> None:
        head = (
            "@program\nasync def other(s): s += 'o'\n"
            "@program\nasync def ended(s):\n    if s['x']: return\n    s += 'o'\n"
            "@program\nasync def p(s, x):\n"
        )

        assert plan_of(tmp_path, head + textwrap.indent(body, "    ")).prefix == prefix

    def test_is_empty_under_a_decorator_that_may_say_more(self, tmp_path: Path) -> None:
        text = """
        import functools
        def loud(f):
            @functools.wraps(f)
            async def g(s):
                s += "!"
                await f(s)
            return g
        @program
        @loud
        async def p(s): s += "a"
        """

        plan = plan_of(tmp_path, text)

        assert plan.prefix == ""
        assert str(plan).splitlines()[1:] == [
            "├─ python: decorator of p (given the state)",
            "└─ 'a'",
        ]

    def test_with_roles_is_in_the_opening(self, tmp_path: Path) -> None:
        text = """
        @program
        async def p(s, x):
            s.system("be brief")
            s.user(f"about {x}")
            s.user("never")
        """

        assert plan_of(tmp_path, text).opening == (
            Turn("system", (Constant("be brief"),)),
            Turn("user", (Constant("about "),)),
        )


class TestEveryStep:
    def test_is_found_before_what_is_in_it(self, tmp_path: Path) -> None:
        plan = plan_of(tmp_path, TIPS)

        kinds = [type(step).__name__ for step in every(plan.steps)]

        assert kinds[:5] == ["Turn", "Constant", "Fork", "Turn", "Template"]
