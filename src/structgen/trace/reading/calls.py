"""Calls in a program: on branches, of programs and of functions that take states.

Owns   the functions that are being read, so that one that calls itself is read once.
Used   by `reader`.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType

from structgen.errors import OptionError
from structgen.trace.reading.expressions import element_of, short
from structgen.trace.reading.meaning import (
    BranchesOf,
    Every,
    FunctionIn,
    Items,
    Known,
    Meaning,
    MethodOf,
    Said,
    Scope,
    StateOf,
)
from structgen.trace.reading.source import (
    Found,
    FunctionNode,
    function_of,
    is_program,
    node_of,
    parameters,
)
from structgen.trace.reading.states import Arguments, States
from structgen.trace.reading.tracks import Container, Track
from structgen.trace.reading.words import PACKAGE, argument, speaks, text_or_hole, word
from structgen.trace.steps import Inline, Join

# Iterables of the same elements; waiting for coroutines that were read where they were made.
PASSING = (list, tuple, iter, reversed, sorted)
WAITING: tuple[object, ...] = (asyncio.gather, asyncio.wait_for, asyncio.wait, asyncio.shield)
WAITING += (asyncio.create_task, asyncio.ensure_future, asyncio.as_completed)
# Methods of branches, and how many functions they call on each; the plain ones cut no branch off.
WORKING = MappingProxyType({"map": 1, "race": 1, "vote": 1, "best_of": 2})
PLAIN = frozenset({"map", "settle"})
COPYING = frozenset({"using", "bind", "budget"})
DEEPEST = 8  # functions that call functions: enough for people, and no explosion


class Calls(States):
    """The reading of calls."""

    def __init__(self) -> None:
        super().__init__()
        self._reading: list[FunctionNode | ast.Lambda] = []
        self._nodes: dict[CodeType, FunctionNode] = {}
        self._programs = 1  # how many programs deep: the plan's own is one

    @abstractmethod
    def body(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        """Read statements."""

    @property
    def innermost(self) -> FunctionNode | ast.Lambda:
        """The function that is being read."""
        return self._reading[-1]

    @contextmanager
    def inside(self, node: FunctionNode | ast.Lambda) -> Iterator[None]:
        """Read a function in this block."""
        self._reading.append(node)
        try:
            yield
        finally:
            self._reading.pop()

    # ------------------------------------------------------------ what is called

    def call(self, node: ast.Call, scope: Scope) -> Meaning | None:
        """Read a call."""
        called = Said(node, scope) if word(node.func, scope) else self.read(node.func, scope)
        match called:
            case Said():
                return called
            case MethodOf(StateOf(track), method):
                return self.on_state(track, method, node, scope)
            case MethodOf(BranchesOf() as branches, method):
                return self._on_branches(branches, method, node, scope)
            case FunctionIn():
                return self._apply(called, self.arguments(node, scope), node)
            case Known() | MethodOf():
                return self._on_known(called, node, scope)
            case _:
                self._on_stranger(node, self.arguments(node, scope))
        return None

    def attribute(self, owner: Meaning | None, name: str) -> Meaning | None:
        """What an attribute means."""
        match owner:
            case StateOf() | BranchesOf():
                return MethodOf(owner, name)
            case Known(thing) if is_program(thing):
                return MethodOf(owner, name)
            case Known(ModuleType() as module):
                return Known(vars(module)[name]) if name in vars(module) else None
            case Known(thing):
                return _member(thing, name)
            case _:
                return None

    def _on_known(self, called: Known | MethodOf, node: ast.Call, scope: Scope) -> Meaning | None:
        arguments = self.arguments(node, scope)
        if isinstance(called, MethodOf) and called.name in COPYING:
            return called.owner  # the same program with other options
        thing = called.thing if isinstance(called, Known) else None
        if _one_of(thing, WAITING):
            self.seen += any(isinstance(each, StateOf | BranchesOf) for each in arguments)
        elif thing is not None and _one_of(thing, vars(builtins).values()):
            return self._through_builtin(thing, arguments)
        elif is_program(thing) and isinstance(arguments[0] if arguments else None, StateOf):
            assert isinstance(called, Known), "only what is known is a program"
            self._inline(called, arguments, node)
        elif any(_is_state(each) for each in arguments):
            return self._foreign(thing, arguments, node)
        else:
            self._on_stranger(node, arguments)
        return None

    def _through_builtin(self, thing: object, arguments: Arguments) -> Meaning | None:
        """Iterables that pass states on."""
        first = arguments[0] if arguments else None
        if thing is enumerate and first is not None:
            return Every(Items((None, element_of(first))))
        if thing is zip:
            elements = tuple(element_of(each) for each in arguments)
            return Every(Items(elements)) if any(elements) else None
        if thing is map and isinstance(first, FunctionIn):
            self._apply(first, [element_of(each) for each in arguments[1:]], None)
            return None
        return first if _one_of(thing, PASSING) else None

    def _on_stranger(self, node: ast.Call, arguments: Arguments) -> None:
        """Something that the plan cannot look into is called."""
        for index, function in enumerate(arguments):
            if not isinstance(function, FunctionIn):
                continue
            rest = arguments[index + 1 :]
            branches = [StateOf(b.track) for b in arguments if isinstance(b, BranchesOf)]
            if any(_is_state(each) for each in rest):
                self._apply(function, rest, None)  # as in start_soon(work, branch)
                return
            # It may be called once, several times or never.
            with self.stage.within(Container.block(f"{short(node.func, 40)}(...)")):
                self._apply(function, [*branches], None)
        for track in dict.fromkeys(track for each in arguments for track in _given(each)):
            self.note(short(node), track, touches=True)

    # ------------------------------------------------------------ functions and programs

    def node(self, function: FunctionType) -> FunctionNode:
        """The function in its file, read once: so that recursion is seen."""
        code = function.__code__
        if code not in self._nodes:
            self._nodes[code] = node_of(function)
        return self._nodes[code]

    def _apply(
        self, function: FunctionIn, arguments: Arguments, node: ast.Call | None
    ) -> Meaning | None:
        """Read the body of a function where it is called."""
        self.seen += any(_is_state(each) for each in arguments)
        tracks = [each.track for each in arguments if isinstance(each, StateOf)]
        home = tracks[0] if tracks else self.home
        if function.program and function.node not in self._reading:
            container = Container.around(lambda body: Inline(function.name, body))
            with self.stage.within(container, only=home):
                self.stage.show(home)
                return self._enter(function, arguments, node, home)
        return self._enter(function, arguments, node, home)

    def _enter(
        self, function: FunctionIn, arguments: Arguments, node: ast.Call | None, home: Track
    ) -> Meaning | None:
        if function.node in self._reading or len(self._reading) > DEEPEST:
            note = "recursive" if function.node in self._reading else "not followed further"
            self.stage.lay(home, Inline(function.name, note=note))
            return None
        inner = Scope(function.node, function.scope)
        for name, meaning in _bound(function.node, arguments, node):
            inner.bind(name, meaning)
        with self.inside(function.node), self.at_home(home):
            if isinstance(function.node, ast.Lambda):
                return self.read(function.node.body, inner)
            returned = _returned(function.node)
            if returned is not None and speaks(returned, inner):
                return Said(returned, inner)
            self.body(function.node.body, inner)
        return None

    def _foreign(self, thing: object, arguments: Arguments, node: ast.Call) -> Meaning | None:
        """A function of a module: read as if it stood here, if its source is there."""
        found = function_of(thing) if isinstance(thing, FunctionType | MethodType) else None
        there = self._node_or_none(found)
        if found is None or there is None:
            self._on_stranger(node, arguments)
            return None
        function = FunctionIn(there, Scope(None, function=found.function))
        arguments = arguments if found.owner is None else [Known(found.owner), *arguments]
        if not found.wrapped:
            return self._apply(function, arguments, node)
        with self.stage.within(Container.block(f"decorated {function.name}")):
            return self._apply(function, arguments, node)

    def _node_or_none(self, found: Found | None) -> FunctionNode | None:
        """The function in its file; those of this package are not looked into."""
        if found is None or found.function.__module__.split(".")[0] == PACKAGE:
            return None
        try:
            return self.node(found.function)
        except OptionError:
            return None

    def _inline(self, program: Known, arguments: Arguments, node: ast.Call) -> None:
        """Another program on a state of this one: read one level deep."""
        state, found = arguments[0], function_of(program.thing)
        assert isinstance(state, StateOf), "asked by who calls this"
        assert found is not None, "a program has a function"
        name, there = found.function.__name__, self._node_or_none(found)
        if there is None or there in self._reading or self._programs > 1:
            note = "recursive" if there in self._reading else "see its own plan"
            note = "without source" if there is None else note
            self.stage.lay(state.track, Inline(name, note=note))
            return
        container = Container.around(lambda body: Inline(name, body))
        function = FunctionIn(there, Scope(None, function=found.function))
        owner = program.owner if found.owner is None else found.owner
        given = arguments if owner is None else [Known(owner), *arguments]
        self._programs += 1
        with self.stage.within(container, only=state.track):
            self.stage.show(state.track)
            if found.wrapped:
                self.note(f"decorator of {name}", state.track, touches=True)
            self._enter(function, given, node, state.track)
        self._programs -= 1

    # ------------------------------------------------------------ branches

    def _on_branches(
        self, branches: BranchesOf, method: str, node: ast.Call, scope: Scope
    ) -> Meaning | None:
        arguments = self.arguments(node, scope)
        if method == "join":
            mode = argument(node, 0, "mode")
            text = "gather" if mode is None else text_or_hole(mode, scope)
            self.stage.lay(branches.parent, Join(text))
            return None
        self.seen += 1
        working = WORKING.get(method, 0)
        with ExitStack() as stack:
            if method not in PLAIN:
                stack.enter_context(self.stage.within(Container.block(method)))
            for meaning in arguments[:working]:
                self._on_each(branches, meaning, node)
        if not working and method not in PLAIN:
            self.note(short(node), branches.parent, touches=True)
        return None

    def _on_each(self, branches: BranchesOf, function: Meaning | None, node: ast.Call) -> None:
        match function:
            case FunctionIn():
                self._apply(function, [StateOf(branches.track)], None)
            case Known(FunctionType() as thing):
                self._foreign(thing, [StateOf(branches.track)], node)


def _bound(
    node: FunctionNode | ast.Lambda, arguments: Arguments, call: ast.Call | None
) -> Iterator[tuple[str, Meaning | None]]:
    """Parameters and what they are called with."""
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    keywords = [keyword.arg for keyword in call.keywords] if call is not None else []
    given, named = arguments, []
    if keywords:
        given, named = arguments[: -len(keywords)], arguments[-len(keywords) :]
    for each in parameters(node):
        yield each.arg, None
    yield from zip(positional, given, strict=False)
    for keyword, meaning in zip(keywords, named, strict=False):
        if keyword is not None:
            yield keyword, meaning


def _returned(node: FunctionNode) -> ast.expr | None:
    """What a function returns that does nothing else."""
    match node.body:
        case [ast.Return(value=value)] | [ast.Expr(value=ast.Constant()), ast.Return(value=value)]:
            return value
        case _:
            return None


def _is_state(meaning: Meaning | None) -> bool:
    match meaning:
        case StateOf() | BranchesOf():
            return True
        case Items(each):
            return any(_is_state(one) for one in each)
        case Every(element):
            return _is_state(element)
        case _:
            return False


def _member(thing: object, name: str) -> Known | None:
    """A method of an object, or program that it has; whatever else it has may change."""
    found = inspect.getattr_static(thing, name, None)
    found = found.__func__ if isinstance(found, staticmethod) else found
    if isinstance(found, FunctionType):
        return Known(found if isinstance(thing, type) else MethodType(found, thing))
    return Known(found, None if isinstance(thing, type) else thing) if is_program(found) else None


def _given(meaning: Meaning | None) -> tuple[Track, ...]:
    """The tracks that are touched by who is given this: of branches also their parent's."""
    match meaning:
        case BranchesOf(track, parent):
            return (parent, track)
        case Every(element):
            return _given(element)
        case Items(each):
            return tuple(track for one in each for track in _given(one))
        case StateOf(track):
            return (track,)
        case _:
            return ()


def _one_of(thing: object, others: Iterable[object]) -> bool:
    """Whether it is one of these: by identity, since `==` of a user's object may be anything."""
    return any(thing is other for other in others)
