"""What the names and expressions in a program stand for, as far as a plan needs to know.

Owns   meanings, and scopes: which name means what where.
Used   by `expressions` and `reader`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from types import FunctionType, ModuleType
from typing import NamedTuple, TypeAlias, cast

from structgen.trace.reading.source import FunctionNode, literals_of, locals_of
from structgen.trace.reading.tracks import Container, Track
from structgen.trace.steps import Hole, Step, Value


class StateOf(NamedTuple):
    """A state: what it says is laid down on a track."""

    track: Track


class BranchesOf(NamedTuple):
    """The branches of a fork of a state."""

    track: Track
    parent: Track
    number: int | None


class FunctionIn(NamedTuple):
    """A function or lambda and the scope around it."""

    node: FunctionNode | ast.Lambda
    scope: Scope
    program: bool = False

    @property
    def name(self) -> str:
        """Its name."""
        return "lambda" if isinstance(self.node, ast.Lambda) else self.node.name


class Known(NamedTuple):
    """An object that exists: a global, or something of a module; of an object, its `owner`."""

    thing: object
    owner: object = None


class MethodOf(NamedTuple):
    """A method of something, not called yet."""

    owner: Meaning
    name: str


class Said(NamedTuple):
    """An expression that says something once it is appended: `"a" + gen("x")`."""

    node: ast.expr
    scope: Scope


class Items(NamedTuple):
    """Several meanings in a tuple or list."""

    each: tuple[Meaning | None, ...]


class Every(NamedTuple):
    """Something to iterate over, whose elements all mean this."""

    element: Meaning | None


class Context(NamedTuple):
    """Something to enter by `with`: a step to lay down first, and what is around the block."""

    track: Track
    step: Step | None = None
    container: Container | None = None


Meaning: TypeAlias = (
    StateOf | BranchesOf | FunctionIn | Known | MethodOf | Said | Items | Every | Context
)


class UnboundError(Exception):
    """A name that nothing has bound."""


class Scope:
    """Names of one function, inside the scope that it was written in."""

    def __init__(
        self,
        node: FunctionNode | ast.Lambda | None,
        outer: Scope | None = None,
        function: FunctionType | None = None,
        own: frozenset[str] = frozenset(),
    ) -> None:
        """`function` is the real one, for globals; `own` are names besides those of `node`."""
        self._own = own if node is None else own | locals_of(node)
        self._literals = literals_of(node) if isinstance(node, FunctionNode) else {}
        self._outer, self._function = outer, function
        self._bound: dict[str, Meaning | None] = {}

    def bind(self, name: str, meaning: Meaning | None) -> None:
        """From here on the name means this."""
        if meaning is not None or name not in self._literals:
            self._bound[name] = meaning

    def bind_anywhere(self, name: str, meaning: Meaning | None) -> None:
        """Bind in the function that the scope is of: a comprehension has a scope inside it."""
        if name in self._own or self._outer is None:
            self.bind(name, meaning)
        else:
            self._outer.bind_anywhere(name, meaning)

    def look_up(self, name: str) -> Meaning | None:
        """What a name means, None if that is not known. Raises `UnboundError` for a stranger."""
        if name in self._bound:
            return self._bound[name]
        if name in self._own:
            return self._set_once(name)
        if self._function is not None:
            return _from_outside(self._function, name)
        if self._outer is not None:
            return self._outer.look_up(name)
        return _builtin(name)

    def _set_once(self, name: str) -> Known | None:
        """The value of a name that is assigned once, and cannot change after that."""
        # Taken out meanwhile: `x = x` must not be asked for ever.
        node = self._literals.pop(name, None)
        if node is None:
            return None
        try:
            return None if isinstance(node, ast.List) else Known(literal(node, self))
        except NotLiteralError:
            return None
        finally:
            self._literals[name] = node


class NotLiteralError(Exception):
    """An expression whose value the source does not spell out."""


def literal(node: ast.expr, scope: Scope) -> Value:
    """The value of an expression that the source spells out. Raises `NotLiteralError`."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name):
            return _value_named(name, scope)
        case ast.Attribute():
            return _value_of(_module_attribute(node, scope))
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return _strings([literal(element, scope) for element in elements])
        case ast.JoinedStr(values=values):
            return "".join(_formatted(value, scope) for value in values)
        case _:
            return _computed(node, scope)


def _computed(node: ast.expr, scope: Scope) -> Value:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = literal(operand, scope)
            if isinstance(value, int | float):
                return -value
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, two = literal(left, scope), literal(right, scope)
            if isinstance(one, str) and isinstance(two, str):
                return one + two
        case ast.Call(func=ast.Name(id="len"), args=[ast.expr() as counted], keywords=[]):
            value = literal(counted, scope)
            if isinstance(value, tuple | str):
                return len(value)
    raise NotLiteralError


def value_of(node: ast.expr, scope: Scope) -> Value:
    """The value of an expression, or a hole that quotes it."""
    try:
        return literal(node, scope)
    except NotLiteralError:
        return Hole(ast.unparse(node))


def _formatted(node: ast.expr, scope: Scope) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
            value = literal(inner, scope)
            if type(value) in {str, int}:
                return str(value)
    raise NotLiteralError


def _strings(values: list[Value]) -> tuple[str, ...]:
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        raise NotLiteralError
    return tuple(texts)


def _value_named(name: str, scope: Scope) -> Value:
    try:
        return _value_of(scope.look_up(name))
    except UnboundError:
        raise NotLiteralError from None


def _value_of(meaning: Meaning | None) -> Value:
    # Exact types: a subclass of str may do as it likes when it is formatted.
    if isinstance(meaning, Known):
        thing = meaning.thing
        if thing is None or type(thing) in {bool, int, float, str}:
            return cast("Value", thing)
        if type(thing) is tuple and all(type(each) is str for each in thing):
            return cast("Value", thing)
    raise NotLiteralError


def choices_of(node: ast.expr, scope: Scope) -> tuple[str, ...] | Hole:
    """The texts in a list, also in one that is a global: it is shown as it stands now."""
    if isinstance(node, ast.Name):
        with contextlib.suppress(UnboundError):
            match scope.look_up(node.id):
                case Known(list(texts)) if all(type(text) is str for text in texts):
                    return tuple(texts)
    value = value_of(node, scope)
    return value if isinstance(value, tuple) else Hole(ast.unparse(node))


def _module_attribute(node: ast.Attribute, scope: Scope) -> Meaning | None:
    if isinstance(node.value, ast.Name):
        try:
            base = scope.look_up(node.value.id)
        except UnboundError:
            return None
        if isinstance(base, Known) and isinstance(base.thing, ModuleType):
            things = vars(base.thing)
            return Known(things[node.attr]) if node.attr in things else None
    return None


def _from_outside(function: FunctionType, name: str) -> Meaning | None:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        try:
            return Known(cells[name].cell_contents)
        except ValueError:  # it is set later
            return None
    if name in function.__globals__:
        return Known(function.__globals__[name])
    return _builtin(name)


def _builtin(name: str) -> Known:
    if name not in vars(builtins):
        raise UnboundError(name)
    return Known(vars(builtins)[name])
