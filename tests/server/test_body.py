"""What a body may have: counted before it is decoded, refused by the name of the field."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from structgen.server.body import MOST_PARTS, MOST_VALUES, check_counts, decoded
from structgen.server.config import ServerConfig
from structgen.server.errors import ApiError
from structgen.server.openai.wire import ChatBody, CompletionBody
from tests.engine.test_responsive import LIMIT, TRIES, Ticker
from tests.engine.tiny import write_tiny_model
from tests.server.served import Answer, Serve, Served, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": f"f{n}", "parameters": PARAMETERS}}
    for n in range(300)
]
TAGS = [{"begin": f"<f={n}>", "schema": PARAMETERS, "end": "</f>"} for n in range(300)]


@pytest.fixture
def without_pauses() -> Iterator[None]:
    """The collector looks through all that the test session keeps, which is not the server's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def completion(field: str, value: str, *, prompt: str = '"a"') -> bytes:
    return f'{{"model": "tiny", "prompt": {prompt}, "max_tokens": 1, "{field}": {value}}}'.encode()


def listed(value: str, count: int) -> str:
    return f"[{','.join([value] * count)}]"


def mapped(value: str, count: int) -> str:
    members = (f'"{n}":{value}' for n in range(count))
    return f"{{{','.join(members)}}}"


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": HI, "max_tokens": 1, **fields}).encode()


async def refused(data: bytes, type_: type[msgspec.Struct]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await check_counts(data, type_)
    return caught.value


class TestTheCount:
    @pytest.mark.parametrize(
        "value",
        [
            listed("[5]", MOST_PARTS + 10),
            listed("{}", MOST_PARTS + 10),
            listed('"ab"', MOST_PARTS + 10),
            listed("5", MOST_VALUES + 10),
        ],
        ids=["lists", "objects", "texts", "numbers"],
    )
    async def test_refuses_too_many_by_the_field_that_has_them(self, value: str) -> None:
        error = await refused(completion("prompt", value, prompt="1"), CompletionBody)

        assert (error.status, error.param) == (400, "prompt")
        assert f"{MOST_VALUES:,} values" in error.message or f"{MOST_PARTS:,} li" in error.message

    async def test_blames_no_field_where_none_has_most_of_it(self) -> None:
        data = completion("nonsense", listed("{}", MOST_PARTS + 10))

        assert (await refused(data, CompletionBody)).param is None

    @pytest.mark.parametrize(
        "text",
        ['[{"a": 1},', "\\\\\\", '\\"', '"[{,', "é\\u00e9,"],
        ids=["json", "b", "q", "m", "u"],
    )
    async def test_is_not_of_what_a_text_spells(self, text: str) -> None:
        """However the text is cut into slices: an escape may stand anywhere in them."""
        for before in range(3):
            content = "x" * before + text * 300_000
            await check_counts(chat(messages=[{"role": "user", "content": content}]), ChatBody)

    async def test_begins_again_behind_a_text(self) -> None:
        text, many = json.dumps('\\"' * 100_000), listed("[]", MOST_PARTS)

        error = await refused(completion("user", many, prompt=text), CompletionBody)

        assert f"{MOST_PARTS:,} lists" in error.message


class TestADecodedBody:
    def test_leaves_the_collector_as_it_was(self) -> None:
        data = completion("stop", listed('"ab"', 50_000))

        assert len(decoded(data, dict)["stop"]) == 50_000
        assert gc.isenabled()
        with pytest.raises(msgspec.DecodeError):
            decoded(data[:-1], dict)
        assert gc.isenabled()


async def watched(served: Served, path: str, data: bytes) -> tuple[float, Answer]:
    """How late the event loop was, at worst, and what was answered."""
    ticker = Ticker()
    async with ticker.running():
        answer = await served.post(path, data)
    return ticker.worst, answer


LETTER = '"a"'


def large() -> Iterator[tuple[str, bytes, str]]:
    """Bodies, where they are sent, and the field that is to blame; "" where they are served."""
    tags = {"type": "structural_tag", "structures": TAGS, "triggers": ["<f="]}
    parts = [{"type": "text", "text": "a"}] * 10_000
    variables = dict.fromkeys(map(str, range(20_000)))
    yield CHAT, chat(tools=TOOLS, tool_choice="required"), "messages"
    yield CHAT, chat(response_format=tags), ""
    yield CHAT, chat(messages=HI * 10_001), "messages"
    yield CHAT, chat(messages=[{"role": "user", "content": parts}]), "messages"
    yield CHAT, chat(chat_template_kwargs=variables), "chat_template_kwargs"
    for field, value in (
        ("logit_bias", mapped("1", 300_000)),
        ("logit_bias", mapped("1", 70_000)),
        ("stop_token_ids", listed("5", 1_000_000)),
        ("stop_token_ids", listed("5", 400_000)),
        ("stop", listed('"ab"', 500_000)),
        ("structured_outputs", f'{{"choice": {listed(LETTER, 80_000)}}}'),
        ("json_schema", f'{{"enum": {listed(LETTER, 80_000)}}}'),
    ):
        yield COMPLETIONS, completion(field, value), field
    for prompt in (
        listed("5", 1_000_000),
        listed(LETTER, 80_000),
        listed("[5]", 60_000),
        f'"{"ab" * 2_000_000}"',
    ):
        yield COMPLETIONS, completion("user", "1", prompt=prompt), "prompt"


class TestALargeBody:
    @pytest.mark.usefixtures("without_pauses")
    async def test_leaves_the_event_loop_free(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(names=("tiny",))) as served:
            for path, data, param in large():
                lag, answer = await watched(served, path, data)
                lags = [lag]
                while min(lags) >= LIMIT and len(lags) < TRIES:
                    lag, answer = await watched(served, path, data)
                    lags.append(lag)

                assert min(lags) < LIMIT, (data[-80:], lags)
                assert answer.status == (400 if param else 200), answer.text[:200]
                if param:
                    assert answer.error["param"].startswith(param), answer.text[:200]


class TestManyMessages:
    @pytest.mark.usefixtures("without_pauses")
    @pytest.mark.parametrize(
        "content", ["a", [{"type": "text", "text": "a"}]], ids=["text", "parts"]
    )
    async def test_leave_the_event_loop_free(self, tmp_path: Path, content: object) -> None:
        message = {"role": "user", "content": content}
        data = json.dumps({"messages": [message] * 3_000}).encode()
        model = write_tiny_model(tmp_path, max_context=30_000)
        async with serving(model) as served:
            lag, answer = await watched(served, "/tokenize", data)
            lags = [lag]
            while min(lags) >= LIMIT and len(lags) < TRIES:
                lag, answer = await watched(served, "/tokenize", data)
                lags.append(lag)

        assert answer.json["count"] == 3_000 * len("<user\na>\n") + len("<assistant\n")
        assert min(lags) < LIMIT
