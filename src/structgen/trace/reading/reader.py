"""A program's statements, read into the steps of a plan.

Owns   nothing besides what `Calls` owns. Used by `plan`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from structgen.trace.reading.calls import Calls
from structgen.trace.reading.expressions import short
from structgen.trace.reading.meaning import (
    BranchesOf,
    Context,
    FunctionIn,
    Items,
    Known,
    Meaning,
    Scope,
    StateOf,
    UnboundError,
    value_of,
)
from structgen.trace.reading.source import Found
from structgen.trace.reading.tracks import Container
from structgen.trace.reading.words import text_or_hole
from structgen.trace.steps import Assign, Opaque, Step

LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)
SILENT = (ast.Pass, ast.Global, ast.Nonlocal, ast.ClassDef)
CALLABLE = (ast.Lambda, ast.Name)
HARMLESS = frozenset(
    {"len", "print", "str", "repr", "type", "id", "isinstance", "enumerate", "zip"}
)


def steps_of(found: Found, state: str) -> tuple[Step, ...]:
    """The steps of a program. Raises `OptionError` where there is no source."""
    reader = Reader()
    node = reader.node(found.function)
    scope = Scope(node, function=found.function)
    scope.bind(state, StateOf(reader.stage.main))
    if found.owner is not None:
        scope.bind(node.args.args[0].arg, Known(found.owner))
    if found.wrapped:
        reader.note(f"decorator of {node.name}", touches=True)
    reader.program(node, scope)
    return reader.stage.steps()


class Reader(Calls):
    """The reading of statements."""

    def program(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        """Read the plan's own program."""
        with self.inside(node):
            self.body(node.body, scope)

    def body(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        """Read statements, up to the one that is the last to run."""
        for statement in statements:
            self._statement(statement, scope)
            if isinstance(statement, LEAVING):
                break

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
                self._noting(node, lambda: self.read(value, scope), scope)
            case ast.Assign() | ast.AnnAssign():
                self._noting(node, lambda: self._assign(node, scope), scope)
            case ast.AugAssign():
                self._noting(node, lambda: self._grow(node, scope), scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                program = any(_is_program_word(each) for each in node.decorator_list)
                scope.bind(node.name, FunctionIn(node, scope, program))
            case ast.Import() | ast.ImportFrom():
                _import(node, scope)
            case _ if isinstance(node, SILENT):
                pass
            case _:
                self._block(node, scope)

    def _block(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.If():
                self.read(node.test, scope)
                container = Container.conditional(short(node.test))
                with self.stage.within(container, "then"):
                    self.body(node.body, scope)
                with self.stage.within(container, "otherwise"):
                    self.body(node.orelse, scope)
            case ast.For() | ast.AsyncFor():
                self._for(node, scope)
            case ast.While():
                self.read(node.test, scope)
                with self.stage.within(Container.loop(f"while {short(node.test)}")):
                    self.body(node.body, scope)
                self._part("else", node.orelse, scope)
            case ast.With() | ast.AsyncWith():
                with ExitStack() as stack:
                    for item in node.items:
                        stack.enter_context(self._entered(node, item, scope))
                    self.body(node.body, scope)
            case ast.Try() | ast.TryStar():
                self._try(node, scope)
            case ast.Match():
                self.read(node.subject, scope)
                with self.stage.within(Container.block(f"match {short(node.subject)}")):
                    for case in node.cases:
                        self._part(f"case {short(case.pattern)}", case.body, scope)
            case _:
                self._noting(node, lambda: self._children(node, scope), scope)

    # ------------------------------------------------------------ assignments

    def _assign(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> Meaning | None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None:
            return None
        meaning = self.read(node.value, scope)
        for target in targets:
            if isinstance(target, ast.Subscript):
                owner = self.read(target.value, scope)
                if isinstance(owner, StateOf):
                    name = text_or_hole(target.slice, scope)
                    value = value_of(node.value, scope)
                    self.stage.lay(owner.track, Assign(name, value))
            else:
                self.bind(target, meaning, scope)
        named = all(isinstance(target, ast.Name | ast.Tuple | ast.List) for target in targets)
        return meaning if named else None

    def _grow(self, node: ast.AugAssign, scope: Scope) -> None:
        owner = self.read(node.target, scope)
        if not isinstance(node.op, ast.Add) or not isinstance(owner, StateOf | BranchesOf):
            self.read(node.value, scope)
            return
        if isinstance(owner, StateOf):
            self.say(owner.track, node.value, scope)
            return
        given = self.read(node.value, scope) if isinstance(node.value, CALLABLE) else None
        if not isinstance(given, FunctionIn):
            self.say(owner.track, node.value, scope)
        elif isinstance(given.node, ast.Lambda):
            self.say(owner.track, given.node.body, Scope(given.node, given.scope))
        else:
            returned = [each.value for each in ast.walk(given.node) if isinstance(each, ast.Return)]
            for value in returned[:1]:
                if value is not None:
                    self.say(owner.track, value, Scope(given.node, given.scope))

    # ------------------------------------------------------------ blocks

    def _for(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        over = self.read(node.iter, scope)
        if isinstance(over, Items) and all(isinstance(each, StateOf) for each in over.each):
            for state in over.each:  # a loop over states that are written out
                self.bind(node.target, state, scope)
                self.body(node.body, scope)
        else:
            with self.repeating(node.target, node.iter, over, scope):
                self.body(node.body, scope)
        self._part("else", node.orelse, scope)

    def _part(self, header: str, statements: Sequence[ast.stmt], scope: Scope) -> None:
        with self.stage.within(Container.block(header)):
            self.body(statements, scope)

    def _try(self, node: ast.Try | ast.TryStar, scope: Scope) -> None:
        self._part("try", node.body, scope)
        for handler in node.handlers:
            kind = f" {short(handler.type)}" if handler.type is not None else ""
            self._part(f"except{kind}", handler.body, scope)
        self._part("else", node.orelse, scope)
        self._part("finally", node.finalbody, scope)

    @contextmanager
    def _entered(
        self, node: ast.With | ast.AsyncWith, item: ast.withitem, scope: Scope
    ) -> Iterator[None]:
        meaning = self.read(item.context_expr, scope)
        given = meaning if isinstance(meaning, StateOf | BranchesOf) else None
        if item.optional_vars is not None:
            self.bind(item.optional_vars, given, scope)
        match meaning:
            case Context(track, step, container):
                if step is not None:
                    self.stage.lay(track, step)
                if container is None:
                    yield
                    return
                with self.stage.within(container, only=track):
                    self.stage.show(track)
                    yield
            case StateOf() | BranchesOf():
                yield
            case _:
                word = "async with" if isinstance(node, ast.AsyncWith) else "with"
                header = f"{word} {short(item.context_expr)}"
                with self.stage.within(Container.block(header)):
                    yield

    # ------------------------------------------------------------ Python

    def _noting(self, node: ast.stmt, read: Callable[[], Meaning | None], scope: Scope) -> None:
        """Read a statement; note it as Python where nothing in it was understood."""
        before = (self.seen, self.stage.laid)
        meaning = read()
        ends = isinstance(node, LEAVING) and not self._is_last(node)
        if before == (self.seen, self.stage.laid) and (meaning is None or ends):
            touches = _escapes(node, scope)
            self.stage.lay(self.home, Opaque(short(node), touches=touches, ends=ends))

    def _is_last(self, node: ast.stmt) -> bool:
        """Whether it is the last statement of its function: then it cuts nothing off."""
        body = self.innermost.body
        return isinstance(node, ast.Return) and isinstance(body, list) and body[-1] is node

    def _children(self, node: ast.stmt, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.read(child, scope)


def _is_program_word(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).split(".")[-1] == "program"


def _import(node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
    """Names that an import in a function binds, of modules that are loaded already."""
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        if isinstance(node, ast.Import):
            module = sys.modules.get(alias.name if alias.asname else name)
            scope.bind(name, Known(module) if module is not None else None)
        else:
            things = vars(sys.modules[node.module]) if node.module in sys.modules else {}
            scope.bind(name, Known(things[alias.name]) if alias.name in things else None)


def _escapes(node: ast.stmt, scope: Scope) -> bool:
    """Whether a statement may hand a state to something that uses it later."""
    harmless: set[ast.AST] = set()
    for child in ast.walk(node):
        match child:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Await(value=inner):
                harmless.add(inner)
            case ast.Compare(comparators=comparators):
                harmless.update(comparators)
            case ast.Call(func=ast.Name(id=name) as function, args=arguments):
                harmless.add(function)
                harmless.update(arguments if name in HARMLESS else ())
    later = [each for each in ast.walk(node) if isinstance(each, ast.Lambda)]
    inside = {child for each in later for child in ast.walk(each)}
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and (child not in harmless or child in inside):
            try:
                meaning = scope.look_up(child.id)
            except UnboundError:
                continue
            if isinstance(meaning, StateOf | BranchesOf | FunctionIn):
                return True
    return False
