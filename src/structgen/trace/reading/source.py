"""Where a function stands in its file, and what the names in it mean, without running anything.

Owns   nothing. Holds: no user code runs; objects are looked at through `inspect.getattr_static`
       and exact types only, since attributes, `repr` and `==` of users' objects may be code.
Used   by `meaning` and `reader`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from types import CodeType, FunctionType, MethodType
from typing import TypeAlias

from structgen.errors import OptionError

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Found:
    """A Python function, what it is bound to (None for nothing), and whether it is decorated."""

    __slots__ = ("function", "owner", "wrapped")

    def __init__(self, function: FunctionType, owner: object, *, wrapped: bool) -> None:
        self.function, self.owner, self.wrapped = function, owner, wrapped


def function_of(thing: object) -> Found | None:
    """The function of a program, a bound method, a partial or a decorated function."""
    owner, wrapped = None, False
    for _ in range(32):  # more layers than that are a ring
        match thing:
            case functools.partial():
                thing = thing.func
            case MethodType():
                owner, thing = thing.__self__, thing.__func__
            case FunctionType():
                inner = thing.__dict__.get("__wrapped__")
                if not isinstance(inner, FunctionType | MethodType | functools.partial):
                    return Found(thing, owner, wrapped=wrapped)
                thing, wrapped = inner, True
            case _:
                thing = inspect.getattr_static(thing, "function", None)
                if thing is None:
                    return None
    return None


def is_program(thing: object) -> bool:
    """Whether this is a program: it has a coroutine function of its own, and can be run."""
    if isinstance(thing, FunctionType | MethodType | type):
        return False
    if inspect.getattr_static(thing, "run", None) is None:
        return False
    found = function_of(thing)
    return found is not None and inspect.iscoroutinefunction(found.function)


def node_of(function: FunctionType) -> FunctionNode:
    """The function as it stands in its file. Raises `OptionError` where there is no source."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise OptionError(
            "program",
            f"the source of {function.__qualname__!r} cannot be found ({code.co_filename}): it was "
            "made by exec, or in a prompt; write it in a file to see its plan",
        )
    # The whole file, because cutting out and unindenting a function would change its strings.
    try:
        module = ast.parse("".join(lines))
    except SyntaxError as error:
        raise _changed(function, code) from error
    for node in ast.walk(module):
        if isinstance(node, FunctionNode) and _is_at(node, code):
            return node
    raise _changed(function, code)


def _is_at(node: FunctionNode, code: CodeType) -> bool:
    first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    names = list(code.co_varnames[: code.co_argcount])
    return node.name == code.co_name and first == code.co_firstlineno and positional == names


def _changed(function: FunctionType, code: CodeType) -> OptionError:
    return OptionError(
        "program",
        f"{code.co_filename} has changed since {function.__qualname__!r} was imported from line "
        f"{code.co_firstlineno}; import it again",
    )


def parameters(node: FunctionNode | ast.Lambda) -> list[ast.arg]:
    """All parameters, in order."""
    given = node.args
    stars = [star for star in (given.vararg, given.kwarg) if star is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *stars]


def state_parameter(node: FunctionNode) -> str | None:
    """The parameter that takes the State: the one that says so, else the first but `self`."""
    positional = [*node.args.posonlyargs, *node.args.args]
    for each in positional:
        if each.annotation is not None and "State" in ast.unparse(each.annotation):
            return each.arg
    others = [each.arg for each in positional if each.arg not in {"self", "cls"}]
    return others[0] if others else None


def locals_of(node: FunctionNode | ast.Lambda) -> frozenset[str]:
    """Names that are the function's own."""
    names = {each.arg for each in parameters(node)}
    outer: set[str] = set()
    for child in _own_nodes(node):
        match child:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
            case ast.MatchMapping(rest=str(name)):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.split(".")[0] for alias in aliases}
            case ast.Global(names=listed) | ast.Nonlocal(names=listed):
                outer.update(listed)
    return frozenset(names - outer)


def literals_of(node: FunctionNode) -> dict[str, ast.expr]:
    """Names that the function sets once, by a plain assignment: what they are, is known."""
    stores: dict[str, int] = {each.arg: 1 for each in parameters(node)}
    values: dict[str, ast.expr] = {}
    elsewhere: set[str] = set()
    for child in ast.walk(node):
        match child:
            case ast.Nonlocal(names=listed) | ast.Global(names=listed):
                elsewhere.update(listed)
    for child in _own_nodes(node):
        match child:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                stores[name] = stores.get(name, 0) + 1
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values[name] = value
    return {n: v for n, v in values.items() if stores.get(n) == 1 and n not in elsewhere}


def _own_nodes(node: FunctionNode | ast.Lambda) -> list[ast.AST]:
    """The nodes of a function that are not in a scope of their own; `:=` reaches out of those."""
    found: list[ast.AST] = []
    body = node.body if isinstance(node.body, list) else [node.body]
    ahead: list[ast.AST] = list(body)
    while ahead:
        child = ahead.pop()
        found.append(child)
        if isinstance(child, COMPREHENSIONS):
            found += [each.target for each in ast.walk(child) if isinstance(each, ast.NamedExpr)]
        elif not isinstance(child, DEFINITIONS):
            ahead += ast.iter_child_nodes(child)
    return found
