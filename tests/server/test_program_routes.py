"""Programs as endpoints: their arguments, what they answer, what they tell while they run."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from structgen import State, program
from structgen.errors import OptionError
from structgen.program.program import Program
from structgen.server import ServerConfig
from tests.server.served import Answer, Serve, Served

pytestmark = pytest.mark.anyio


class Place(msgspec.Struct):
    name: str
    floor: int = 0


class Spot(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=5)]


@program
async def tip(s: State, topic: str, words: Annotated[int, msgspec.Meta(ge=1)] = 5) -> str:
    """One tip.

    About a topic.
    """
    s += f"A tip about {topic}:"
    return await s.gen("tip", max_tokens=words, ignore_eos=True)


@program
async def visit(s: State, place: Place, others: list[Place] | None = None) -> list[Place]:
    s += place.name
    s["floor"] = place.floor
    await s.gen(max_tokens=1)
    return [place, *(others or [])]


@program
async def spot(s: State, spot: Spot) -> Spot:
    s += spot.name
    await s.gen(max_tokens=1)
    return spot


@program
async def sides(s: State, idea: str, voice: Literal["loud", "calm"] = "calm") -> list[str]:
    """Forks, generates on both branches, and chooses."""
    s += f"{idea}, said {voice}:"
    async with s.fork(2) as branches:
        for index, branch in enumerate(branches):
            branch.append(f" side {index}")
        texts = [await branch.gen("side", max_tokens=3, ignore_eos=True) for branch in branches]
    await s.select("choice", ["yes", "no"])
    return texts


@program
async def long(s: State, tokens: int = 3000) -> str:
    s += "on and on"
    return await s.gen("text", max_tokens=tokens, ignore_eos=True)


@program
async def free(s: State, prompt: str = "hi") -> str:
    s += prompt
    return await s.gen("text")


@program
async def chat(s: State, question: str) -> str:
    s.user(question)
    with s.assistant():
        return await s.gen("answer", max_tokens=4)


@program
async def failing(s: State, how: str, first: bool = False) -> Any:
    if first:
        s += "first"
        await s.gen("text", max_tokens=2, ignore_eos=True)
    match how:
        case "group":
            raise ExceptionGroup("branches", [LookupError("in a group")])
        case "cancel":
            raise asyncio.CancelledError
        case "reset":
            raise ConnectionResetError("of a database")
        case "value" | "number":
            return {"means": [0.5, math.nan if how == "number" else object()]}
        case "half" | "digits":
            return ["\ud800" if how == "half" else 10**5000]
        case "variable" | "infinite":
            s["odd"], s["even"] = {"mean": math.inf} if how == "infinite" else object(), 2
        case "option":
            s += "text"
            await s.gen(max_tokens=-1)
        case "constraint":
            s += "text"
            await s.gen(regex="(")
        case _:
            raise LookupError("half \ud800" if how == "surrogate" else f"no {how}")
    return None


@program
async def exits(s: State) -> None:
    s += "the end"
    sys.exit(3)


@program
async def cancels(s: State) -> None:
    s += "the end"
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


PROGRAMS = (tip, visit, spot, sides, long, free, chat, failing, exits, cancels)


def run(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return f"/v1/programs/{name}", {"arguments": arguments, "options": {"temperature": 0}}


async def refused(served: Served, name: str, **body: Any) -> tuple[int, str | None, str]:
    """Status, param and message of a request that is answered by an error."""
    answer = await served.post(f"/v1/programs/{name}", body)
    return answer.status, answer.error["param"], answer.error["message"]


def told(answer: Answer) -> list[tuple[str, Any]]:
    """Name and data of each event."""
    found: list[tuple[str, Any]] = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def idle(served: Served, seconds: float = 1.0) -> bool:
    """Whether the engine has nothing to do, within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        statistics = served.engine.statistics()
        if statistics.running == statistics.waiting == 0:
            return True
        await asyncio.sleep(0.01)
    return False


class TestTheList:
    async def test_describes_every_program(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            listed = (await served.get("/v1/programs")).json

        assert listed["object"] == "list"
        assert [each["name"] for each in listed["data"]] == [p.__name__ for p in PROGRAMS]
        assert listed["data"][0] == {
            "name": "tip",
            "object": "program",
            "description": "One tip.\n\nAbout a topic.",
            "parameters": {
                "type": "object",
                "properties": {
                    "topic": {"type": "string"},
                    "words": {"type": "integer", "minimum": 1, "default": 5},
                },
                "required": ["topic"],
                "additionalProperties": False,
            },
            "returns": {"type": "string"},
        }

    async def test_has_each_program_by_its_name(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            listed = (await served.get("/v1/programs")).json["data"]
            shown = [(await served.get(f"/v1/programs/{p.__name__}")).json for p in PROGRAMS]

        assert shown == listed

    async def test_knows_no_return_type_that_says_nothing(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            assert (await served.get("/v1/programs/failing")).json["returns"] is None

    async def test_names_the_nearest_program_for_one_that_is_not_there(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            answers = [await served.get("/v1/programs/sied"), await served.post(*run("sied"))]

        for answer in answers:
            assert answer.status == 404
            assert answer.error["code"] == "program_not_found"
            assert "did you mean sides?" in answer.error["message"]


class TestWhatCannotBeServed:
    def refusal(self, programs: list[Any], error: type[Exception]) -> str:
        from structgen.server.endpoint import endpoints

        with pytest.raises(error) as caught:
            endpoints(programs)
        return str(caught.value)

    def test_is_no_program(self) -> None:
        async def bare(s: State) -> None: ...

        assert "expected functions under @program" in self.refusal([bare], TypeError)

    def test_has_the_name_of_another(self) -> None:
        assert "two programs are named 'tip'" in self.refusal([tip, tip], ValueError)

    def test_takes_arguments_without_names(self) -> None:
        @program
        async def many(s: State, *topics: str) -> None: ...

        @program
        async def any_name(s: State, /, **topics: str) -> None: ...

        for each in (many, any_name):
            message = self.refusal([each], OptionError)
            assert f"{each.__name__} cannot be served" in message
            assert "gives arguments by name" in message

    def test_takes_what_json_has_no_form_for_unless_that_is_bound(self) -> None:
        from structgen.server.endpoint import endpoints

        @program
        async def odd(s: State, value: complex, topic: str) -> None: ...

        assert "bind() what clients cannot give" in self.refusal([odd], OptionError)
        bound: Program[..., None] = odd.bind(value=1j)
        assert endpoints([bound])["odd"].parameters["properties"] == {"topic": {"type": "string"}}


class TestARun:
    async def test_answers_what_the_program_gives_in_process(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            answer = await served.post(*run("tip", topic="sleep", words=6))
            result = await tip.using(temperature=0).run(served.engine, "sleep", words=6)

        assert answer.status == 200
        found = answer.json
        assert found.pop("id").startswith("run-")
        assert abs(found.pop("created") - time.time()) < 60
        assert found == {
            "object": "program.result",
            "program": "tip",
            "value": result.value,
            "text": result.text(),
            "variables": {"tip": result.value},
            "usage": {
                "prompt_tokens": 18,
                "completion_tokens": 6,
                "total_tokens": 24,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }

    async def test_gives_the_programs_own_options_first(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            path, body = run("tip", topic="a", words=3)
            body["options"]["max_tokens"] = 1
            own = await served.post(path, body)
            path, body = run("free")
            body["options"] |= {"max_tokens": 2, "ignore_eos": True}
            asked = await served.post(path, body)

        assert own.json["usage"]["completion_tokens"] == 3
        assert asked.json["usage"]["completion_tokens"] == 2

    async def test_is_repeated_by_its_seed(self, serve: Serve) -> None:
        async def drawn(seed: int) -> str:
            body = {"arguments": {"topic": "a", "words": 20}, "options": {"seed": seed}}
            return str((await served.post("/v1/programs/tip", body)).json["value"])

        async with serve(programs=PROGRAMS) as served:
            assert await drawn(1) == await drawn(1) != await drawn(2)

    async def test_reads_values_of_structs_and_models_and_writes_them(self, serve: Serve) -> None:
        place, other = {"name": "hall", "floor": 0}, {"name": "roof", "floor": 9}
        async with serve(programs=PROGRAMS) as served:
            visited = await served.post(*run("visit", place={"name": "hall"}, others=[other]))
            spotted = await served.post(*run("spot", spot={"name": "nook"}))

        assert visited.json["value"] == [place, other]
        assert visited.json["variables"] == {"floor": 0}
        assert spotted.json["value"] == {"name": "nook"}

    async def test_needs_no_arguments_where_all_have_defaults(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            options = {"options": {"max_tokens": 1}}
            for body in (options, {**options, "arguments": None}, {**options, "arguments": {}}):
                assert (await served.post("/v1/programs/free", body)).status == 200

    async def test_takes_the_chat_template_of_the_model(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            text = (await served.post(*run("chat", question="hi<|im_end|>"))).json["text"]

        assert text.startswith("<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n")

    async def test_counts_tokens_of_all_branches(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            found = (await served.post(*run("sides", idea="cats"))).json

        assert found["usage"]["completion_tokens"] == 6
        assert found["variables"].keys() == {"choice"}
        assert len(found["value"]) == 2


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("name", "arguments", "param", "message"),
        [
            ("tip", {}, "arguments.topic", "missing"),
            ("tip", {"topic": 3}, "arguments.topic", "Expected `str`"),
            ("tip", {"topic": "a", "word": 3}, "arguments.word", "did you mean words?"),
            ("tip", {"topic": "a", "words": 0}, "arguments.words", ">= 1"),
            ("tip", [], "arguments", "Expected `object`"),
            ("visit", {"place": {}}, "arguments.place.name", "missing"),
            ("visit", {"place": {"name": "a", "wing": 1}}, "arguments.place", "wing"),
            ("spot", {"spot": {"name": "a", "wing": 1}}, "arguments.spot", "wing"),
            ("visit", {"place": {"name": "a"}, "others": [1]}, "arguments.others[0]", "object"),
            ("spot", {"spot": {"name": "a long name"}}, "arguments.spot.name", "at most 5"),
            ("spot", {}, "arguments.spot", "required"),
            ("spot", {"spot": {"name": "a"}, "at": 1}, "arguments.at", "not permitted"),
            ("sides", {"idea": "a", "voice": "shrill"}, "arguments.voice", '"calm", "loud"'),
        ],
    )
    async def test_is_an_argument_that_the_program_does_not_take(
        self, serve: Serve, name: str, arguments: Any, param: str, message: str
    ) -> None:
        async with serve(programs=PROGRAMS) as served:
            status, found, said = await refused(served, name, arguments=arguments)

        assert status == 400
        assert message in said
        assert (found, said.partition(": ")[0]) == (param, param)

    @pytest.mark.parametrize(
        ("body", "status", "param"),
        [
            ({"argument": {}}, 400, "argument"),
            ({"options": {"temperatur": 1}}, 400, "options.temperatur"),
            ({"options": {"regex": "a"}}, 400, "options.regex"),
            ({"options": {"temperature": -1}}, 400, "options.temperature"),
            ({"options": {"logit_bias": {"a": 1}}}, 400, "options.logit_bias"),
            ({"options": {"logit_bias": {"999999": 1}}}, 400, "options.logit_bias"),
            ({"budget": {"tokens": 0}}, 400, "budget.tokens"),
            ({"budget": {"seconds": 0}}, 400, "budget.seconds"),
            ({"model": "another"}, 404, "model"),
            ({"arguments": {"prompt": ""}}, 400, None),
            ({"arguments": {"prompt": "a" * 5000}}, 400, None),
        ],
        ids=str,
    )
    async def test_is_named_where_the_body_has_it(
        self, serve: Serve, body: Any, status: int, param: str | None
    ) -> None:
        async with serve(programs=PROGRAMS) as served:
            for stream in (False, True):
                found = await refused(served, "free", **body, stream=stream)
                assert found[:2] == (status, param)

    async def test_is_a_body_that_is_no_json(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            for body in ("", "{", "[" * 100_000, b"\xff", '{"arguments": {"prompt": "\\ud800"}}'):
                assert (await served.post("/v1/programs/free", body)).status == 400


class TestABudget:
    async def test_ends_a_run_that_generates_more(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            found = await refused(served, "long", budget={"tokens": 5})
            idles = await idle(served)

        assert found[:2] == (400, "budget.tokens")
        assert "more than its budget of 5 tokens" in found[2]
        assert idles

    async def test_is_the_least_of_the_clients_and_the_programs(self, serve: Serve) -> None:
        async with serve(programs=[long.budget(tokens=3)]) as served:
            for asked in (2, 100, None):
                _, _, message = await refused(served, "long", budget={"tokens": asked})
                assert f"budget of {min(asked or 3, 3)} tokens" in message

    async def test_of_the_client_in_seconds_is_the_clients_fault(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            found = await refused(served, "long", budget={"seconds": 0.05})
            assert found[:2] == (400, "budget.seconds")
            assert await idle(served)

    async def test_of_the_server_in_seconds_is_a_timeout(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS, config=ServerConfig(request_timeout=0.05)) as served:
            answer = await served.post("/v1/programs/long", {"budget": {"seconds": 60}})
            assert (answer.status, answer.error["code"]) == (504, "timeout")
            assert await idle(served)


class TestAStream:
    async def test_tells_what_happens_and_then_the_result(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            path, body = run("tip", topic="sleep")
            whole = (await served.post(path, body)).json
            answer = await served.post(path, {**body, "stream": True})

        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = told(answer)
        names = [name for name, _ in events]
        assert names[:3] == ["run_started", "program_entered", "call_started"]
        assert names[-4:] == ["variable_set", "program_left", "run_ended", "result"]
        assert all(data["event"] == name for name, data in events[:-1])
        text = "".join(data["text"] for name, data in events if name == "text_delta")
        assert text == whole["value"]
        for key in ("program", "value", "text", "variables"):
            assert events[-1][1][key] == whole[key]

    async def test_counts_time_from_the_beginning(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            path, body = run("tip", topic="sleep")
            events = told(await served.post(path, {**body, "stream": True}))

        times = [data["at"] for name, data in events if name != "result"]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] < 60

    async def test_tells_branches_apart(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            path, body = run("sides", idea="cats")
            events = told(await served.post(path, {**body, "stream": True}))

        branches = [data["branch"] for name, data in events if name == "branch_opened"]
        assert branches == [[0], [1]]
        texts = {
            state: "".join(
                data["text"]
                for name, data in events
                if name == "text_delta" and data["state"] == state
            )
            for state in (1, 2)
        }
        assert list(texts.values()) == events[-1][1]["value"]

    async def test_leaves_out_the_value_that_json_has_no_form_for(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            events = told(
                await served.post(
                    "/v1/programs/failing", {"arguments": {"how": "variable"}, "stream": True}
                )
            )

        variables = [data for name, data in events if name == "variable_set"]
        assert [each["name"] for each in variables] == ["odd", "even"]
        assert ["value" in each for each in variables] == [False, True]
        assert events[-1][1]["omitted"] == ["odd"]

    async def test_has_a_status_for_what_fails_before_anything_was_computed(
        self, serve: Serve
    ) -> None:
        async with serve(programs=PROGRAMS) as served:
            body = {"arguments": {"how": "luck"}, "stream": True}
            answer = await served.post("/v1/programs/failing", body)

        assert answer.status == 500
        assert answer.error["message"] == "the program failing raised LookupError: no luck"

    async def test_ends_by_an_error_event_after_that(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            body = {"arguments": {"how": "luck", "first": True}, "stream": True}
            answer = await served.post("/v1/programs/failing", body)

        assert answer.status == 200
        name, data = told(answer)[-1]
        assert name == "error"
        assert data["error"]["message"] == "the program failing raised LookupError: no luck"
        assert "result" not in [name for name, _ in told(answer)]


class TestAProgramThatFails:
    @pytest.mark.parametrize(
        ("how", "status", "code", "message"),
        [
            ("luck", 500, "program_failed", "failing raised LookupError: no luck"),
            ("group", 500, "program_failed", "failing raised LookupError: in a group"),
            ("reset", 500, "program_failed", "ConnectionResetError: of a database"),
            ("surrogate", 500, "program_failed", "LookupError: half ?"),
            ("value", 500, "value_not_json", "returned a dict, which cannot be written as JSON"),
            ("half", 500, "value_not_json", "half of a surrogate pair"),
            ("digits", 500, "value_not_json", "4300 digits"),
            ("number", 500, "value_not_json", "`means[1]` is nan, and JSON has no such number"),
            ("option", 500, "program_failed", "OptionError: max_tokens: must be at least 0"),
            ("constraint", 500, "program_failed", "ConstraintError: regex '('"),
        ],
    )
    async def test_says_by_what_and_no_more(
        self, serve: Serve, how: str, status: int, code: str | None, message: str
    ) -> None:
        async with serve(programs=PROGRAMS) as served:
            answer = await served.post(*run("failing", how=how))

        assert (answer.status, answer.error["code"]) == (status, code)
        assert message in answer.error["message"]
        assert answer.error["param"] is None
        assert "Traceback" not in answer.text
        assert ".py" not in answer.text

    async def test_leaves_a_log_that_can_be_written(
        self, serve: Serve, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serve(programs=PROGRAMS) as served:
            await served.post(*run("failing", how="surrogate"))

        assert b"LookupError: half ?" in caplog.text.encode()

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("asked", [run("failing", how="cancel"), run("cancels")])
    async def test_may_cancel_itself(
        self, serve: Serve, asked: tuple[str, dict[str, Any]], stream: bool
    ) -> None:
        path, body = asked
        async with serve(programs=PROGRAMS) as served:
            answer = await served.post(path, {**body, "stream": stream})

        assert answer.status == 500
        assert "cancelled" in answer.error["message"]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_ends_no_server_by_an_exit(self, serve: Serve, stream: bool) -> None:
        async with serve(programs=PROGRAMS) as served:
            path, body = run("exits")
            answer = await served.post(path, {**body, "stream": stream})
            after = await served.get("/health")

        assert (answer.status, after.status) == (500, 200)
        assert "SystemExit: 3" in answer.error["message"]

    @pytest.mark.parametrize("how", ["variable", "infinite"])
    async def test_omits_variables_that_json_has_no_form_for(self, serve: Serve, how: str) -> None:
        async with serve(programs=PROGRAMS) as served:
            found = (await served.post(*run("failing", how=how))).json

        assert (found["value"], found["variables"], found["omitted"]) == (
            None,
            {"even": 2},
            ["odd"],
        )

    async def test_costs_its_key_what_it_has_used(self, serve: Serve) -> None:
        config = ServerConfig(api_keys=("k",), key_tokens=1)
        async with serve(programs=PROGRAMS, config=config) as served:
            path, body = run("failing", how="luck", first=True)
            first = await served.post(path, body, Authorization="Bearer k")
            second = await served.post(path, body, Authorization="Bearer k")

        assert (first.status, second.status) == (500, 429)


class TestAClientThatLeaves:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_ends_the_program_and_its_requests(self, serve: Serve, stream: bool) -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        @program
        async def endless(s: State) -> None:
            s += "on and on"
            try:
                async with s.stream(max_tokens=3000, ignore_eos=True) as pieces:
                    async for _ in pieces:
                        begun.set()
            finally:
                ended.set()

        async with serve(programs=[endless]) as served:
            body = {"stream": stream}
            asking = asyncio.create_task(served.client.post("/v1/programs/endless", json=body))
            await asyncio.wait_for(begun.wait(), 2)
            if stream:
                (await asking).close()
            else:
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            await asyncio.wait_for(ended.wait(), 2)
            assert await idle(served)
            statistics = served.engine.statistics()

        assert statistics.slots_held == 0


class TestTheCache:
    def cached(self, answer: Answer) -> int:
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def test_is_shared_by_runs_of_one_salt_only(self, serve: Serve) -> None:
        async with serve(programs=PROGRAMS) as served:
            found = []
            for salt in (None, None, "a", "b", "a"):
                path, body = run("tip", topic="the weather of tomorrow")
                found.append(self.cached(await served.post(path, {**body, "cache_salt": salt})))

        assert found[0] == found[2] == found[3] == 0
        assert found[1] == found[4] > 0

    async def test_of_one_key_is_no_other_keys(self, serve: Serve) -> None:
        config = ServerConfig(api_keys=("first", "second"))
        async with serve(programs=PROGRAMS, config=config) as served:
            found = []
            for key in ("first", "second", "first"):
                path, body = run("sides", idea="a cat cafe in the old town")
                found.append(await served.post(path, body, Authorization=f"Bearer {key}"))

        first, second, again = map(self.cached, found)
        assert first == second < again
