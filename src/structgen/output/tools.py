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
import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_type_hints

import msgspec

from structgen.errors import OptionError
from structgen.output.types import Form
from structgen.request import JsonSchema, Structure
from structgen.schemas import described, of_pydantic
from structgen.terms import Either, Json, Pattern

ToolFunction = Callable[..., Coroutine[Any, Any, Any]]
"""An `async def` function whose parameters are annotated; its docstring tells what it does."""

Result = Any  # what a tool returned
Made = Any  # a class that msgspec or pydantic made of a signature, or an object of it

ANSWER = r"[^\[{\s](.|\n)*"  # what no call begins with
_MODES = ("auto", "required")
_PLAIN = (str, int, float, bool, type(None), Enum)


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call.

    parameters   name -> annotation and default; `inspect.Parameter.empty` where it has none
    """

    name: str
    description: str
    function: ToolFunction
    parameters: Mapping[str, tuple[Any, Any]]


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
    specs = [_spec(tool)["function"] for tool in _named(functions).values()]
    return "\n".join(json.dumps(spec, ensure_ascii=False) for spec in specs)


def result_text(value: object) -> str:
    """A tool's result as the model reads it: a text as it is, anything else as JSON.

    Raises `TypeError` for what JSON has no form for.
    """
    if isinstance(value, str):
        return readable(value)
    try:
        plain = _dumped(value) if of_pydantic(type(value)) else value
        try:
            return msgspec.json.encode(plain, enc_hook=_dumped).decode()
        except UnicodeEncodeError:
            builtins = msgspec.to_builtins(plain, enc_hook=_dumped, str_keys=True)
            return msgspec.json.encode(_all_readable(builtins)).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the result cannot be written as JSON: {error}") from error


def readable(text: str) -> str:
    """A text that a prompt can have: halves of surrogate pairs, which are no text, become `?`."""
    return text.encode(errors="replace").decode()


def _all_readable(value: object) -> object:
    """Numbers, strings, lists and dicts, with strings that a prompt can have."""
    match value:
        case str():
            return readable(value)
        case list() | tuple():
            return [_all_readable(each) for each in value]
        case dict():
            return {_all_readable(key): _all_readable(each) for key, each in value.items()}
        case _:
            return value


def _dumped(value: object) -> object:
    """What pydantic knows, as numbers, strings, lists and dicts; msgspec knows nothing of it."""
    type_ = type(value)
    if not of_pydantic(type_) or "pydantic" not in sys.modules:
        raise TypeError(f"it has no form for values of the type {type_.__name__}")
    pydantic: Any = sys.modules["pydantic"]
    found: object = pydantic.TypeAdapter(type_).dump_python(value, mode="json")
    return found


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
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise OptionError(
            "tools",
            f"{name}: its annotations cannot be resolved: {error}; define the types in "
            "the module, not in a function",
        ) from None
    parameters: dict[str, tuple[Any, Any]] = {}
    for each in inspect.signature(function).parameters.values():
        if each.kind in {each.POSITIONAL_ONLY, each.VAR_POSITIONAL, each.VAR_KEYWORD}:
            raise OptionError(
                "tools", f"{name}: a model gives arguments by name, so {each} cannot be one"
            )
        if each.name not in hints:
            raise OptionError(
                "tools", f"{name}: the parameter {each.name!r} has no annotation; give it a type"
            )
        parameters[each.name] = (hints[each.name], each.default)
    return Tool(name, inspect.cleandoc(function.__doc__ or ""), function, parameters)


def _spec(tool: Tool) -> dict[str, Any]:
    """A tool in the form that chat templates were made for."""
    schema, _ = _described(tool, _arguments(tool, pydantic=_needs_pydantic([tool])))
    if (reference := schema.pop("$ref", None)) is not None:
        # Templates and models know the object itself here, and no reference to it.
        schema = {**schema["$defs"].pop(reference.rpartition("/")[2]), **schema}
    if not schema.get("$defs", True):
        del schema["$defs"]
    schema.pop("title", None)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": schema}}


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
    return any(of_pydantic(type_) for tool in tools for type_, _ in tool.parameters.values())


def _arguments(tool: Tool, *, pydantic: bool) -> Made:
    """A class whose fields are the parameters of a tool."""
    empty = inspect.Parameter.empty
    name, items = f"{tool.name}_arguments", tool.parameters.items()
    try:
        if pydantic:
            named = {
                each: (type_, ... if value is empty else value) for each, (type_, value) in items
            }
            closed = {"extra": "forbid"}
            return sys.modules["pydantic"].create_model(name, __config__=closed, **named)
        fields = [
            (each, type_) if value is empty else (each, type_, _default(value))
            for each, (type_, value) in items
        ]
        return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    except (TypeError, ValueError, NameError) as error:
        raise OptionError("tools", f"{tool.name}: its parameters make no object: {error}") from None


def _default(value: object) -> object:
    """A default as a field has it; one that JSON cannot show is left out of the schema."""
    return value if isinstance(value, _PLAIN) else msgspec.field(default_factory=lambda: value)


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
    if isinstance(call, msgspec.Struct):
        names = call.arguments.__struct_fields__  # type: ignore[attr-defined] # `_call` defines it
        name = str(call.__struct_config__.tag)
    else:
        names, name = type(call.arguments).__pydantic_fields__, call.name
    return Asked(name, {each: getattr(call.arguments, each) for each in names})
