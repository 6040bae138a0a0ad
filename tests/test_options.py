"""Options as keywords: which there are, and what is said of others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from structgen.errors import ConstraintError, OptionError
from structgen.options import (
    did_you_mean,
    frozen,
    in_words,
    merged,
    nearest,
    request_from,
    unknown_option,
)
from structgen.request import Choice, Constraint, Ebnf, JsonSchema, Regex, Structure, Text
from structgen.terms import Fixed

PROMPT = (Text("a prompt"),)


class TestAnUnknownOption:
    @pytest.mark.parametrize(
        ("option", "meant"),
        [
            ("max_token", "max_tokens"),
            ("max_new_tokens", "max_tokens"),
            ("temp", "temperature"),
            ("Temperature", "temperature"),
            ("stops", "stop"),
            ("presence_penality", "presence_penalty"),
        ],
    )
    def test_is_answered_with_the_nearest_one(self, option: str, meant: str) -> None:
        message = rf"^{option}: unknown option \(did you mean {meant}\?\); the options are "
        with pytest.raises(OptionError, match=message) as caught:
            request_from(PROMPT, {option: 1})

        assert caught.value.option == option

    def test_that_is_like_no_other_lists_all(self) -> None:
        with pytest.raises(OptionError, match=r"^heat: unknown option; .* deadline, ebnf, freq"):
            request_from(PROMPT, {"heat": 1})

    def test_says_whose_options_there_are(self) -> None:
        error = unknown_option("seeds", ["seed", "by"], "select")

        assert str(error) == (
            "seeds: unknown option of select (did you mean seed?); the options are by, seed"
        )


class TestTheNearestWord:
    def test_keeps_its_own_case(self) -> None:
        assert nearest("smollm", ["SmolLM2", "Llama"]) == "SmolLM2"

    def test_may_be_begun(self) -> None:
        assert nearest("rep", ["temperature", "repetition_penalty"]) == "repetition_penalty"

    @pytest.mark.parametrize("word", ["", "re", "walk", "length_penalty"])
    def test_is_none_where_nothing_is_near(self, word: str) -> None:
        known = ["temperature", "repetition_penalty", "presence_penalty"]

        assert nearest(word, known) is None
        assert did_you_mean(word, known) == ""

    def test_may_be_short_and_half_wrong(self) -> None:
        assert nearest("sied", ["sides", "tip"]) == "sides"


class TestAConstraintInWords:
    @pytest.mark.parametrize(
        ("constraint", "words"),
        [
            (Regex("a+"), "regex 'a+'"),
            (JsonSchema('{"type": "null"}'), """JSON schema '{"type": "null"}'"""),
            (Ebnf('root ::= "a"'), """EBNF grammar 'root ::= "a"'"""),
            (Choice(("yes", "no")), "choice of 'yes', 'no'"),
            (Regex("a" * 81), f"regex '{'a' * 77}...'"),
            (Choice(("a" * 90, "b")), f"choice of '{'a' * 76}..."),
        ],
        ids=["regex", "schema", "grammar", "choice", "long", "long choice"],
    )
    def test_is_no_repr(self, constraint: Constraint, words: str) -> None:
        assert in_words(constraint) == words


class Point(msgspec.Struct):
    x: int


class Made:
    """What an engine would make of a constraint."""

    constraint = Regex("a+")


class TestAConstraint:
    @pytest.mark.parametrize(
        ("options", "constraint"),
        [
            ({}, None),
            ({"regex": None, "json_schema": None, "ebnf": None, "constraint": None}, None),
            ({"regex": "a+"}, Regex("a+")),
            ({"ebnf": 'root ::= "a"'}, Ebnf('root ::= "a"')),
            ({"json_schema": '{"type": "null"}'}, JsonSchema('{"type": "null"}')),
            ({"json_schema": {"const": "é"}}, JsonSchema('{"const":"é"}')),
            ({"json_schema": True}, JsonSchema("true")),
            ({"json_schema": Point}, JsonSchema(Point)),
            (
                {"json_schema": "{}", "separators": [", ", ": "]},
                JsonSchema("{}", (", ", ": ")),
            ),
            ({"constraint": Choice(("a", "b"))}, Choice(("a", "b"))),
            ({"constraint": Fixed("a")}, Structure(Fixed("a"))),
            ({"constraint": Made()}, Regex("a+")),
            (
                {"constraint": JsonSchema("{}"), "separators": (",", ":")},
                JsonSchema("{}", (",", ":")),
            ),
        ],
    )
    def test_is_one_of_the_keywords(
        self, options: dict[str, Any], constraint: Constraint | None
    ) -> None:
        assert request_from(PROMPT, options).constraint == constraint
        assert request_from(PROMPT, frozen(options)).constraint == constraint

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"regex": "a", "ebnf": "b"}, "^regex: it cannot be combined with ebnf; give one"),
            (
                {"constraint": Regex("a"), "json_schema": True, "regex": "a"},
                "^regex: it cannot be combined with json_schema and constraint",
            ),
            ({"regex": b"a"}, "^regex: "),
            ({"ebnf": 5}, "^ebnf: "),
            ({"constraint": "a+"}, "^constraint: expected Regex, .* a pattern goes to regex="),
            ({"constraint": Point(1)}, r"^constraint: expected .*, got Point\(x=1\)"),
            ({"separators": (",", ":")}, "^separators: they lay out the JSON of json_schema"),
            ({"regex": "a", "separators": (",", ":")}, "^separators: they lay out"),
            ({"json_schema": "{}", "separators": ","}, "^separators: expected two strings"),
            ({"json_schema": "{}", "separators": (",", 1)}, "^separators: expected two strings"),
        ],
    )
    def test_is_one_at_most_and_of_its_kind(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=message) as caught:
            request_from(PROMPT, options)

        assert caught.value.option == message[1:].partition(":")[0]

    def test_that_has_no_schema_is_refused_by_its_name(self) -> None:
        with pytest.raises(ConstraintError, match=r"complex.*has no JSON schema"):
            request_from(PROMPT, {"json_schema": complex})

    @pytest.mark.parametrize("options", [5, "abc", b"abc", None, ("a", 5), {"one"}], ids=str)
    def test_that_chooses_takes_a_sequence_of_strings(self, options: Any) -> None:
        message = r"^choices: expected a sequence of strings, got .*; write Choice\(\[\"yes\", "
        with pytest.raises(ConstraintError, match=message):
            request_from(PROMPT, {"constraint": Choice(options)})

    def test_that_chooses_keeps_nothing_that_may_change(self) -> None:
        options = ["a", "b"]
        choice = Choice(options)
        options.append("c")

        assert choice.options == ("a", "b")
        assert hash(choice) == hash(Choice(("a", "b")))

    def test_of_a_call_stands_beside_no_option(self) -> None:
        with pytest.raises(OptionError, match=r"^regex: the call has the choice of 'a' already"):
            request_from(PROMPT, {"regex": "a"}, constraint=Choice(("a",)))

    def test_of_a_call_takes_separators(self) -> None:
        request = request_from(PROMPT, {"separators": (",", ":")}, constraint=JsonSchema("{}"))

        assert request.constraint == JsonSchema("{}", (",", ":"))

    def test_does_not_change_with_the_dict_that_it_came_from(self) -> None:
        schema = {"type": "null"}
        options = frozen({"json_schema": schema})
        schema["type"] = "string"

        assert options == {"json_schema": '{"type":"null"}'}


class TestOptionsOverDefaults:
    def test_win_one_by_one(self) -> None:
        assert merged({"seed": 1, "top_k": 2}, {"seed": 3}) == {"seed": 3, "top_k": 2}

    def test_replace_the_constraint_as_a_whole(self) -> None:
        defaults = {"json_schema": "{}", "separators": (",", ":"), "seed": 1}

        assert merged(defaults, {"regex": "a"}) == {"regex": "a", "seed": 1}
        assert merged(defaults, {}, bound=True) == {"seed": 1}

    def test_may_take_the_constraint_away(self) -> None:
        given = merged({"regex": "a"}, {"regex": None})

        assert request_from(PROMPT, given).constraint is None

    def test_may_lay_out_the_schema_of_the_defaults(self) -> None:
        given = merged({"json_schema": "{}"}, {"separators": (",", ":")})

        assert request_from(PROMPT, given).constraint == JsonSchema("{}", (",", ":"))
