"""Options as keywords: which there are, and what is said of others."""

from __future__ import annotations

import pytest

from structgen.errors import OptionError
from structgen.options import did_you_mean, in_words, nearest, request_from, unknown_option
from structgen.request import Choice, Constraint, Ebnf, JsonSchema, Regex, Text

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
        with pytest.raises(OptionError, match=r"^heat: unknown option; .* deadline, frequency_p"):
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

    @pytest.mark.parametrize("word", ["", "re", "walk"])
    def test_is_none_where_nothing_is_near(self, word: str) -> None:
        assert nearest(word, ["temperature", "repetition_penalty"]) is None
        assert did_you_mean(word, ["temperature", "repetition_penalty"]) == ""


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
