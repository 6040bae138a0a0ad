"""What `engine.compile` gives: a constraint whose grammar is ready, and stays so.

Owns   nothing but a reference: as long as it lives, its engine has the grammar at hand.
Used   by `engine`, and by those who give it to `gen(constraint=...)` or ask it about texts.
"""

from __future__ import annotations

from structgen.grammar.compiler import Grammar
from structgen.options import in_words
from structgen.request import Constraint


class Compiled:
    """A constraint that an engine has compiled: `await engine.compile(Regex("a+"))`.

    It is what `constraint=` takes in any generating call. On another engine its constraint counts,
    and is compiled there.
    """

    __slots__ = ("_constraint", "_grammar")

    def __init__(self, constraint: Constraint, grammar: Grammar) -> None:
        """Made by `Engine.compile`."""
        self._constraint, self._grammar = constraint, grammar

    def __repr__(self) -> str:
        return f"<compiled {in_words(self._constraint)}, by {self.path}>"

    @property
    def constraint(self) -> Constraint:
        """What it was made of."""
        return self._constraint

    @property
    def path(self) -> str:
        """What enforces it: "xgrammar" or "llguidance", which make the masks.

        With ", final check" where a finished text is looked at, too.
        """
        return self._grammar.path

    @property
    def unmasked(self) -> tuple[str, ...]:
        """What only the final check enforces, as "path: keyword"; empty where the mask is exact."""
        return self._grammar.source.unmasked

    def accepts(self, text: str) -> bool:
        """Whether a reply with exactly this text could be decoded and delivered as complete.

        Takes some milliseconds for each 1,000 characters, in the caller's thread. Raises
        `GenerationError` for a text that the constraint can match in too many ways to follow them.
        """
        return self._grammar.accepts(text)
