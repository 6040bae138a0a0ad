"""A grammar that is cut into lexemes, in Lark's syntax as llguidance has it.

Holds  all of it is ASCII, and every character that is no letter or digit is written as its number:
       nothing in a form can be taken for syntax.
Used   by `production`.
"""

from __future__ import annotations

from collections.abc import Mapping

from structgen.grammar.characters import Ranges, complement
from structgen.grammar.form.places import Fork, Lexeme, Loop, Option, Part, Row
from structgen.grammar.form.tree import (
    Chars,
    Either,
    Form,
    Join,
    Marker,
    Repeat,
    Rule,
    Text,
    Until,
    Value,
    Without,
    nullable,
    parts_of,
)


def written(rules: Mapping[str, Part], start: str) -> str:
    """The rules, of which `start` is what the output is."""
    names = {name: f"r{number}" for number, name in enumerate(rules)} | {start: "start"}
    terminals: dict[Form, str] = {}
    lines = [f"{names[name]}: {_part(part, names, terminals)}" for name, part in rules.items()]
    lines += [f"{name}: {_terminal(form)}" for form, name in terminals.items()]
    return "\n".join(lines)


def _part(part: Part, names: Mapping[str, str], terminals: dict[Form, str]) -> str:
    match part:
        case Rule(name):
            return names[name]
        case Lexeme(form):
            letter = "v" if isinstance(form, Value) else "T"
            token = f"<[{form.token}]>" if isinstance(form, Marker) else ""
            return token or terminals.setdefault(form, f"{letter}{len(terminals)}")
        case Option(inner):
            return f"({_part(inner, names, terminals)}?)"
        case Row(parts):
            row = [_part(each, names, terminals) for each in parts]
            return f"({' '.join(row)})" if row else '""'
        case Fork(options):
            return f"({' | '.join(_part(each, names, terminals) for each in options)})"
        case Loop(inner, least, most):
            return f"({_part(inner, names, terminals)}{_counts(least, most)})"


def _counts(least: int, most: int | None) -> str:
    found = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return found or f"{{{least},{'' if most is None else most}}}"


def _terminal(form: Form) -> str:
    match form:
        case Value(json):
            return f"%json {json}"
        case Repeat(part, 0, most) if not nullable(part):
            return _lexeme(Repeat(part, 1, most))
        case _ if nullable(form):
            return f"{_lexeme(form)} & /(?s:.)+/"
        case _:
            return _lexeme(form)


def _lexeme(form: Form) -> str:
    """A form without rules as a terminal."""
    match form:
        case Until(strings, ending, among):
            each, some = characters(among), _texts(strings)
            return f"(/{each}*{literal(ending)}/ & ~/{each}*{some}{each}+/)"
        case Without(strings, among):
            each = characters(among)
            return f"(/{each}*/ & ~/{each}*{_texts(strings)}{each}*/)"
        case Join(parts) if _has_free(form):
            return f"({' '.join(map(_lexeme, parts))})"
        case Either(options) if _has_free(form):
            return f"({' | '.join(map(_lexeme, options))})"
        case Repeat(part, least, most) if _has_free(form):
            return f"({_lexeme(part)}{_counts(least, most)})"
        case _:
            return f"/{pattern(form)}/"


def _has_free(form: Form) -> bool:
    """Whether some free text is in a form: that is no pattern, but one less another."""
    return isinstance(form, Until | Without) or any(map(_has_free, parts_of(form)))


def pattern(form: Form) -> str:
    """A form without rules as a pattern of the backend; parts can be written side by side."""
    match form:
        case Chars(ranges):
            return characters(ranges)
        case Text(text):
            return literal(text)
        case Join(parts):
            return "".join(map(pattern, parts))
        case Either(options):
            return f"(?:{'|'.join(map(pattern, options))})"
        case Repeat(part, least, most):
            return f"(?:{pattern(part)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(form)


def _texts(strings: tuple[str, ...]) -> str:
    return f"(?:{'|'.join(map(literal, strings))})"


def literal(text: str) -> str:
    """A text as a pattern."""
    return "".join(map(_character, text))


def characters(ranges: Ranges) -> str:
    """A class as a pattern."""
    rest = complement(ranges)
    negated = 0 < len(rest) < len(ranges)
    spelled = "".join(
        _character(chr(low)) if low == high else f"{_character(chr(low))}-{_character(chr(high))}"
        for low, high in (rest if negated else ranges)
    )
    return f"[{'^' if negated else ''}{spelled}]" if rest else "(?s:.)"


def _character(character: str) -> str:
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\x{{{ord(character):x}}}"
