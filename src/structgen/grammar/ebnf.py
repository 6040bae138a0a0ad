r"""EBNF as it is written for language models (`root ::= "a" [0-9]+ | x`), read into forms.

Owns   the syntax: what is understood, and what is refused with its line, its rule and what to write
       instead.
Holds  a text fits the grammar if and only if its rule `root` derives it, character by character;
       where rules overlap or one text can be derived in several ways makes no difference.
Used   by `compiler`, and by `structure` for rules inside of larger forms.

    root ::= "SELECT " column (", " column)* " FROM " name   # a rule; this is a comment
    column ::= name | "*"                                     # rules in any order
    name ::= [a-z_] [a-z0-9_]{0,30}                           # counts: * + ? {2} {2,} {,3} {2,3}

Texts stand in "..." or '...', classes in [...] and [^...]; in both, `\n \t \r`, `\xhh`, `\uhhhh`,
`\Uhhhhhhhh`, and a backslash before any other sign that is no letter or digit. A rule ends where
the next one begins, may have several lines, and may be recursive, also from the left.

The notation is that of llama.cpp (GBNF) and xgrammar, without their extensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from structgen.errors import ConstraintError
from structgen.grammar.characters import (
    EVERYTHING,
    Ranges,
    complement,
    contains,
    intersection,
    union,
)
from structgen.grammar.form.derivation import ranks_of, sample_of, speaks
from structgen.grammar.form.production import lark_of
from structgen.grammar.form.tree import (
    BLANK,
    MOST_REPEATS,
    Chars,
    Form,
    Rule,
    Text,
    either,
    join,
    repeat,
)
from structgen.grammar.matcher import Vocabulary
from structgen.grammar.source import Source
from structgen.request import Ebnf

MOST_CHARACTERS = 64_000
MOST_RULES = 1_000
DEEPEST_GROUPS = 40

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<define>[A-Za-z_][A-Za-z0-9_-]*)[ \t\r\n]*::=
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<set>\[(?:[^]\\\n]|\\.)*\])
    |(?P<count>\{[ ]*[0-9]*[ ]*,?[ ]*[0-9]*[ ]*\})
    |(?P<sign>[()|*+?])""",
    re.VERBOSE,
)
_COUNTS: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {"*": (0, None), "+": (1, None), "?": (0, 1)}
)
_CONTROLS = MappingProxyType({"n": "\n", "t": "\t", "r": "\r"})
_HEX = MappingProxyType({"x": 2, "u": 4, "U": 8})
# What is met where a token should be, what that is elsewhere, and what to write instead.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        ".": r". is no class here; write [^\n] for any character of a line",
        "/": "a pattern in /.../; write classes in [...] and counts instead",
        '"': r"a text that is not closed on its line; write \n for a new line and \" for the sign",
        "'": r"a text that is not closed on its line; write \n for a new line and \' for the sign",
        "[": r"a class that is not closed on its line; write \] for the sign, \n for a new line",
        "]": r'a ] that closes nothing; write "]" for the text',
        "{": "a { that is no count; write {2}, {2,}, {,3} or {2,3}, or quote it as a text",
        "}": 'a } that closes nothing; write "}" for the text',
        "=": "a single =; a rule is written name ::= ..., and looking ahead is not supported",
        ":": "a single :; a rule is written name ::= ...",
        ";": "a ; ; a rule ends where the next one begins: leave it out",
        "<": 'a < ; names stand without brackets, and texts in quotes: write name or "<"',
    }
)


def source_of(constraint: Ebnf, vocabulary: Vocabulary) -> Source:
    """The source of a grammar.

    Raises `ConstraintError`, naming line and rule, for what is malformed, refers to rules that are
    not there, can never end, derives nothing, exceeds a limit or has texts of characters that the
    model has no tokens for.
    """
    rules = rules_of(constraint.grammar, vocabulary.spelled)
    name = f"EBNF {constraint.grammar!r:.200}"
    return Source(name, lark_of(rules, "root", name), sample_of(rules, "root"))


def rules_of(grammar: str, spelled: Ranges = EVERYTHING) -> dict[str, Form]:
    """The forms of the rules; `root` is where texts begin. Raises as `source_of` does."""
    if not isinstance(grammar, str):
        raise ConstraintError(f"EBNF: expected a grammar as a string, got {grammar!r:.80}")
    if len(grammar) > MOST_CHARACTERS:
        raise ConstraintError(
            f"EBNF: {len(grammar)} characters, more than {MOST_CHARACTERS}; write less, such as "
            "classes for lists of characters, or use choices for lists of texts"
        )
    reader = _Reader(grammar, spelled)
    rules = reader.rules()
    if "root" not in rules:
        found = f"there are {', '.join(rules)}"[:200] if rules else "there is none at all"
        raise ConstraintError(
            f"EBNF {grammar!r:.80}: it has no rule root, where a text begins ({found}); write "
            "root ::= ..."
        )
    ends = ranks_of(rules)
    for name in rules:
        if name not in ends:
            raise reader.refusal(
                f"it can never end, since each way through it leads to {name} again; add an "
                "alternative without that",
                reader.places[name],
                name,
            )
    if not speaks(rules, "root"):
        raise reader.refusal(
            "it derives the empty text only; write what is to be generated",
            reader.places["root"],
            "root",
        )
    return rules


# ---------------------------------------------------------------- reading


class _Reader:
    """Reads a grammar from its beginning to its end."""

    def __init__(self, grammar: str, spelled: Ranges) -> None:
        self._grammar, self._spelled = grammar, spelled
        self._at = 0
        self._depth = 0
        self._rule = ""
        self.places: dict[str, int] = {}
        self._mentioned: dict[str, tuple[int, str]] = {}

    def rules(self) -> dict[str, Form]:
        """All rules by name."""
        found: dict[str, Form] = {}
        while self._token() is not None:
            token = self._token()
            if token is None or token.lastgroup != "define":
                if token is not None and token.lastgroup == "name":
                    self._at = token.end()
                    self._token()  # what stands in the place of ::= may be refused by its name
                raise self.refusal("a rule is expected here; write name ::= ...")
            self._rule = token["define"]
            if self._rule in found:
                raise self.refusal(
                    "it is there a second time; write one rule, with its alternatives after |"
                )
            if len(found) >= MOST_RULES:
                raise self.refusal(f"more than {MOST_RULES} rules; write fewer")
            self.places[self._rule] = self._at
            self._at = token.end()
            found[self._rule] = self._either()
            if self._took(")"):
                raise self.refusal("a ) that closes no group; leave it out, or quote it")
        for name, (at, rule) in self._mentioned.items():
            if name not in found:
                raise self.refusal(
                    f"there is no rule {name}; write {name} ::= ..., or quote it as a text",
                    at,
                    rule,
                )
        return found

    def _either(self) -> Form:
        options = [self._join()]
        while self._took("|"):
            options.append(self._join())
        return either(options)

    def _join(self) -> Form:
        parts: list[Form] = []
        while (form := self._atom()) is not None:
            parts.append(self._counted(form))
        if not parts:
            raise self.refusal('there is nothing in an alternative; write "" for the empty text')
        return join(parts)

    def _atom(self) -> Form | None:
        """A name, text, class or group; None where no such thing comes next."""
        token = self._token()
        if token is None or token.lastgroup == "define" or token[0] in {"|", ")"}:
            return None
        if token.lastgroup == "count" or token[0] in _COUNTS:
            raise self.refusal(f"{token[0]} has nothing to repeat; write what before it")
        at, self._at = self._at, token.end()
        if token.lastgroup == "name":
            if self._grammar[self._at : self._at + 1] == "(":
                raise self.refusal(f"{token[0]}(...): there are no macros; write a rule", at)
            self._mentioned.setdefault(token[0], (at, self._rule))
            return Rule(token[0])
        if token.lastgroup == "text":
            return self._text(token[0][1:-1], at)
        if token.lastgroup == "set":
            return self._set(token[0][1:-1], at)
        return self._group(at)

    def _group(self, opened: int) -> Form:
        self._depth += 1
        if self._depth > DEEPEST_GROUPS:
            raise self.refusal(f"more than {DEEPEST_GROUPS} groups in one another; write rules")
        form = self._either()
        self._depth -= 1
        if not self._took(")"):
            raise self.refusal("a group that is not closed; write ) where it ends", opened)
        return form

    def _counted(self, form: Form) -> Form:
        while True:
            token = self._token()
            if token is None or not (token.lastgroup == "count" or token[0] in _COUNTS):
                return form
            least, most = self._counts(token[0])
            if most is not None and least > most:
                raise self.refusal(f"{token[0]} has more before its comma; write the smaller first")
            if max(least, most or 0) > MOST_REPEATS:
                raise self.refusal(
                    f"{token[0]:.40} repeats more than {MOST_REPEATS} times; write * or +, and "
                    "bound the length with max_tokens"
                )
            self._at = token.end()
            form = repeat(form, least, most)

    def _counts(self, sign: str) -> tuple[int, int | None]:
        if sign in _COUNTS:
            return _COUNTS[sign]
        low, comma, high = (each.strip() for each in sign[1:-1].partition(","))
        if not low and not high:
            raise self.refusal(f"{sign} says nothing; write {{2}}, {{2,}}, {{,3}} or {{2,3}}")
        if max(len(low), len(high)) > 9:
            raise self.refusal(f"{sign:.40} repeats too often; write * or +")
        least = int(low or 0)
        return least, (int(high) if high else None) if comma else least

    # ------------------------------------------------------------ texts and classes

    def _text(self, inside: str, at: int) -> Form:
        if self._grammar[self._at : self._at + 1].isalnum():
            raise self.refusal(
                "a letter right after a text; leave a space before a name, and write [aA] for a "
                "letter of either case",
                at,
            )
        text = "".join(character for character, _ in self._characters(inside, at))
        for character in text:
            if not contains(self._spelled, ord(character)):
                raise self.refusal(
                    f"{character!r} is a character that the model has no tokens for; leave that "
                    "text out",
                    at,
                )
        return Text(text) if text else BLANK

    def _set(self, inside: str, at: int) -> Form:
        negated = inside.startswith("^")
        members = self._characters(inside[negated:], at)
        if not members:
            raise self.refusal(
                r"a class of no character; write \] for the sign, and [\x00-\U0010ffff] for any "
                "character",
                at,
            )
        found: list[tuple[int, int]] = []
        while members:
            low, _ = members.pop(0)
            high = low
            if len(members) > 1 and members[0] == ("-", False):
                members.pop(0)
                high, _ = members.pop(0)
            if low > high:
                raise self.refusal(f"{low}-{high} ends before it begins; turn it round", at)
            found.append((ord(low), ord(high)))
        ranges = complement(union(found)) if negated else union(found)
        ranges = intersection(ranges, self._spelled)
        if not ranges:
            raise self.refusal("a class of no character that the model has tokens for", at)
        return join([Chars(ranges)])

    def _characters(self, inside: str, at: int) -> list[tuple[str, bool]]:
        """Each character of a text or class, and whether it was written with a backslash."""
        found = []
        rest = iter(range(len(inside)))
        for n in rest:
            character = inside[n]
            if character != "\\":
                self._check_code(ord(character), at)
                found.append((character, False))
                continue
            letter = inside[next(rest)]
            if letter in _HEX:
                digits = inside[n + 2 : n + 2 + _HEX[letter]]
                if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[letter]}}}", digits):
                    raise self.refusal(
                        f"\\{letter}{digits}: {_HEX[letter]} hexadecimal digits are expected", at
                    )
                for _ in digits:
                    next(rest)
                self._check_code(int(digits, 16), at)
                found.append((chr(int(digits, 16)), True))
            elif letter in _CONTROLS:
                found.append((_CONTROLS[letter], True))
            elif letter.isascii() and letter.isalnum():
                raise self.refusal(
                    f"\\{letter} has no meaning here; write the characters, such as [0-9] for "
                    r"digits, or \xhh or \uhhhh for a code",
                    at,
                )
            else:
                found.append((letter, True))
        return found

    def _check_code(self, code: int, at: int) -> None:
        if not contains(EVERYTHING, code):
            raise self.refusal(f"U+{code:04X} is no character of its own; leave it out", at)

    # ------------------------------------------------------------ tokens

    def _token(self) -> re.Match[str] | None:
        """What comes next, which is not taken; None at the end."""
        while True:
            found = _TOKEN.match(self._grammar, self._at)
            if found is None or found.lastgroup != "space":
                break
            self._at = found.end()
        if found is None and self._at < len(self._grammar):
            sign = self._grammar[self._at]
            raise self.refusal(_REFUSED.get(sign, f"{sign!r} has no meaning here; quote it"))
        return found

    def _took(self, sign: str) -> bool:
        token = self._token()
        if token is None or token[0] != sign:
            return False
        self._at = token.end()
        return True

    def refusal(self, what: str, at: int | None = None, rule: str | None = None) -> ConstraintError:
        """An error at a place: what is wrong and what to write instead."""
        at = self._at if at is None else at
        rule = self._rule if rule is None else rule
        line = self._grammar.count("\n", 0, at) + 1
        shown = self._grammar.split("\n")[line - 1].strip()
        where = f"line {line}" + (f", rule {rule}" if rule else "")
        return ConstraintError(f"EBNF {where} ({shown!r:.80}): {what}")
