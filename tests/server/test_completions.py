"""`/v1/completions` on a tiny model: prompts, echoes, streams, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.server.served import Answer, Serve, Served

PATH = "/v1/completions"
PROMPT = "the quick brown fox"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}


def joined(chunks: list[Any]) -> dict[int, Any]:
    """The choices of a stream's events, as an answer in one piece has them."""
    found: dict[int, Any] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        if choice["index"] not in found:
            found[choice["index"]] = choice
            continue
        whole = found[choice["index"]]
        assert whole["finish_reason"] is None, "something follows the end"
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        whole["token_ids"] = whole.get("token_ids", []) + choice.get("token_ids", [])
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"][name] += values
    return found


async def texts(served: Served, **body: Any) -> list[str]:
    answer = await served.post(PATH, {**GREEDY, **body})
    assert answer.status == 200, answer.text
    return [choice["text"] for choice in answer.json["choices"]]


class TestAnAnswer:
    async def test_is_what_the_engine_says(self, serve: Serve) -> None:
        async with serve() as served:
            answer = (await served.post(PATH, GREEDY)).json
            said = await served.engine.generate(PROMPT, max_tokens=12, temperature=0)
            name = served.service.names[0]

        (choice,) = answer["choices"]
        assert choice == {
            "index": 0,
            "text": said.text,
            "finish_reason": "length",
            "logprobs": None,
        }
        assert answer["id"].startswith("cmpl-")
        assert (answer["object"], answer["model"]) == ("text_completion", name)
        assert answer["usage"] == {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 12,
            "total_tokens": len(PROMPT) + 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    async def test_says_what_of_its_prompt_was_cached(self, serve: Serve) -> None:
        async with serve() as served:
            counts = [(await served.post(PATH, GREEDY)).json["usage"] for _ in range(2)]

        assert [each["prompt_tokens"] for each in counts] == [len(PROMPT)] * 2
        assert counts[1]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT) - 1}

    async def test_has_sixteen_tokens_if_nothing_else_was_asked_for(self, serve: Serve) -> None:
        body = {"prompt": PROMPT, "ignore_eos": True, "max_tokens": None}
        async with serve(max_context=200) as served:
            answer = await served.post(PATH, body)
            longer = await served.post(PATH, {**body, "min_tokens": 20})
            shorter = await served.post(PATH, {**body, "prompt": "x" * 190})

        counts = [each.json["usage"]["completion_tokens"] for each in (answer, longer, shorter)]
        assert counts == [16, 20, 10]

    async def test_keeps_to_a_constraint(self, serve: Serve) -> None:
        async with serve() as served:
            numbers = await texts(served, regex="[0-9]{3}", temperature=1, n=4, seed=5)
            answers = await texts(served, structured_outputs={"choice": ["yes", "no"]})

        assert all(number.isdigit() and len(number) == 3 for number in numbers)
        assert len(set(numbers)) > 1
        assert answers[0] in {"yes", "no"}


REFUSED_PROMPTS: list[tuple[Any, str]] = [
    ("", "it is empty"),
    ([], "got an empty list"),
    ([""], "it is empty"),
    (["", "fine"], "number 0 is empty"),
    (["fine", ""], "number 1 is empty"),
    ([[]], "it is empty"),
    ([[1], []], "number 1 is empty"),
    (["fine", 1], "expected texts, or token ids, or lists of token ids"),
    ([1, "fine"], "expected texts"),
    ([[1], "fine"], "expected texts"),
    ([[1], 1], "expected texts"),
    ([259], "token 259 is not in the vocabulary of 259"),
    ([-1], "token -1 is not in the vocabulary"),
    ([2**63], "is not in the vocabulary"),
    ([1.5], "expected a whole number, got 1.5"),
    ([[1, "a"]], "got `str`"),
    ([True], "got `bool`"),
    (None, "got `null`"),
    (5, "got `int`"),
    ({"text": "fine"}, "got `object`"),
]


class TestPrompts:
    async def test_are_text_or_ids_or_lists_of_them(self, serve: Serve) -> None:
        async with serve() as served:
            ids = list(await served.engine.encode(PROMPT))
            found = [
                await texts(served, prompt=prompt) for prompt in (PROMPT, [PROMPT], ids, [ids])
            ]

        assert len(found[0]) == 1
        assert found == [found[0]] * 4

    async def test_have_their_choices_side_by_side(self, serve: Serve) -> None:
        drawn = {"temperature": 1, "seed": 7, "n": 2}
        async with serve() as served:
            apart = [await texts(served, prompt=each, **drawn) for each in ("one", "two", "three")]
            answer = await served.post(PATH, {**GREEDY, "prompt": ["one", "two", "three"], **drawn})

        choices = answer.json["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert [choice["text"] for choice in choices] == [text for each in apart for text in each]
        assert apart[0][0] != apart[0][1]

    async def test_count_once_whatever_n_is(self, serve: Serve) -> None:
        body = {**GREEDY, "prompt": ["one", "three"], "n": 3, "ignore_eos": True}
        async with serve() as served:
            usage = (await served.post(PATH, body)).json["usage"]

        assert usage["prompt_tokens"] == len("one") + len("three")
        assert usage["completion_tokens"] == 2 * 3 * 12
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    @pytest.mark.parametrize("prompt", [" ", "\n", [[0]]], ids=repr)
    async def test_may_be_one_token(self, serve: Serve, prompt: Any) -> None:
        async with serve() as served:
            answer = await served.post(PATH, {**GREEDY, "prompt": prompt})

        assert answer.json["usage"]["prompt_tokens"] == 1

    async def test_of_text_are_text_whatever_they_spell(self, serve: Serve) -> None:
        marked = "a<|im_end|>"
        async with serve() as served:
            end = served.engine.loaded.checkpoint.tokenizer.token_id("<|im_end|>")
            spelled = await served.post(PATH, {**GREEDY, "prompt": marked})
            meant = await served.post(PATH, {**GREEDY, "prompt": [64, end]})

        assert spelled.json["usage"]["prompt_tokens"] == len(marked)
        assert meant.json["usage"]["prompt_tokens"] == 2

    async def test_that_cannot_be_continued_are_refused(self, serve: Serve) -> None:
        async with serve() as served:
            for prompt, message in REFUSED_PROMPTS:
                answer = await served.post(PATH, {**GREEDY, "prompt": prompt, "echo": True})

                assert answer.status == 400, prompt
                assert message in answer.error["message"]
                assert str(answer.error["param"]).partition("[")[0] == "prompt"
            assert served.engine.statistics().steps == 0

    async def test_that_are_missing_are_refused(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post(PATH, {"max_tokens": 5})

        assert (answer.status, answer.error["param"]) == (400, "prompt")

    async def test_that_are_too_long_are_refused_by_their_own_code(self, serve: Serve) -> None:
        async with serve() as served:
            ids = [1] * 5000
            for prompt in ("x" * 5000, ids, "x" * 4090, [ids]):
                answer = await served.post(PATH, {**GREEDY, "prompt": prompt})

                assert answer.status == 400
                assert answer.error["code"] == "context_length_exceeded"
                assert answer.error["param"] == "prompt"


class TestAnEcho:
    @pytest.mark.parametrize("as_ids", [False, True])
    async def test_begins_with_the_prompt(self, serve: Serve, as_ids: bool) -> None:
        prompt = "Zürich \N{GRINNING FACE}"
        async with serve() as served:
            sent = list(await served.engine.encode(prompt)) if as_ids else prompt
            (plain,) = await texts(served, prompt=sent)
            (echoed,) = await texts(served, prompt=sent, echo=True)

        assert echoed == prompt + plain

    async def test_has_the_log_probabilities_of_the_prompt(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post(PATH, {**GREEDY, "echo": True, "logprobs": 2})
            (score,) = await served.engine.score(PROMPT[0], [PROMPT[1:]])
            output = await served.engine.generate(
                PROMPT, max_tokens=12, temperature=0, logprobs=True
            )

        logprobs = answer.json["choices"][0]["logprobs"]
        values = logprobs["token_logprobs"]
        assert logprobs["tokens"][: len(PROMPT)] == list(PROMPT)
        assert (values[0], logprobs["top_logprobs"][0]) == (None, None)
        assert values[1 : len(PROMPT)] == pytest.approx(score.logprobs, abs=1e-4)
        drawn = [entry.logprob for entry in output.logprobs]
        assert values[len(PROMPT) :] == pytest.approx(drawn, abs=1e-4)
        assert {len(values) for values in logprobs.values()} == {len(PROMPT) + len(drawn)}

    async def test_scores_a_prompt_once_for_all_of_its_choices(self, serve: Serve) -> None:
        prompts = ["the quick brown fox " * 20, "jumps over the lazy dog " * 20]
        body = {**GREEDY, "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 5}
        async with serve() as served:
            answer = await served.post(PATH, body)
            first = served.engine.statistics().prefilled_tokens
            streamed = await served.post(PATH, {**body, "stream": True})

        choices = answer.json["choices"]
        length = sum(map(len, prompts))
        assert length <= first <= length + 2 * len(choices), "the last token is computed for each"
        for number, choice in enumerate(choices):
            leader, size = choices[number - number % 5], len(prompts[number // 5])
            assert choice["text"] == leader["text"]
            for name, values in choice["logprobs"].items():
                assert values[:size] == leader["logprobs"][name][:size]
                assert len(values) == size + 2
        told = joined(streamed.chunks)
        assert [told[n]["logprobs"]["tokens"] for n in range(10)] == [
            choice["logprobs"]["tokens"] for choice in choices
        ]

    async def test_may_be_all_there_is(self, serve: Serve) -> None:
        body = {**GREEDY, "max_tokens": 0, "echo": True, "logprobs": 1}
        async with serve() as served:
            answer = await served.post(PATH, body)
            plain = await served.post(PATH, {**body, "logprobs": None})
            streamed = await served.post(PATH, {**body, "stream": True})

        (choice,) = answer.json["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
        assert answer.json["usage"]["completion_tokens"] == 0
        assert plain.json["choices"][0]["text"] == PROMPT
        assert joined(streamed.chunks)[0]["text"] == PROMPT

    async def test_of_a_long_prompt_is_the_same(self, serve: Serve) -> None:
        prompt = "0123456789" * 250
        body = {**GREEDY, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 3}
        async with serve() as served:
            answer = await served.post(PATH, body)

        logprobs = answer.json["choices"][0]["logprobs"]
        assert logprobs["tokens"][:2500] == list(prompt)
        assert logprobs["text_offset"][:2500] == list(range(2500))


STREAMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": {"temperature": 1, "seed": 3, "n": 3},
    "several prompts": {"prompt": ["one", "two"], "n": 2},
    "an echo": {"echo": True},
    "an echo with log-probabilities": {"echo": True, "logprobs": 2, "n": 2},
    "log-probabilities": {"logprobs": 0, "max_tokens": 40},
    "ids": {"return_token_ids": True, "echo": True},
    "a stop that is kept": {"stop": ["e", "o", "a"], "include_stop_str_in_output": True},
    "a stop that is cut off": {"stop": ["e", "o", "a"], "logprobs": 1, "max_tokens": 100},
    "an end": {"logit_bias": {"258": 100}, "logprobs": 1, "max_tokens": 3},
}


class TestAStream:
    @pytest.mark.parametrize("options", list(STREAMED.values()), ids=list(STREAMED))
    async def test_is_the_answer_in_pieces(self, serve: Serve, options: dict[str, Any]) -> None:
        body = {**GREEDY, "max_tokens": 24, **options}
        async with serve(radix=False) as served:
            whole = await served.post(PATH, body)
            streamed = await served.post(PATH, {**body, "stream": True})

        wanted = {choice["index"]: choice for choice in whole.json["choices"]}
        found = joined(streamed.chunks)
        for index, choice in wanted.items():
            choice.setdefault("token_ids", [])
            found[index].setdefault("token_ids", [])
            assert found[index] == choice
        assert found.keys() == wanted.keys()

    async def test_begins_with_the_prompt_that_it_echoes(self, serve: Serve) -> None:
        async with serve() as served:
            body = {**GREEDY, "echo": True, "stream": True, "return_token_ids": True}
            chunks = (await served.post(PATH, body)).chunks

        first, *others = [chunk["choices"][0] for chunk in chunks]
        assert first["text"].startswith(PROMPT)
        assert len(first["prompt_token_ids"]) == len(PROMPT)
        assert all("prompt_token_ids" not in choice for choice in others)

    async def test_has_one_choice_an_event_and_one_end_each(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post(PATH, {**GREEDY, "n": 3, "stream": True})

        assert answer.headers["Content-Type"].startswith("text/event-stream")
        ends = Counter[int]()
        for chunk in answer.chunks:
            (choice,) = chunk["choices"]
            ends[choice["index"]] += choice["finish_reason"] is not None
            assert "usage" not in chunk
        assert ends == {0: 1, 1: 1, 2: 1}
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in answer.chunks}) == 1

    async def test_says_its_usage_at_the_end_if_it_is_asked_to(self, serve: Serve) -> None:
        body = {**GREEDY, "prompt": ["one", "two"], "n": 2}
        async with serve(radix=False) as served:
            whole = await served.post(PATH, body)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = (await served.post(PATH, {**body, **options})).chunks

        *others, last = chunks
        assert (last["choices"], last["usage"]) == ([], whole.json["usage"])
        assert all(chunk["usage"] is None for chunk in others)

    async def test_that_cannot_be_served_is_refused_before_it_begins(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.post(PATH, {**GREEDY, "temperature": -1, "stream": True})

        assert (answer.status, answer.error["param"]) == (400, "temperature")
        assert answer.headers["Content-Type"].startswith("application/json")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "0 asks for nothing; set echo or logprobs"),
    ({"max_tokens": -1}, "max_tokens", "must be at least 0, got -1"),
    ({"max_tokens": 0, "echo": True, "regex": "a"}, "max_tokens", "it is 0"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "more than max"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20, got 21"),
    ({"logprobs": -1}, "logprobs", "between 0 and 20, got -1"),
    ({"logprobs": True}, "logprobs", "got `bool`"),
    ({"suffix": "."}, "suffix", "it fills no gaps"),
    ({"best_of": 2}, "best_of", "expected 1 or n, which is 1"),
    ({"best_of": 3, "n": 2}, "best_of", "expected 1 or n, which is 2"),
    ({"best_of": 0}, "best_of", "expected 1 or n"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 257}, "n", "257 choices of each of 1 prompts are more than 256 in all"),
    ({"prompt": ["a"] * 257}, "prompt", "1 choices of each of 257 prompts are more than"),
    ({"prompt": ["a"] * 129, "n": 2}, "n", "more than 256"),
    ({"echo": "yes"}, "echo", "got `str`"),
    ({"regex": "(abc"}, "regex", "(abc"),
    ({"stop_regex": "(abc"}, "stop_regex", "(abc"),
    ({"top_logprobs": 2}, "top_logprobs", "unknown field"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only a stream"),
]


class TestARefusal:
    async def test_names_the_field(self, serve: Serve) -> None:
        async with serve() as served:
            for options, param, message in REFUSED:
                answer = await served.post(PATH, {**GREEDY, **options})

                assert answer.status == 400, options
                assert message in answer.error["message"]
                assert answer.error["param"] == param
            assert served.engine.statistics().steps == 0

    async def test_spares_what_asks_for_nothing_else(self, serve: Serve) -> None:
        async with serve() as served:
            for options in (
                {"best_of": 1},
                {"best_of": 2, "n": 2},
                {"best_of": None, "suffix": None},
            ):
                assert await texts(served, **options)

    async def test_of_more_than_could_ever_wait_says_so(self, serve: Serve) -> None:
        async with serve(max_running=2, max_waiting=1) as served:
            several = await served.post(PATH, {**GREEDY, "n": 3})
            more = await served.post(PATH, {**GREEDY, "n": 4})

        assert several.status == 200
        assert (more.status, more.error["param"]) == (400, "n")


class TestManyAtOnce:
    async def test_answer_each_its_own(self, serve: Serve) -> None:
        prompts = [f"number {n}" for n in range(60)]
        async with serve(max_running=8) as served:
            answer = await served.post(
                PATH, {**GREEDY, "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1}
            )
            now = served.engine.statistics()

        found = answer.json["choices"]
        assert [choice["text"][: len(prompts[n])] for n, choice in enumerate(found)] == prompts
        assert (now.running, now.waiting, now.slots_held) == (0, 0, 0)

    async def test_end_together_when_one_fails(self, serve: Serve) -> None:
        async with serve() as served:
            answer: Answer = await served.post(
                PATH, json.dumps({**GREEDY, "prompt": [[1], [2], [999]]})
            )
            now = served.engine.statistics()

        assert answer.status == 400
        assert (now.running, now.waiting) == (0, 0)
