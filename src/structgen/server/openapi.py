"""The OpenAPI document of a server: every route with its body, its answers and its errors.

Owns   what a route says of itself, `Described`, and how that is written in OpenAPI 3.1.
Holds  schemas are those of the types that bodies are read into and answers are made of; what the
       types do not state stands in `openai/bounds`. Each program is a path of its own.
Used   by `routes`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from structgen.server.call import Access, Route
from structgen.server.endpoint import Endpoint
from structgen.server.openai.bounds import bound
from structgen.server.openai.examples import example_of_program, examples
from structgen.server.openai.replies import ErrorReply
from structgen.server.service import Service

Json = dict[str, Any]

VERSION = "1.0.0"  # of what the document describes, not of the package
_REFERENCE = "#/components/schemas/{name}"
_PROGRAM = "/v1/programs/{name}"
_ERRORS = {
    "400": "The body is no JSON, or something in it cannot be served: `param` names the field",
    "401": "The API key is missing or wrong",
    "404": "There is nothing of that name",
    "413": "The body is larger than the server takes",
    "415": "The body is not said to be JSON",
    "429": "The key is at one of its limits; Retry-After says when to send it again",
    "500": "The server, or the program that it ran, failed",
    "503": "It cannot be served now; Retry-After says when to send it again",
    "504": "It was not finished in time",
    "default": "Any other error: 405 for a method that the path has not",
}


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A route.

    takes     type of the body, None for none
    answers   type of the answer, None for one that is no JSON
    events    type of the events, where it can stream
    """

    method: str
    path: str
    handle: Route
    access: Access
    summary: str
    takes: Any = None
    answers: Any = None
    events: Any = None


def document(routes: Sequence[Described], service: Service, url: str = "/") -> Json:
    """The document. `url` is where the routes begin.

    Raises `EngineClosedError` while it is not known what the model is called.
    """
    schemas = _Schemas(routes, service)
    paths: dict[str, Json] = {}
    for route in routes:
        for path, operation in _operations(route, schemas, service):
            paths.setdefault(path, {})[route.method.lower()] = operation
    components: Json = {"schemas": schemas.components}
    if service.config.api_keys or service.config.admin_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "structgen", "version": VERSION},
        "servers": [{"url": url}],
        "paths": paths,
        "components": components,
    }


class _Schemas:
    """The schemas of all types in the document; `components` has those with names."""

    def __init__(self, routes: Sequence[Described], service: Service) -> None:
        types = [ErrorReply]
        for route in routes:
            types += [each for each in (route.takes, route.answers, route.events) if each]
        found, self.components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
        self._of = {_key(type_): schema for type_, schema in zip(types, found, strict=True)}
        bound(self.components, self.named(routes), service)

    def of(self, type_: object) -> Json:
        """The schema of a type that a route has: most often a reference."""
        return self._of[_key(type_)]

    def whole(self, type_: object) -> Json:
        """A copy of the schema that `of` refers to."""
        name = _name(self.of(type_))
        found: Json = copy.deepcopy(self.components[name])
        return found

    def named(self, routes: Iterable[Described]) -> set[str]:
        """Names of the schemas that stand in bodies."""
        found: set[str] = set()
        waiting = [_name(self.of(route.takes)) for route in routes if route.takes]
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += [_name(each) for each in _references(self.components[name])]
        return found

    def add(self, program: str, part: str, schema: Json) -> Json:
        """Give a schema of a program a name, and names to its own definitions.

        The types of its arguments and of its value may be called alike, or like the part.
        """
        name = _ascii(f"{program}.{part}")
        names = {each: _ascii(f"{name}.{each}") for each in schema.get("$defs", ())}
        schema = _moved(schema, names)
        for each, inner in schema.pop("$defs", {}).items():
            self.components[names[each]] = inner
        self.components[name] = schema
        return {"$ref": _REFERENCE.format(name=name)}


# ---------------------------------------------------------------- operations


def _operations(
    route: Described, schemas: _Schemas, service: Service
) -> Iterable[tuple[str, Json]]:
    """Where a route is and what it does; a route of programs is one for each of them."""
    path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
    if path != _PROGRAM or route.takes is None:
        yield path, _operation(route, path, schemas, service)
        return
    for endpoint in service.programs.values():
        own = path.replace("{name}", endpoint.name)
        operation = _operation(route, own, schemas, service)
        body, result = _of_program(endpoint, route, schemas)
        content = {"schema": body, **example_of_program(endpoint.parameters)}
        operation["requestBody"]["content"]["application/json"] = content
        operation["responses"]["200"]["content"] = {
            **_json(result),
            **_events(result, schemas.of(route.events), schemas.of(ErrorReply)),
        }
        operation["summary"] = f"Run the program {endpoint.name}"
        operation["description"] = endpoint.description
        yield own, operation


def _operation(route: Described, path: str, schemas: _Schemas, service: Service) -> Json:
    operation: Json = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", path)]),
        "summary": route.summary,
        "responses": {"200": _answer(route, schemas)}
        | {
            status: {"description": _ERRORS[status], "content": _json(schemas.of(ErrorReply))}
            for status in _statuses(route, path, service)
        },
    }
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.takes is not None:
        content = {"schema": schemas.of(route.takes), **examples(path, service)}
        body = {"required": True, "content": {"application/json": content}}
        operation["requestBody"] = body
    if "401" in operation["responses"]:
        operation["security"] = [{"key": []}]
    return operation


def _statuses(route: Described, path: str, service: Service) -> list[str]:
    """The errors that a route may answer by."""
    config = service.config
    keys = config.api_keys if route.access == "user" else (*config.api_keys, *config.admin_keys)
    found = {
        "400": route.takes is not None,
        "401": route.access != "open" and bool(keys),
        "404": "{" in path or route.events is not None,  # of a name in the path, or of a model
        "413": route.takes is not None,
        "415": route.takes is not None,
        "429": route.access != "open" and bool(keys),
        "500": route.takes is not None,
        "503": True,
        "504": route.events is not None,
        "default": True,
    }
    return [status for status, there in found.items() if there]


def _answer(route: Described, schemas: _Schemas) -> Json:
    if route.answers is None:
        return {"description": "Text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content = _json(schemas.of(route.answers))
    if route.events is not None:
        content |= _events(schemas.of(route.events), schemas.of(ErrorReply), end="[DONE]")
    said = "The answer" if route.events is None else "The answer, or with `stream` its events"
    return {"description": said, "content": content}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _events(*schemas: Json, end: str = "") -> Json:
    """A stream of events, whose data is JSON, but for the text that may end it.

    As later releases of OpenAPI have it, the schema is that of one event.
    """
    data: Json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": list(schemas)},
    }
    properties = {
        "event": {"type": "string"},
        "data": {"anyOf": [data, {"const": end}]} if end else data,
    }
    event = {"type": "object", "properties": properties, "required": ["data"]}
    return {"text/event-stream": {"schema": event}}


def _of_program(endpoint: Endpoint, route: Described, schemas: _Schemas) -> tuple[Json, Json]:
    """Body and answer of one program."""
    name, parameters = endpoint.name, dict(endpoint.parameters)
    body, result = schemas.whole(route.takes), schemas.whole(route.answers)
    body["properties"]["arguments"] = schemas.add(name, "Arguments", parameters)
    if parameters.get("required"):
        body["required"] = ["arguments"]
    if endpoint.returns is not None:
        returns = dict(endpoint.returns)
        result["properties"]["value"] = schemas.add(name, "Value", returns)
    # Both are made of parts that refer to the document already, and have no definitions.
    return (
        schemas.add(name, "Body", {**body, "title": f"{name}.Body"}),
        schemas.add(name, "Result", {**result, "title": f"{name}.Result"}),
    )


# ---------------------------------------------------------------- schemas


def _key(type_: object) -> str:
    return repr(type_)  # a union is no other than one of the same members


def _name(schema: Mapping[str, Any]) -> str:
    """The name that a reference has."""
    return str(schema["$ref"]).rpartition("/")[2]


def _references(schema: object) -> Iterable[Json]:
    """The references in a schema, at any depth."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _moved(schema: Json, names: Mapping[str, str]) -> Json:
    """A schema that refers to the document's schemas of these names for its own definitions."""
    schema = copy.deepcopy(schema)
    moved = {f"#/$defs/{each}": _REFERENCE.format(name=name) for each, name in names.items()}
    for each in _references(schema):
        each["$ref"] = moved.get(each["$ref"], each["$ref"])
    for each in _mappings(schema):
        each |= {tag: moved.get(place, place) for tag, place in each.items()}
    return schema


def _mappings(schema: object) -> Iterable[Json]:
    """From tags of unions to the schemas that these stand for, at any depth."""
    if isinstance(schema, dict):
        if isinstance(told := schema.get("discriminator"), dict) and "mapping" in told:
            yield told["mapping"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _mappings(each)


def _ascii(name: str) -> str:
    """A name as OpenAPI has them; no two of Python's become one."""
    return re.sub(r"[^\w.]|[^\x00-\x7f]", lambda found: f"-{ord(found[0]):x}-", name)
