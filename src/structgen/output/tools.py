"""Functions that a model may call: their schemas, the form of a call, and the text of a result.

Owns   the way from a signature to a schema and from what a model wrote to arguments. It runs
       nothing.
Holds  a call that is read has the name of a tool and arguments that its annotations admit; the
       model can write no other.
Used   by `program`, for `call(tools=...)`.

A call is one JSON object, `{"name": "weather", "arguments": {"city": "Ulm"}}`, and several are an
array of them. A model that may choose to answer instead does so in text that begins with neither
`{` nor `[`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

import msgspec

from structgen.errors import OptionError
from structgen.output.calls import ANSWER, tools_text
from structgen.output.signature import (
    EMPTY,
    Made,
    Parameters,
    arguments_class,
    arguments_in,
    needs_pydantic,
    object_schema,
    parameters_of,
)
from structgen.output.types import Form
from structgen.output.values import json_of, readable
from structgen.request import JsonSchema, Structure
from structgen.schemas import described
from structgen.terms import Either, Json, Pattern

ToolFunction = Callable[..., Coroutine[Any, Any, Any]]
"""An `async def` function whose parameters are annotated; its docstring tells what it does."""

Result = Any  # what a tool returned

_MODES = ("auto", "required")


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call.

    parameters   name -> annotation and default, `EMPTY` where it has none
    """

    name: str
    description: str
    function: ToolFunction
    parameters: Parameters


class Asked(msgspec.Struct, frozen=True):
    """A call as a model wrote it, its arguments as the values that the function takes."""

    name: str
    arguments: Mapping[str, Any]


class ToolCall(msgspec.Struct, frozen=True):
    """A call that was run.

    arguments   as the function got them
    result      what it returned; None where it raised
    error       what it raised; None where it returned
    text        the result, or the error, as the model reads it
    """

    name: str
    arguments: Mapping[str, Any]
    result: Any
    error: Exception | None
    text: str


class Called(msgspec.Struct, frozen=True):
    """What came of `call(tools=...)`: a sequence of results, empty where the model answered.

    text    what the model wrote: its calls, or its answer
    calls   its calls, in order, each with its result
    """

    text: str
    calls: tuple[ToolCall, ...] = ()

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Result]:
        return (call.result for call in self.calls)

    def __getitem__(self, index: int) -> Result:
        """The result of one call."""
        return self.calls[index].result


class Toolbox(msgspec.Struct, frozen=True):
    """Some tools, and the form of what a model writes to call them.

    form    reads a text as a tuple of `Asked`, empty for an answer
    specs   the tools as chat templates take them
    """

    tools: Mapping[str, Tool]
    form: Form[tuple[Asked, ...]]
    specs: tuple[Mapping[str, Any], ...]


def toolbox(functions: Sequence[ToolFunction], choice: str, *, parallel: bool) -> Toolbox:
    """The tools of one call.

    choice     "auto": the model may answer instead; "required"; or the name of the tool to call
    parallel   several calls at once, as an array

    Raises `OptionError` for functions that are no tools, and for a choice that names none.
    """
    tools = _named(functions)
    if choice not in {*_MODES, *tools}:
        raise OptionError(
            "choice", f"expected auto, required or a tool ({', '.join(tools)}), got {choice!r}"
        )
    callable_ = list(tools.values()) if choice in _MODES else [tools[choice]]
    schema, read = _calls(callable_, parallel=parallel)
    form = _form(schema, read, parallel=parallel, answers=choice == "auto")
    return Toolbox(tools, form, tuple(_spec(tool) for tool in tools.values()))


def describe_tools(functions: Sequence[ToolFunction]) -> str:
    """The tools as text, a JSON object a line: for prompts of models whose templates have no tools.

    Each has name, description and the JSON Schema of its arguments. Raises `OptionError` for what
    is no tool.
    """
    return tools_text(_spec(tool)["function"] for tool in _named(functions).values())


def result_text(value: object) -> str:
    """A tool's result as the model reads it: a text as it is, anything else as JSON.

    Raises `TypeError` for what JSON has no form for.
    """
    if isinstance(value, str):
        return readable(value)
    try:
        return json_of(value).decode()
    except TypeError as error:
        raise TypeError(f"the result cannot be written as JSON: {error}") from error


# ---------------------------------------------------------------- signatures


def _named(functions: Sequence[ToolFunction]) -> dict[str, Tool]:
    if not isinstance(functions, Sequence) or not functions:
        raise OptionError("tools", "expected a list of async functions; write tools=[weather]")
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = tool_of(function)
        if tool.name in tools or tool.name in _MODES:
            raise OptionError("tools", f"two tools are named {tool.name!r}; rename one of them")
        tools[tool.name] = tool
    return tools


def tool_of(function: ToolFunction) -> Tool:
    """A function as a tool. Raises `OptionError`, saying what to change, where it can be none."""
    if not inspect.iscoroutinefunction(function):
        raise OptionError(
            "tools",
            f"{function!r:.80} is no async function; write `async def`, and let one that blocks "
            "run in a thread: `await anyio.to_thread.run_sync(...)`",
        )
    name = function.__name__
    try:
        parameters = parameters_of(function, "a model")
    except TypeError as error:
        raise OptionError("tools", f"{name}: {error}") from None
    for each, (type_, _) in parameters.items():
        if type_ is EMPTY:
            raise OptionError(
                "tools", f"{name}: the parameter {each!r} has no annotation; give it a type"
            )
    return Tool(name, inspect.cleandoc(function.__doc__ or ""), function, parameters)


def _spec(tool: Tool) -> dict[str, Any]:
    """A tool in the form that chat templates were made for."""
    schema, _ = _described(tool, _arguments(tool, pydantic=_needs_pydantic([tool])))
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": object_schema(schema)}}


# ---------------------------------------------------------------- calls


def _calls(tools: Sequence[Tool], *, parallel: bool) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """Schema and reader of a call of one of the tools, or of an array of calls."""
    pydantic = _needs_pydantic(tools)
    models = tuple(
        _call(tool, _arguments(tool, pydantic=pydantic), pydantic=pydantic) for tool in tools
    )
    one: Any = Union[models]  # noqa: UP007 - of a tuple that is only known here
    if not parallel:
        return _described(tools[0], one)
    if pydantic:
        field = sys.modules["pydantic"].Field
        return _described(tools[0], Annotated[list[one], field(min_length=1)])
    return _described(tools[0], Annotated[list[one], msgspec.Meta(min_length=1)])


def _described(tool: Tool, type_: object) -> tuple[dict[str, Any], Callable[[str], Any]]:
    try:
        return described(type_)
    except TypeError as error:
        raise OptionError("tools", f"{tool.name}: its arguments have no schema: {error}") from None


def _needs_pydantic(tools: Sequence[Tool]) -> bool:
    return any(needs_pydantic(tool.parameters) for tool in tools)


def _arguments(tool: Tool, *, pydantic: bool) -> Made:
    """A class whose fields are the parameters of a tool."""
    try:
        return arguments_class(f"{tool.name}_arguments", tool.parameters, pydantic=pydantic)
    except TypeError as error:
        raise OptionError("tools", f"{tool.name}: {error}") from None


def _call(tool: Tool, arguments: Made, *, pydantic: bool) -> Made:
    """A class for the calls of a tool: its name, which tells it from the others, and arguments."""
    if pydantic:
        named: Any = Literal[tool.name]
        return sys.modules["pydantic"].create_model(
            tool.name, name=(named, ...), arguments=(arguments, ...)
        )
    return msgspec.defstruct(tool.name, [("arguments", arguments)], tag_field="name", tag=tool.name)


def _form(
    schema: dict[str, Any], read: Callable[[str], Any], *, parallel: bool, answers: bool
) -> Form[tuple[Asked, ...]]:
    constraint = JsonSchema(schema)

    def convert(text: str) -> tuple[Asked, ...]:
        if answers and text[:1] not in {"{", "["}:
            return ()
        found = read(text)
        return tuple(map(_asked, found if parallel else [found]))

    if not answers:
        return Form("tool call", constraint, convert)
    either = Either((Json(constraint.schema), Pattern(ANSWER)))
    return Form("tool call", Structure(either), convert)


def _asked(call: Made) -> Asked:
    """A call as it was read, by whichever library."""
    name = call.name if not isinstance(call, msgspec.Struct) else call.__struct_config__.tag
    return Asked(str(name), arguments_in(call.arguments))
