"""Calls as a model writes them: what fits, what is read of it, and that one is the other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.errors import ConstraintError
from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.output.calls import (
    CallForm,
    CallPiece,
    CallReader,
    HermesForm,
    JsonForm,
    Written,
    _answer,
    tools_text,
)
from structgen.output.reasoning import FAMILIES, reasoned
from structgen.request import Structure
from structgen.terms import Term, regex
from tests.grammar.derivatives import vocabulary_of

VOCABULARY = vocabulary_of([bytes([byte]) for byte in range(256)])
WEATHER = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
)
NOTHING = '{"type":"object","properties":{},"additionalProperties":false}'
FUNCTIONS = {"weather": WEATHER, "now": NOTHING}

ULM = '{"name": "weather", "arguments": {"city": "Ulm"}}'
LOOSE = '{"name": "weather", "arguments": { "city":"Ulm"}}'
NOW = '{"name": "now", "arguments": {}}'


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def grammar(term: Term) -> Grammar:
    return compile_constraint(Structure(term), VOCABULARY)


def read(reader: CallReader, pushes: Sequence[str]) -> tuple[str, list[CallPiece]]:
    """The text beside the calls, and the calls, each as one piece."""
    found = [*map(reader.push, pushes), reader.flush()]
    calls: list[CallPiece] = []
    for piece in (piece for _, pieces in found for piece in pieces):
        if piece.name:
            calls.append(piece)
        else:
            last = calls[piece.index]
            calls[piece.index] = CallPiece(last.index, last.name, last.arguments + piece.arguments)
    return "".join(text for text, _ in found), calls


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


ARRAY, ONE, TAGS, TAG = JsonForm(), JsonForm(False, False), HermesForm(), HermesForm(False)
FORMS = [
    pytest.param(ARRAY, [f"[{ULM}]", f"[{NOW}, {ULM}, {NOW}]", f"[{LOOSE}]"], id="array"),
    pytest.param(JsonForm(several=False), [f"[{ULM}]", f"[{NOW}]"], id="array of one"),
    pytest.param(ONE, [ULM, NOW, LOOSE], id="object"),
    pytest.param(TAGS, [tagged(ULM), f"{tagged(NOW)}\n{tagged(LOOSE)}"], id="tags"),
    pytest.param(TAG, [tagged(ULM)], id="tag"),
]
WRONG = [
    "",
    "[]",
    "Ulm",
    "{}",
    '{"name": "rain", "arguments": {}}',
    '[{"name": "now", "arguments": {"city": "Ulm"}}]',
    '[{"name": "weather", "arguments": {}}]',
    '{"name": "weather", "arguments": {"city": "Rome"}}',
    tagged('{"name": "weather", "arguments": {"city": "Rome"}}'),
    f"[{ULM}",
    f"[{ULM}] ",
    f" {ULM}",
    f"{ULM}, {NOW}",
    f"{tagged(ULM)} {tagged(NOW)}",
    f"{tagged(ULM)}\nThere.",
    "<tool_call>",
]


@pytest.mark.parametrize(("form", "fitting"), FORMS)
class TestAForm:
    def test_lets_through_calls_of_the_functions(self, form: CallForm, fitting: list[str]) -> None:
        found = grammar(form.calls(FUNCTIONS))

        assert [text for text in fitting if not found.accepts(text)] == []

    def test_lets_nothing_else_through(self, form: CallForm, fitting: list[str]) -> None:
        found, free = grammar(form.calls(FUNCTIONS)), grammar(form.calls_or_text(FUNCTIONS))

        assert [text for text in WRONG if found.accepts(text)] == []
        assert [text for text in fitting if not free.accepts(text)] == []

    def test_lets_an_answer_through_where_there_may_be_one(
        self, form: CallForm, fitting: list[str]
    ) -> None:
        found = grammar(form.calls_or_text(FUNCTIONS))

        assert fitting
        assert found.accepts("It is 3 degrees.\n\n1 [2] {3}")
        assert not found.accepts("<tool_call>" if isinstance(form, HermesForm) else '[{"name"')

    def test_is_read_as_what_was_written(self, form: CallForm, fitting: list[str]) -> None:
        for text in fitting:
            for answers in (False, True):
                said, calls = read(form.reader(answers=answers), [text])

                assert said == ""
                assert [json.loads(call.arguments) for call in calls] == [
                    {"city": "Ulm"} if call.name == "weather" else {} for call in calls
                ]
                assert [call.index for call in calls] == list(range(text.count('"name"')))

    def test_writes_what_it_lets_through(self, form: CallForm, fitting: list[str]) -> None:
        calls = [Written("weather", '{"city": "Ulm"}')]

        assert form.written("", calls) == fitting[0]
        assert form.written("Well.", calls) == f"\n{fitting[0]}"

    def test_tells_how_a_call_is_written(self, form: CallForm, fitting: list[str]) -> None:
        head, _, _ = fitting[0].partition("weather")

        assert f"{head}NAME" in form.told()


class TestAnAnswer:
    def test_may_stand_before_tags(self) -> None:
        found = grammar(TAGS.calls_or_text(FUNCTIONS))
        text = f"Let me look.\n{tagged(ULM)}"

        assert found.accepts(text)
        assert read(TAGS.reader(answers=True), [text])[0] == "Let me look."

    def test_is_what_it_was_where_the_calls_are_written_again(self) -> None:
        text = f"Let me look.\n\n\n{tagged(ULM)}\n{tagged(NOW)}"

        said, calls = read(TAGS.reader(answers=True), [text])
        again = TAGS.written(said, [Written(call.name, call.arguments) for call in calls])

        assert said + again == text

    @pytest.mark.parametrize("text", ["<tool_", "a\n<tool_call", " \n", "<tools>", "a <tool_call"])
    def test_is_given_out_whole_in_the_end(self, text: str) -> None:
        assert read(TAGS.reader(answers=True), list(text)) == (text, [])

    def test_of_white_space_alone_is_none_before_a_call(self) -> None:
        said, [call] = read(TAGS.reader(answers=True), list(f" \n\n{tagged(NOW)}"))

        assert (said, call.name) == ("", "now")

    @pytest.mark.parametrize("form", [ARRAY, ONE], ids=["array", "object"])
    def test_with_an_opening_tag_is_no_answer(self, form: JsonForm) -> None:
        found = grammar(form.calls_or_text(FUNCTIONS, "qwen3"))

        fitting = ["a", "<", "<thin", "<thinx>", "x<think>", "<<think>", "<think"]
        fitting.append("<think>[</think>a")
        assert [text for text in fitting if not found.accepts(text)] == []
        assert [
            text for text in ("<think>", "<think>x", " a", "[", "{") if found.accepts(text)
        ] == []

    def test_can_have_any_characters_in_its_tags(self) -> None:
        found = grammar(regex(_answer("^-]\\[")))

        assert found.accepts("^-]\\x")
        assert found.accepts("^")
        assert not found.accepts("^-]\\[x")


class TestReasoning:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_stands_before_a_form(self, family: str) -> None:
        found = grammar(reasoned(family, regex("[0-9]")))
        opening, closing = ("◁think▷", "◁/think▷") if family == "kimi" else ("<think>", "</think>")
        inside = family == "deepseek-r1"

        assert found.accepts("3") != inside
        assert found.accepts(f"{opening}\nhm\n{closing}\n\n3") == (family != "gpt-oss")
        assert found.accepts(f"hm{closing}3") == inside
        assert not found.accepts(f"{opening}hm{closing}x")
        assert not found.accepts(f"{opening}3")

    @pytest.mark.parametrize("family", ["deepseek-r1", "qwen3", "kimi"])
    @pytest.mark.parametrize("form", [ARRAY, ONE, TAGS], ids=["array", "object", "tags"])
    def test_stands_before_calls_and_before_answers(self, form: CallForm, family: str) -> None:
        found = grammar(form.calls_or_text(FUNCTIONS, family))
        opening, closing = ("◁think▷", "◁/think▷") if family == "kimi" else ("<think>", "</think>")
        call = form.written("", [Written("now", "{}")])

        texts = [f"{opening}\nhm\n{closing}\n\n{end}" for end in (call, "noon")]
        assert [text for text in texts if not found.accepts(text)] == []
        assert not found.accepts(f"{opening}{call}")
        for text in (call, "noon"):
            assert found.accepts(text) == (family != "deepseek-r1")

    @pytest.mark.parametrize("form", [ARRAY, ONE, TAGS], ids=["array", "object", "tags"])
    def test_that_broke_off_in_its_tag_is_no_call(self, form: CallForm) -> None:
        assert read(form.reader(answers=False), ["<th", "in"]) == ("", [])

    def test_is_none_without_a_family(self) -> None:
        assert reasoned(None, regex("[0-9]")) == regex("[0-9]")


# ---------------------------------------------------------------- pieces

json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.text(alphabet='ab"\\{}[],:é\n ', max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
written = st.lists(
    st.builds(
        Written,
        st.sampled_from(["weather", "now", "a_b-C9"]),
        st.dictionaries(st.text(max_size=3), json_values, max_size=3).map(json.dumps),
    ),
    min_size=1,
    max_size=3,
)
cuts = st.lists(st.integers(0, 10_000), max_size=8)


class TestPieces:
    @settings(deadline=None, max_examples=80)
    @given(st.sampled_from([ARRAY, TAGS]), written, cuts, st.booleans())
    def test_are_the_same_however_the_text_is_split(
        self, form: CallForm, calls: list[Written], cuts: list[int], answers: bool
    ) -> None:
        text = form.written("", calls)

        said, found = read(form.reader(answers=answers), pieces_of(text, cuts))

        assert said == ""
        assert [(call.name, call.arguments) for call in found] == [
            (call.name, call.arguments) for call in calls
        ]

    @settings(deadline=None, max_examples=60)
    @given(st.text(alphabet="<tool_cal>\n/ x", max_size=40), written, cuts)
    def test_of_an_answer_before_tags_are_the_same_too(
        self, before: str, calls: list[Written], cuts: list[int]
    ) -> None:
        text = before + TAGS.written(before, calls)
        if "<tool_call>" in before:
            return

        whole = read(TAGS.reader(answers=True), [text])

        assert read(TAGS.reader(answers=True), pieces_of(text, cuts)) == whole
        assert whole[0] == (before if before.strip() else "")

    @settings(deadline=None, max_examples=60)
    @given(st.sampled_from([ARRAY, TAGS]), written, st.integers(0, 500), cuts)
    def test_of_a_text_that_breaks_off_are_what_came(
        self, form: CallForm, calls: list[Written], length: int, cuts: list[int]
    ) -> None:
        text = form.written("", calls)[:length]

        said, found = read(form.reader(answers=False), pieces_of(text, cuts))

        assert said == ""
        for call, whole in zip(found, calls, strict=False):
            assert call.name == whole.name
            assert whole.arguments.startswith(call.arguments)

    def test_come_with_the_first_characters_that_make_them_certain(self) -> None:
        reader = ARRAY.reader(answers=False)

        assert reader.push('[{"name": "weath') == ("", [])
        assert reader.push('er"') == ("", [CallPiece(0, "weather")])
        assert reader.push(', "arguments": {"ci') == ("", [CallPiece(0, arguments='{"ci')])
        assert reader.push('ty": "}') == ("", [CallPiece(0, arguments='ty": "}')])
        assert reader.push('"}}') == ("", [CallPiece(0, arguments='"}')])
        assert reader.push("") == ("", [])
        assert reader.push("]") == ("", [])
        assert reader.flush() == ("", [])

    def test_of_an_answer_come_at_once(self) -> None:
        reader = ARRAY.reader(answers=True)

        assert reader.push("He") == ("He", [])
        assert reader.push("[llo") == ("[llo", [])


class TestFunctionsAsText:
    def test_are_an_object_a_line(self) -> None:
        assert tools_text([{"name": "a", "description": "ü"}, {"name": "b"}]) == (
            '{"name": "a", "description": "ü"}\n{"name": "b"}'
        )


class TestASchemaThatIsNone:
    def test_is_refused_with_the_form(self) -> None:
        with pytest.raises(ConstraintError, match="strng"):
            grammar(ARRAY.calls({"a": '{"type": "strng"}'}))
