"""Structural tags, as xgrammar, vLLM and SGLang write them, as terms.

    {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}
    {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}

Owns   the meaning of each format. That of the library (xgrammar 0.2) holds, with two differences:
       JSON has at most two white-space characters in a row, and all of a schema is enforced.
Holds  what a term cannot say is refused with the path of its field.
Used   by `formats`.

Free text has to end somewhere: `any_text`, and the text between triggered tags, stand at the end of
the output or right before a fixed text, such as the end of the tag around them. What follows a
part of the output is known as `Next` here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, assert_never, get_args

import msgspec

from structgen.errors import OptionError
from structgen.schemas import schema_text
from structgen.terms import (
    Fixed,
    Free,
    Json,
    Pattern,
    Repeat,
    Rules,
    Term,
    either,
    optional,
    repeat,
    sequence,
)

Schema = bool | dict[str, Any]
Next = tuple[str, ...] | None
"""The texts of which one follows a part of the output; none: what follows has no fixed beginning.
None: nothing follows, the output ends."""
_ANYTHING: Next = ()


class _Format(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """Base of the formats, of which each names its type."""


class _Const(_Format, tag="const_string"):
    value: str


class _Schema(_Format, tag="json_schema"):
    json_schema: Schema
    style: str = "json"
    any_order: bool = False
    max_whitespace_cnt: int | None = None
    excludes: list[str] = []


class _FreeText(_Format, tag="any_text"):
    excludes: list[str] = []
    max_tokens: int | None = None
    max_chars: int | None = None


class _Grammar(_Format, tag="grammar"):
    grammar: str
    syntax: str = "ebnf"


class _Regex(_Format, tag="regex"):
    pattern: str


class _Sequence(_Format, tag="sequence"):
    elements: list[_Kind]


class _Or(_Format, tag="or"):
    elements: list[_Kind]


class _Tag(_Format, tag="tag"):
    begin: str
    content: _Kind
    end: str | list[str]


class _Triggered(_Format, tag="triggered_tags"):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class _Separated(_Format, tag="tags_with_separator"):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class _Optional(_Format, tag="optional"):
    content: _Kind


class _Plus(_Format, tag="plus"):
    content: _Kind


class _Star(_Format, tag="star"):
    content: _Kind


class _Repeat(_Format, tag="repeat"):
    min: int
    max: int
    content: _Kind


class _Dispatch(_Format, tag="dispatch"):
    rules: list[tuple[str, _Kind]]
    loop: bool = True
    excludes: list[str] = []


_Kind = (
    _Const
    | _Schema
    | _FreeText
    | _Grammar
    | _Regex
    | _Sequence
    | _Or
    | _Tag
    | _Triggered
    | _Separated
    | _Optional
    | _Plus
    | _Star
    | _Repeat
    | _Dispatch
)


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the older form."""

    begin: str
    schema: Schema | str
    end: str


class _Whole(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All of a structural tag."""

    type: str = "structural_tag"
    format: _Kind | None = None
    structures: list[_Structure] | None = None
    triggers: list[str] | None = None


_TOKENS = "a term is made of texts and knows no tokens; write their text"
_REFUSED = MappingProxyType(
    {
        "token": _TOKENS,
        "exclude_token": _TOKENS,
        "any_tokens": _TOKENS,
        "token_triggered_tags": _TOKENS,
        "token_dispatch": _TOKENS,
        "qwen_xml_parameter": "arguments as XML cannot be enforced here; write json_schema",
    }
)
_TYPES = tuple(str(each.__struct_config__.tag) for each in get_args(_Kind))
_PLACE = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_INVALID = re.compile(r"Invalid value '(?P<type>[^']*)'")
_FIELD = re.compile(r"(?P<fault>unknown|missing required) field `(?P<name>[^`]*)`")
_LAYOUTS = MappingProxyType({0: (",", ":"), 1: (", ", ": ")})  # by white space in a row
_MOST_WHITE = 2  # that JSON has here if its layout is free


def structural_tag(given: Mapping[str, Any], field: str) -> Term:
    """The term of a structural tag that stands in this field.

    Raises `OptionError`, naming the field in it, for what is none and for what no term can say.
    """
    try:
        whole = msgspec.convert(given, _Whole)
        if whole.type != "structural_tag":
            raise OptionError(f"{field}.type", f"expected structural_tag, got {whole.type!r:.80}")
        if whole.format is None:
            return _triggered(_older(whole, field), field, None)
        for name in ("structures", "triggers"):
            if getattr(whole, name) is not None:
                raise OptionError(f"{field}.{name}", "it is the older form; leave format or it out")
        return _term(whole.format, f"{field}.format", None)
    except msgspec.ValidationError as error:
        raise _refusal(error, field) from None
    except RecursionError:
        raise OptionError(field, "it is nested too deeply") from None


def _refusal(error: msgspec.ValidationError, field: str) -> OptionError:
    message, place = str(error), ""
    if found := _PLACE.search(message):
        message, place = message[: found.start()], found["path"]
    if place.endswith(".type") and (invalid := _INVALID.search(message)):
        type_ = invalid["type"]
        known = f"unknown; the types are {', '.join(_TYPES)}"
        message = f"{type_}: {_REFUSED.get(type_, known)}"
    elif faulty := _FIELD.search(message):
        place = f"{place}.{faulty['name']}"
        message = "unknown field" if faulty["fault"] == "unknown" else "it is missing"
    return OptionError(f"{field}{place}", message)


def _older(whole: _Whole, field: str) -> _Triggered:
    """The older form as the newer one."""
    if whole.structures is None or whole.triggers is None:
        raise OptionError(field, "expected format, or structures and triggers")
    tags = [
        _Tag(
            begin=each.begin,
            content=_Schema(json_schema=_schema(each.schema, f"{field}.structures[{n}].schema")),
            end=each.end,
        )
        for n, each in enumerate(whole.structures)
    ]
    return _Triggered(triggers=whole.triggers, tags=tags)


def _schema(given: Schema | str, path: str) -> Schema:
    """A schema, which may be given as JSON text."""
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise OptionError(path, f"it is no JSON: {error}") from None
    if not isinstance(found, bool | dict):
        raise OptionError(path, "expected a JSON Schema, an object or a boolean")
    return found


# ---------------------------------------------------------------- formats as terms


def _term(format_: _Kind, path: str, then: Next) -> Term:
    match format_:
        case _FreeText():
            found: Term = _free_text(format_, path, then)
        case _Tag():
            found = _tag(format_, path, then)
        case _Triggered():
            found = _triggered(format_, path, then)
        case _Separated():
            found = _separated(format_, path)
        case _Dispatch():
            found = _dispatch(format_, path, then)
        case _Const() | _Schema() | _Grammar() | _Regex():
            found = _leaf(format_, path)
        case _:
            found = _joined(format_, path, then)
    return found


def _leaf(format_: _Const | _Schema | _Grammar | _Regex, path: str) -> Term:
    """What is made of no other formats, and knows where it ends."""
    match format_:
        case _Const(value=value):
            return Fixed(value)
        case _Regex(pattern=pattern):
            return Pattern(pattern)
        case _Grammar(grammar=grammar, syntax=syntax):
            if syntax != "ebnf":
                raise OptionError(f"{path}.syntax", f"expected ebnf, got {syntax!r:.80}")
            return Rules(grammar)
        case _Schema():
            return _json(format_, path)
        case _:
            assert_never(format_)


def _joined(
    format_: _Sequence | _Or | _Optional | _Plus | _Star | _Repeat, path: str, then: Next
) -> Term:
    """What is made of other formats."""
    match format_:
        case _Sequence(elements=elements):
            _check_some(elements, f"{path}.elements")
            nexts = [*map(_beginnings, elements[1:]), then]
            return sequence(
                *(
                    _term(each, f"{path}.elements[{n}]", after)
                    for n, (each, after) in enumerate(zip(elements, nexts, strict=True))
                )
            )
        case _Or(elements=elements):
            _check_some(elements, f"{path}.elements")
            after = _at_end(then)
            return either(
                *(_term(each, f"{path}.elements[{n}]", after) for n, each in enumerate(elements))
            )
        case _Optional(content=content):
            return optional(_term(content, f"{path}.content", _at_end(then)))
        case _Plus(content=content):
            return repeat(_term(content, f"{path}.content", _ANYTHING), 1)
        case _Star(content=content):
            return repeat(_term(content, f"{path}.content", _ANYTHING))
        case _Repeat(min=least, max=most, content=content):
            if least < 0 or (most != -1 and most < least):
                raise OptionError(f"{path}.max", "expected 0 <= min <= max, or -1 for no bound")
            part = _term(content, f"{path}.content", _ANYTHING)
            return repeat(part, least, None if most == -1 else most)
        case _:
            assert_never(format_)


def _json(format_: _Schema, path: str) -> Term:
    if format_.style != "json":
        raise OptionError(f"{path}.style", f"expected json, got {format_.style!r:.80}")
    if format_.any_order:
        raise OptionError(
            f"{path}.any_order", "objects have all that they must have, in their schema's order"
        )
    if format_.excludes:
        raise OptionError(f"{path}.excludes", "it cannot be enforced in JSON; leave it out")
    white = format_.max_whitespace_cnt
    if white is not None and white < 0:
        raise OptionError(f"{path}.max_whitespace_cnt", f"must be at least 0, got {white}")
    layout = None if white is None or white >= _MOST_WHITE else _LAYOUTS[white]
    return Json(schema_text(format_.json_schema), layout)


def _free_text(format_: _FreeText, path: str, then: Next) -> Term:
    for name in ("max_tokens", "max_chars"):
        if getattr(format_, name) is not None:
            raise OptionError(
                f"{path}.{name}", "it cannot be enforced in free text; write a regex with a bound"
            )
    return _until(format_.excludes, path, then)


def _until(strings: Sequence[str], path: str, then: Next) -> Free:
    """Free text without these strings. Raises `OptionError` where it could not be told to end."""
    if then == _ANYTHING:
        raise OptionError(
            path, "free text has to stand at the end, or right before a const_string or a tag"
        )
    return Free(tuple(dict.fromkeys((*strings, *(then or ())))))


def _tag(format_: _Tag, path: str, then: Next) -> Term:
    ends = [format_.end] if isinstance(format_.end, str) else format_.end
    if not any(ends):  # an end that is no text: what follows the tag ends it
        return sequence(format_.begin, _term(format_.content, f"{path}.content", then))
    if not all(ends):
        raise OptionError(f"{path}.end", "one of the ends is empty; leave it out")
    content = _term(format_.content, f"{path}.content", tuple(ends))
    return sequence(format_.begin, content, either(*ends))


def _triggered(format_: _Triggered, path: str, then: Next) -> Term:
    """Free text up to a trigger, and then one of the tags that begin with it; and again."""
    _check_some(format_.triggers, f"{path}.triggers")
    _check_some(format_.tags, f"{path}.tags")
    for n, tag in enumerate(format_.tags):
        if sum(tag.begin.startswith(trigger) for trigger in format_.triggers) != 1:
            raise OptionError(
                f"{path}.tags[{n}].begin", "expected a text that begins with one of the triggers"
            )
    first, stop = format_.at_least_one, format_.stop_after_first
    after = then if stop else _ANYTHING
    tags = either(*(_tag(t, f"{path}.tags[{n}]", after) for n, t in enumerate(format_.tags)))
    if first and stop:
        return tags
    free = _until((*format_.triggers, *format_.excludes), path, _at_end(then) if stop else then)
    if stop:
        return either(free, sequence(free, tags))
    return sequence(tags if first else "", Repeat(sequence(free, tags)), free)


def _separated(format_: _Separated, path: str) -> Term:
    _check_some(format_.tags, f"{path}.tags")
    tag = either(*(_tag(t, f"{path}.tags[{n}]", _ANYTHING) for n, t in enumerate(format_.tags)))
    several = tag
    if not format_.stop_after_first:
        several = sequence(tag, repeat(sequence(format_.separator, tag)))
    return several if format_.at_least_one else optional(several)


def _dispatch(format_: _Dispatch, path: str, then: Next) -> Term:
    """Free text up to a pattern, and then its format; and again, if it loops."""
    _check_some(format_.rules, f"{path}.rules")
    after = _ANYTHING if format_.loop else then
    rules = either(
        *(
            sequence(pattern, _term(each, f"{path}.rules[{n}][1]", after))
            for n, (pattern, each) in enumerate(format_.rules)
        )
    )
    strings = (*(pattern for pattern, _ in format_.rules), *format_.excludes)
    free = _until(strings, path, then if format_.loop else _at_end(then))
    if format_.loop:
        return sequence(Repeat(sequence(free, rules)), free)
    return either(free, sequence(free, rules))


def _at_end(then: Next) -> Next:
    """What follows one of several texts: free text can be one of them only at the end."""
    return None if then is None else _ANYTHING


def _beginnings(format_: _Kind) -> Next:
    """The texts of which one begins whatever has this format; none if that cannot be said."""
    match format_:
        case _Const(value=value) if value:
            return (value,)
        case _Tag(begin=begin) if begin:
            return (begin,)
        case _Sequence(elements=[first, *_]):
            return _beginnings(first)
        case _Plus(content=content):
            return _beginnings(content)
        case _Or(elements=elements):
            each = [_beginnings(element) for element in elements]
            return tuple(text for texts in each for text in texts or ()) if all(each) else _ANYTHING
        case _:
            return _ANYTHING


def _check_some(items: Sequence[object], path: str) -> None:
    if not items:
        raise OptionError(path, "there must be at least one")
