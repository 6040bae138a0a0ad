"""Constraints in every dialect: what each asks for, what is refused, and what comes back."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import msgspec
import pytest

from structgen.errors import OptionError
from structgen.request import Choice, Constraint, Ebnf, JsonSchema, Regex, Structure
from structgen.server.config import ServerConfig
from structgen.server.openai.formats import OBJECT, Asked, behind, constraint_of_body
from structgen.server.openai.wire import ChatBody
from structgen.terms import Either, Fixed, Json, Pattern, Rules, Sequence
from tests.server.served import Answer, Serve, Served

MESSAGES = [{"role": "user", "content": "hi"}]
SWITCH = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {"type": "const_string", "value": "yes"}


def asked(**fields: Any) -> Asked | None:
    body = msgspec.convert({"model": "m", "messages": MESSAGES, **fields}, ChatBody)
    return constraint_of_body(body)


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


class TestADialect:
    @pytest.mark.parametrize(
        ("fields", "field", "constraint"),
        [
            (
                {"response_format": {"type": "json_object"}},
                "response_format",
                JsonSchema(OBJECT),
            ),
            (
                {"response_format": json_schema(SWITCH, strict=True)},
                "response_format.json_schema.schema",
                JsonSchema(SWITCH),
            ),
            (
                {"response_format": json_schema(True)},
                "response_format.json_schema.schema",
                JsonSchema("true"),
            ),
            (
                {"response_format": {"type": "structural_tag", "format": TAG}},
                "response_format",
                Structure(Fixed("yes")),
            ),
            (
                {"structured_outputs": {"json": SWITCH}},
                "structured_outputs.json",
                JsonSchema(SWITCH),
            ),
            (
                {"structured_outputs": {"json": json.dumps(SWITCH)}},
                "structured_outputs.json",
                JsonSchema(json.dumps(SWITCH)),
            ),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", Regex("a")),
            (
                {"structured_outputs": {"choice": ["a", "b"]}},
                "structured_outputs.choice",
                Choice(("a", "b")),
            ),
            (
                {"structured_outputs": {"grammar": 'root ::= "a"'}},
                "structured_outputs.grammar",
                Ebnf('root ::= "a"'),
            ),
            (
                {"structured_outputs": {"json_object": True}},
                "structured_outputs.json_object",
                JsonSchema(OBJECT),
            ),
            (
                {"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}},
                "structured_outputs.structural_tag",
                Structure(Fixed("yes")),
            ),
            (
                {"structured_outputs": {"structural_tag": {"format": TAG}}},
                "structured_outputs.structural_tag",
                Structure(Fixed("yes")),
            ),
            ({"regex": "a"}, "regex", Regex("a")),
            ({"ebnf": 'root ::= "a"'}, "ebnf", Ebnf('root ::= "a"')),
            ({"json_schema": SWITCH}, "json_schema", JsonSchema(SWITCH)),
            ({"json_schema": "{"}, "json_schema", JsonSchema("{")),
        ],
        ids=str,
    )
    def test_says_what_an_output_must_be(
        self, fields: Any, field: str, constraint: Constraint
    ) -> None:
        assert asked(**fields) == Asked(field, constraint)

    @pytest.mark.parametrize(
        "fields",
        [{}, {"response_format": {"type": "text"}}, {"regex": None, "structured_outputs": None}],
        ids=str,
    )
    def test_may_say_nothing(self, fields: Any) -> None:
        assert asked(**fields) is None

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            (
                {"regex": "a", "response_format": {"type": "json_object"}},
                "^response_format: it cannot be combined with regex; give one of them",
            ),
            (
                {"regex": "a", "ebnf": "b", "json_schema": "{}"},
                "^regex: it cannot be combined with ebnf, json_schema",
            ),
            (
                {"structured_outputs": {"regex": "a", "json_object": True}},
                "^structured_outputs.regex: it cannot be combined with structured_outputs.json_obj",
            ),
            (
                {"structured_outputs": {"choice": ["a"]}, "regex": "a"},
                "^structured_outputs.choice: it cannot be combined with regex",
            ),
            ({"structured_outputs": {}}, "^structured_outputs: it says nothing; give one of json,"),
            ({"structured_outputs": {"json_object": False}}, "^structured_outputs: it says nothi"),
            (
                {"structured_outputs": {"structural_tag": "{"}},
                "^structured_outputs.structural_tag: it is no JSON",
            ),
            (
                {"structured_outputs": {"structural_tag": "[]"}},
                "^structured_outputs.structural_tag: expected an object",
            ),
            (
                {"structured_outputs": {"structural_tag": {"format": {"type": "token"}}}},
                "^structured_outputs.structural_tag.format.type: token: a term is",
            ),
            (
                {"response_format": {"type": "structural_tag"}},
                "^response_format: expected format, or structures and triggers",
            ),
            (
                {"response_format": {"type": "xml"}},
                "^response_format.type: unknown 'xml'; expected",
            ),
            (
                {"response_format": {"type": "json_schema"}},
                "^response_format.json_schema.schema: expected a JSON Schema, an object or a bool",
            ),
            (
                {"response_format": json_schema("{}")},
                "^response_format.json_schema.schema: expected a JSON Schema",
            ),
            (
                {"response_format": {**json_schema({}), "type": "json_object"}},
                "^response_format.json_schema: it belongs to the type json_schema; leave it out",
            ),
            (
                {"response_format": {"type": "text", "format": TAG}},
                "^response_format.format: it belongs to the type structural_tag",
            ),
        ],
        ids=lambda value: str(value)[:70],
    )
    def test_is_refused_where_it_says_two_things_or_none(self, fields: Any, why: str) -> None:
        with pytest.raises(OptionError, match=why):
            asked(**fields)


class TestReasoning:
    @pytest.mark.parametrize(
        ("constraint", "term"),
        [
            (JsonSchema("{}", (",", ":")), Json("{}", (",", ":"))),
            (Regex("a"), Pattern("a")),
            (Ebnf("b"), Rules("b")),
            (Choice(["a", "b"]), Either((Fixed("a"), Fixed("b")))),
            (Structure(Fixed("a")), Fixed("a")),
        ],
        ids=str,
    )
    def test_stands_before_what_is_constrained(self, constraint: Constraint, term: object) -> None:
        found = behind("deepseek-r1", constraint)

        assert isinstance(found, Structure)
        assert isinstance(found.term, Sequence)
        assert found.term.parts[-1] == term
        assert Fixed("</think>") in found.term.parts

    @pytest.mark.parametrize("family", [None, "gpt-oss"])
    def test_without_tags_leaves_the_constraint_as_it_is(self, family: Any) -> None:
        assert behind(family, Regex("a")) == Regex("a")


# ---------------------------------------------------------------- over HTTP


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as found:
        yield found


async def content(served: Served, **fields: Any) -> str:
    """The content of an answer, which is the same as a stream."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 64, **fields}
    whole = await served.post("/v1/chat/completions", body)
    assert whole.status == 200, whole.text
    [choice] = whole.json["choices"]
    streamed = await served.post("/v1/chat/completions", {**body, "stream": True})
    choices = [chunk["choices"][0] for chunk in streamed.chunks]
    pieces = [each["delta"].get("content", "") for each in choices]
    assert "".join(pieces) == choice["message"]["content"]
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["stop"]
    assert choice["finish_reason"] == "stop"
    assert "\ufffd" not in "".join(pieces)
    return str(choice["message"]["content"])


class TestAConstraint:
    @pytest.mark.parametrize(
        "fields",
        [
            {"response_format": json_schema(SWITCH)},
            {"structured_outputs": {"json": json.dumps(SWITCH)}},
            {"json_schema": SWITCH},
        ],
        ids=["openai", "vllm", "sglang"],
    )
    async def test_holds_in_every_dialect(self, served: Served, fields: Any) -> None:
        found = json.loads(await content(served, **fields))

        jsonschema.Draft202012Validator(SWITCH).validate(found)

    async def test_can_be_one_of_some_texts(self, served: Served) -> None:
        fields = {"structured_outputs": {"choice": ["cat", "category"]}}

        assert await content(served, **fields) in {"cat", "category"}

    async def test_can_be_a_pattern_a_grammar_or_a_tag(self, served: Served) -> None:
        tagged = {"type": "tag", "begin": "<a>", "content": TAG, "end": "</a>"}
        pattern = "(😀|🚀){3}"

        assert re.fullmatch(pattern, await content(served, regex=pattern))
        assert await content(served, ebnf='root ::= "a" | "bc"') in {"a", "bc"}
        assert await content(
            served, response_format={"type": "structural_tag", "format": tagged}
        ) == ("<a>yes</a>")

    async def test_knows_characters_by_what_they_are(self, served: Served) -> None:
        """C4: the same enum as UTF-8 and as escapes; keys and values beyond ASCII."""
        schema = json_schema({"enum": ["在线", "离线"]})
        name = served.service.names[0]
        body = {"model": name, "messages": MESSAGES, "temperature": 0, "response_format": schema}
        spelled = [json.dumps(body, ensure_ascii=ascii_) for ascii_ in (False, True)]

        answers = [await served.post("/v1/chat/completions", each) for each in spelled]

        texts = [each.json["choices"][0]["message"]["content"] for each in answers]
        assert texts[0] == texts[1]
        assert json.loads(texts[0]) in {"在线", "离线"}
        assert answers[0].headers["Content-Type"].startswith("application/json")
        named = {
            "type": "object",
            "properties": {"名": {"enum": ["Zürich", "😀"]}},
            "required": ["名"],
            "additionalProperties": False,
        }
        found = json.loads(await content(served, response_format=json_schema(named)))
        assert list(found) == ["名"]
        assert found["名"] in {"Zürich", "😀"}


REFUSED = [
    ({"regex": "(abc"}, "regex"),
    ({"regex": "*a"}, "regex"),
    ({"regex": ""}, "regex"),
    ({"structured_outputs": {"regex": "(abc"}}, "structured_outputs.regex"),
    ({"response_format": json_schema({"type": "strng"})}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({"enum": []})}, "response_format.json_schema.schema"),
    ({"json_schema": "{not json"}, "json_schema"),
    ({"structured_outputs": {"json": "{not json"}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"ebnf": "root ::= foo"}, "ebnf"),
    ({"ebnf": 'start ::= "a"'}, "ebnf"),
    ({"ebnf": ""}, "ebnf"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    (
        {"response_format": {"type": "structural_tag", "format": {**TAG, "value": ""}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "token"}}},
        "response_format.format.type",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
    ({"response_format": "json"}, "response_format"),
]


class TestAConstraintThatIsNone:
    async def test_is_refused_with_its_field_while_a_stream_goes_on(self, served: Served) -> None:
        """C1: whatever is wrong with one client's constraint, another's stream is untouched."""
        long = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200, "stream": True}
        long["model"] = served.service.names[0]
        long["ignore_eos"] = True
        undisturbed = await served.post("/v1/chat/completions", long)

        async with served.client.post("/v1/chat/completions", json=long) as stream:
            answers = [await self.refused(served, fields) for fields, _ in REFUSED]
            text = await stream.text()

        assert [(each.status, each.error["param"]) for each in answers] == [
            (400, field) for _, field in REFUSED
        ]
        assert all(each.error["message"] for each in answers)
        assert said(text) == said(undisturbed.text)
        assert (served.engine.statistics().running, served.engine.statistics().waiting) == (0, 0)

    @staticmethod
    async def refused(served: Served, fields: Any) -> Answer:
        return await served.post("/v1/chat/completions", {"messages": MESSAGES, **fields})

    async def test_is_refused_before_a_stream_begins(self, served: Served) -> None:
        answer = await served.post(
            "/v1/chat/completions", {"messages": MESSAGES, "stream": True, "regex": "(abc"}
        )

        assert answer.status == 400
        assert "(abc" in answer.error["message"]
        assert answer.error["code"] == "invalid_constraint"


def said(stream: str) -> list[Any]:
    """What the events of a stream add, without the stream's own id and time."""
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    return [json.loads(each)["choices"] for each in events if each != "[DONE]"]


class TestAModelThatReasons:
    async def test_has_its_answer_constrained(self, serve: Serve) -> None:
        """Its reasoning is free, so that a stop has to end it here."""
        async with serve(config=ServerConfig(reasoning="deepseek-r1")) as served:
            answer = await served.post(
                "/v1/chat/completions",
                {"messages": MESSAGES, "max_tokens": 8, "regex": "[0-9]", "temperature": 0},
            )

        [choice] = answer.json["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == ""
        assert choice["message"]["reasoning_content"]
