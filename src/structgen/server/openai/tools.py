"""The tools of a chat: what a client declares, how a model is told of them, how it calls them.

Owns   what of a body's `tools`, `tool_choice` and `parallel_tool_calls` can be served.
Holds  a call has the name of a declared tool, and arguments that are valid under its schema: the
       output is constrained to nothing else. Objects of a schema that name their properties, and
       say nothing of others, have no others.
Used   by the chat route and by `/tokenize`.

With `tool_choice` auto the model may answer instead. A JSON constraint (`response_format` and the
like) then binds that answer. Other constraints are refused, since what fits them could look like a
call; and so is any constraint where a tool must be called, since there is no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import msgspec

from structgen.chat import Chat, Turn
from structgen.errors import OptionError
from structgen.models.template import TemplateChat
from structgen.options import did_you_mean
from structgen.output.calls import (
    OPENING,
    CallForm,
    CallPiece,
    CallReader,
    HermesForm,
    JsonForm,
    Written,
    tools_text,
)
from structgen.output.reasoning import Family, reasoned
from structgen.request import JsonSchema, Text
from structgen.schemas import schema_text
from structgen.server.config import ToolForm as FormName
from structgen.server.openai.formats import Asked
from structgen.server.openai.pieces import ToolPiece, ToolReader
from structgen.server.openai.wire import CalledTool, ChatBody, NamedTool, ToolSpec
from structgen.terms import Json, Term, either

_Mode = Literal["auto", "required", "named"]
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
# Beside these, the properties that an object names may not be all that it has to have.
_MORE = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
    | {"patternProperties", "unevaluatedProperties", "additionalProperties"}
)


class ToolForm:
    """How the tools of one chat are called.

    parallel   several calls may stand in one answer
    family     whose reasoning may stand before the answer
    """

    def __init__(
        self,
        kind: Literal["json", "hermes"],
        chat: Chat | None,
        *,
        parallel: bool,
        family: str | None,
    ) -> None:
        self.kind, self.parallel, self.family = kind, parallel, family
        self.described = chat is not None and chat.with_tools(()) is not chat

    def of(self, *, several: bool, array: bool = False) -> CallForm:
        """The form of the calls of an answer; as JSON, `array` makes an array of one call, too."""
        if self.kind == "hermes":
            return HermesForm(several)
        return JsonForm(several or array, several)

    def written(self, text: str, calls: Sequence[CalledTool]) -> str:
        """How the calls of an earlier answer stand behind its text, without that text."""
        each = [Written(call.function.name, call.function.arguments) for call in calls]
        return self.of(several=self.parallel).written(text, each)


class Tooling(msgspec.Struct, frozen=True):
    """The tools of one chat, ready for its requests.

    term     what the output must be
    specs    the tools as chat templates take them
    form     of the calls
    system   what the model has to be told of them besides; "" for nothing
    answers  whether the model may answer instead
    """

    term: Term
    specs: tuple[Mapping[str, Any], ...]
    form: CallForm
    system: str
    answers: bool

    def told(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns of the chat, of which the first tells the model what it has to know."""
        if not self.system:
            return list(turns)
        if not turns or turns[0].role != "system":
            return [Turn("system", (Text(self.system),)), *turns]
        said = turns[0].content
        added = Text(f"\n\n{self.system}" if said else self.system)
        return [Turn("system", (*said, added)), *turns[1:]]

    def reader(self) -> ToolReader:
        """A reader of one choice."""
        return _Reader(self.form.reader(answers=self.answers))


class _Reader:
    """Reads calls, and gives each an id."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader

    def push(self, text: str) -> tuple[str, list[ToolPiece]]:
        return self._named(*self._reader.push(text))

    def flush(self) -> tuple[str, list[ToolPiece]]:
        return self._named(*self._reader.flush())

    def _named(self, text: str, pieces: Sequence[CallPiece]) -> tuple[str, list[ToolPiece]]:
        return text, [
            ToolPiece(
                piece.index,
                f"call_{uuid4().hex}" if piece.name else "",
                piece.name,
                piece.arguments,
            )
            for piece in pieces
        ]


def form_of(
    kind: FormName, chat: Chat | None, *, parallel: bool = True, family: Family | None = None
) -> ToolForm:
    """How a model's calls are written: as asked for, or as its template shows that it learned."""
    if kind == "auto":
        literals = chat.template.literals if isinstance(chat, TemplateChat) else frozenset()
        kind = "hermes" if any(OPENING in literal for literal in literals) else "json"
    return ToolForm(kind, chat, parallel=parallel, family=family)


def tooling_of(body: ChatBody, form: ToolForm, asked: Asked | None) -> Tooling | None:
    """The tools of a chat; None where none can be called.

    asked   what the answer must be, where it is one

    Raises `OptionError` naming the field that cannot be served.
    """
    schemas = _schemas(body.tools or ())
    choice = _choice(body.tool_choice, schemas)
    if choice is None:
        return None
    several = form.parallel and choice.mode != "named"
    answer = None if asked is None else _answer(asked, choice.mode, form)
    calls = form.of(several=several, array=answer is not None)
    functions = {name: schemas[name] for name in choice.names}
    if choice.mode != "auto":
        term = reasoned(form.family, calls.calls(functions))
    elif answer is not None:
        term = reasoned(form.family, either(calls.calls(functions), answer))
    else:
        term = calls.calls_or_text(functions, form.family)
    specs = tuple(_spec(tool) for tool in body.tools or ())
    return Tooling(
        term,
        specs,
        calls,
        _told(specs, calls, choice, form),
        answers=choice.mode == "auto",
    )


# ---------------------------------------------------------------- what is declared


def _schemas(tools: Sequence[ToolSpec]) -> dict[str, str]:
    """From the name of each tool to the schema of its arguments."""
    found: dict[str, str] = {}
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if tool.type != "function":
            raise OptionError(
                f"{place}.type", f"expected function, got {tool.type!r}; no other tools are known"
            )
        if tool.function is None:
            raise OptionError(f"{place}.function", "it is missing")
        name = tool.function.name
        if _NAME.fullmatch(name) is None:
            raise OptionError(
                f"{place}.function.name",
                f"{name!r:.80} is no name: 1 to 64 letters, digits, dashes and underscores",
            )
        if name in found:
            raise OptionError(
                f"{place}.function.name", f"two tools are named {name!r}; rename one of them"
            )
        found[name] = _arguments(tool.function.parameters, f"{place}.function.parameters")
    return found


def _arguments(given: Mapping[str, Any] | None, place: str) -> str:
    """The JSON Schema of a tool's arguments, which are an object."""
    if given is None:
        return schema_text(_NO_ARGUMENTS)
    if given.get("type", "object") != "object":
        raise OptionError(
            f"{place}.type", f"arguments are an object, not {given['type']!r:.80}; write object"
        )
    closed = _closed(given)
    assert isinstance(closed, dict), "it was one before"
    return schema_text({**closed, "type": "object"})


def _closed(schema: object) -> object:
    """The schema, in which objects that name all their properties have no others."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    if isinstance(found.get("properties"), dict):
        found["properties"] = {name: _closed(each) for name, each in found["properties"].items()}
        if not _MORE & found.keys():
            found["additionalProperties"] = False
    if "items" in found:
        found["items"] = _closed(found["items"])
    return found


def _spec(tool: ToolSpec) -> dict[str, Any]:
    """A tool in the form that chat templates were made for."""
    function = tool.function
    assert function is not None, "it was looked at before"
    described = {} if function.description is None else {"description": function.description}
    parameters = _NO_ARGUMENTS if function.parameters is None else function.parameters
    return {
        "type": "function",
        "function": {"name": function.name, **described, "parameters": dict(parameters)},
    }


# ---------------------------------------------------------------- what is asked for


class _Choice(NamedTuple):
    """What may be called."""

    mode: _Mode
    names: tuple[str, ...]


def _choice(given: str | NamedTool | None, names: Mapping[str, str]) -> _Choice | None:
    """What may be called, None for nothing."""
    if given == "none" or (given is None and not names):
        return None
    if not names:
        raise OptionError("tool_choice", "there are no tools to choose from; send tools, too")
    match given:
        case None | "auto":
            return _Choice("auto", tuple(names))
        case "required":
            return _Choice("required", tuple(names))
        case NamedTool():
            return _Choice("named", (_name_of(given, names),))
        case _:
            form = '{"type": "function", "function": {"name": NAME}}'
            raise OptionError(
                "tool_choice", f"expected auto, none, required or {form}, got {given!r:.80}"
            )


def _name_of(choice: NamedTool, names: Mapping[str, str]) -> str:
    if choice.type != "function":
        raise OptionError("tool_choice.type", f"expected function, got {choice.type!r:.80}")
    if choice.function is None:
        raise OptionError("tool_choice.function", "it is missing; write the name of a tool")
    name = choice.function.name
    if name not in names:
        known = ", ".join(names)
        raise OptionError(
            "tool_choice",
            f"no tool is named {name!r:.80}{did_you_mean(name, names)}; declared: {known:.200}",
        )
    return name


def _answer(asked: Asked, mode: _Mode, form: ToolForm) -> Term:
    """What an answer must be that is no call. Raises `OptionError` where it could look like one."""
    constraint = asked.constraint
    if mode != "auto":
        raise OptionError(
            asked.field,
            f"with tool_choice {mode} the output is a call, and no answer that has a form; leave "
            "it out, or let tool_choice be auto",
        )
    if not isinstance(constraint, JsonSchema):
        raise OptionError(
            asked.field,
            "what fits it could look like a call of a tool; beside tools, write a JSON schema",
        )
    if form.kind == "json" and not _is_object(constraint.schema, asked.field):
        raise OptionError(
            asked.field,
            'what fits it could look like a call of a tool; beside tools, write "type": "object"',
        )
    return Json(constraint.schema, constraint.separators)


def _is_object(schema: str, field: str) -> bool:
    """Whether the values of a schema are objects by its own word."""
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise OptionError(field, f"it is no JSON: {error}") from None
    return isinstance(found, dict) and found.get("type") == "object"


# ---------------------------------------------------------------- what is told


def _told(
    specs: Sequence[Mapping[str, Any]], calls: CallForm, choice: _Choice, form: ToolForm
) -> str:
    """What the model has to know that its chat template does not tell it."""
    if form.described and form.kind == "hermes":
        return ""
    functions = tools_text(spec["function"] for spec in specs)
    listed = "" if form.described else f"You can call these functions:\n{functions}\n\n"
    match choice.mode:
        case "auto":
            wanted = "If none of them helps, answer without a call."
        case "required":
            wanted = "Call at least one of them."
        case _:
            wanted = f"Call {choice.names[0]}."
    return f"{listed}{calls.told()}\n{wanted}"
