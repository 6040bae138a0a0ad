"""`/v1/models`: what is served, by each of its names."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from structgen.server import ServerConfig
from tests.server.served import Serve


class TestTheList:
    async def test_has_all_names_in_order(self, serve: Serve) -> None:
        config = ServerConfig(names=("small", "org/small"))
        async with serve(config=config) as served:
            answer = await served.get("/v1/models")

        assert answer.json["object"] == "list"
        assert [each["id"] for each in answer.json["data"]] == ["small", "org/small"]
        first = answer.json["data"][0]
        assert first == {
            "id": "small",
            "object": "model",
            "created": served.service.created,
            "owned_by": "structgen",
            "root": first["root"],
            "max_model_len": 4096,
        }

    async def test_has_the_engines_own_names_if_none_were_given(self, serve: Serve) -> None:
        async with serve() as served:
            answer = await served.get("/v1/models")
            names = served.service.names

        assert tuple(each["id"] for each in answer.json["data"]) == names


class TestOneModel:
    @pytest.mark.parametrize("name", ["small", "org/small", "a b/c%d", "/a/path"])
    async def test_is_found_by_any_name(self, serve: Serve, name: str) -> None:
        async with serve(config=ServerConfig(names=("other", name))) as served:
            plain = await served.get(f"/v1/models/{quote(name)}")
            escaped = await served.get(f"/v1/models/{quote(name, safe='')}")

        assert (plain.status, plain.json["id"]) == (200, name)
        assert escaped.json == plain.json

    async def test_of_another_name_is_not_there(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(names=("small",))) as served:
            answer = await served.get("/v1/models/org/other")

        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "'org/other' here; served: small" in answer.error["message"]


class TestARequestForAModel:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    async def test_is_served_by_its_name_only(
        self, serve: Serve, path: str, body: dict[str, object]
    ) -> None:
        async with serve(config=ServerConfig(names=("small", "tiny"))) as served:
            known = await served.post(path, {**body, "model": "tiny"})
            unknown = await served.post(path, {**body, "model": "large"})

        assert known.status == 200
        assert known.json.get("model", "tiny") == "tiny"
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        assert unknown.error["param"] == "model"
