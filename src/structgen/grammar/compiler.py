"""From a constraint to a grammar that can be matched, and what the backend may spend on it.

Owns   the limits of the backend, and which kinds of constraint there are grammars for.
Holds  a `Grammar` never changes: it is compiled once, shared by all requests with the same
       constraint, and every request follows it with a matcher of its own. What compiles is
       enforced exactly, or the request that meets a limit later fails; nothing is let through.
Used   by `engine`, which keeps grammars; any thread may compile.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits

from structgen.errors import ConstraintError, GenerationError
from structgen.grammar.dialect import Expression, from_choice, from_regex
from structgen.grammar.matcher import GuidanceMatcher, Vocabulary
from structgen.request import Choice, Constraint, Regex

KINDS = frozenset({"regex", "choice"})


class Grammar:
    """A compiled constraint."""

    def __init__(self, state: LLMatcher, vocabulary: Vocabulary, size: int) -> None:
        """`state` stands before the first token, and stays there; `size` tells what it takes."""
        self._state, self._vocabulary = state, vocabulary
        self.size = size  # some 20 bytes each

    def matcher(self) -> GuidanceMatcher:
        """A matcher that has accepted nothing yet."""
        return GuidanceMatcher(self._state.deep_copy(), self._vocabulary)

    def matches(self, tokens: Sequence[int], tail: str = "") -> bool:
        """Whether the text of these tokens, and the tail after it, is a complete output."""
        matcher = self.matcher()
        ids = [*tokens, *self._vocabulary.backend.greedy_tokenize(tail)]
        return matcher.try_all(ids) == len(ids) and matcher.complete


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    """Compile a constraint; may take long, and releases the interpreter lock meanwhile.

    Raises `ConstraintError`, quoting it, if it is malformed or cannot be enforced.
    """
    match constraint:
        case Regex(pattern):
            expression = from_regex(pattern, vocabulary.spelled)
            name = f"regex {pattern!r:.200}"
        case Choice(options):
            expression = from_choice(options, vocabulary.spelled)
            name = f"choices {options!r:.200}"
        case _:
            raise refusal(constraint)
    return _compiled(expression, vocabulary, name)


def refusal(constraint: Constraint) -> ConstraintError:
    """The error for a kind of constraint that there is no grammar for."""
    return ConstraintError(
        f"{constraint!r:.300} cannot be enforced: this version of the engine knows the "
        f"constraints {' and '.join(sorted(KINDS))}; use one of these, or leave it out and check "
        "the text yourself"
    )


def _compiled(expression: Expression, vocabulary: Vocabulary, name: str) -> Grammar:
    # Without `no_forcing` a mask has one bit where the next bytes are certain: the spelling that
    # the backend would choose, and none of the others that a model may prefer.
    lazy = "[lazy]" if expression.lazy else ""
    lark = f'%llguidance {{"no_forcing": true}}\nstart{lazy}: /{expression.source}/'
    state = LLMatcher(
        vocabulary.backend,
        LLMatcher.grammar_from_lark(lark),
        log_level=0,
        limits=LLParserLimits(verbose_errors=False),
    )
    if state.is_error():
        reason = state.get_error().strip().partition("\n")[0]
        raise ConstraintError(f"{name}: {reason}; a simpler one may do")
    grammar = Grammar(state, vocabulary, 1_000 + len(expression.source))
    try:
        # Followed through a long text, what blows up does so here, and not in a request.
        grammar.matcher().try_all(vocabulary.backend.greedy_tokenize(expression.sample))
    except GenerationError as error:
        raise ConstraintError(
            f"{name}: it can match in too many ways at once ({error}); bound fewer repeats "
            "inside other repeats"
        ) from None
    return grammar
