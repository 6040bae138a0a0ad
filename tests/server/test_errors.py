"""Errors as answers: which status each has, and the form that all have."""

from __future__ import annotations

import json

import msgspec
import pytest

from structgen.errors import (
    BudgetError,
    ConstraintError,
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    EngineDiedError,
    OptionError,
    OverloadedError,
    PromptError,
    TemplateError,
    UnsupportedError,
)
from structgen.server.errors import ApiError, api_error, of_validation, unknown_model


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    role: str


class Body(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[Inner]
    stop: str | None = None


class TestAnErrorOfThePackage:
    @pytest.mark.parametrize(
        ("error", "status", "code"),
        [
            (PromptError("why"), 400, None),
            (ContextLengthError("why"), 400, "context_length_exceeded"),
            (ConstraintError("why"), 400, "invalid_constraint"),
            (OptionError("n", "why"), 400, None),
            (UnsupportedError("why"), 400, "unsupported"),
            (TemplateError("why"), 400, None),
            (BudgetError("why", budget="tokens"), 400, "budget_exceeded"),
            (DeadlineError("why"), 504, "timeout"),
            (OverloadedError("why"), 503, "overloaded"),
            (EngineClosedError("why"), 503, "not_ready"),
            (EngineDiedError("why"), 503, "engine_died"),
        ],
        ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
    )
    def test_has_its_status(self, error: Exception, status: int, code: str | None) -> None:
        made = api_error(error)

        assert made is not None
        assert (made.status, made.code) == (status, code)
        assert "why" in made.message
        assert made.type == ("invalid_request_error" if status < 500 else "server_error")

    def test_names_the_field_that_it_was_read_from(self) -> None:
        names = {"max_tokens": "max_completion_tokens", "prompt": "messages", "constraint": "regex"}

        found = [
            api_error(error, names)
            for error in (
                OptionError("max_tokens", "x"),
                OptionError("top_p", "x"),
                PromptError("x"),
                ConstraintError("x"),
            )
        ]

        assert [each.param for each in found if each] == [
            "max_completion_tokens",
            "top_p",
            "messages",
            "regex",
        ]

    def test_is_found_inside_a_group(self) -> None:
        group = ExceptionGroup("branches", [ExceptionGroup("more", [OverloadedError("full")])])

        made = api_error(group)

        assert made is not None
        assert (made.status, made.headers["Retry-After"]) == (503, "1")


class TestAnyOtherError:
    def test_means_nothing_to_a_client(self) -> None:
        assert api_error(ValueError("a fault of ours")) is None


class TestTheForm:
    def test_has_all_four_keys(self) -> None:
        body = json.loads(ApiError(400, "what").body)

        assert body == {
            "error": {
                "message": "what",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
        }


class TestABodyOfAnotherForm:
    @staticmethod
    def refused(body: str) -> ApiError:
        with pytest.raises(msgspec.ValidationError) as error:
            msgspec.json.decode(body, type=Body)
        return of_validation(error.value, Body.__struct_fields__)

    @pytest.mark.parametrize(
        ("body", "param", "said"),
        [
            ('{"messages": [], "stpo": 1}', "stpo", "unknown field (did you mean stop"),
            ('{"messages": [{"role": "user", "name": 1}]}', "messages[0].name", "unknown field"),
            ('{"messages": [], "guided_regex": ""}', "guided_regex", "structured_outputs.regex"),
            ('{"messages": [{}]}', "messages[0].role", "missing"),
            ("{}", "messages", "missing"),
            ('{"messages": [{"role": 1}]}', "messages[0].role", "Expected `str`, got `int`"),
            ('{"messages": 1}', "messages", "Expected `array`, got `int`"),
        ],
    )
    def test_is_refused_by_the_name_of_the_field(self, body: str, param: str, said: str) -> None:
        error = self.refused(body)

        assert (error.status, error.param) == (400, param)
        assert said in error.message

    def test_that_is_no_object_is_refused(self) -> None:
        error = self.refused("[]")

        assert error.param is None
        assert "object" in error.message


class TestWhatIsSaid:
    def test_of_megabytes_of_nonsense_is_short(self) -> None:
        name = "f" * 1_000_000
        with pytest.raises(msgspec.ValidationError) as found:
            msgspec.json.decode(json.dumps({"messages": [], name: 1}), type=Body)

        made = of_validation(found.value, Body.__struct_fields__)

        assert made.code == "unknown_field"
        assert len(made.body) < 5000
        assert len(unknown_model(name, ["tiny"]).body) < 5000
