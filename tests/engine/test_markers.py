"""Control tokens that a constraint writes out: drawn and forced there, shown, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from structgen import Engine
from structgen.models.checkpoint import open_checkpoint
from structgen.output.calls import CallForm, HermesForm
from structgen.output.reasoning import reasoned
from structgen.request import Completion
from structgen.terms import Term, literal, text
from structgen.terms import json as json_value
from tests.engine.tiny import CHATML, write_tiny_model
from tests.server.served import serving

CALL, CALLED, THINK, THOUGHT, VISION = range(259, 264)
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|vision|>")
LIKE_QWEN = (
    "{% if tools %}call in <tool_call>\n</tool_call>\n{% endif %}"
    + CHATML
    + "{% if enable_thinking is defined %}<think></think>{% endif %}"
)
SAID = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}}
STRICT = {**SAID, "required": ["a"], "additionalProperties": False}
CALLS = {"say": json.dumps(STRICT)}
FORM: CallForm = HermesForm(several=False)
PROMPT = "the quick brown fox"


def marked(folder: Path, *, special: bool) -> Path:
    """A model whose template writes tags, which its tokenizer has as tokens."""
    added = dict.fromkeys(TAGS[:4], special) | {TAGS[4]: True}
    return write_tiny_model(folder, max_context=1024, added=added, template=LIKE_QWEN)


@pytest.fixture(scope="module")
def marked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tags that are special tokens: elsewhere they have no text."""
    return marked(tmp_path_factory.mktemp("special"), special=True)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tags that are no special tokens, as Qwen's are."""
    return marked(tmp_path_factory.mktemp("plain"), special=False)


async def drawn(
    model: Path, term: Term, liked: Sequence[int] = (), *, jump: bool = True
) -> Completion:
    """What a model writes in the form of a term that likes some tokens best of all."""
    bias = dict.fromkeys(liked, 100.0)
    async with Engine(model, slots=2000, threads=1, jump_forward=jump) as engine:
        return await engine.generate(
            PROMPT, constraint=term, temperature=0, max_tokens=120, logit_bias=bias
        )


class TestTheMarkersOfAModel:
    def test_are_what_its_template_writes_and_not_around_turns(
        self, marked_model: Path, plain_model: Path
    ) -> None:
        found = [open_checkpoint(model).markers for model in (marked_model, plain_model)]

        assert found == [dict(zip(TAGS[:4], range(259, 263), strict=True))] * 2

    def test_are_none_where_the_template_has_no_others(self, tiny_model: Path) -> None:
        assert open_checkpoint(tiny_model).markers == {}


class TestAMarkerInALiteral:
    @pytest.mark.parametrize("jump", [True, False], ids=["forced", "drawn"])
    async def test_is_one_token_and_is_shown(
        self, marked_model: Path, plain_model: Path, jump: bool
    ) -> None:
        model = marked_model if jump else plain_model
        done = await drawn(model, FORM.calls(CALLS), [CALL, CALLED], jump=jump)

        assert done.finish.reason == "stop"
        assert done.text.startswith('<tool_call>\n{"name": "say", "arguments": {"a"')
        assert done.text.endswith("}\n</tool_call>")
        assert done.text.count("<") == 2
        assert (done.tokens[0], done.tokens[-1]) == (CALL, CALLED)
        assert done.tokens.count(CALL) == done.tokens.count(CALLED) == 1

    async def test_needs_no_draw(self, marked_model: Path) -> None:
        done = await drawn(marked_model, literal("<think>\nso</think>"))

        assert done.text == "<think>\nso</think>"
        assert (done.tokens[0], done.tokens[-1]) == (THINK, THOUGHT)
        assert done.finish.usage.completion_tokens == 5

    async def test_is_no_text_of_a_string(self, marked_model: Path) -> None:
        done = await drawn(marked_model, literal("<think>") + json_value(STRICT), [THINK, CALL])

        assert done.tokens.count(THINK) == 1
        assert CALL not in done.tokens

    async def test_of_turns_is_spelled_in_letters(self, marked_model: Path) -> None:
        done = await drawn(marked_model, literal("<|im_start|>a<|vision|>"), [257, VISION])

        assert done.text == "<|im_start|>a<|vision|>"
        assert max(done.tokens) < 256


class TestAMarkerAfterFreeText:
    async def test_ends_it(self, marked_model: Path) -> None:
        done = await drawn(marked_model, FORM.calls_or_text(CALLS), [CALL])

        assert done.tokens[0] == CALL
        assert done.text.startswith('<tool_call>\n{"name": "say"')

    async def test_is_the_only_one_that_may_come(self, marked_model: Path) -> None:
        term = text(until="<tool_call>") + "<tool_call>!"
        async with Engine(marked_model, slots=2000, threads=1) as engine:
            done = await engine.generate(
                PROMPT,
                constraint=term,
                temperature=0,
                max_tokens=30,
                logit_bias={THINK: 100.0, CALLED: 100.0, VISION: 100.0, CALL: 50.0},
            )

        assert done.text == "<tool_call>!"

    async def test_closes_a_thought(self, marked_model: Path) -> None:
        term = reasoned("qwen3", literal("yes"))
        done = await drawn(marked_model, term, [THINK, THOUGHT])

        assert done.tokens[:2] == (THINK, THOUGHT)
        assert done.text.startswith("<think></think>")
        assert done.text.endswith("yes")

    async def test_may_be_spelled_in_letters(self, marked_model: Path) -> None:
        async with Engine(marked_model, slots=2000, threads=1) as engine:
            grammar = await engine.compile(FORM.calls_or_text(CALLS))

        assert grammar.accepts(
            'so <tool_call>\n{"name": "say", "arguments": {"a":""}}\n</tool_call>'
        )
        assert not grammar.accepts("so <tool_call> it is")


class TestAnAnswerOverHttp:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_calls_a_tool_by_the_token(self, marked_model: Path, stream: bool) -> None:
        tool = {"type": "function", "function": {"name": "say", "parameters": STRICT}}
        body = {
            "messages": [{"role": "user", "content": "say it"}],
            "tools": [tool],
            "temperature": 0,
            "max_tokens": 120,
            "logit_bias": {str(CALL): 100},
            "parallel_tool_calls": False,
            "stream": stream,
            "return_token_ids": True,
        }
        async with serving(marked_model) as served:
            answer = await served.post("/v1/chat/completions", body)

        assert answer.status == 200, answer.text
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in answer.chunks]
            calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
            assert not "".join(delta.get("content") or "" for delta in deltas)
        else:
            choice = answer.json["choices"][0]
            calls = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["token_ids"][0] == CALL
            assert not choice["message"]["content"]
        assert calls[0]["function"]["name"] == "say"
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        assert set(json.loads(arguments)) == {"a"}
