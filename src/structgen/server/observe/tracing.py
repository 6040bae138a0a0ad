"""Spans of OpenTelemetry, one for each call that generates; none where that is not installed.

Owns   the names of attributes, which are those of the conventions for generative AI. They are
       still under development there; here is the one place that spells them.
Used   by `call`. Without an SDK, which whoever runs the process chooses, spans go nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

try:
    from opentelemetry import propagate, trace

    _API: Any = trace
    _PROPAGATE: Any = propagate
except ImportError:  # the extra `otel` is not installed
    _API = _PROPAGATE = None

if TYPE_CHECKING:
    from structgen.server.call import Call

# What each route does, in the words of the conventions; other routes have no spans.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/programs/{name}": "invoke_workflow",
}
# From an attribute to the field of the body that has it.
_ASKED = {
    "gen_ai.request.model": "model",
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.choice.count": "n",
    "gen_ai.request.stream": "stream",
}


@contextmanager
def spanned(call: Call) -> Iterator[None]:
    """A span around a call, under the one that the client sent along, if it did."""
    operation = _OPERATIONS.get(call.route)
    if _API is None or operation is None:
        yield
        return
    tracer = _API.get_tracer("structgen.server")
    with tracer.start_as_current_span(
        f"{operation} {call.program}".strip(),
        context=_PROPAGATE.extract(call.request.headers),
        kind=_API.SpanKind.SERVER,
        record_exception=False,  # a client that leaves is no error, and bodies stay out of traces
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        finally:
            if span.is_recording():
                span.set_attributes(_attributes(call, operation))
                if call.failure is not None:
                    span.set_status(_API.StatusCode.ERROR, call.failure.code or call.failure.type)


def _attributes(call: Call, operation: str) -> dict[str, Any]:
    """What is known of a call at its end."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "structgen",
        "gen_ai.response.id": call.id,
        "gen_ai.usage.input_tokens": call.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": call.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.usage.cached_tokens,
    }
    if call.finishes:
        found["gen_ai.response.finish_reasons"] = tuple(call.finishes)
    if call.first_token is not None:
        found["gen_ai.response.time_to_first_chunk"] = call.first_token
    if call.program:
        found["gen_ai.workflow.name"] = call.program
    if call.failure is not None:
        found["error.type"] = call.failure.code or call.failure.type
    asked = {name: getattr(call.asked, field, None) for name, field in _ASKED.items()}
    return found | {name: value for name, value in asked.items() if value is not None}
