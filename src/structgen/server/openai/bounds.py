"""What bodies are held to beyond their types, in the words of JSON Schema.

Owns   the tables of that: by the field's name, by type and field, and by type.
Holds  what is written here is refused by the server, too. What depends on several fields is left
       out, but for the fields of which one has to be there.
Used   by `openapi`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from structgen.models.template import TemplateChat
from structgen.sampling import INT32_MAX, LEAST_REPETITION
from structgen.server.openai.wire import MOST, PARTS_OF_OTHER_TYPES, StructuredOutputs
from structgen.server.service import Service

Json = dict[str, Any]
_TEXT = {"type": "string", "minLength": 1}
_NULL = {"type": "null"}
_NAME = "^[A-Za-z0-9_-]{1,64}$"
_FIELDS: Mapping[str, Json] = {
    "best_of": {"minimum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "logprobs": {"minimum": 0, "maximum": 20},
    "max_completion_tokens": {"minimum": 1},
    "max_tokens": {"minimum": 0},
    "messages": {"minItems": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "priority": {"minimum": -INT32_MAX, "maximum": INT32_MAX},
    "regex": {"minLength": 1, "format": "regex"},
    "repetition_penalty": {"minimum": LEAST_REPETITION},
    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
    "seconds": {"exclusiveMinimum": 0, "maximum": 1e9},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "stop": {"minLength": 1},
    "stop_regex": {"minLength": 1, "format": "regex"},
    "temperature": {"minimum": 0},
    "top_k": {"minimum": -1, "maximum": INT32_MAX},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
}
_KINDS = {
    **dict.fromkeys(("enum", "format", "minLength"), ("string",)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), ("integer", "number")),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("propertyNames", "additionalProperties", "maxProperties"), ("object",)),
}
_MAPS = ("chat_template_kwargs", "logit_bias")
# What some types do not say at all, or too widely.
_TYPES: Mapping[tuple[str, str], Json] = {
    ("ChatBody", "modalities"): {"enum": [["text"], None]},
    ("ChatMessage", "audio"): _NULL,
    ("ChatMessage", "function_call"): _NULL,
    ("CalledTool", "type"): {"const": "function"},
    ("CompletionBody", "suffix"): {"enum": ["", None]},
    **{("ContentPart", field): _NULL for field in PARTS_OF_OTHER_TYPES},
    ("ContentPart", "type"): {"enum": ["text", "input_text", "output_text", "refusal"]},
    ("Function", "name"): {"type": "string", "pattern": _NAME},
    ("NamedTool", "type"): {"const": "function"},
    ("ProgramBudget", "tokens"): {"type": ["integer", "null"], "minimum": 1},
    ("ProgramOptions", "seed"): {"type": ["integer", "null"], "minimum": 0, "maximum": 2**63 - 1},
    ("ResponseFormat", "type"): {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
    ("StreamOptions", "continuous_usage_stats"): {"enum": [False, None]},
    ("StructuredOutputs", "json_object"): {"enum": [True, None]},
    ("ToolSpec", "type"): {"enum": ["function"]},
    **{
        (body, "skip_special_tokens"): {"enum": [True, None]}
        for body in ("ChatBody", "CompletionBody")
    },
}


def _has(name: str) -> Json:
    """An object has this property, and it is no null."""
    return {"required": [name], "properties": {name: {"not": _NULL}}}


def _part(field: str, *types: str) -> Json:
    """A part of one of these types has its text in this field, and in no other."""
    other = "text" if field == "refusal" else "refusal"
    return {
        "properties": {"type": {"enum": list(types)}, field: {"type": "string"}, other: _NULL},
        "required": ["type", field],
    }


def _one_of(names: Iterable[str]) -> Json:
    """An object has one of these properties; the others are null, if they are there."""
    names = tuple(names)
    return {
        "anyOf": [
            {
                "required": [name],
                "properties": {
                    other: {"not": _NULL} if other == name else _NULL for other in names
                },
            }
            for name in names
        ]
    }


def _format(type_: str, *fields: str) -> Json:
    """A response format of this type has these of the fields that belong to a type."""
    others = {"json_schema", "format", "structures", "triggers"} - set(fields)
    return {
        "properties": {"type": {"const": type_}, **dict.fromkeys(sorted(others), _NULL)}
        | {field: {"not": _NULL} for field in fields},
        "required": ["type", *fields],
    }


# What has to be there of several fields.
_WHOLE: Mapping[str, Json] = {
    "ChatMessage": {
        "anyOf": [
            _has("content"),
            {
                "required": ["role", "tool_calls"],
                "properties": {
                    "role": {"const": "assistant"},
                    "tool_calls": {"type": "array", "minItems": 1},
                },
            },
            _has("refusal"),
        ]
    },
    "ContentPart": {
        "anyOf": [_part("text", "text", "input_text", "output_text"), _part("refusal", "refusal")]
    },
    "NamedTool": _has("function"),
    "ResponseFormat": {
        "anyOf": [
            _format("text"),
            _format("json_object"),
            _format("json_schema", "json_schema"),
            _format("structural_tag", "format"),
            _format("structural_tag", "structures", "triggers"),
        ]
    },
    "StructuredOutputs": _one_of(StructuredOutputs.__struct_fields__),
    "TokenizeBody": _one_of(("prompt", "messages")),
    "ToolSpec": _has("function"),
}


def bound(components: dict[str, Json], names: Iterable[str], service: Service) -> None:
    """Write down what the bodies of these names are held to."""
    fields, types = _fields(service), {**_TYPES, **_types(service)}
    for name in names:
        for field, schema in components[name].get("properties", {}).items():
            _without_points(schema)
            if (type_ := types.get((name, field))) is not None:
                schema.pop("type", None)
                schema.pop("anyOf", None)
                schema.update(type_)
            elif field in fields:
                _narrow(schema, fields[field])
        if name in _WHOLE:
            components[name]["allOf"] = [_WHOLE[name]]


def _fields(service: Service) -> dict[str, Json]:
    """The table of fields, with what the server and its model say of them."""
    limits = {name: {"maxItems": most} for name, most in MOST.items() if name not in _MAPS}
    found = {
        name: {**limits.get(name, {}), **_FIELDS.get(name, {})} for name in {*limits, *_FIELDS}
    }
    found["model"] = {"enum": list(service.names)}
    found["n"] = {"minimum": 1, "maximum": service.config.max_choices}
    last = service.engine.loaded.checkpoint.tokenizer.vocab_size - 1
    for name in ("stop_token_ids", "tokens"):
        found[name] |= {"minimum": 0, "maximum": last}
    found["logit_bias"] = {
        "maxProperties": MOST["logit_bias"],
        "propertyNames": {"pattern": whole_numbers(last)},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
    most = {"maximum": service.engine.loaded.max_context}
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        found[name] |= most
    found["chat_template_kwargs"] = _variables(service)
    return found


def _types(service: Service) -> dict[tuple[str, str], Json]:
    """The table of types, with what the model says of them."""
    last = service.engine.loaded.checkpoint.tokenizer.vocab_size - 1
    token = {"type": "integer", "minimum": 0, "maximum": last}
    ids = {"type": "array", "minItems": 1, "items": token}
    most = service.config.max_choices
    texts = {"type": "array", "minItems": 1, "maxItems": most, "items": _TEXT}
    several = {"type": "array", "minItems": 1, "maxItems": most, "items": ids}
    return {("CompletionBody", "prompt"): {"anyOf": [_TEXT, texts, ids, several]}}


def _variables(service: Service) -> Json:
    """What a chat template can be given."""
    chat = service.engine.chat
    reads = sorted(chat.template.reads) if isinstance(chat, TemplateChat) else []
    return {"propertyNames": {"enum": reads}} if reads else {"maxProperties": 0}


def whole_numbers(last: int) -> str:
    """A pattern of the whole numbers from 0 to this one."""
    digits = str(last)
    found = [f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if len(digits) > 1 else []
    for at, digit in enumerate(digits):
        least, most = int(at == 0), int(digit) - (at < len(digits) - 1)
        if least <= most:
            rest = len(digits) - at - 1
            found.append(f"{digits[:at]}[{least}-{most}][0-9]{{{rest}}}")
    return f"^({'|'.join(['0', *found])})$"


def _without_points(schema: Json) -> None:
    """Integers are written as 16.0, too, and to JSON Schema that is one."""
    for word in ("anyOf", "items"):
        inner = schema.get(word, [])
        for each in inner if isinstance(inner, list) else [inner]:
            _without_points(each)
    kinds = schema.get("anyOf", [])
    if {"type": "integer"} in kinds and {"type": "number"} in kinds:
        schema["anyOf"] = [each for each in kinds if each != {"type": "number"}]


def _narrow(schema: Json, bounds: Mapping[str, Any]) -> None:
    """Add bounds to a schema of one value or of several, which may also be null."""
    for each in schema.get("anyOf", [schema]):
        each |= {word: of for word, of in bounds.items() if each.get("type") in _KINDS[word]}
        if "items" in each:
            _narrow(each["items"], bounds)
