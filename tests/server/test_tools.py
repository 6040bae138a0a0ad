"""Tools: what may be declared and chosen, what the model is told, and its calls over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.chat import CHATML, Chat, Turn
from structgen.errors import OptionError
from structgen.grammar.compiler import compile_constraint
from structgen.models.template import Template, TemplateChat
from structgen.request import Delta, Finish, Structure, Text
from structgen.server.config import ServerConfig
from structgen.server.openai.formats import constraint_of_body
from structgen.server.openai.pieces import ChoiceReader, Piece
from structgen.server.openai.tools import ToolForm, Tooling, form_of, tooling_of
from structgen.server.openai.wire import CalledTool, ChatBody, FunctionCall
from tests.engine.tiny import CHATML as TEMPLATE
from tests.engine.tiny import write_tiny_model
from tests.grammar.derivatives import vocabulary_of
from tests.server.served import Answer, Serve, Served, serving

Body = dict[str, Any]
VOCABULARY = vocabulary_of([bytes([byte]) for byte in range(256)])
MESSAGES = [{"role": "user", "content": "weather?"}]
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
}
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    "write <tool_call>{{ '{' }}...</tool_call>{% endif %}" + TEMPLATE
)
EQUIPPED = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TEMPLATE


def tool(name: str, parameters: Mapping[str, Any] | None = None, **more: Any) -> Body:
    arguments = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **arguments, **more}}


WEATHER = tool("get_weather", WEATHER_SCHEMA, description="The weather of a city.")
NOW = tool("now")
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SWITCH = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
SWITCHED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SWITCH}}
OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 1}}'
NOON = '{"name": "now", "arguments": {}}'


def template(source: str) -> TemplateChat:
    return TemplateChat(Template(source, name="test"), ["<|im_start|>", "<|im_end|>"])


def body_of(**fields: Any) -> ChatBody:
    return msgspec.convert(
        {"model": "m", "messages": MESSAGES, "tools": [WEATHER, NOW], **fields}, ChatBody
    )


def tooling(form: ToolForm | None = None, **fields: Any) -> Tooling | None:
    body = body_of(**fields)
    form = form or form_of("json", CHATML, parallel=body.parallel_tool_calls is not False)
    return tooling_of(body, form, constraint_of_body(body))


def some(form: ToolForm | None = None, **fields: Any) -> Tooling:
    found = tooling(form, **fields)
    assert found is not None
    return found


def fitting(found: Tooling, *texts: str) -> list[str]:
    grammar = compile_constraint(Structure(found.term), VOCABULARY)
    return [text for text in texts if grammar.accepts(text)]


# ---------------------------------------------------------------- what may be asked for


class TestDeclarations:
    @pytest.mark.parametrize(
        ("tools", "why"),
        [
            ([WEATHER, {"type": "custom"}], r"^tools\[1\].type: expected function, got 'custom'"),
            ([{"type": "function"}], r"^tools\[0\].function: it is missing"),
            (
                [tool("get weather")],
                r"^tools\[0\].function.name: 'get weather' is no name: 1 to 64",
            ),
            ([tool("")], r"^tools\[0\].function.name: '' is no name"),
            ([tool("a" * 65)], r"^tools\[0\].function.name: 'aaa"),
            ([tool("a\n")], r"^tools\[0\].function.name: 'a.n' is no name"),
            ([NOW, WEATHER, NOW], r"^tools\[2\].function.name: two tools are named 'now'; rename"),
            (
                [tool("a", {"type": "array"})],
                r"^tools\[0\].function.parameters.type: arguments are an object, not 'array'",
            ),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_that_no_model_could_call_are_refused(self, tools: list[Body], why: str) -> None:
        for choice in (None, "none", "required"):
            with pytest.raises(OptionError, match=why):
                tooling(tools=tools, tool_choice=choice)

    @pytest.mark.parametrize(
        ("parameters", "valid", "invalid"),
        [
            (None, ["{}"], ['{"a": 1}']),
            ({}, ["{}", '{"a": 1}'], ["3", "[]"]),
            ({"type": "object"}, ["{}", '{"a": 1}'], ["3"]),
            ({"properties": {"a": {"type": "integer"}}}, ["{}", '{"a": 1}'], ['{"b": 1}', "3"]),
            (
                {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
                ['{"b": 1}'],
                ['{"a": ""}'],
            ),
            (
                {"properties": {"a": {"type": "object", "properties": {"b": {"const": 1}}}}},
                ['{"a": {"b": 1}}'],
                ['{"a": {"c": 1}}'],
            ),
            (
                {
                    "$ref": "#/$defs/A",
                    "$defs": {"A": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
                },
                ['{"a": 1}'],
                ["{}", "3", '{"a": ""}'],
            ),
            (
                {
                    "properties": {"a": {"type": "integer"}},
                    "allOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
                },
                ['{"a": 1, "b": 2}', '{"b": 2}'],
                ["{}"],
            ),
            (
                {"properties": {"a": {"items": {"properties": {"b": {"type": "null"}}}}}},
                ['{"a": [{"b": null}]}', '{"a": []}'],
                ['{"a": [{"c": null}]}'],
            ),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_say_what_arguments_there_are(
        self, parameters: Body | None, valid: list[str], invalid: list[str]
    ) -> None:
        found = some(tools=[tool("a", parameters)], tool_choice="required")
        calls = {each: f'[{{"name": "a", "arguments": {each}}}]' for each in (*valid, *invalid)}

        assert fitting(found, *calls.values()) == [calls[each] for each in valid]

    def test_without_arguments_say_so_to_the_model(self) -> None:
        [spec] = some(tools=[NOW]).specs

        assert spec["function"]["parameters"]["properties"] == {}

    def test_are_told_as_they_are(self) -> None:
        assert some().specs[0] == WEATHER


class TestAChoice:
    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": None},
            {"tools": []},
            {"tools": None, "tool_choice": "none"},
            {"tool_choice": "none"},
        ],
        ids=str,
    )
    def test_may_be_of_nothing(self, fields: Body) -> None:
        assert tooling(**fields) is None

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"tools": None, "tool_choice": "auto"}, "^tool_choice: there are no tools to choose"),
            (
                {"tools": [], "tool_choice": NAMED},
                "^tool_choice: there are no tools to choose from",
            ),
            ({"tool_choice": "any"}, "^tool_choice: expected auto, none, required or {.*got 'any'"),
            (
                {"tool_choice": {"type": "function", "function": {"name": "get_wether"}}},
                r"^tool_choice: no tool is named 'get_wether' \(did you mean get_weather\?\); decl",
            ),
            ({"tool_choice": {"type": "function"}}, "^tool_choice.function: it is missing"),
            (
                {"tool_choice": {"type": "allowed_tools"}},
                "^tool_choice.type: expected function, got 'allowed_tools'",
            ),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_of_what_there_is_not_is_refused(self, fields: Body, why: str) -> None:
        with pytest.raises(OptionError, match=why):
            tooling(**fields)

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, ["It rains.", f"[{OSLO}]", f"[{OSLO}, {NOON}]"]),
            ({"tool_choice": "auto"}, ["It rains.", f"[{OSLO}]", f"[{OSLO}, {NOON}]"]),
            ({"parallel_tool_calls": False}, ["It rains.", OSLO]),
            ({"tool_choice": "required"}, [f"[{OSLO}]", f"[{OSLO}, {NOON}]"]),
            ({"tool_choice": "required", "parallel_tool_calls": False}, [OSLO]),
            ({"tool_choice": NAMED}, [OSLO]),
        ],
        ids=str,
    )
    def test_says_what_the_output_may_be(self, fields: Body, expected: list[str]) -> None:
        texts = ("It rains.", OSLO, f"[{OSLO}]", f"[{OSLO}, {NOON}]", "", "[]", NOON + NOON)

        assert fitting(some(**fields), *texts) == expected

    def test_of_one_tool_leaves_no_other(self) -> None:
        named = {"type": "function", "function": {"name": "now"}}

        assert fitting(some(tool_choice=named), OSLO, NOON) == [NOON]


class TestAnAnswerWithAForm:
    def test_may_stand_in_place_of_calls(self) -> None:
        found = some(response_format=SWITCHED)
        texts = ('{"a": true}', "It rains.", f"[{OSLO}]", OSLO, "{}")

        assert fitting(found, *texts) == ['{"a": true}', f"[{OSLO}]"]

    def test_is_told_from_one_call_by_an_array(self) -> None:
        found = some(response_format=SWITCHED, parallel_tool_calls=False)
        texts = ('{"a": true}', f"[{OSLO}]", OSLO, f"[{OSLO}, {NOON}]")

        assert fitting(found, *texts) == ['{"a": true}', f"[{OSLO}]"]

    def test_may_be_any_json_beside_tags(self) -> None:
        form = form_of("hermes", CHATML)
        found = some(form, response_format={"type": "json_schema", "json_schema": {"schema": True}})
        tagged = f"<tool_call>\n{OSLO}\n</tool_call>"

        assert fitting(found, "[3]", "<", tagged, f"[3]\n{tagged}") == ["[3]", tagged]

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            (
                {"tool_choice": "required", "response_format": SWITCHED},
                "^response_format.json_schema.schema: with tool_choice required the output is",
            ),
            ({"tool_choice": NAMED, "regex": "a"}, "^regex: with tool_choice named the output is"),
            ({"regex": "a"}, "^regex: what fits it could look like a call.*write a JSON schema"),
            (
                {"structured_outputs": {"json": {"type": "array"}}},
                '^structured_outputs.json: what fits it could .*write "type": "object"',
            ),
            ({"json_schema": "{"}, "^json_schema: it is no JSON"),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_that_could_look_like_a_call_is_refused(self, fields: Body, why: str) -> None:
        with pytest.raises(OptionError, match=why):
            tooling(**fields)


# ---------------------------------------------------------------- what the model is told


def texts_of(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in turns]


class TestWhatTheModelIsTold:
    USER = Turn("user", (Text("weather?"),))

    def told(self, *turns: Turn, chat: Chat = CHATML, kind: Any = "json", **fields: Any) -> Any:
        body = body_of(**fields)
        form = form_of(kind, chat, parallel=body.parallel_tool_calls is not False)
        return texts_of(some(form, **fields).told([*turns, self.USER]))

    def test_is_a_system_turn_where_there_is_none(self) -> None:
        [(role, text), user] = self.told()

        assert role == "system"
        assert user == ("user", "weather?")
        lines = text.splitlines()
        assert lines[0] == "You can call these functions:"
        assert [json.loads(line)["name"] for line in lines[1:3]] == ["get_weather", "now"]
        assert '[{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}]' in text
        assert lines[-1] == "If none of them helps, answer without a call."

    def test_stands_behind_what_the_system_said(self) -> None:
        [(_, text), _] = self.told(Turn("system", (Text("Be kind."),)))

        assert text.startswith("Be kind.\n\nYou can call these functions:\n{")

    def test_says_what_must_be_called(self) -> None:
        assert self.told(tool_choice="required")[0][1].endswith("\nCall at least one of them.")
        assert self.told(tool_choice=NAMED)[0][1].endswith("\nCall get_weather.")

    def test_has_the_form_of_one_call_where_there_is_one(self) -> None:
        [(_, text), _] = self.told(parallel_tool_calls=False)

        assert '[{"name"' not in text
        assert '{"name": "NAME"' in text

    def test_is_left_to_a_template_that_says_all_of_it(self) -> None:
        assert self.told(chat=template(HERMES), kind="auto") == [("user", "weather?")]

    def test_is_the_form_alone_where_the_template_lists_the_tools(self) -> None:
        [(_, text), _] = self.told(chat=template(EQUIPPED))

        assert text.startswith("To call, write a JSON array of calls and nothing else: [")
        assert "get_weather" not in text

    def test_has_tags_where_they_were_asked_for(self) -> None:
        [(_, text), _] = self.told(kind="hermes")

        assert '<tool_call>\n{"name": "NAME"' in text
        assert "You can call these functions:" in text


class TestTheForm:
    @pytest.mark.parametrize(
        ("chat", "kind"),
        [
            (CHATML, "json"),
            (None, "json"),
            (template(EQUIPPED), "json"),
            (template(HERMES), "hermes"),
        ],
        ids=["markers", "none", "equipped", "hermes"],
    )
    def test_is_what_the_template_shows(self, chat: Chat | None, kind: str) -> None:
        assert form_of("auto", chat).kind == kind
        assert form_of("json", chat).kind == "json"
        assert form_of("hermes", chat).kind == "hermes"

    def test_is_how_earlier_calls_are_written(self) -> None:
        call = CalledTool(function=FunctionCall(name="now", arguments='{"a": 1}'), id="1")
        one = '{"name": "now", "arguments": {"a": 1}}'

        assert form_of("json", None).written("", [call]) == f"[{one}]"
        assert form_of("json", None).written("Hm.", [call, call]) == f"\n[{one}, {one}]"
        assert form_of("json", None, parallel=False).written("", [call]) == one
        assert form_of("hermes", None).written("Hm.", [call]) == (
            f"\n<tool_call>\n{one}\n</tool_call>"
        )


# ---------------------------------------------------------------- reasoning and calls


def read(reader: ChoiceReader, pushes: Sequence[str]) -> list[Piece]:
    end = Finish(reason="stop", complete=True)
    return [
        *(reader.read(Delta(request=0, text=text)) for text in pushes),
        reader.read(Delta(request=0, finish=end)),
    ]


class TestReasoning:
    def test_stands_before_calls(self) -> None:
        found = some(form_of("json", CHATML, family="qwen3"))
        thought = "<think>\nhm\n</think>\n\n"

        texts = [f"{thought}[{OSLO}]", f"{thought}It rains.", f"[{OSLO}]", "It rains."]
        assert fitting(found, *texts, thought, f"{thought}[3]", "<think>[3]") == texts

    def test_stands_before_tags_with_text_between(self) -> None:
        found = some(form_of("hermes", CHATML, family="deepseek-r1"))
        call = f"<tool_call>\n{OSLO}\n</tool_call>"

        texts = [f"hm</think>\n\n{call}", f"<think>hm</think>Well.\n{call}", "hm</think>Well."]
        assert fitting(found, *texts, call, "It rains.") == texts

    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.integers(1, 20), max_size=12))
    def test_is_set_apart_before_calls_are_read(self, lengths: list[int]) -> None:
        found = some(form_of("hermes", CHATML, family="qwen3"))
        text = f"<think>\nhm [1]\n</think>\n\nWell.\n<tool_call>\n{OSLO}\n</tool_call>"
        pushes, rest = [], text
        for length in lengths:
            pushes.append(rest[:length])
            rest = rest[length:]

        reader = ChoiceReader("qwen3", found.reader())
        pieces = read(reader, [*pushes, rest])

        assert "".join(piece.reasoning for piece in pieces) == "hm [1]"
        assert "".join(piece.content for piece in pieces) == "Well."
        calls = [call for piece in pieces for call in piece.tools]
        assert [call.name for call in calls if call.name] == ["get_weather"]
        assert json.loads("".join(call.arguments for call in calls)) == {"city": "Oslo", "days": 1}
        assert [bool(call.id) for call in calls] == [True, *[False] * (len(calls) - 1)]
        assert reader.called


# ---------------------------------------------------------------- over HTTP


def token(character: str, model: Path) -> str:
    """The id of a character of the tiny model, as `logit_bias` has it."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return str(vocabulary[character])


class Calls(msgspec.Struct):
    """What an answer, or a stream of events, comes to."""

    content: str | None
    calls: list[tuple[str, str, str]]
    finish: str


def of_whole(answer: Answer) -> Calls:
    assert answer.status == 200, answer.text
    [choice] = answer.json["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" for call in calls)
    return Calls(
        message["content"],
        [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls],
        choice["finish_reason"],
    )


def of_stream(answer: Answer) -> Calls:
    assert answer.status == 200, answer.text
    content, calls, finishes = None, list[list[str]](), list[str]()
    for chunk in answer.chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        if "content" in delta:
            content = (content or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if "id" in call:
                assert call["index"] == len(calls)
                assert (call["type"], bool(function["name"])) == ("function", True)
                calls.append([call["id"], function["name"], ""])
            else:
                assert not function.get("name")
            calls[call["index"]][2] += function.get("arguments", "")
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    [finish] = finishes
    return Calls(content, [(call[0], call[1], call[2]) for call in calls], finish)


async def answered(served: Served, **fields: Any) -> tuple[Calls, Calls]:
    """The same request at once and as a stream."""
    body = {
        "messages": MESSAGES,
        "tools": [WEATHER, NOW],
        "temperature": 0,
        "max_tokens": 300,
        **fields,
    }
    path = "/v1/chat/completions"
    whole, streamed = (
        await served.post(path, body),
        await served.post(path, {**body, "stream": True}),
    )
    return of_whole(whole), of_stream(streamed)


class TestCallsOverHttp:
    async def test_of_a_named_tool_are_one_with_valid_arguments(self, serve: Serve) -> None:
        """B6: shape, finish reason and arguments, at once and as a stream."""
        async with serve() as served:
            whole, streamed = await answered(served, tool_choice=NAMED)

        [(id_, name, arguments)] = whole.calls
        assert (whole.content, whole.finish, name) == (None, "tool_calls", "get_weather")
        assert id_.startswith("call_")
        jsonschema.validate(json.loads(arguments), WEATHER_SCHEMA)
        [(streamed_id, *rest)] = streamed.calls
        assert (streamed.content, streamed.finish, rest) == (None, "tool_calls", [name, arguments])
        assert streamed_id != id_

    @pytest.mark.parametrize("form", ["json", "hermes"])
    async def test_that_are_required_may_be_several(
        self, serve: Serve, tiny_chat_model: Path, form: Any
    ) -> None:
        async with serve(config=ServerConfig(tool_form=form)) as served:
            whole, streamed = await answered(
                served,
                tool_choice="required",
                logit_bias={token(",", tiny_chat_model): 90, token("Ċ", tiny_chat_model): 90},
                max_tokens=160,
            )

        assert whole.finish == streamed.finish == "length"
        assert whole.content in {None, ""}
        assert len(whole.calls) > 1
        assert len({id_ for id_, _, _ in whole.calls}) == len(whole.calls)
        assert [call[1:] for call in whole.calls] == [call[1:] for call in streamed.calls]
        for _, name, arguments in whole.calls[:-1]:
            schema = WEATHER_SCHEMA if name == "get_weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(arguments), schema)

    async def test_are_the_model_s_to_make_or_to_leave(
        self, serve: Serve, tiny_chat_model: Path
    ) -> None:
        call = {token(sign, tiny_chat_model): 100 for sign in "[]"}
        answer = {token("a", tiny_chat_model): 100}
        async with serve() as served:
            called = await answered(served, logit_bias=call)
            said = await answered(served, logit_bias=answer, max_tokens=5)

        for each in called:
            assert (each.content, each.finish, len(each.calls)) == (None, "tool_calls", 1)
        assert said[0] == said[1] == Calls("aaaaa", [], "length")

    async def test_are_none_where_none_may_be_made(self, serve: Serve) -> None:
        async with serve() as served:
            whole, streamed = await answered(served, tool_choice="none", max_tokens=8)
            plain = await served.post(
                "/v1/chat/completions",
                {"messages": MESSAGES, "temperature": 0, "max_tokens": 8},
            )

        assert whole.calls == streamed.calls == []
        assert whole.content == of_whole(plain).content

    async def test_that_broke_off_are_not_said_to_be_whole(self, serve: Serve) -> None:
        async with serve() as served:
            whole, streamed = await answered(served, tool_choice=NAMED, max_tokens=45)

        assert (whole.finish, streamed.finish) == ("length", "length")
        assert [call[1:] for call in whole.calls] == [call[1:] for call in streamed.calls]
        assert whole.calls[0][1] == "get_weather"

    async def test_are_cut_by_no_stop(self, serve: Serve) -> None:
        async with serve() as served:
            plain, _ = await answered(served, tool_choice=NAMED)
            stopped, _ = await answered(served, tool_choice=NAMED, stop=['"days"', '", '])

        assert stopped.calls[0][1:] == plain.calls[0][1:]
        assert stopped.finish == "tool_calls"

    async def test_take_part_in_several_choices(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post(
                "/v1/chat/completions",
                {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": NAMED, "n": 3, "seed": 1},
            )

        choices = answer.json["choices"]
        calls = [call for choice in choices for call in choice["message"]["tool_calls"]]
        assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 3
        assert len({call["id"] for call in calls}) == 3

    async def test_go_on_with_their_results(self, serve: Serve) -> None:
        """A call, its result, and what the model says to it; the prefix is in the cache."""
        async with serve() as served:
            whole, _ = await answered(served, tool_choice=NAMED)
            [(id_, name, arguments)] = whole.calls
            function = {"name": name, "arguments": arguments}
            calls = [{"id": id_, "type": "function", "function": function}]
            messages = [
                *MESSAGES,
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": id_, "content": "rain"},
            ]
            tokenized = await served.post("/tokenize", {"messages": messages})
            answer = await served.post(
                "/v1/chat/completions",
                {"messages": messages, "tools": [WEATHER, NOW], "max_tokens": 4},
            )
            ids = tokenized.json["tokens"]
            text = await served.post("/detokenize", {"tokens": ids})

        assert f'[{{"name": "get_weather", "arguments": {arguments}}}]' in text.json["prompt"]
        assert answer.status == 200
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
            ({"tools": None, "tool_choice": "required"}, "tool_choice"),
            ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
            (
                {"tools": [tool("a", {"type": "object", "properties": {"b": {"type": "strng"}}})]},
                "tools",
            ),
            ({"regex": "a"}, "regex"),
            ({"tools": [{"function": {"name": "a"}}]}, "tools[0].type"),
            ({"tools": [tool("a", parametres={})]}, "tools[0].function.parametres"),
            ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
            ({"tools": "get_weather"}, "tools"),
        ],
        ids=lambda value: str(value)[:60],
    )
    async def test_that_cannot_be_made_are_refused_with_their_field(
        self, serve: Serve, fields: Body, param: str
    ) -> None:
        async with serve() as served:
            for stream in (False, True):
                answer = await served.post(
                    "/v1/chat/completions",
                    {"messages": MESSAGES, "tools": [WEATHER], "stream": stream, **fields},
                )

                assert (answer.status, answer.error["param"]) == (400, param)

    async def test_are_written_as_the_template_has_them(self, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path, max_context=2048)
        (folder / "chat_template.jinja").write_text(HERMES)
        async with serving(folder) as served:
            whole, streamed = await answered(served, tool_choice=NAMED)

        assert whole.content is streamed.content is None
        assert whole.finish == streamed.finish == "tool_calls"
        assert whole.calls[0][1:] == streamed.calls[0][1:]
