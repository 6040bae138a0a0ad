"""JSON that is still being written: every beginning of a text, against a search by brute force."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.output.partial import Partial

NOTHING = object()
NUMBER = "0123456789+-.eE"  # also contains "", the end of the text
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=6)
    | st.sampled_from(
        ['a"b', "\\", "\U0001f600", "\n\t", "é", "\ud83d", "\ude00x", "\ud83d\ud83d"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('ab\\"\U0001f600', max_size=3), inner, max_size=4)
    ),
    max_leaves=6,
)


def scan(text: str) -> tuple[list[str], bool]:
    """What closes the containers that are open at the end, and whether a string is open there."""
    closers: list[str] = []
    inside = escaped = False
    for sign in text:
        if inside:
            inside = escaped or sign != '"'
            escaped = not escaped and sign == "\\"
        elif sign == '"':
            inside = True
        elif sign in "[{":
            closers.append("]" if sign == "[" else "}")
        elif sign in "]}":
            closers.pop()
    return closers, inside


def brute(text: str) -> Any:
    """The value of the longest beginning that becomes JSON by closing what is open in it."""
    for end in range(len(text), 0, -1):
        cut = text[:end]
        closers, inside = scan(cut)
        last = cut[-1]
        if not inside and last.isdigit() and text[end : end + 1] in NUMBER:
            continue  # the number goes on, or may go on
        if inside and half_of_a_pair(cut) and other_half_may_come(text[end : end + 6]):
            continue
        try:
            return json.loads(cut + ('"' if inside else "") + "".join(reversed(closers)))
        except ValueError:
            continue
    return NOTHING


def half_of_a_pair(text: str) -> bool:
    """Whether an open string ends with the first half of a surrogate pair, as an escape."""
    try:
        tail = json.loads('"' + text[-6:] + '"')
    except ValueError:
        return False
    slashes = len(text[:-6]) - len(text[:-6].rstrip("\\"))
    whole = text[-6:-4] == "\\u" and slashes % 2 == 0
    return whole and len(tail) == 1 and "\ud800" <= tail <= "\udbff"


def other_half_may_come(rest: str) -> bool:
    """Whether what follows is the second half of a pair, or may become that."""
    if len(rest) < 6 and "\\u".startswith(rest[:2]):
        return True
    return rest[:3].lower() == "\\ud" and rest[3] in "cdefCDEF"


def taken(parser: Partial) -> Any:
    return parser.value() if parser._begun else NOTHING


def read(*pieces: str) -> Any:
    parser = Partial()
    for piece in pieces:
        parser.push(piece)
    return taken(parser)


class TestEveryBeginning:
    @settings(deadline=None, max_examples=150)
    @given(values, st.booleans(), st.sampled_from([None, (",", ":"), 1]), st.integers())
    def test_is_what_brute_force_makes_of_it(
        self, value: Any, ascii_only: bool, layout: Any, seed: int
    ) -> None:
        indent, separators = (layout, None) if isinstance(layout, int) else (None, layout)
        text = json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=separators)
        expected = [brute(text[:end]) for end in range(len(text) + 1)]

        assert [read(text[:end]) for end in range(len(text) + 1)] == expected
        assert self.in_pieces(text, random.Random(seed)) <= set(map(repr, expected))

    @staticmethod
    def in_pieces(text: str, dice: random.Random) -> set[str]:
        """The values that are handed out while the text comes in pieces."""
        parser, found, at = Partial(), set(), 0
        while at < len(text):
            end = at + dice.randint(1, 5)
            parser.push(text[at:end])
            if parser.due:
                found.add(repr(parser.value()))
            at = end
        parser.end()
        if not text.strip().lstrip("-")[:1].isdigit():
            assert not parser.changed or parser.due
            assert repr(taken(parser)) == repr(json.loads(text))
        return found

    @settings(deadline=None, max_examples=100)
    @given(values)
    def test_comes_to_the_whole_value_in_the_end(self, value: Any) -> None:
        text = json.dumps(value)
        parser = Partial()
        for sign in text:
            parser.push(sign)
        parser.end()

        assert repr(parser.value()) == repr(json.loads(text))


class TestWhatIsThere:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("", NOTHING),
            (" \n", NOTHING),
            ("1", NOTHING),
            ("tru", NOTHING),
            ("true", True),
            ('"', ""),
            ('"a\\', "a"),
            ('"a\\u00', "a"),
            ('"a\\u00e9', "aé"),
            ('"\\ud83d', ""),
            ('"\\ud83d\\ude0', ""),
            ('"\\ud83d\\ude00', "\U0001f600"),
            ('"\\ud83dx', "\ud83dx"),
            ("{", {}),
            ('{"ab', {}),
            ('{"ab"', {}),
            ('{"ab":', {}),
            ('{"ab":1', {}),
            ('{"ab":1,', {"ab": 1}),
            ('{"ab":"x', {"ab": "x"}),
            ('{"ab":[', {"ab": []}),
            ('{"a":{"b":{"c', {"a": {"b": {}}}),
            ('{"a":{"b":null,"c":', {"a": {"b": None}}),
            ("[1.5e", []),
            ("[1.5e1 ", [15.0]),
            ('[[],["x', [[], ["x"]]),
            ('{"a":1,"a":[', {"a": []}),
        ],
    )
    def test_is_what_is_complete_and_a_string_as_far_as_it_goes(
        self, text: str, value: Any
    ) -> None:
        found = read(text)

        assert found is value if value is NOTHING else found == value
        assert read(*text) == found

    @pytest.mark.parametrize(
        "text", ["}", "[}", '{"a" 1', "{1", "[1,,", "[01,", "nul,", "1 2", "[]]"]
    )
    def test_is_never_guessed(self, text: str) -> None:
        with pytest.raises(ValueError, match="JSON cannot go on with"):
            read(text)

    @pytest.mark.parametrize("text", ['"\\x"', '"\\ud8zz"', '"a\nb"'])
    def test_has_no_other_escapes(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"JSON|escape"):
            read(text)

    def test_says_where_it_went_wrong(self) -> None:
        parser = Partial()
        parser.push("[1, ")

        with pytest.raises(ValueError, match=r"'}' at character 5"):
            parser.push("2}")


class TestAValueThatWasHandedOut:
    def test_does_not_change(self) -> None:
        parser = Partial()
        seen, copies = [], []
        for sign in '{"a":[1,{"b":"xy"}],"c":2}':
            parser.push(sign)
            if parser.due:
                seen.append(parser.value())
                copies.append(json.dumps(seen[-1]))

        assert [json.dumps(each) for each in seen] == copies
        assert len(set(copies)) == len(copies)

    def test_is_due_when_something_of_it_is_new(self) -> None:
        parser = Partial()
        due = []
        for sign in '{"a": [1, 2]}':
            parser.push(sign)
            due.append(parser.due)
            if parser.due:
                parser.value()

        # The object, the array, 1 after its comma, 2 with the array's end.
        assert [at for at, each in enumerate(due) if each] == [0, 6, 8, 11]


class TestTime:
    @pytest.mark.parametrize(
        "text",
        [
            json.dumps(list(range(20_000))),
            json.dumps({str(n): n for n in range(10_000)}),
            "[" * 20_000,
            json.dumps(["x" * 5] * 10_000),
        ],
        ids=["array", "object", "depth", "strings"],
    )
    def test_of_all_copies_is_linear(self, text: str) -> None:
        parser, copied = Partial(), 0
        for at in range(0, len(text), 4):
            parser.push(text[at : at + 4])
            if parser.due:
                copied += parser._weight
                parser.value()

        assert copied <= 80 * len(text)  # quadratic time would be thousands of times the text
