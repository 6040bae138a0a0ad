"""`trace_plan(program)`: the picture of a program before it runs, from its source alone.

Owns   nothing: a plan is frozen data.
Holds  nothing of the program is executed, not once, so no side effect of it can happen.
Used   by users, and by whatever draws programs.

The idea of a picture before the run is that of SGLang's tracer (Zheng et al., 2024), which ran the
program with stand-ins for its arguments. Reading the source needs no stand-ins: it also sees both
sides of a condition, and arguments in f-strings.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from structgen.errors import OptionError
from structgen.trace.outline import one_line, rails, shorten
from structgen.trace.reading.reader import steps_of
from structgen.trace.reading.source import function_of, node_of, parameters, state_parameter
from structgen.trace.steps import (
    Assign,
    Conditional,
    Constant,
    Fork,
    Inline,
    Join,
    Opaque,
    Prime,
    Scope,
    Step,
    Template,
    Turn,
    Using,
    every,
    inside,
    variable,
)

WIDTH = 100


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a program would say and ask for.

    program      its name
    parameters   names of what it is called with, besides the state
    steps        in the order in which they are written; see `steps` for their kinds

    `str(plan)` is a text tree. Strings that are globals are taken as they stand now.
    """

    program: str
    parameters: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that it may set, in order, those of its branches included."""
        found = [variable(step) for step in every(self.steps)]
        return tuple(dict.fromkeys(name for name in found if name))

    @property
    def prefix(self) -> str:
        """The text that is known to begin every run; "" where none is.

        It ends before the first role: markup is the model's, see `opening`.
        """
        texts: list[str] = []
        for step in self.opening:
            if not isinstance(step, Constant):
                break
            texts.append(step.text)
        return "".join(texts)

    @property
    def opening(self) -> tuple[Constant | Turn, ...]:
        """What is known to be said first in every run: constant text and turns of it.

        The last one may go on with text that is not constant, and so may a last turn.
        """
        found, _ = _opening(self.steps)
        return tuple(found)

    def __str__(self) -> str:
        head = Line(0, f"program {self.program}({', '.join(self.parameters)})")
        lines = [head, *_lines(self.steps)]
        drawn = rails([line.depth for line in lines], room=WIDTH // 2)
        return "\n".join(
            shorten(rail + one_line(line.text), WIDTH)
            for rail, line in zip(drawn, lines, strict=True)
        )


def trace_plan(program: object) -> Plan:
    """Read a program, or a coroutine function that takes a State, without running it.

    Raises `TypeError` for anything else, and `OptionError` for one without source: what was made by
    exec or in a prompt, and a file that has changed since it was imported.
    """
    found = function_of(program)
    if found is None or isinstance(program, type):
        raise TypeError(f"trace_plan takes a program, got {type(program).__name__}")
    if not inspect.iscoroutinefunction(found.function):
        raise TypeError(
            f"trace_plan takes a program or an `async def` function; {found.function.__name__!r} "
            "is a plain function"
        )
    node = node_of(found.function)
    state = state_parameter(node)
    if state is None:
        raise OptionError(
            "program", f"{node.name!r} takes no State: write `async def {node.name}(s: State)`"
        )
    names = tuple(each.arg for each in parameters(node) if each.arg not in {state, "self", "cls"})
    return Plan(program=node.name, parameters=names, steps=steps_of(found, state))


# ---------------------------------------------------------------- the constant beginning


def _opening(steps: Sequence[Step]) -> tuple[list[Constant | Turn], bool]:
    """The constant beginning of some steps, and whether it is all of them."""
    found: list[Constant | Turn] = []
    for step in steps:
        whole = True
        match step:
            case Constant():
                found.append(step)
            case Template((str(text), *_)):
                found.append(Constant(text))
                whole = False
            case Turn(role, body):
                said, whole = _opening(body)
                texts = tuple(each for each in said if isinstance(each, Constant))
                found.append(Turn(role, texts))
            case Scope(_, body) | Using(_, body) | Inline(_, body, ""):
                said, whole = _opening(body)
                found += said
            case Join("gather") | Fork() | Prime() | Assign():
                pass
            case Opaque(touches=False, ends=False):
                pass
            case _:
                whole = False
        if not whole:
            return found, False
    return found, True


# ---------------------------------------------------------------- the text tree


class Line(NamedTuple):
    """A line of the tree, and the steps below it."""

    depth: int
    text: str
    body: tuple[Step, ...] = ()


def _lines(steps: Sequence[Step]) -> list[Line]:
    found: list[Line] = []
    ahead = _opened(1, steps)
    while ahead:
        line = ahead.pop()
        found.append(line)
        ahead += _opened(line.depth + 1, line.body)
    return found


def _opened(depth: int, steps: Sequence[Step]) -> list[Line]:
    """The lines of some steps, last one first."""
    lines = [line for step in steps for line in _lines_of(depth, step)]
    return lines[::-1]


def _lines_of(depth: int, step: Step) -> list[Line]:
    match step:
        case Conditional():
            return [Line(depth, str(step), step.then), *_else(depth, step)]
        case Turn(body=(only,)) if not inside(only):
            return [Line(depth, f"{step}: {only}")]  # most turns say one thing
        case _:
            return [Line(depth, str(step), inside(step))]


def _else(depth: int, step: Conditional) -> list[Line]:
    match step.otherwise:
        case ():
            return []
        case (Conditional() as other,):
            return [Line(depth, f"else {other}", other.then), *_else(depth, other)]
        case _:
            return [Line(depth, "else", step.otherwise)]
