"""The words of the language: which functions say something, and the steps that they are.

Owns   nothing. Used by all that read programs.
"""

from __future__ import annotations

import ast
from types import FunctionType, ModuleType

from structgen.trace.reading.meaning import (
    Known,
    Meaning,
    Said,
    Scope,
    UnboundError,
    choices_of,
    value_of,
)
from structgen.trace.steps import Call, Gen, Hole, Options, Select, Value

PACKAGE = "structgen"
ROLES = frozenset({"system", "user", "assistant", "tool"})
MARKS = {f"{role}_{end}": (role, end == "begin") for role in ROLES for end in ("begin", "end")}
WRAPPING = "separate_reasoning"
WORDS = frozenset({"gen", "select", "image", WRAPPING}) | ROLES | MARKS.keys()


def word(function: ast.expr, scope: Scope) -> str:
    """Which word of the language a function is, "" if none.

    A name that is bound nowhere counts as the word that it spells.
    """
    name = ""
    match function:
        case ast.Name(id=spelt):
            try:
                name = _word_of(scope.look_up(spelt))
            except UnboundError:
                name = spelt
        case ast.Attribute(value=ast.Name(id=module), attr=attribute):
            try:
                owner = scope.look_up(module)
            except UnboundError:
                owner = None
            if isinstance(owner, Known) and isinstance(owner.thing, ModuleType):
                inside = owner.thing.__name__.split(".")[0] == PACKAGE
                name = attribute if inside else ""
    return name if name in WORDS else ""


def _word_of(meaning: Meaning | None) -> str:
    thing = meaning.thing if isinstance(meaning, Known) else None
    if not isinstance(thing, FunctionType) and type(thing) is not type:
        return ""
    inside = str(thing.__module__).split(".")[0] == PACKAGE
    return thing.__name__ if inside else ""


def speaks(node: ast.expr, scope: Scope) -> bool:
    """Whether an expression says more than text when it is appended."""
    for child in ast.walk(node):
        match child:
            case ast.Call(func=function) if word(function, scope):
                return True
            case ast.Name(id=name, ctx=ast.Load()):
                try:
                    if isinstance(scope.look_up(name), Said):
                        return True
                except UnboundError:
                    pass
    return False


def gen_step(call: ast.Call, scope: Scope, *, streamed: bool = False) -> Gen | Select:
    """The step of a `gen` or `stream` call; with `choices=` it is a select."""
    if any(keyword.arg == "choices" for keyword in call.keywords):
        return select_step(call, scope)
    return Gen(_name(call, scope), _options(call, scope, {"name"}), streamed)


def select_step(call: ast.Call, scope: Scope) -> Select:
    """The step of a `select` call."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "choices"]
    given += call.args[1:2]
    choices = choices_of(given[0], scope) if given else Hole("?")
    return Select(_name(call, scope), choices, _options(call, scope, {"name", "choices"}))


def call_step(call: ast.Call, scope: Scope) -> Call:
    """The step of a `call` of tools."""
    match argument(call, 0, "tools"):
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            tools: tuple[str, ...] | Hole = tuple(ast.unparse(each) for each in elements)
        case None:
            tools = Hole("?")
        case other:
            tools = Hole(ast.unparse(other))
    return Call(_name(call, scope, 1), tools, _options(call, scope, {"name", "tools"}))


def using_options(call: ast.Call, scope: Scope) -> Options:
    """The options of a `using` call."""
    return _options(call, scope, set())


def text_or_hole(node: ast.expr, scope: Scope) -> str | Hole:
    """A name: text, or a hole where the source does not spell it out."""
    value = value_of(node, scope)
    return value if isinstance(value, str | Hole) else Hole(ast.unparse(node))


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument by position or by name."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return named[0] if named else next(iter(call.args[position : position + 1]), None)


def _name(call: ast.Call, scope: Scope, position: int = 0) -> str | Hole:
    node = argument(call, position, "name")
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return ""
    return text_or_hole(node, scope)


def _options(call: ast.Call, scope: Scope, besides: set[str]) -> Options:
    found: list[tuple[str, Value]] = []
    for keyword in call.keywords:
        if keyword.arg is None:
            found.append(("**", Hole(ast.unparse(keyword.value))))
        elif keyword.arg not in besides:
            found.append((keyword.arg, value_of(keyword.value, scope)))
    return tuple(found)
