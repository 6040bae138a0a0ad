"""Whether a scripted reply is what the request's constraint asks for, as the engine has it.

Owns   the grammars of the constraints that scripted requests brought lately, over a vocabulary of
       one token a byte: what a mask lets through does not depend on how a text is cut.
Holds  what the engine refuses is refused here in the same words; a text passes here if and only if
       some model could have written it under the engine's masks.
Used   by the scripted backend, in tests: a grammar is compiled at once, on the event loop.
"""

from __future__ import annotations

from functools import lru_cache

from structgen.errors import ConstraintError, UnsupportedError
from structgen.grammar.automaton import automaton_of
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.grammar.matcher import byte_vocabulary
from structgen.options import check_bound, in_words
from structgen.request import Constraint, Request

MOST_KEPT = 128  # grammars


class Course:
    """One reply on its way through a constraint, character by character.

    path   what holds an engine's output to it; see `Finish.enforced`
    """

    def __init__(self, constraint: Constraint) -> None:
        """Raises `ConstraintError` for what the engine would refuse."""
        self._grammar = _grammar_of(constraint)
        self._matcher = self._grammar.matcher()
        self._named = in_words(constraint)
        self._may_end = [self._matcher.complete]  # after each number of characters
        self._refused: int | None = None  # the first character that no mask lets through
        self.path = self._grammar.path

    @property
    def finished(self) -> bool:
        """Whether the output must end here: it is complete, and nothing could follow."""
        return self._matcher.finished and self._refused is None

    def follow(self, text: str) -> None:
        """Read on, though it may be that no mask lets the text through: a stop may cut it off."""
        for character in text:
            # Half of a surrogate pair has bytes, too, which no grammar takes.
            data = character.encode("utf-8", "surrogatepass")
            if self._refused is None and self._matcher.try_all(data) < len(data):
                self._refused = len(self._may_end) - 1
            self._may_end.append(self._refused is None and self._matcher.complete)

    def may_end(self, length: int) -> bool:
        """Whether the output may end after that many of the characters that were read."""
        return self._may_end[length]

    def check(self, text: str, *, ended: bool) -> None:
        """Raise `AssertionError` for an output that no mask lets through.

        text    what is kept of what was read
        ended   it ended by itself, where it then has to be complete
        """
        refused = self._refused
        if refused is not None and refused < len(text):
            before = text[max(0, refused - 40) : refused]
            reason = f"no mask lets {text[refused]!r} follow {before!r}"
        elif ended and not self.may_end(len(text)):
            reason = "it ends before it is complete"
        else:
            return
        raise AssertionError(f"reply {text!r:.500} has not the form of {self._named}: {reason}")

    def fault(self, text: str) -> str | None:
        """What the final check finds wrong with a text that may end."""
        return self._grammar.fault(text)

    def captures(self, text: str) -> tuple[tuple[str, str], ...]:
        """What a text without fault captures by name, in order."""
        return self._grammar.captures(text)


def course_of(request: Request) -> Course | None:
    """What the reply to a request has to follow; None if that is nothing.

    Raises what an engine raises for a request that cannot be served.
    """
    if request.want.prompt_logprobs is not None:
        raise UnsupportedError("the scripted backend has no log-probabilities of prompts")
    course = None if request.constraint is None else Course(request.constraint)
    check_bound(request)
    if request.sampling.stop_regex:
        automaton_of(request.sampling.stop_regex)
    return course


def _grammar_of(constraint: Constraint) -> Grammar:
    try:
        hash(constraint)
    except TypeError:
        raise ConstraintError(f"{constraint!r:.200} is not made of strings") from None
    return _compiled(constraint)


@lru_cache(maxsize=MOST_KEPT)
def _compiled(constraint: Constraint) -> Grammar:
    return compile_constraint(constraint, byte_vocabulary())
