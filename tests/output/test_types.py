"""Python types as forms: what is asked for, and that what comes back is a value of the type."""

from __future__ import annotations

import datetime as dt
import json
import re
import uuid
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum, StrEnum, auto
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, TypedDict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from structgen.errors import InvalidOutputError, OptionError
from structgen.output.types import BOOL, FLOAT, INT, form_of
from structgen.request import Choice, JsonSchema, Regex

always = settings(deadline=None, derandomize=True)


class City(msgspec.Struct):
    name: str
    population: Annotated[int, msgspec.Meta(ge=0)]


class Country(msgspec.Struct):
    capital: City
    others: list[City] = []
    mayors: dict[str, City] = {}
    twin: City | None = None


@dataclass
class Point:
    x: int
    y: int = 0


class Even(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("odd")


class Movie(TypedDict):
    title: str
    year: int


class Pair(NamedTuple):
    left: int
    right: str


class Empty(msgspec.Struct):
    pass


class Mood(StrEnum):
    GOOD = auto()
    BAD = auto()


class Grade(IntEnum):
    ONE = 1
    TWO = 2


class Answer(Enum):
    YES = True
    NO = False
    SURE = True  # noqa: PIE796 - an alias, which must not become a choice of its own


class Size(Enum):
    SMALL = 0.5


class Nothing(Enum):
    pass


class Both(Enum):
    TEXT = "1"
    NUMBER = 1


class Right(Flag):
    READ = 1
    WRITE = 2


class Unknown(msgspec.Struct):
    field: Missing  # type: ignore[name-defined]  # noqa: F821 - the test is what happens then


class Plain:
    pass


UserId = NewType("UserId", int)
Score = TypeAliasType("Score", int)


def pattern_of(type_: Any) -> str:
    constraint = form_of(type_).constraint
    assert isinstance(constraint, Regex)
    return constraint.pattern


def options_of(type_: Any) -> tuple[str, ...]:
    constraint = form_of(type_).constraint
    assert isinstance(constraint, Choice)
    return constraint.options


def schema_of(type_: Any) -> Any:
    constraint = form_of(type_).constraint
    assert isinstance(constraint, JsonSchema)
    return json.loads(constraint.schema)


class TestText:
    def test_has_no_constraint(self) -> None:
        assert form_of(str).constraint is None

    def test_is_read_as_it_is(self) -> None:
        assert form_of(str).read(' "a"\n') == ' "a"\n'


class TestNumbers:
    def test_are_asked_for_with_the_documented_patterns(self) -> None:
        assert [pattern_of(type_) for type_ in (int, float, bool)] == [INT, FLOAT, BOOL]

    @always
    @given(st.from_regex(INT, fullmatch=True))
    def test_whole_ones_read_as_python_reads_them(self, text: str) -> None:
        value = form_of(int).read(text)

        assert type(value) is int
        assert value == int(text)

    @always
    @given(st.from_regex(FLOAT, fullmatch=True))
    def test_with_a_point_read_as_python_reads_them(self, text: str) -> None:
        value = form_of(float).read(text)

        assert type(value) is float
        assert value == float(text)

    @always
    @given(st.from_regex(FLOAT, fullmatch=True))
    def test_are_what_sglang_lets_pass(self, text: str) -> None:
        assert re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+", text)

    @always
    @given(st.text("0123456789.-+e_ \n٣", max_size=6))
    def test_are_refused_where_the_constraint_would_refuse_them(self, text: str) -> None:
        for type_, pattern in ((int, INT), (float, FLOAT)):
            if re.fullmatch(pattern, text):
                form_of(type_).read(text)
            else:
                with pytest.raises(InvalidOutputError, match=f"no {type_.__name__}: expected"):
                    form_of(type_).read(text)

    @pytest.mark.parametrize("text", ["1" * 21, "0." + "1" * 21, "1" * 21 + ".0"])
    def test_have_at_most_twenty_digits_on_a_side(self, text: str) -> None:
        assert not re.fullmatch(INT, text)
        assert not re.fullmatch(FLOAT, text)

    def test_of_twenty_digits_are_exact(self) -> None:
        assert form_of(int).read("9" * 20) == 10**20 - 1


class TestTruth:
    def test_is_written_as_in_python(self) -> None:
        assert [form_of(bool).read(text) for text in ("True", "False")] == [True, False]

    @pytest.mark.parametrize("text", ["true", "1", "yes", "", "True "])
    def test_is_nothing_else(self, text: str) -> None:
        with pytest.raises(InvalidOutputError, match=r"no bool: expected \(True\|False\)"):
            form_of(bool).read(text)


class TestValuesThatAreListed:
    def test_of_a_literal_are_the_choices(self) -> None:
        assert options_of(Literal["red", "blue", 3, True]) == ("3", "True", "blue", "red")

    def test_come_back_as_they_stand_in_the_literal(self) -> None:
        form = form_of(Literal["red", 3, True, None])  # noqa: PYI061 - one of the spellings
        values = [form.read(text) for text in ("red", "3", "True", "None")]

        assert values == ["red", 3, True, None]
        assert [type(value) for value in values] == [str, int, bool, type(None)]

    @pytest.mark.parametrize("type_", [Mood, Grade, Answer, Right])
    def test_of_an_enum_come_back_as_members(self, type_: type[Enum]) -> None:
        form = form_of(type_)

        assert [form.read(str(member.value)) for member in type_] == list(type_)

    def test_of_an_enum_are_asked_for_by_value_and_once_each(self) -> None:
        assert options_of(Mood) == ("bad", "good")
        assert options_of(Answer) == ("False", "True")

    def test_can_be_enum_members_in_a_literal(self) -> None:
        assert form_of(Literal[Mood.GOOD]).read("good") is Mood.GOOD

    def test_of_several_types_are_one_choice(self) -> None:
        assert options_of(Grade | Literal["none"] | bool | None) == (
            *("1", "2", "False", "None", "True"),
            "none",
        )

    def test_do_not_depend_on_which_of_two_equal_types_was_asked_for_first(self) -> None:
        assert options_of(Literal["q", "p"]) == options_of(Literal["p", "q"]) == ("p", "q")

    def test_and_no_others_are_read(self) -> None:
        with pytest.raises(InvalidOutputError, match="no Mood: expected one of 'bad', 'good'; "):
            form_of(Mood).read("goo")

    @pytest.mark.parametrize(
        ("type_", "message"),
        [
            (Both, "Both has two values that are written '1'"),
            (Literal[1, "1"], "has two values that are written '1', 1 and '1'"),
            (Literal["None"] | None, "has two values that are written 'None'"),
            (Size, "Size.SMALL: 0.5> cannot be written as one word"),
            (Literal[b"x"], "b'x' cannot be written as one word"),
            (Literal["a", ""], "'' has no text to write; write None for nothing"),
            (Nothing, "Nothing has no values"),
        ],
    )
    def test_are_refused_where_text_could_not_tell_them(self, type_: Any, message: str) -> None:
        with pytest.raises(OptionError, match=re.escape(message)):
            form_of(type_)


class TestOrNone:
    @pytest.mark.parametrize("type_", [int | None, Optional[float], None | bool])  # noqa: UP045 - one of the spellings
    def test_adds_a_word_to_a_number(self, type_: Any) -> None:
        form = form_of(type_)

        assert pattern_of(type_).startswith("(None|")
        assert form.read("None") is None
        assert form.read("True" if "bool" in str(type_) else "1") == 1

    def test_adds_a_choice(self) -> None:
        form = form_of(Mood | None)

        assert form.constraint == Choice(("None", "bad", "good"))
        assert form.read("None") is None
        assert form.read("bad") is Mood.BAD

    def test_of_text_is_json(self) -> None:
        form = form_of(str | None)

        assert form.constraint == JsonSchema('{"anyOf":[{"type":"string"},{"type":"null"}]}')
        assert [form.read(text) for text in ("null", '"None"')] == [None, "None"]

    def test_is_no_none_where_it_was_not_asked_for(self) -> None:
        with pytest.raises(InvalidOutputError, match="no int"):
            form_of(int).read("None")


class TestNames:
    @pytest.mark.parametrize("type_", [UserId, Score, Annotated[int, "a note"]])
    def test_that_add_nothing_to_a_type_change_nothing(self, type_: Any) -> None:
        assert pattern_of(type_) == INT

    def test_that_add_nothing_are_seen_through_in_unions(self) -> None:
        assert form_of(UserId | None).read("7") == 7

    def test_of_bounds_are_kept(self) -> None:
        bounded = Annotated[int, msgspec.Meta(ge=1, le=5)]

        assert schema_of(bounded) == {"type": "integer", "minimum": 1, "maximum": 5}
        assert form_of(bounded).read("5") == 5
        with pytest.raises(InvalidOutputError, match="`int` <= 5"):
            form_of(bounded).read("6")


class TestEverythingElse:
    @pytest.mark.parametrize(
        ("type_", "value"),
        [
            (City, City("Bern", 1)),
            (Country, Country(City("Bern", 1), [City("Basel", 2)], {"x": City("Chur", 3)})),
            (Point, Point(1, 2)),
            (Movie, Movie(title="M", year=1931)),
            (Pair, Pair(1, "b")),
            (list[int], [1, 2]),
            (dict[str, float], {"a": 0.5}),
            (tuple[int, str], (1, "a")),
            (dt.date, dt.date(2024, 2, 29)),
            (uuid.UUID, uuid.UUID(int=7)),
            (City | None, None),
            (int | str, "a"),
            (Any, {"any": [1, None]}),
        ],
    )
    def test_comes_back_from_json(self, type_: Any, value: object) -> None:
        assert form_of(type_).read(msgspec.json.encode(value).decode()) == value

    def test_is_asked_for_by_msgspecs_schema_written_compactly(self) -> None:
        assert form_of(list[int]).constraint == JsonSchema(
            '{"type":"array","items":{"type":"integer"}}'
        )

    def test_admits_no_fields_that_reading_would_throw_away(self) -> None:
        definitions = schema_of(Country)["$defs"]

        assert [definitions[name]["additionalProperties"] for name in definitions] == [False, False]

    def test_is_closed_wherever_it_stands(self) -> None:
        deep = dict[str, tuple[list[Point | None], Movie]]

        assert [each["additionalProperties"] for each in schema_of(deep)["$defs"].values()] == [
            *(False, False),
        ]

    def test_leaves_mappings_open(self) -> None:
        assert schema_of(Country)["$defs"]["Country"]["properties"]["mayors"] == {
            "type": "object",
            "additionalProperties": {"$ref": "#/$defs/City"},
            "default": {},
        }
        assert schema_of(dict) == {"type": "object"}

    def test_differs_from_msgspecs_schema_in_nothing_else(self) -> None:
        def opened(schema: Any) -> Any:
            if isinstance(schema, list):
                return [opened(part) for part in schema]
            if not isinstance(schema, dict):
                return schema
            kept = {key: opened(part) for key, part in schema.items()}
            if "properties" in kept and kept.get("additionalProperties") is False:
                del kept["additionalProperties"]
            return kept

        for type_ in (Country, Point, Movie, Pair, Empty, tuple[Point, ...], Point | None):
            assert opened(schema_of(type_)) == msgspec.json.schema(type_)

    @pytest.mark.parametrize(
        ("type_", "text", "message"),
        [
            (City, '{"name":"Bern"}', "no City: .*missing required field `population`"),
            (City, '{"name":"Bern","population":-1}', r"`int` >= 0 - at `\$.population`; it"),
            (City, '{"name":"Ber', "no City: Input data was truncated"),
            (City, "", "no City: Input data was truncated"),
            (Even, '{"number":3}', "no Even: odd"),
            (list[int], "[1,2] [", r"no list\[int\]: JSON is malformed"),
            (list[Any], "[" * 100_000, "no list.Any.: maximum recursion depth"),
            (Any, '"\ud800"', "no Any: .*surrogates not allowed"),
        ],
    )
    def test_says_why_a_text_is_no_value(self, type_: Any, text: str, message: str) -> None:
        with pytest.raises(InvalidOutputError, match=message) as caught:
            form_of(type_).read(text)

        assert caught.value.text == text
        assert len(str(caught.value)) < 300

    @pytest.mark.parametrize(
        ("type_", "reason"),
        [
            (Plain, "Plain cannot be asked for: type <class .*Plain'> is not supported"),
            (complex, "complex cannot be asked for: type <class 'complex'> is not supported"),
            (Unknown, "Unknown cannot be asked for: name 'Missing' is not defined"),
            (City | Point, r"City \| .*Point cannot be asked for: .*more than one dict-like type"),
            (3, "3 cannot be asked for"),
            ("int", "int cannot be asked for"),
        ],
    )
    def test_that_cannot_be_described_is_refused_by_name(self, type_: Any, reason: str) -> None:
        with pytest.raises(OptionError, match=f"^type: .*{reason}.*; supported are str, int") as e:
            form_of(type_)

        assert e.value.option == "type"


class TestTheSameType:
    @pytest.mark.parametrize("type_", [int, City, list[int], Literal["a"], int | None])
    def test_has_the_same_form_each_time(self, type_: Any) -> None:
        assert form_of(type_) is form_of(type_)

    def test_need_not_be_hashable(self) -> None:
        noted = Annotated[int, {"a": "note"}]

        assert form_of(noted).read("4") == 4

    def test_is_not_one_that_only_compares_equal(self) -> None:
        assert form_of(Literal[1]).read("1") == 1
        assert form_of(Literal[True]).read("True") is True
