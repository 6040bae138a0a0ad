"""A tenant's backend: the contract of every backend, and no request outside its namespace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from structgen import State, program
from structgen.backend import Backend
from structgen.request import Completion, Delta, Namespace
from structgen.server.tenant import Tenant
from structgen.testing import ScriptedBackend
from tests.conformance import BackendConformance, MakeBackend

pytestmark = pytest.mark.anyio
OWN = Namespace(tenant="own")


class TestTheContract(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        @asynccontextmanager
        async def make() -> AsyncIterator[Backend]:
            backend = ScriptedBackend(" 9, 10, 11, \N{GRINNING FACE}", chunk=4)
            yield Tenant(backend, OWN, lambda _: None, lambda _: None)

            assert (backend.running, backend.open_scopes) == (0, set())

        return make

    def check_continuation(self, whole: Completion, half: Completion, rest: Completion) -> None:
        # The script does not depend on the prompt, so it begins again.
        assert half.tokens == rest.tokens == whole.tokens[:6]


class _Noting(ScriptedBackend):
    """Notes the namespace of everything that it is asked for."""

    def __init__(self) -> None:
        super().__init__("abc")
        self.namespaces: list[Namespace] = []

    async def score(self, *args: Any, namespace: Namespace = Namespace(), **more: Any) -> Any:
        self.namespaces.append(namespace)
        return await super().score(*args, namespace=namespace, **more)

    async def prime(self, *args: Any, namespace: Namespace = Namespace(), **more: Any) -> Any:
        self.namespaces.append(namespace)
        return await super().prime(*args, namespace=namespace, **more)

    def scope(self, *args: Any, namespace: Namespace = Namespace()) -> Any:
        self.namespaces.append(namespace)
        return super().scope(*args, namespace=namespace)


@program
async def everything(s: State) -> None:
    s += "text"
    await s.gen(max_tokens=2)
    async with s.fork(2) as branches:
        await branches.map(lambda branch, _: branch.gen(max_tokens=1))
    await s.select("choice", ["a", "b"])


class TestATenant:
    async def test_has_all_that_a_program_asks_for_in_its_namespace(self) -> None:
        backend = _Noting()

        await everything.run(Tenant(backend, OWN, lambda _: None, lambda _: None))

        assert {request.namespace for request in backend.requests} == {OWN}
        assert len(backend.namespaces) >= 2
        assert set(backend.namespaces) == {OWN}

    async def test_tells_of_every_delta(self) -> None:
        heard: list[Delta] = []

        result = await everything.run(
            Tenant(ScriptedBackend("abc"), OWN, heard.append, lambda _: None)
        )

        assert sum(delta.finish is not None for delta in heard) == 3
        tokens = sum(len(delta.tokens) for delta in heard)
        assert 0 < tokens <= result.usage.completion_tokens
