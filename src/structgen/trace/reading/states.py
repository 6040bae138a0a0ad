"""Calls on a state: what it says, generates and forks.

Owns   nothing besides what `Expressions` owns. Used by `calls`.
"""

from __future__ import annotations

import ast
from typing import TypeAlias

from structgen.trace.reading.expressions import short
from structgen.trace.reading.meaning import BranchesOf, Context, Meaning, Scope, StateOf, value_of
from structgen.trace.reading.saying import Saying
from structgen.trace.reading.tracks import Container, Track
from structgen.trace.reading.words import (
    MARKS,
    ROLES,
    argument,
    call_step,
    gen_step,
    select_step,
    text_or_hole,
    using_options,
)
from structgen.trace.steps import Hole, Mark, Prime, Turn, Using
from structgen.trace.steps import Scope as ScopeStep

READS = frozenset({"text", "messages", "parts", "tokens", "meta"})
Arguments: TypeAlias = list[Meaning | None]


class States(Saying):
    """The reading of calls on states."""

    def arguments(self, node: ast.Call, scope: Scope) -> Arguments:
        """What a call is given: by position, then by name."""
        found = [self.read(each, scope) for each in node.args]
        return found + [self.read(keyword.value, scope) for keyword in node.keywords]

    def on_state(self, track: Track, method: str, node: ast.Call, scope: Scope) -> Meaning | None:
        """A method of a state is called."""
        if method in ROLES and not node.args:
            return Context(track, container=Container.around(lambda body: Turn(method, body)))
        if method in ROLES:
            self.turn(track, method, node, scope)
            return None
        if method == "append" and node.args:
            self.say(track, node.args[0], scope)
            return None
        self.arguments(node, scope)
        known = getattr(self, f"_state_{method}", None)
        if known is not None:
            meaning: Meaning | None = known(track, node, scope)
            return meaning
        if method in MARKS:
            self.stage.lay(track, Mark(*MARKS[method]))
        elif method not in READS:
            self.note(short(node), track, touches=True)
        return None

    # ------------------------------------------------------------ one for each method

    def _state_gen(self, track: Track, node: ast.Call, scope: Scope) -> None:
        self.stage.lay(track, gen_step(node, scope))

    def _state_select(self, track: Track, node: ast.Call, scope: Scope) -> None:
        self.stage.lay(track, select_step(node, scope))

    def _state_call(self, track: Track, node: ast.Call, scope: Scope) -> None:
        self.stage.lay(track, call_step(node, scope))

    def _state_stream(self, track: Track, node: ast.Call, scope: Scope) -> Context:
        return Context(track, step=gen_step(node, scope, streamed=True))

    def _state_prime(self, track: Track, _node: ast.Call, _scope: Scope) -> None:
        self.stage.lay(track, Prime())

    def _state_settle(self, _track: Track, _node: ast.Call, _scope: Scope) -> None:
        self.seen += 1

    def _state_copy(self, track: Track, _node: ast.Call, _scope: Scope) -> StateOf:
        return StateOf(self.stage.fork(track, 1))

    def _state_fork(self, track: Track, node: ast.Call, scope: Scope) -> BranchesOf:
        given = argument(node, 0, "n")
        value = value_of(given, scope) if given is not None else 1
        if type(value) is int:
            return BranchesOf(self.stage.fork(track, value), track, value)
        hole = value if isinstance(value, Hole) else Hole(repr(value))
        return BranchesOf(self.stage.fork(track, hole), track, None)

    def _state_using(self, track: Track, node: ast.Call, scope: Scope) -> Context:
        options = using_options(node, scope)
        return Context(track, container=Container.around(lambda body: Using(options, body)))

    def _state_var_scope(self, track: Track, node: ast.Call, scope: Scope) -> Context:
        given = argument(node, 0, "name")
        name = text_or_hole(given, scope) if given is not None else Hole("?")
        return Context(track, container=Container.around(lambda body: ScopeStep(name, body)))
