r"""Patterns that end an output, as trees: a part of the regular expressions of Python's `re`.

Owns   the syntax: what is understood, and what is refused with what to write instead.
Holds  what parses means what it means to `re` for `str` and without flags, and never matches the
       empty text.
Used   by `automaton`, which is built from the trees.

Understood: characters; `.`; classes such as `[a-z_]` and `[^\s,]`; `\d \w \s \D \W \S`;
`\n \t \r \f \v \a`, `\xhh`, `\uhhhh`, `\Uhhhhhhhh`, and a backslash before anything that is no
ASCII letter or digit; `(...)`, `(?:...)`, `|`; `* + ? {m} {m,} {,n} {m,n}`, also lazy, which makes
no difference where the first match to end counts; `^` and `\A`, the beginning of the output; `\b`
and `\B`, where a character follows.

Refused: everything that would need to look ahead, look back or count without bound (lookaround,
back-references, conditions, atomic groups, possessive repeats), `$` and `\Z`, since nobody knows
yet where the output ends, flags, names, comments, and patterns that match the empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from structgen.errors import ConstraintError

MOST_REPEATS = 2_000
DEEPEST = 50  # groups in groups: each takes three calls to parse and one to build

# ---------------------------------------------------------------- trees


class CharSet(msgspec.Struct, frozen=True):
    """One character of a set.

    ranges    (first, last) code points
    kinds     letters out of `dDsSwW`, each standing for what it stands for after a backslash
    negated   the characters that are in none of them
    """

    ranges: tuple[tuple[int, int], ...] = ()
    kinds: str = ""
    negated: bool = False

    def __contains__(self, character: str) -> bool:
        code = ord(character)
        found = any(low <= code <= high for low, high in self.ranges) or any(
            KINDS[kind](character) for kind in self.kinds
        )
        return found != self.negated


class Join(msgspec.Struct, frozen=True):
    """One part after the other; of no parts: nothing, which is always there."""

    parts: tuple[Tree, ...] = ()


class Either(msgspec.Struct, frozen=True):
    """One of several."""

    options: tuple[Tree, ...]


class Repeat(msgspec.Struct, frozen=True):
    """A part `least` to `most` times, None for any number of times. The part has characters."""

    part: Tree
    least: int
    most: int | None


class Start(msgspec.Struct, frozen=True):
    """The beginning of the output."""


class Edge(msgspec.Struct, frozen=True):
    """A place between a word character and none; with `edge` False, any other place."""

    edge: bool


Tree = CharSet | Join | Either | Repeat | Start | Edge


def is_word(character: str) -> bool:
    r"""Whether a character is a `\w`."""
    return character.isalnum() or character == "_"


# As `re` defines them for str: by the same properties of Unicode as the methods of str.
KINDS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "d": str.isdecimal,
        "D": lambda character: not character.isdecimal(),
        "s": str.isspace,
        "S": lambda character: not character.isspace(),
        "w": is_word,
        "W": lambda character: not is_word(character),
    }
)
ANY = CharSet(((ord("\n"), ord("\n")),), negated=True)
NOTHING = Join()

_COUNTS = re.compile(r"\{(?:([0-9]+)|([0-9]*),([0-9]*))\}")
_CONTROLS = MappingProxyType(dict(zip("afnrtv", "\a\f\n\r\t\v", strict=True)))
_HEX = MappingProxyType({"x": 2, "u": 4, "U": 8})
# What follows "(?", what that is called, and what to write instead; the first that fits.
_REFUSED = (
    ("<=", "looking behind", "make it a part of the pattern, which is then cut off with the rest"),
    ("<!", "looking behind", "write a set such as [^x] for the character before"),
    ("=", "looking ahead", "make it a part of the pattern, which is cut off in any case"),
    ("!", "looking ahead", "write a set such as [^x] for the character that may follow"),
    ("P=", "a back-reference", "write out what may stand there"),
    ("P", "a named group", "nothing is captured: write (?:...)"),
    ("#", "a comment", "leave it out"),
    ("(", "a condition", "write the two cases as alternatives, (?:a|b)"),
    (">", "an atomic group", "nothing is ever tried twice: write (?:...)"),
    (
        "",
        "a flag, or nothing known",
        r"write [aA] for either case, [\s\S] for any character, (?:^|\n) for a line's beginning",
    ),
)


def parse(pattern: str) -> Tree:
    """The tree of a pattern. Raises `ConstraintError`, quoting it, for what is not understood."""
    return _Parser(pattern).whole()


def refusal(pattern: object, what: str, instead: str) -> ConstraintError:
    """An error about a pattern (or several): what is wrong with it and what to write instead."""
    return ConstraintError(f"stop_regex {pattern!r:.200}: {what}; {instead}")


def nullable(tree: Tree) -> bool:
    """Whether the empty text may match."""
    match tree:
        case CharSet():
            return False
        case Join(parts):
            return all(nullable(part) for part in parts)
        case Either(options):
            return any(nullable(option) for option in options)
        case Repeat(part, least):
            return least == 0 or nullable(part)
        case Start() | Edge():
            return True


def _consumes(tree: Tree) -> bool:
    """Whether any characters are in it at all."""
    match tree:
        case CharSet():
            return True
        case Join(parts) | Either(parts):
            return any(_consumes(part) for part in parts)
        case Repeat():
            return True
        case Start() | Edge():
            return False


# ---------------------------------------------------------------- parsing


class _Parser:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> Tree:
        tree = self._either()
        if self._at < len(self._pattern):  # only a ")" ends the options before
            raise self._refused("')' closes no group", r"write \) for the character")
        if nullable(tree):
            raise refusal(
                self._pattern,
                "it matches the empty text, which is everywhere",
                "demand a character: + for *, {1,9} for {0,9}, and no empty alternative",
            )
        return tree

    def _either(self) -> Tree:
        options = [self._join()]
        while self._took("|"):
            options.append(self._join())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _join(self) -> Tree:
        parts: list[Tree] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Join(tuple(parts))

    def _atom(self) -> Tree:
        if self._counts() is not None:
            raise self._refused("there is nothing to repeat", r"write \*, \+, \?, \{ for the sign")
        match self._take():
            case ".":
                return ANY
            case "^":
                return Start()
            case "$":
                raise self._no_end("$")
            case "(":
                return self._group()
            case "[":
                return self._set()
            case "\\":
                return self._escape()
            case character:
                return _one(ord(character))

    # ------------------------------------------------------------ repeats

    def _repeated(self, part: Tree) -> Tree:
        counts = self._counts()
        if counts is None:
            return part
        if isinstance(part, Start | Edge):
            raise self._refused(r"^, \A, \b and \B cannot be repeated", "write it once")
        if not self._took("?") and self._took("+"):  # lazy is as good; possessive is not
            raise self._refused("a possessive repeat", "nothing is ever tried twice: drop the +")
        if self._counts() is not None:
            raise self._refused("a repeat of a repeat", "write (?:a*)* if you mean it")
        least, most = counts
        if most == 0:
            return NOTHING
        if not _consumes(part):
            return part if least else Either((part, NOTHING))
        return Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        """Read how often something is repeated; None, and nothing read, if nothing is said."""
        if self._took("*"):
            return 0, None
        if self._took("+"):
            return 1, None
        if self._took("?"):
            return 0, 1
        found = _COUNTS.match(self._pattern, self._at)
        if found is None:
            return None  # a "{" that begins no count is a character
        exact, low, high = found.groups()
        if exact is not None:
            low = high = exact
        if max(len(low), len(high)) > 9 or max(int(low or 0), int(high or 0)) > MOST_REPEATS:
            raise self._refused(
                f"{found[0]:.40} repeats more than {MOST_REPEATS} times", "repeat less, or write *"
            )
        self._at = found.end()
        least, most = int(low or 0), int(high) if high else None
        if most is not None and least > most:
            raise self._refused(f"{found[0]} has more before its comma", "write the smaller first")
        return least, most

    # ------------------------------------------------------------ groups

    def _group(self) -> Tree:
        opened = self._at - 1
        if self._took("?") and not self._took(":"):
            rest = self._pattern[self._at :]
            _, what, instead = next(row for row in _REFUSED if rest.startswith(row[0]))
            raise self._refused(f"(?{rest[:1]} is {what}", instead)
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._refused(f"more than {DEEPEST} groups in one another", "use fewer")
        tree = self._either()
        self._depth -= 1
        if not self._took(")"):
            raise refusal(
                self._pattern, f"the group that opens at {opened} is not closed", r"write \( or )"
            )
        return tree

    # ------------------------------------------------------------ sets and escapes

    def _set(self) -> CharSet:
        opened, negated = self._at - 1, self._took("^")
        ranges: list[tuple[int, int]] = []
        kinds = ""
        first = True
        while first or not self._took("]"):
            first = False
            member = self._member(opened)
            if self._pattern.startswith("-", self._at) and self._pattern[self._at + 1 :][:1] != "]":
                self._at += 1
                member = self._range(member, self._member(opened))
            ranges += member.ranges
            kinds += member.kinds
        return CharSet(tuple(ranges), "".join(sorted(set(kinds))), negated)

    def _member(self, opened: int) -> CharSet:
        if self._at == len(self._pattern):
            raise refusal(
                self._pattern, f"the set that opens at {opened} is not closed", r"write \[ or ]"
            )
        character = self._take()
        if character != "\\":
            return _one(ord(character))
        return _one(ord("\b")) if self._took("b") else self._escaped()

    def _range(self, low: CharSet, high: CharSet) -> CharSet:
        if low.kinds or high.kinds:
            raise self._refused("a range has a character at both ends", r"write \- for the sign")
        (first, _), (last, _) = low.ranges[0], high.ranges[0]
        if first > last:
            raise self._refused("a range that ends before it begins", "write the smaller first")
        return CharSet(((first, last),))

    def _escape(self) -> Tree:
        if self._took("A"):
            return Start()
        if self._took("b"):
            return Edge(edge=True)
        if self._took("B"):
            return Edge(edge=False)
        for letter in "Zz":
            if self._took(letter):
                raise self._no_end(f"\\{letter}")
        return self._escaped()

    def _escaped(self) -> CharSet:
        """What a backslash and what follows mean, inside of a set as well."""
        if self._at == len(self._pattern):
            raise self._refused("it ends with a backslash", r"write \\ for the character")
        letter = self._take()
        if letter in KINDS:
            return CharSet(kinds=letter)
        if letter in _CONTROLS:
            return _one(ord(_CONTROLS[letter]))
        if letter in _HEX:
            return self._hexadecimal(letter, _HEX[letter])
        if letter in "0123456789":
            raise self._refused(
                f"\\{letter} is a back-reference or an octal number",
                r"write out what may stand there, or \x00 for a code",
            )
        if letter.isascii() and letter.isalpha():
            raise self._refused(
                f"\\{letter} has no meaning here", rf"write {letter}, or \xhh or \uhhhh for a code"
            )
        return _one(ord(letter))

    def _hexadecimal(self, letter: str, length: int) -> CharSet:
        digits = self._pattern[self._at : self._at + length]
        if not re.fullmatch(f"[0-9a-fA-F]{{{length}}}", digits) or int(digits, 16) > 0x10FFFF:
            raise self._refused(
                f"\\{letter}{digits} is no character", f"write {length} hexadecimal digits"
            )
        self._at += length
        return _one(int(digits, 16))

    # ------------------------------------------------------------ reading

    def _take(self) -> str:
        self._at += 1
        return self._pattern[self._at - 1]

    def _took(self, sign: str) -> bool:
        """Whether `sign` came next; it has been read then."""
        found = self._pattern.startswith(sign, self._at)
        self._at += len(sign) * found
        return found

    def _refused(self, what: str, instead: str) -> ConstraintError:
        return refusal(self._pattern, f"{what} (at {self._at})", instead)

    def _no_end(self, sign: str) -> ConstraintError:
        return self._refused(
            f"{sign} is the end of the output, which is not known while it is written",
            r"write \n for the end of a line",
        )


def _one(code: int) -> CharSet:
    return CharSet(((code, code),))
