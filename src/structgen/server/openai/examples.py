"""Bodies that can be sent as they are, for the document to show.

Used by `openapi`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from structgen.server.service import Service

Json = dict[str, Any]
_ASK = [{"role": "user", "content": "What is 2+2?"}]
_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
_WEATHER = {"name": "weather", "description": "Tells the weather", "parameters": _CITY}
_EXAMPLES: Mapping[str, Mapping[str, Json]] = {
    "/v1/chat/completions": {
        "answer": {"messages": _ASK, "temperature": 0, "max_tokens": 16},
        "stream": {
            "messages": [{"role": "system", "content": "Be brief."}, *_ASK],
            "max_tokens": 16,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "choices": {"messages": _ASK, "n": 2, "seed": 7, "max_tokens": 8, "logprobs": True},
        "json": {
            "messages": _ASK,
            "max_tokens": 64,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": _CITY},
            },
        },
        "tools": {
            "messages": _ASK,
            "max_tokens": 64,
            "tools": [{"type": "function", "function": _WEATHER}],
            "tool_choice": "required",
        },
    },
    "/v1/completions": {
        "text": {"prompt": "1, 2, 3,", "temperature": 0, "max_tokens": 8},
        "several": {"prompt": ["1, 2, 3,", "a, b, c,"], "n": 2, "max_tokens": 8, "stream": True},
        "scores": {"prompt": "1, 2, 3,", "max_tokens": 0, "echo": True, "logprobs": 1},
        "regex": {"prompt": "1, 2, 3,", "max_tokens": 8, "regex": "[0-9]{1,3}"},
    },
}


def examples(path: str, service: Service) -> Json:
    """The examples of a path, as a media type has them; nothing where there are none."""
    found = {
        name: {"value": {"model": service.names[0], **body}}
        for name, body in _EXAMPLES.get(path, {}).items()
    }
    return {"examples": found} if found else {}


def example_of_program(parameters: Mapping[str, Any]) -> Json:
    """The same of a program; nothing where it has arguments that must be given."""
    if parameters.get("required"):
        return {}
    return {"examples": {"plain": {"value": {"arguments": {}, "options": {"max_tokens": 16}}}}}
