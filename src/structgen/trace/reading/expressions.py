"""Expressions of a program, read in the order in which Python would evaluate them.

Owns   the stage, and where Python that concerns no state is noted.
Holds  nothing of the program runs. What an expression does to a state is laid down on the state's
       track; what it means is returned, None for anything that a plan need not know.
Used   by `reader`, which adds statements and the bodies of functions.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from structgen.trace.reading.meaning import (
    BranchesOf,
    Every,
    FunctionIn,
    Items,
    Meaning,
    Said,
    Scope,
    StateOf,
    UnboundError,
)
from structgen.trace.reading.tracks import Container, Stage, Track
from structgen.trace.reading.words import speaks
from structgen.trace.steps import Opaque

Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
SOURCE_LIMIT = 80


class Expressions(ABC):
    """The reading of expressions."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.home = self.stage.main  # where Python is noted that concerns no state
        self.seen = 0  # what was understood, so that it is not noted as Python besides

    # ------------------------------------------------------------ evaluating

    def read(self, node: ast.expr, scope: Scope) -> Meaning | None:
        """Read an expression; returns what it means."""
        # By the name of the node's class, as `ast.NodeVisitor` does it.
        reader = getattr(self, f"_read_{type(node).__name__.lower()}", self._read_parts)
        meaning: Meaning | None = reader(node, scope)
        return meaning

    def _read_parts(self, node: ast.expr, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.read(child, scope)

    def _read_name(self, node: ast.Name, scope: Scope) -> Meaning | None:
        try:
            return scope.look_up(node.id)
        except UnboundError:
            return None

    def _read_await(self, node: ast.Await, scope: Scope) -> Meaning | None:
        meaning = self.read(node.value, scope)
        if isinstance(meaning, StateOf | BranchesOf):
            self.seen += 1  # settling: what was appended has its place in the plan already
        return meaning

    def _read_call(self, node: ast.Call, scope: Scope) -> Meaning | None:
        return self.call(node, scope)

    def _read_attribute(self, node: ast.Attribute, scope: Scope) -> Meaning | None:
        return self.attribute(self.read(node.value, scope), node.attr)

    def _read_subscript(self, node: ast.Subscript, scope: Scope) -> Meaning | None:
        owner = self.read(node.value, scope)
        self.read(node.slice, scope)
        if not isinstance(owner, BranchesOf):
            return _item(owner, node)
        if isinstance(node.slice, ast.Name):
            self.stage.spread(node.slice.id, owner.track)
        return _branch(owner, node.slice)

    def _read_lambda(self, node: ast.Lambda, scope: Scope) -> FunctionIn:
        return FunctionIn(node, scope)

    def _read_tuple(self, node: ast.Tuple, scope: Scope) -> Items | None:
        return self._items(node.elts, scope)

    def _read_list(self, node: ast.List, scope: Scope) -> Items | None:
        return self._items(node.elts, scope)

    def _read_starred(self, node: ast.Starred, scope: Scope) -> Meaning | None:
        return self.read(node.value, scope)

    def _read_namedexpr(self, node: ast.NamedExpr, scope: Scope) -> Meaning | None:
        meaning = self.read(node.value, scope)
        self.bind(node.target, meaning, scope)
        return meaning

    def _read_ifexp(self, node: ast.IfExp, scope: Scope) -> None:
        self.read(node.test, scope)
        container = Container.conditional(short(node.test))
        with self.stage.within(container, "then"):
            self.read(node.body, scope)
        with self.stage.within(container, "otherwise"):
            self.read(node.orelse, scope)

    def _read_boolop(self, node: ast.BoolOp, scope: Scope) -> None:
        first, *others = node.values
        self.read(first, scope)
        with self.stage.within(Container.conditional(short(first)), "then"):
            for other in others:
                self.read(other, scope)

    def _read_binop(self, node: ast.BinOp, scope: Scope) -> Said | None:
        if isinstance(node.op, ast.Add) and speaks(node, scope):
            return Said(node, scope)
        self._read_parts(node, scope)
        return None

    def _items(self, elements: Sequence[ast.expr], scope: Scope) -> Items | None:
        meanings = tuple(self.read(element, scope) for element in elements)
        return Items(meanings) if any(meaning is not None for meaning in meanings) else None

    # ------------------------------------------------------------ repeating

    def _read_listcomp(self, node: Comprehension, scope: Scope) -> Meaning | None:
        targets = [child for each in node.generators for child in ast.walk(each.target)]
        names = frozenset(child.id for child in targets if isinstance(child, ast.Name))
        inner = Scope(None, scope, own=names)
        with ExitStack() as stack:
            for each in node.generators:
                over = self.read(each.iter, inner)
                stack.enter_context(self.repeating(each.target, each.iter, over, inner))
                for test in each.ifs:
                    self.read(test, inner)
                    stack.enter_context(
                        self.stage.within(Container.conditional(short(test)), "then")
                    )
            if isinstance(node, ast.DictComp):
                self.read(node.key, inner)
                self.read(node.value, inner)
                return None
            return Every(self.read(node.elt, inner))

    _read_setcomp = _read_generatorexp = _read_dictcomp = _read_listcomp

    @contextmanager
    def repeating(
        self, target: ast.expr, iterable: ast.expr, over: Meaning | None, scope: Scope
    ) -> Iterator[None]:
        """The body of a loop: on the branches of a fork each does its part once."""
        element = element_of(over)
        self.bind(target, element, scope)
        tracks = tracks_in(element)
        header = f"for {ast.unparse(target)} in {short(iterable)}"
        names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        home = self.at_home(tracks[0] if tracks else None)
        with home, self.stage.within(Container.loop(header, names), never=tracks):
            yield

    @contextmanager
    def at_home(self, track: Track | None) -> Iterator[None]:
        """Python that concerns no state is noted on this track, if there is one."""
        before = self.home
        self.home = track or before
        try:
            yield
        finally:
            self.home = before

    # ------------------------------------------------------------ names

    def bind(self, target: ast.expr, meaning: Meaning | None, scope: Scope) -> None:
        """Let a target of an assignment mean this."""
        match target:
            case ast.Name(id=name):
                scope.bind_anywhere(name, meaning)
            case ast.Starred(value=value):
                self.bind(value, meaning, scope)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for index, element in enumerate(elements):
                    self.bind(element, _part(meaning, index, len(elements), element), scope)

    # ------------------------------------------------------------ left to others

    @abstractmethod
    def call(self, node: ast.Call, scope: Scope) -> Meaning | None:
        """Read a call."""

    @abstractmethod
    def attribute(self, owner: Meaning | None, name: str) -> Meaning | None:
        """What an attribute means."""

    def note(self, source: str, track: Track | None = None, *, touches: bool = False) -> None:
        """Note Python that the plan does not look into."""
        self.stage.lay(track or self.home, Opaque(source, touches=touches))


# ---------------------------------------------------------------- meanings of parts


def element_of(meaning: Meaning | None) -> Meaning | None:
    """What each element means when one iterates over this."""
    match meaning:
        case BranchesOf(track):
            return StateOf(track)
        case Every(element):
            return element
        case _:
            return None


def tracks_in(meaning: Meaning | None) -> tuple[Track, ...]:
    """The tracks of the states in a meaning."""
    match meaning:
        case StateOf(track):
            return (track.family,)
        case Items(each):
            return tuple(track for one in each for track in tracks_in(one))
        case _:
            return ()


def _branch(branches: BranchesOf, index: ast.expr) -> Meaning | None:
    """What `branches[index]` means."""
    track = branches.track
    match index:
        case ast.Slice():
            return branches
        case ast.Constant(value=str()):
            return None  # the values of a variable
        case _ if branches.number == 1:
            return StateOf(track)
        case ast.Constant(value=int(number)):
            return StateOf(track.single(number))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return StateOf(track.single(-number))
        case _:
            return StateOf(track)  # one after the other, in a loop


def _item(owner: Meaning | None, node: ast.Subscript) -> Meaning | None:
    match owner, node.slice:
        case Items(each), ast.Constant(value=int(number)) if -len(each) <= number < len(each):
            return each[number]
        case Every(element), index if not isinstance(index, ast.Slice):
            return element
        case _:
            return None


def _part(meaning: Meaning | None, index: int, of: int, target: ast.expr) -> Meaning | None:
    match meaning:
        case BranchesOf(track, _, number):
            if isinstance(target, ast.Starred):
                return meaning
            return StateOf(track if number == of == 1 else track.single(index))
        case Items(each) if len(each) == of:
            return each[index]
        case Every(element):
            return element
        case _:
            return None


def short(node: ast.AST, limit: int = SOURCE_LIMIT) -> str:
    """The source of a node in one line, cut."""
    line = " ".join(ast.unparse(node).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
