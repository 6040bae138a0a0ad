"""From a constraint to a grammar that can be matched, and what the backend may spend on it.

Owns   the limits of the backend, and which kinds of constraint there are grammars for. xgrammar
       is used where its mask is exact, if the vocabulary has a compiler of it at hand.
Holds  a `Grammar` never changes: it is compiled once, shared by all requests with the same
       constraint, and every request follows it with a matcher of its own. What compiles is
       enforced exactly, or the request that meets a limit later fails; nothing is let through.
Used   by `engine`, which keeps grammars; any thread may compile.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from structgen.errors import ConstraintError, GenerationError
from structgen.grammar import ebnf, schema, structure
from structgen.grammar.dialect import Expression, from_choice, from_regex
from structgen.grammar.gate import laid_out
from structgen.grammar.matcher import LIMITS, WIDE_LIMITS, GuidanceMatcher, Vocabulary
from structgen.grammar.source import Source
from structgen.grammar.xgrammar_matcher import Automaton, Compiler, XgrammarMatcher
from structgen.request import Choice, Constraint, Ebnf, JsonSchema, Regex, Structure

KINDS = frozenset({"regex", "choice", "json_schema", "ebnf", "structure"})


class Grammar:
    """A compiled constraint."""

    def __init__(
        self, start: LLMatcher | Automaton, vocabulary: Vocabulary, source: Source
    ) -> None:
        """`start` stands before the first token, and stays there."""
        self._start, self._vocabulary = start, vocabulary
        self.source = source
        self.size = 1_000 + len(source.lark)  # some 20 bytes each
        if isinstance(start, Automaton):
            self.size += start.bytes // 20

    @property
    def path(self) -> str:
        """What enforces the constraint: the backend of the mask, and whether a check follows."""
        backend = "xgrammar" if isinstance(self._start, Automaton) else "llguidance"
        return backend if self.source.judge is None else f"{backend}, final check"

    def matcher(self) -> GuidanceMatcher | XgrammarMatcher:
        """A matcher that has accepted nothing yet."""
        if isinstance(self._start, Automaton):
            return self._start.matcher()
        marked = self.source.marked
        return GuidanceMatcher(self._start.deep_copy(), self._vocabulary, marked=marked)

    def matches(self, tokens: Sequence[int], tail: str = "") -> bool:
        """Whether the text of these tokens, and the tail after it, is what the mask lets through.

        The final check is another question; see `fault`.
        """
        matcher = self.matcher()
        ids = [*tokens, *self._vocabulary.backend.greedy_tokenize(tail)]
        return matcher.try_all(ids) == len(ids) and matcher.complete

    def fault(self, text: str) -> str | None:
        """What the final check finds wrong with a text that the mask lets through."""
        return None if self.source.judge is None else self.source.judge.fault(text)

    def accepts(self, text: str) -> bool:
        """Whether an output with exactly this text can be decoded, and is then delivered.

        Raises `GenerationError` if the backend has to give up.
        """
        return self.matches((), text) and self.fault(text) is None

    def captures(self, text: str) -> tuple[tuple[str, str], ...]:
        """(name, text) of each capture of a term in a whole output; see `Finish.captures`.

        Raises `ConstraintError` for a text that does not fit, `GenerationError` if the backend has
        to give up.
        """
        return () if self.source.finder is None else self.source.finder.captures(text)


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    """Compile a constraint; may take long, and releases the interpreter lock meanwhile.

    Raises `ConstraintError`, quoting it, if it is malformed or cannot be enforced.
    """
    return _compiled(source_of(constraint, vocabulary), vocabulary)


def source_of(constraint: Constraint, vocabulary: Vocabulary) -> Source:
    """A constraint in the words of the backends. Raises `ConstraintError`, as above."""
    match constraint:
        case Regex(pattern):
            found = from_regex(pattern, vocabulary.spelled)
            return _from_expression(found, f"regex {pattern!r:.200}")
        case Choice(options):
            found = from_choice(options, vocabulary.spelled)
            return _from_expression(found, f"choices {options!r:.200}")
        case JsonSchema():
            return schema.source_of(constraint)
        case Ebnf():
            return ebnf.source_of(constraint, vocabulary)
        case Structure():
            return structure.source_of(constraint, vocabulary)
        case _:
            raise refusal(constraint)


def refusal(constraint: Constraint) -> ConstraintError:
    """The error for a kind of constraint that there is no grammar for."""
    return ConstraintError(
        f"{constraint!r:.300} cannot be enforced: this version of the engine knows the "
        f"constraints {' and '.join(sorted(KINDS))}; use one of these, or leave it out and check "
        "the text yourself"
    )


def _from_expression(expression: Expression, name: str) -> Source:
    lazy = "[lazy]" if expression.lazy else ""
    return Source(name, f"start{lazy}: /{expression.source}/", expression.sample)


def _compiled(source: Source, vocabulary: Vocabulary) -> Grammar:
    grammar = Grammar(_start(source, vocabulary), vocabulary, source)
    try:
        # Followed through a long text, what blows up does so here, and not in a request. And what
        # all matchers of a vocabulary share is made by the first one: in this thread.
        grammar.matcher().try_all(vocabulary.backend.greedy_tokenize(source.sample))
        if isinstance(first := grammar.matcher(), GuidanceMatcher):
            first.follow_certain()
    except GenerationError as error:
        raise ConstraintError(
            f"{source.name}: it can match in too many ways at once ({error}); bound fewer repeats "
            "inside other repeats"
        ) from None
    return grammar


def _start(source: Source, vocabulary: Vocabulary) -> LLMatcher | Automaton:
    """What stands before the first token, by the backend that the source is for."""
    closed, xgrammar = source.closed, vocabulary.at_hand(Compiler)
    if xgrammar is not None and closed is not None and laid_out(source.separators):
        return xgrammar.compiled(closed, source.separators)
    # Without `no_forcing` a mask has one bit where the next bytes are certain: the spelling that
    # the backend would choose, and none of the others that a model may prefer.
    state = LLMatcher(
        vocabulary.backend,
        LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\n{source.lark}'),
        log_level=0,
        limits=LIMITS if source.judge is None else WIDE_LIMITS,  # a judge is there for JSON
    )
    if state.is_error():
        reason = state.get_error().strip().partition("\n")[0]
        raise ConstraintError(f"{source.name}: {reason}; a simpler one may do")
    return state
