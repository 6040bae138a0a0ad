"""What is appended to a state: text, templates, and expressions that generate.

Owns   nothing besides what `Expressions` owns. Used by `calls`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from structgen.trace.reading.expressions import Expressions, short
from structgen.trace.reading.meaning import NotLiteralError, Said, Scope, literal
from structgen.trace.reading.tracks import Container, Track
from structgen.trace.reading.words import (
    MARKS,
    ROLES,
    WRAPPING,
    gen_step,
    select_step,
    speaks,
    word,
)
from structgen.trace.steps import Constant, Hole, Mark, Opaque, Step, Template, Turn

Piece: TypeAlias = str | Hole | Callable[[Track], None]


class Saying(Expressions):
    """The reading of what is appended."""

    def say(self, track: Track, node: ast.expr, scope: Scope) -> None:
        """An expression is appended to a state."""
        # All of it is evaluated before any of it is said, as in Python.
        pieces = [*self._pieces(node, scope)]
        texts: list[str | Hole] = []
        for piece in pieces:
            if isinstance(piece, str | Hole):
                texts.append(piece)
            else:
                self._lay_text(track, texts)
                texts = []
                piece(track)
        self._lay_text(track, texts)
        self.seen += 1

    def _lay_text(self, track: Track, texts: Sequence[str | Hole]) -> None:
        merged: list[str | Hole] = []
        for text in texts:
            if isinstance(text, str) and merged and isinstance(merged[-1], str):
                merged[-1] += text
            else:
                merged.append(text)
        match merged:
            case []:
                pass
            case [str(text)]:
                self.stage.lay(track, Constant(text))
            case _:
                self.stage.lay(track, Template(tuple(part for part in merged if part != "")))

    def _pieces(self, node: ast.expr, scope: Scope) -> Iterator[Piece]:
        text = _text(node, scope)
        match node:
            case _ if text is not None:
                yield text
            case ast.JoinedStr(values=values):
                for each in values:
                    yield from self._pieces(each, scope)
            case ast.FormattedValue(value=inner):
                yield from self._formatted(node, inner, scope)
            case ast.BinOp(left=left, op=ast.Add(), right=right) if _is_text(node, scope):
                yield from self._pieces(left, scope)
                yield from self._pieces(right, scope)
            case ast.IfExp() if speaks(node, scope):
                self.read(node.test, scope)
                yield self._either(node, scope)
            case ast.Call() if word(node.func, scope):
                yield from self._worded(node, scope)
            case _:
                meaning = self.read(node, scope)
                if isinstance(meaning, Said) and meaning.node is not node:
                    yield from self._pieces(meaning.node, meaning.scope)
                else:
                    yield Hole(ast.unparse(node))

    def _formatted(
        self, node: ast.FormattedValue, inner: ast.expr, scope: Scope
    ) -> Iterator[Piece]:
        # Only as the whole f-string would be: a format may change the text.
        text = _text(ast.JoinedStr([node]), scope)
        if text is None:
            self.read(inner, scope)
        yield Hole(ast.unparse(inner)) if text is None else text

    def _either(self, node: ast.IfExp, scope: Scope) -> Callable[[Track], None]:
        def lay(track: Track) -> None:
            container = Container.conditional(short(node.test))
            with self.stage.within(container, "then"):
                self.say(track, node.body, scope)
            with self.stage.within(container, "otherwise"):
                self.say(track, node.orelse, scope)

        return lay

    def _worded(self, node: ast.Call, scope: Scope) -> Iterator[Piece]:
        """A word of the language is appended."""
        spelt = word(node.func, scope)
        if spelt == WRAPPING and node.args:
            yield from self._pieces(node.args[0], scope)
        elif spelt in ROLES:
            yield lambda track: self.turn(track, spelt, node, scope)
        else:
            yield lambda track: self.stage.lay(track, _step(spelt, node, scope))

    def turn(self, track: Track, role: str, node: ast.Call, scope: Scope) -> None:
        """A whole turn is said."""
        container = Container.around(lambda body: Turn(role, body))
        with self.stage.within(container, only=track):
            self.stage.show(track)
            for each in node.args:
                self.say(track, each, scope)


def _step(spelt: str, node: ast.Call, scope: Scope) -> Step:
    """What a word is, but for roles."""
    if spelt in MARKS:
        return Mark(*MARKS[spelt])
    match spelt:
        case "gen":
            return gen_step(node, scope)
        case "select":
            return select_step(node, scope)
        case _:
            return Opaque(short(node), touches=True)


def _text(node: ast.expr, scope: Scope) -> str | None:
    """The text that an expression is known to be."""
    try:
        value = literal(node, scope)
    except NotLiteralError:
        return None
    return value if isinstance(value, str) else None


def _is_text(node: ast.BinOp, scope: Scope) -> bool:
    """Whether a sum is a sum of texts: something in it is one, or says something."""
    ahead: list[ast.expr] = [node]
    while ahead:
        match ahead.pop():
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                ahead += [left, right]
            case ast.Constant(value=str()) | ast.JoinedStr():
                return True
            case other if speaks(other, scope):
                return True
    return False
