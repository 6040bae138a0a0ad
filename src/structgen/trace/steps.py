"""What a program says and asks for, step by step: the vocabulary of a plan.

Owns   the shapes of steps, all of them frozen and JSON. `str(step)` is one line for people, without
       what is in the step.
Used   by `plan`, which makes and shows them, and by whatever draws programs.

A value that the source spells out is that value; any other is a `Hole`, which quotes the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, Union

import msgspec


class Hole(msgspec.Struct, frozen=True):
    """A place that is filled when the program runs; `source` is the Python that fills it."""

    source: str


Value: TypeAlias = bool | int | float | str | tuple[str, ...] | Hole | None
Options: TypeAlias = tuple[tuple[str, Value], ...]


class Constant(msgspec.Struct, frozen=True, tag_field="step", tag="constant"):
    """Text that is the same in every run."""

    text: str

    def __str__(self) -> str:
        return repr(self.text)


class Template(msgspec.Struct, frozen=True, tag_field="step", tag="template"):
    """Text with holes, in order."""

    parts: tuple[str | Hole, ...]

    def __str__(self) -> str:
        # As an f-string reads, its texts escaped as `repr` does it.
        texts = [repr(p)[1:-1] if isinstance(p, str) else f"{{{p.source}}}" for p in self.parts]
        return f"'{''.join(texts)}'"


class Gen(msgspec.Struct, frozen=True, tag_field="step", tag="gen"):
    """A generation; `streamed` where the program reads it piece by piece."""

    name: str | Hole = ""
    options: Options = ()
    streamed: bool = False

    def __str__(self) -> str:
        verb = "stream" if self.streamed else "gen"
        return _words(verb, _said(self.name), _listed(self.options))


class Select(msgspec.Struct, frozen=True, tag_field="step", tag="select"):
    """A choice between texts."""

    name: str | Hole = ""
    choices: tuple[str, ...] | Hole = ()
    options: Options = ()

    def __str__(self) -> str:
        choices = f"of {_said(self.choices)}"
        return _words("select", _said(self.name), choices, _listed(self.options))


class Call(msgspec.Struct, frozen=True, tag_field="step", tag="call"):
    """A turn in which the model calls functions, and the turns of their results.

    tools   the functions, each as the Python that names it
    """

    name: str | Hole = ""
    tools: tuple[str, ...] | Hole = ()
    options: Options = ()

    def __str__(self) -> str:
        tools = _said(self.tools) if isinstance(self.tools, Hole) else ", ".join(self.tools)
        return _words("call", _said(self.name), f"of {tools}", _listed(self.options))


class Prime(msgspec.Struct, frozen=True, tag_field="step", tag="prime"):
    """What was said so far is computed ahead."""

    def __str__(self) -> str:
        return "prime"


class Turn(msgspec.Struct, frozen=True, tag_field="step", tag="turn"):
    """One message of a chat."""

    role: str
    body: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.role


class Mark(msgspec.Struct, frozen=True, tag_field="step", tag="mark"):
    """A turn that begins (`opens`) or ends here, its other end somewhere else."""

    role: str
    opens: bool

    def __str__(self) -> str:
        return f"{self.role} {'begins' if self.opens else 'ends'}"


class Scope(msgspec.Struct, frozen=True, tag_field="step", tag="scope"):
    """What is said in it becomes a variable too."""

    name: str | Hole
    body: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return f"scope {_said(self.name)}"


class Using(msgspec.Struct, frozen=True, tag_field="step", tag="using"):
    """Default options for what is in it."""

    options: Options
    body: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return _words("using", _listed(self.options))


class Fork(msgspec.Struct, frozen=True, tag_field="step", tag="fork"):
    """Branches; `body` is what each of them does, or one alone, in a `Block` with its number."""

    count: int | Hole
    body: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return f"fork {_said(self.count)}"


class Join(msgspec.Struct, frozen=True, tag_field="step", tag="join"):
    """What the branches made comes into their parent."""

    mode: str | Hole = "gather"

    def __str__(self) -> str:
        return f"join {_said(self.mode)}"


class Loop(msgspec.Struct, frozen=True, tag_field="step", tag="loop"):
    """Steps that are repeated, any number of times; `header` is the Python that says how often."""

    header: str
    body: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.header


class Conditional(msgspec.Struct, frozen=True, tag_field="step", tag="conditional"):
    """Steps of which one list is taken."""

    test: str
    then: tuple[Step, ...] = ()
    otherwise: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return f"if {self.test}"


class Block(msgspec.Struct, frozen=True, tag_field="step", tag="block"):
    """Steps inside other Python that may run, repeat or cut them: try, a timeout, a retry."""

    header: str
    body: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.header


class Inline(msgspec.Struct, frozen=True, tag_field="step", tag="inline"):
    """Another program on the same state. Without a body it is named only; `note` says why."""

    program: str
    body: tuple[Step, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return f"program {self.program}" + (f" ({self.note})" if self.note else "")


class Assign(msgspec.Struct, frozen=True, tag_field="step", tag="assign"):
    """A variable is set by Python; nothing is said."""

    name: str | Hole
    value: Value

    def __str__(self) -> str:
        return f"set {_said(self.name)} = {_quoted(self.value)}"


class Opaque(msgspec.Struct, frozen=True, tag_field="step", tag="python"):
    """Python that the plan does not look into.

    touches   whether it was given a state, and so may do anything to it
    ends      whether what follows in its list is not reached: return, raise, break, continue
    """

    source: str
    touches: bool = False
    ends: bool = False

    def __str__(self) -> str:
        return f"python: {self.source}" + (" (given the state)" if self.touches else "")


# `Union` and not `|`: the structs above name the type before it exists.
Step: TypeAlias = Union[  # noqa: UP007 - as said above
    Constant,
    Template,
    Gen,
    Select,
    Call,
    Prime,
    Turn,
    Mark,
    Scope,
    Using,
    Fork,
    Join,
    Loop,
    Conditional,
    Block,
    Inline,
    Assign,
    Opaque,
]


def inside(step: Step) -> tuple[Step, ...]:
    """The steps in a step."""
    if isinstance(step, Conditional):
        return (*step.then, *step.otherwise)
    body: tuple[Step, ...] = getattr(step, "body", ())
    return body


def every(steps: Sequence[Step]) -> Iterator[Step]:
    """All steps, each before what is in it."""
    ahead = [*reversed(steps)]
    while ahead:
        step = ahead.pop()
        yield step
        ahead += reversed(inside(step))


def variable(step: Step) -> str:
    """The variable that a step sets, "" for none and for one whose name is not known."""
    name = getattr(step, "name", "")
    return name if isinstance(name, str) else ""


def _words(*words: str) -> str:
    return " ".join(word for word in words if word)


def _listed(options: Options) -> str:
    return ", ".join(f"{name}={_quoted(value)}" for name, value in options)


def _quoted(value: Value) -> str:
    return value.source if isinstance(value, Hole) else repr(value)


def _said(value: Value) -> str:
    match value:
        case Hole(source):
            return f"{{{source}}}"
        case tuple():
            return ", ".join(map(repr, value))
        case _:
            return str(value)
