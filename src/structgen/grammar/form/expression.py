"""A pattern of Python's `re` as a form; a pattern that stands inside of something larger.

Holds  what `dialect` refuses is refused, and a text fits if and only if `re.fullmatch` finds it.
Used   by `structure`.
"""

from __future__ import annotations

from structgen.grammar.characters import OPS, PARSER, Item, Ranges, inside, intersection, matched
from structgen.grammar.dialect import from_regex
from structgen.grammar.form.tree import BLANK, Form, anything, either, join, repeat


def form_of(pattern: str, spelled: Ranges) -> Form:
    """The form of a pattern. Raises `ConstraintError` as `from_regex` does."""
    from_regex(pattern, spelled)
    parsed = PARSER.parse(pattern)
    return _row(list(parsed), parsed.state.flags, spelled)


def _row(items: list[Item], flags: int, spelled: Ranges) -> Form:
    return join(_item(item, flags, spelled) for item in items)


def _item(item: Item, flags: int, spelled: Ranges) -> Form:
    op, argument = item
    if op in {OPS.LITERAL, OPS.NOT_LITERAL, OPS.ANY, OPS.IN}:
        return anything(intersection(matched(op, argument, flags), spelled))
    if op is OPS.SUBPATTERN:
        return _row(list(argument[3]), inside(flags, argument), spelled)
    if op is OPS.BRANCH:
        return either(_row(list(each), flags, spelled) for each in argument[1])
    if op in {OPS.MAX_REPEAT, OPS.MIN_REPEAT}:
        low, high, body = argument
        most = None if high is OPS.MAXREPEAT else int(high)
        return repeat(_row(list(body), flags, spelled), int(low), most)
    assert op is OPS.AT, op  # an anchor, where it changes nothing; `from_regex` refuses all others
    return BLANK
