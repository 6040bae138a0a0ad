"""Terms as forms: what each part of a term lets the output be.

Owns   what a term means: how free text ends, and where JSON may stand.
Holds  a text fits if and only if it is made of texts that fit the parts, joined as the term says;
       where one part ends and the next begins makes no difference to the mask. Where a fixed text
       has a control token of the model in it, such as `<tool_call>`, that token stands for it;
       nowhere else does one.
Used   by `compiler`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from structgen import terms
from structgen.errors import ConstraintError
from structgen.grammar import ebnf, schema
from structgen.grammar.characters import Ranges, contains
from structgen.grammar.dialect import Expression, from_regex
from structgen.grammar.form.derivation import sample_of, speaks
from structgen.grammar.form.expression import form_of
from structgen.grammar.form.lexemes import leads
from structgen.grammar.form.production import lark_of
from structgen.grammar.form.tree import (
    BLANK,
    MOST_REPEATS,
    Form,
    Marker,
    Rule,
    Text,
    Until,
    Value,
    Without,
    anything,
    either,
    join,
    repeat,
    replaced,
)
from structgen.grammar.matcher import Vocabulary
from structgen.grammar.outline import DEEPEST, bare, check, endings_of, flat, names_in
from structgen.grammar.schema import Relaxed
from structgen.grammar.source import Source
from structgen.grammar.spans import reading_of
from structgen.request import Structure
from structgen.terms import Capture, Either, Fixed, Json, Pattern, Repeat, Rules, Term

MOST_ENDINGS = 256  # characters of the strings that end a free text
_SIGNS = MappingProxyType(
    {
        "object": "{",
        "array": "[",
        "string": '"',
        "number": "-0123456789",
        "integer": "-0123456789",
        "boolean": "ft",
        "null": "n",
    }
)


def source_of(constraint: Structure, vocabulary: Vocabulary) -> Source:
    """The source of a term.

    Raises `ConstraintError` for a part that cannot be enforced, for parts that cannot stand where
    they do, and for a term that is too large or too deep.
    """
    term = constraint.term
    check(term)
    name = f"term {term!r:.200}"
    forms = _Forms(vocabulary.spelled, name, vocabulary.markers)
    rules = forms.rules_of(term, last=True)
    if rules[""] == BLANK or not speaks(rules, ""):
        raise ConstraintError(f"{name}: it is the empty text only; write what is to be generated")
    found = Source(name, lark_of(rules, "", name), sample_of(rules, ""), marked=forms.marked)
    inner = bare(term)
    if isinstance(inner, Pattern):
        found = _alone(found, from_regex(inner.regex, vocabulary.spelled))
    captures = tuple(dict.fromkeys(names_in(term)))
    if not captures and not forms.values:
        return found
    values = tuple(forms.values.values())
    judges = {each: value.judge for each, value in forms.values.items()}
    reading = reading_of(term, _Forms(vocabulary.spelled, name).lark, judges, name)
    return msgspec.structs.replace(
        found,
        closed=values[0].closed if isinstance(inner, Json) else None,
        separators=inner.separators if isinstance(inner, Json) else None,
        judge=reading if values else None,
        unmasked=tuple(dict.fromkeys(each for value in values for each in value.unmasked)),
        captures=captures,
        finder=reading if captures else None,
    )


def _alone(source: Source, expression: Expression) -> Source:
    """A term that is one pattern: it ends at the first match where the pattern says so."""
    if not expression.lazy:
        return source
    return msgspec.structs.replace(source, lark=f"start[lazy]: /{expression.source}/")


# ---------------------------------------------------------------- forms


class _Forms:
    """Terms as forms.

    values   the schemas in it
    marked   there are control tokens in it
    """

    def __init__(
        self, spelled: Ranges, name: str, markers: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`markers`: from the spelling of control tokens to their ids."""
        self._spelled, self._name, self._markers = spelled, name, markers
        longest_first = sorted(markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.marked = False
        self._rules: dict[str, Form] = {}
        self.values: dict[Json, Relaxed] = {}
        self._grammars: dict[Rules, str] = {}

    def rules_of(self, term: Term, *, last: bool) -> dict[str, Form]:
        """The rules of a term, of which the one without a name is the whole."""
        form = self.form(term, last=last)
        return {"": form} | self._rules

    def lark(self, term: Term, last: bool) -> str:
        """The grammar of a part of the term."""
        return lark_of(self.rules_of(term, last=last), "", self._name)

    def form(self, term: Term, *, ending: str | None = None, last: bool = False) -> Form:
        """The form of a term.

        ending   the string that follows the free text with which it ends, and becomes part of it
        last     it is the last of the output
        """
        match term:
            case Fixed(text):
                found = self._fixed(text)
            case Pattern(regex):
                found = form_of(regex, self._spelled)
            case Json():
                found = self._json(term)
            case Rules():
                found = self._grammar(term)
            case terms.Free(until):
                found = self._free(until, ending, last=last)
            case terms.Sequence(parts):
                found = self._sequence(parts, ending, last=last)
            case Either(options):
                found = either([self.form(option, last=last) for option in options])
            case Repeat(part, least, most):
                found = self._repeated(part, least, most, last=last)
            case Capture(_, part):
                found = self.form(part, ending=ending, last=last)
            case _:
                raise AssertionError(term)
        return found

    def _fixed(self, text: str) -> Form:
        for character in text:
            if not contains(self._spelled, ord(character)):
                raise ConstraintError(
                    f"literal {text!r:.80}: it has {character!r}, which the model has no tokens "
                    "for, or which is half of a surrogate pair; leave it out"
                )
        found: list[Form] = []
        at = 0
        for match in self._marker.finditer(text):
            self.marked = True
            marker = Marker(match[0], self._markers[match[0]])
            # Whoever reads a text, and a model without the habit, has it letter by letter.
            found += [_text(text[at : match.start()]), either([marker, Text(match[0])])]
            at = match.end()
        return join([*found, _text(text[at:])])

    def _json(self, term: Json) -> Form:
        if term not in self.values:
            self.values[term] = schema.relaxed(term.schema, term.separators)
        found = self.values[term].json
        whole = json.loads(found)
        signs = _begins(whole, whole, DEEPEST)
        begins = leads(tuple((ord(sign), ord(sign)) for sign in sorted(signs)))
        return Value(found, begins, numeric=any(map(str.isdecimal, signs)))

    def _grammar(self, term: Rules) -> Form:
        if term not in self._grammars:
            prefix = self._grammars[term] = f"{len(self._grammars)}/"
            found = ebnf.rules_of(term.ebnf, self._spelled)
            names: dict[str, Form] = {name: Rule(prefix + name) for name in found}
            self._rules |= {prefix + name: replaced(form, names) for name, form in found.items()}
        return Rule(self._grammars[term] + "root")

    def _repeated(self, part: Term, least: int, most: int | None, *, last: bool) -> Form:
        if least < 0 or (most is not None and most < least):
            raise ConstraintError(
                f"repeat: from {least} to {most} times; give 0 <= least <= most, or most=None"
            )
        if max(least, most or 0) > MOST_REPEATS:
            raise ConstraintError(
                f"repeat: more than {MOST_REPEATS} times; give most=None, and bound the length "
                "with max_tokens"
            )
        return repeat(self.form(part, last=last and most == 1), least, most)

    # ------------------------------------------------------------ free text

    def _free(self, until: Sequence[str], ending: str | None, *, last: bool) -> Form:
        strings = tuple(dict.fromkeys(until))
        if ending is not None:
            spelled = Until(strings, ending, self._spelled)
            if (match := self._marker.match(ending)) is None:
                return spelled
            self.marked = True
            marker = Marker(match[0], self._markers[match[0]])
            free = Without(strings, self._spelled)
            return either([spelled, join([free, marker, self._fixed(ending[match.end() :])])])
        if not last:
            raise ConstraintError(
                f"{self._name}: a text without an end stands before something else; give "
                "text(until=...) one of the fixed texts that follow it at once"
            )
        self._check_endings(strings)
        any_text = repeat(anything(self._spelled), 0, None)
        return Without(strings, self._spelled) if strings else any_text

    def _check_endings(self, until: Sequence[str]) -> None:
        if sum(map(len, until)) > MOST_ENDINGS:
            raise ConstraintError(
                f"text: more than {MOST_ENDINGS} characters in `until`; use fewer"
            )
        for each in until:
            self._fixed(each)
            if not each:
                raise ConstraintError("text: an empty string in `until`; it would end at once")
            for other in until:
                if each != other and each in other:
                    raise ConstraintError(
                        f"text: {other!r:.80} in `until` has {each!r:.80} in it, and would never "
                        "come first; leave one of them out"
                    )

    def _sequence(self, parts: Sequence[Term], ending: str | None, *, last: bool) -> Form:
        todo = list(flat(parts))
        found: list[Form] = []
        while todo:
            part = todo.pop(0)
            until = endings_of(part)
            self._check_endings(until or ())
            if until is None:
                found.append(self.form(part, last=last and not todo))
            elif not todo:
                found.append(self.form(part, ending=ending, last=last))
            else:
                heads = self._heads(todo.pop(0), until)
                if len(heads) == 1 and (begin := heads[0][0]):
                    found.append(self.form(part, ending=begin))
                    todo = [*flat(heads[0][1]), *todo]
                    continue
                found.append(
                    either(
                        join(
                            [
                                self.form(part, ending=begin),
                                self._sequence(rest, None, last=last and not todo),
                            ]
                        )
                        for begin, rest in heads
                    )
                )
        return join(found)

    def _heads(self, term: Term, until: Sequence[str]) -> list[tuple[str, list[Term]]]:
        """How a term goes on after a free text: with which of the strings, and what is behind it.

        Raises `ConstraintError` unless it always begins with one of them.
        """
        if isinstance(term, Either):
            return [head for option in term.options for head in self._heads(option, until)]
        first, *rest = list(flat((term,))) or [term]
        if isinstance(first, Fixed):
            for begin in until:
                if first.text.startswith(begin):
                    behind = first.text[len(begin) :]
                    return [(begin, [*([Fixed(behind)] if behind else []), *rest])]
        ends = ", ".join(map(repr, until))[:200] or "nothing"
        raise ConstraintError(
            f"{self._name}: text(until=...) ends before {ends}, but is followed by {first!r:.80}; "
            "write a fixed text that begins with such a string right after it"
        )


def _text(text: str) -> Form:
    return Text(text) if text else BLANK


# ---------------------------------------------------------------- JSON


def _begins(found: object, whole: object, depth: int) -> str:
    """The characters that a JSON value may begin with under a schema; rather too many."""
    anything = "".join(_SIGNS.values())
    if not isinstance(found, dict) or not depth:
        return anything
    kinds = found.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and kinds and all(isinstance(each, str) for each in kinds):
        return "".join(_SIGNS.get(kind, anything) for kind in kinds)
    if "const" in found or isinstance(found.get("enum"), list):
        values = [found["const"]] if "const" in found else found["enum"]
        return "".join(json.dumps(value)[0] for value in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(found.get(word), list):
            return "".join(_begins(each, whole, depth - 1) for each in found[word])
    if isinstance(found.get("$ref"), str):
        return _begins(_target(found["$ref"], whole), whole, depth - 1)
    return anything


def _target(reference: str, whole: object) -> object:
    at: object = whole
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        at = at.get(name) if isinstance(at, Mapping) else None
    return at
