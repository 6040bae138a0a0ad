"""Functions as tools: what is asked of a model, what is read of it, and what it is told."""

from __future__ import annotations

import json
import math
from enum import StrEnum, auto
from typing import Annotated, Any, Literal

import jsonschema
import msgspec
import pydantic
import pytest

from structgen.errors import InvalidOutputError, OptionError
from structgen.output.tools import (
    Asked,
    describe_tools,
    result_text,
    tool_of,
    toolbox,
)
from structgen.request import JsonSchema, Structure
from structgen.terms import Either, Json


class Unit(StrEnum):
    CELSIUS = auto()
    KELVIN = auto()


class Place(msgspec.Struct):
    name: str
    floor: int = 0


class Spot(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=5)]


class Anything(pydantic.BaseModel):
    value: object


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


async def weather(
    city: str, days: Annotated[int, msgspec.Meta(ge=1)] = 3, unit: Unit = Unit.CELSIUS
) -> str:
    """The weather of the coming days.

    From a very good station.
    """
    return f"{city} {days} {unit}"


async def visit(place: Place, others: list[Place] = [], via: Literal["air", "sea"] = "air") -> None:  # noqa: B006 - as users write it
    del place, others, via


async def spot(spot: Spot, at: int = 1) -> str:
    return f"{spot.name} {at}"


async def now() -> str:
    return "noon"


class Station:
    async def read(self, number: int) -> int:
        return number


def schema_of(*functions: Any, choice: str = "required", parallel: bool = False) -> Any:
    constraint = toolbox(functions, choice, parallel=parallel).form.constraint
    assert isinstance(constraint, JsonSchema)
    return json.loads(constraint.schema)


def read(text: str, *functions: Any, choice: str = "required", parallel: bool = False) -> Any:
    return toolbox(functions, choice, parallel=parallel).form.read(text)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


VALID = [
    call("weather", city="Ulm"),
    call("weather", city="Ulm", days=1, unit="kelvin"),
    call("visit", place={"name": "a"}, others=[{"name": "b", "floor": 1}]),
    call("now"),
]
INVALID = [
    call("rain", city="Ulm"),
    call("weather"),
    call("weather", city=3),
    call("weather", city="Ulm", days=0),
    call("weather", city="Ulm", unit="fahrenheit"),
    call("weather", city="Ulm", wind=True),
    call("now", city="Ulm"),
    call("visit", place={"name": "a", "wing": 1}),
    {"name": "now"},
    {"name": "now", "arguments": {}, "id": 1},
    [],
]


class TestTheSchema:
    @pytest.mark.parametrize("value", VALID, ids=str)
    def test_admits_calls_that_the_function_takes(self, value: Any) -> None:
        validator = jsonschema.Draft202012Validator(schema_of(weather, visit, now))

        assert validator.is_valid(value)

    @pytest.mark.parametrize("value", INVALID, ids=str)
    def test_admits_nothing_else(self, value: Any) -> None:
        validator = jsonschema.Draft202012Validator(schema_of(weather, visit, now))

        assert not validator.is_valid(value)

    def test_of_several_calls_is_an_array_of_them(self) -> None:
        validator = jsonschema.Draft202012Validator(schema_of(weather, visit, now, parallel=True))

        assert validator.is_valid(VALID)
        assert not validator.is_valid([])
        assert not validator.is_valid([*VALID, call("now", city="Ulm")])

    def test_can_be_of_one_tool_only(self) -> None:
        validator = jsonschema.Draft202012Validator(schema_of(weather, now, choice="now"))

        assert validator.is_valid(call("now"))
        assert not validator.is_valid(call("weather", city="Ulm"))

    def test_has_names_before_arguments(self) -> None:
        definitions = schema_of(weather)["$defs"]

        assert list(definitions["weather"]["properties"]) == ["name", "arguments"]
        assert list(definitions["weather_arguments"]["properties"]) == ["city", "days", "unit"]

    @pytest.mark.parametrize("parallel", [False, True])
    def test_is_pydantics_where_its_types_are_used(self, parallel: bool) -> None:
        validator = jsonschema.Draft202012Validator(schema_of(spot, now, parallel=parallel))
        good, bad = call("spot", spot={"name": "a"}), call("spot", spot={"name": "longer"})

        assert validator.is_valid([good] if parallel else good)
        assert not validator.is_valid([bad] if parallel else bad)


class TestACall:
    @pytest.mark.parametrize(
        ("value", "arguments"),
        [
            (VALID[0], {"city": "Ulm", "days": 3, "unit": Unit.CELSIUS}),
            (VALID[1], {"city": "Ulm", "days": 1, "unit": Unit.KELVIN}),
            (VALID[2], {"place": Place("a"), "others": [Place("b", 1)], "via": "air"}),
            (VALID[3], {}),
        ],
        ids=str,
    )
    def test_is_read_as_the_values_that_the_function_takes(
        self, value: Any, arguments: dict[str, Any]
    ) -> None:
        assert read(json.dumps(value), weather, visit, now) == (Asked(value["name"], arguments),)

    def test_of_several_is_read_in_order(self) -> None:
        found = read(json.dumps(VALID), weather, visit, now, parallel=True)

        assert [each.name for each in found] == ["weather", "weather", "visit", "now"]

    def test_is_read_by_pydantic_where_its_types_are_used(self) -> None:
        text = json.dumps(call("spot", spot={"name": "a"}))

        assert read(text, spot, now) == (Asked("spot", {"spot": Spot(name="a"), "at": 1}),)

    @pytest.mark.parametrize("value", INVALID[:7], ids=str)
    def test_that_is_none_is_refused(self, value: Any) -> None:
        with pytest.raises(InvalidOutputError, match="no tool call"):
            read(json.dumps(value), weather, visit, now)

    def test_can_be_an_answer_where_the_model_may_choose(self) -> None:
        assert read("It rains.", weather, choice="auto") == ()
        assert len(read(json.dumps(VALID[0]), weather, choice="auto")) == 1

    def test_begins_as_no_answer_does(self) -> None:
        constraint = toolbox([weather], "auto", parallel=True).form.constraint

        assert isinstance(constraint, Structure)
        assert isinstance(constraint.term, Either)
        assert [type(each).__name__ for each in constraint.term.options] == ["Json", "Pattern"]
        first = constraint.term.options[0]
        assert isinstance(first, Json)
        assert json.loads(first.schema) == schema_of(weather, parallel=True)


class TestWhatTheModelIsTold:
    def test_is_name_docstring_and_arguments(self) -> None:
        [spec] = toolbox([weather], "required", parallel=False).specs

        assert spec["type"] == "function"
        assert spec["function"]["name"] == "weather"
        assert spec["function"]["description"] == (
            "The weather of the coming days.\n\nFrom a very good station."
        )
        validator = jsonschema.Draft202012Validator(spec["function"]["parameters"])
        assert validator.is_valid({"city": "Ulm"})
        assert not validator.is_valid({})

    def test_is_a_line_for_each_tool_in_a_prompt(self) -> None:
        lines = describe_tools([weather, now]).splitlines()

        assert [json.loads(line)["name"] for line in lines] == ["weather", "now"]
        assert "description" not in json.loads(lines[1])

    @pytest.mark.parametrize(
        ("result", "text"),
        [
            ("a <b>", "a <b>"),
            (None, "null"),
            ({"a": [1, 2.5]}, '{"a":[1,2.5]}'),
            (Place("a"), '{"name":"a","floor":0}'),
            (Spot(name="a"), '{"name":"a"}'),
            ([Spot(name="a"), Place("b")], '[{"name":"a"},{"name":"b","floor":0}]'),
            ({Unit.KELVIN: {1}, 2: b"ab"}, '{"kelvin":[1],"2":"YWI="}'),
        ],
        ids=str,
    )
    def test_of_a_result_is_text_or_json(self, result: object, text: str) -> None:
        assert result_text(result) == text

    @pytest.mark.parametrize(
        ("result", "text"),
        [
            ("a\ud800b\U0001f600", "a?b\U0001f600"),
            ({"\udfff": ["é\ud800", None]}, '{"?":["é?",null]}'),
            (Place("\ud800"), '{"name":"?","floor":0}'),
            ([Spot.model_construct(name="\ud800")], '[{"name":"?"}]'),
            (Spot.model_construct(name="\ud800"), '{"name":"?"}'),
        ],
        ids=ascii,
    )
    def test_has_a_sign_for_halves_of_surrogate_pairs(self, result: object, text: str) -> None:
        assert result_text(result) == text

    @pytest.mark.parametrize(
        ("result", "why"),
        [
            (object(), "the type object"),
            ({"a": [1 + 2j]}, "the type complex"),
            ({(1, 2): 3}, "the type tuple"),
            ({"mean": math.nan}, "`mean` is nan"),
            (endless(), "recursion"),
            (Anything(value=object()), "unknown type: <class 'object'>"),
        ],
        ids=["object", "complex", "key", "nan", "endless", "pydantic"],
    )
    def test_is_nothing_where_json_has_no_form_for_it(self, result: object, why: str) -> None:
        with pytest.raises(TypeError, match=rf"^the result cannot be written as JSON: .*{why}"):
            result_text(result)


class TestWhatIsNoTool:
    def blocking(self, city: str) -> str:
        return city

    @pytest.mark.parametrize(
        ("functions", "message"),
        [
            ([], "expected a list of async functions"),
            ([len], "no async function; write `async def`"),
            ([blocking], "no async function; write `async def`"),
            ([now, now], "two tools are named 'now'"),
        ],
        ids=["none", "builtin", "blocking", "twice"],
    )
    def test_is_refused(self, functions: Any, message: str) -> None:
        with pytest.raises(OptionError, match=f"^tools: .*{message}"):
            toolbox(functions, "required", parallel=False)

    def test_is_one_whose_arguments_have_no_names_or_types(self) -> None:
        async def bare(city) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - the test
            del city

        async def many(*cities: str) -> None:
            del cities

        async def strange(value: complex) -> None:
            del value

        async def local(value: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821 - the test
            del value

        for function, message in (
            (bare, "bare: the parameter 'city' has no annotation"),
            (many, r"many: a model gives arguments by name, so \*cities"),
            (strange, "strange: its arguments have no schema"),
            (local, "local: its annotations cannot be resolved: .*Nowhere"),
        ):
            with pytest.raises(OptionError, match=message):
                toolbox([function], "required", parallel=False)

    def test_is_no_method(self) -> None:
        assert tool_of(Station().read).parameters.keys() == {"number"}

    @pytest.mark.parametrize("choice", ["none", "weather", ""])
    def test_cannot_be_chosen(self, choice: str) -> None:
        with pytest.raises(OptionError, match=r"^choice: expected auto, required or a tool .now"):
            toolbox([now], choice, parallel=False)
