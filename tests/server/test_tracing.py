"""Spans of OpenTelemetry: what they say of a call, and that they are an extra."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from structgen.server.observe import tracing
from tests.server.served import Serve

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "a secret"}],
    "max_tokens": 4,
    "ignore_eos": True,
    "temperature": 0.5,
    "seed": 7,
}


class _Api:
    """The API's module, with a provider of the test's own in place of the process's one."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider

    def __getattr__(self, name: str) -> object:
        found: object = getattr(self._provider if name == "get_tracer" else _REAL, name)
        return found


_REAL = tracing._API


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_API", _Api(provider))
    yield exporter
    provider.shutdown()


class TestASpan:
    async def test_says_what_was_asked_and_what_it_took(
        self, serve: Serve, spans: InMemorySpanExporter
    ) -> None:
        async with serve() as served:
            answer = await served.post(CHAT, BODY, X_Request_Id="the-id")

        (span,) = spans.get_finished_spans()
        found = dict(span.attributes or {})
        assert span.name == "chat"
        assert found["gen_ai.operation.name"] == "chat"
        assert found["gen_ai.request.temperature"] == 0.5
        assert found["gen_ai.request.seed"] == 7
        assert found["gen_ai.usage.output_tokens"] == 4
        assert found["gen_ai.usage.input_tokens"] == answer.json["usage"]["prompt_tokens"]
        assert found["gen_ai.response.finish_reasons"] == ("length",)
        assert found["gen_ai.response.id"] == "the-id"
        assert "secret" not in str(found)

    async def test_continues_the_trace_of_the_client(
        self, serve: Serve, spans: InMemorySpanExporter
    ) -> None:
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        async with serve() as served:
            await served.post(CHAT, BODY, traceparent=f"00-{trace}-{parent}-01")

        (span,) = spans.get_finished_spans()
        assert f"{span.context.trace_id:032x}" == trace
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == parent

    async def test_of_a_refused_call_says_why(
        self, serve: Serve, spans: InMemorySpanExporter
    ) -> None:
        async with serve() as served:
            await served.post(CHAT, {**BODY, "stpo": 1})

        (span,) = spans.get_finished_spans()
        assert (span.attributes or {})["error.type"] == "unknown_field"
        assert not span.status.is_ok

    async def test_is_not_made_of_questions_about_the_server(
        self, serve: Serve, spans: InMemorySpanExporter
    ) -> None:
        async with serve() as served:
            await served.get("/health")
            await served.get("/v1/models")

        assert spans.get_finished_spans() == ()


class TestWithoutTheExtra:
    async def test_calls_are_answered_all_the_same(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tracing, "_API", None)
        async with serve() as served:
            assert (await served.post(CHAT, BODY)).status == 200
