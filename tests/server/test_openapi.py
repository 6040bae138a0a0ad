"""The OpenAPI document: complete, valid, and true of what the server takes and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from aiohttp import ClientSession, web

from structgen import Engine, State, program
from structgen.server import ServerConfig, add_routes
from structgen.server.routes import ROUTES
from tests.server.served import ENGINE_OPTIONS, Serve, Served

pytestmark = pytest.mark.anyio
CONFIG = ServerConfig(names=("tiny",))
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


class Place(msgspec.Struct):
    name: str
    inner: Place | None = None


@program
async def visit(s: State, place: Place, days: int = 1) -> list[Place]:
    """Goes there."""
    s += place.name
    await s.gen("text", max_tokens=days)
    return [place]


@program
async def greet(s: State) -> Any:
    s += "hello"
    return await s.gen("text", max_tokens=2)


async def document(served: Served, **headers: str) -> Any:
    answer = await served.get("/openapi.json", **headers)
    assert answer.status == 200
    return answer.json


def operations(found: Any) -> dict[tuple[str, str], Any]:
    return {
        (method.upper(), path): operation
        for path, item in found["paths"].items()
        for method, operation in item.items()
    }


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def is_valid(found: Any, schema: Any, value: Any) -> bool:
    whole = {**schema, "components": found["components"]}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(value))


def body_schema(found: Any, path: str) -> Any:
    operation = found["paths"][path]["post"]
    return operation["requestBody"]["content"]["application/json"]["schema"]


def answer_schema(found: Any, method: str, path: str, status: str, kind: str = "json") -> Any:
    media = "text/event-stream" if kind == "event" else "application/json"
    return found["paths"][path][method]["responses"][status]["content"][media]["schema"]


class TestTheDocument:
    async def test_has_every_route(self, serve: Serve) -> None:
        async with serve(programs=[visit, greet], config=CONFIG) as served:
            found = operations(await document(served))

        expected = {(r.method, re.sub(r":[^}]*}", "}", r.path)) for r in ROUTES}
        expected -= {("POST", "/v1/programs/{name}")}
        expected |= {("POST", "/v1/programs/visit"), ("POST", "/v1/programs/greet")}
        assert found.keys() == expected

    async def test_says_something_of_every_route(self, serve: Serve) -> None:
        async with serve(programs=[visit], config=CONFIG) as served:
            found = operations(await document(served))

        names = [operation["operationId"] for operation in found.values()]
        assert len(set(names)) == len(names)
        assert all(operation["summary"] for operation in found.values())
        for (_, path), operation in found.items():
            declared = [each["name"] for each in operation.get("parameters", [])]
            assert declared == re.findall(r"{(\w+)}", path)
        assert found["POST", "/v1/programs/visit"]["description"] == "Goes there."

    async def test_refers_to_nothing_that_is_not_there(self, serve: Serve) -> None:
        async with serve(programs=[visit], config=CONFIG) as served:
            found = await document(served)

        schemas = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
        assert set(references(found)) <= schemas

    async def test_has_schemas_that_are_schemas(self, serve: Serve) -> None:
        async with serve(programs=[visit], config=CONFIG) as served:
            found = await document(served)

        for name, schema in found["components"]["schemas"].items():
            assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)
            jsonschema.Draft202012Validator.check_schema(schema)

    async def test_asks_for_a_key_where_there_are_keys(self, serve: Serve) -> None:
        async with serve() as served:
            without = await document(served)
        async with serve(config=ServerConfig(api_keys=("k",))) as served:
            assert (await served.get("/openapi.json")).status == 401
            found = await document(served, Authorization="Bearer k")

        assert "securitySchemes" not in without["components"]
        assert found["components"]["securitySchemes"] == {
            "key": {"type": "http", "scheme": "bearer"}
        }
        chat = found["paths"]["/v1/chat/completions"]["post"]
        assert chat["security"] == [{"key": []}]
        assert {"401", "429"} <= chat["responses"].keys()

    async def test_knows_where_an_application_has_put_it(self, tiny_chat_model: Any) -> None:
        async with Engine(tiny_chat_model, **ENGINE_OPTIONS) as engine:
            app, inner = web.Application(), web.Application()
            add_routes(inner, engine)
            app.add_subapp("/llm", inner)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                async with ClientSession(url) as client:
                    response = await client.get("/llm/openapi.json")
                    found = await response.json()
            finally:
                await runner.cleanup()

        assert found["servers"] == [{"url": "/llm"}]


class TestASchemaOfABody:
    @pytest.mark.parametrize(
        ("path", "body", "valid"),
        [
            ("/v1/chat/completions", CHAT, True),
            ("/v1/chat/completions", {**CHAT, "temperature": -1}, False),
            ("/v1/chat/completions", {**CHAT, "n": 0}, False),
            ("/v1/chat/completions", {**CHAT, "stpo": ["x"]}, False),
            ("/v1/chat/completions", {**CHAT, "model": "another"}, False),
            ("/v1/chat/completions", {**CHAT, "stop": None, "user": "me"}, True),
            ("/v1/chat/completions", {}, False),
            ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1}, True),
            ("/v1/programs/visit", {"arguments": {"place": {"name": "a"}}}, True),
            ("/v1/programs/visit", {"arguments": {"place": {"name": 1}}}, False),
            ("/v1/programs/visit", {"arguments": {"place": {"name": "a"}, "day": 1}}, False),
            ("/v1/programs/visit", {}, False),
            ("/v1/programs/greet", {}, True),
            ("/v1/programs/greet", {"options": {"top_p": 0}}, False),
            ("/v1/programs/greet", {"budget": {"tokens": 0}}, False),
        ],
        ids=lambda each: json.dumps(each) if isinstance(each, dict) else str(each),
    )
    async def test_holds_of_what_the_server_takes(
        self, serve: Serve, path: str, body: Any, valid: bool
    ) -> None:
        async with serve(programs=[visit, greet], config=CONFIG) as served:
            found = await document(served)
            status = (await served.post(path, body)).status

        assert is_valid(found, body_schema(found, path), body) is valid
        assert (status == 200) is valid


class TestASchemaOfAnAnswer:
    async def test_holds_of_the_answer(self, serve: Serve) -> None:
        arguments = {"arguments": {"place": {"name": "a", "inner": {"name": "b"}}}}
        async with serve(programs=[visit], config=CONFIG) as served:
            found = await document(served)
            for method, path, body in (
                ("post", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
                ("post", "/v1/programs/visit", arguments),
                ("get", "/v1/programs", None),
            ):
                answer = await served.send(method.upper(), path, body)
                assert answer.status == 200
                assert is_valid(found, answer_schema(found, method, path, "200"), answer.json)

    async def test_holds_of_events(self, serve: Serve) -> None:
        arguments = {"arguments": {"place": {"name": "a"}}}
        async with serve(programs=[visit], config=CONFIG) as served:
            found = await document(served)
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/programs/visit", arguments)):
                answer = await served.post(path, {**body, "stream": True})
                event = answer_schema(found, "post", path, "200", "event")["properties"]["data"]
                schema = event.get("anyOf", [event])[0]["contentSchema"]
                events = [json.loads(event) for event in answer.events if event != "[DONE]"]
                assert len(events) > 2
                assert [event for event in events if not is_valid(found, schema, event)] == []

    async def test_holds_of_errors(self, serve: Serve) -> None:
        async with serve(
            programs=[visit], config=ServerConfig(names=("tiny",), max_body=500)
        ) as served:
            found = await document(served)
            for status, body in ((400, {}), (404, {**CHAT, "model": "x"}), (413, " " * 501)):
                answer = await served.post("/v1/chat/completions", body)
                schema = answer_schema(found, "post", "/v1/chat/completions", str(status))
                assert answer.status == status
                assert is_valid(found, schema, answer.json)
