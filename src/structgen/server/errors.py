"""Errors as HTTP answers: which status each has, and the one JSON form that all have.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "stop", "code": null}}

Owns   the form (OpenAI's, all four keys always there) and the table from exception to status.
Used   by every route; the official clients raise by the status, and retry 408, 409, 429 and 5xx.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from aiohttp import web

from structgen.errors import (
    BudgetError,
    ConstraintError,
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    EngineDiedError,
    OptionError,
    OutputError,
    OverloadedError,
    PromptError,
    StructgenError,
    TemplateError,
    UnsupportedError,
    leaves,
)
from structgen.options import did_you_mean

INVALID = "invalid_request_error"
SERVER = "server_error"
# What other servers, or older versions of them, call something else.
MOVED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
    "max_new_tokens": "max_tokens",
}
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})  # of bodies, as they are sent
MOST_SAID = 2000  # characters of a message: who sends megabytes of nonsense gets no echo of them
_MOST_PATH = 200  # characters of a path that are repeated
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`")
_MISSING_FIELD = re.compile(r"required field `(?P<name>[^`]*)`")


class ApiError(Exception):
    """A request that is answered by an error.

    param         the field of the body that is to blame, "messages[0].content"
    retry_after   seconds after which it may be sent again
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, _clipped(message), type_
        self.param = None if param is None else _clipped(param)
        self.code, self.retry_after = code, retry_after

    @property
    def body(self) -> bytes:
        """The JSON of it."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    @property
    def headers(self) -> dict[str, str]:
        """What the answer's headers say of it."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        # The standard of HTTP wants this beside each 401.
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def response(self) -> web.Response:
        """The whole answer."""
        return web.Response(
            status=self.status,
            body=self.body,
            content_type="application/json",
            headers=self.headers,
        )


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_SAID else f"{text[: MOST_SAID - 3]}..."


class _Meaning(NamedTuple):
    status: int
    type: str = INVALID
    code: str | None = None
    retry_after: int | None = None


# The first that an error is an instance of.
_MEANINGS: tuple[tuple[type[BaseException], _Meaning], ...] = (
    (ContextLengthError, _Meaning(400, INVALID, "context_length_exceeded")),
    (PromptError, _Meaning(400)),
    (ConstraintError, _Meaning(400, INVALID, "invalid_constraint")),
    (OptionError, _Meaning(400)),
    (UnsupportedError, _Meaning(400, INVALID, "unsupported")),
    (TemplateError, _Meaning(400)),
    (DeadlineError, _Meaning(504, SERVER, "timeout")),
    (OutputError, _Meaning(500, SERVER, "invalid_output")),
    (BudgetError, _Meaning(400, INVALID, "budget_exceeded")),
    (OverloadedError, _Meaning(503, SERVER, "overloaded", 1)),
    (EngineClosedError, _Meaning(503, SERVER, "not_ready", 5)),
    (EngineDiedError, _Meaning(503, SERVER, "engine_died")),
    (StructgenError, _Meaning(500, SERVER)),
)


def api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError | None:
    """What an exception means to a client; None for one that nobody raised on purpose.

    names   from an option's own name to the field of the body that it was read from; what the
            prompt and the constraint were read from stands under "prompt" and "constraint"
    """
    error = next(leaves(error), error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPException):
        return of_http(error)
    for kind, meaning in _MEANINGS:
        if isinstance(error, kind):
            return ApiError(
                meaning.status,
                str(error),
                type_=meaning.type,
                param=_blamed(error, names or {}),
                code=meaning.code,
                retry_after=meaning.retry_after,
            )
    return None


def _blamed(error: BaseException, names: Mapping[str, str]) -> str | None:
    """The field of the body that an error is about."""
    match error:
        case OptionError():
            return names.get(error.option, error.option)
        case PromptError() | TemplateError():
            return names.get("prompt")
        case ConstraintError():
            return names.get("constraint")
        case _:
            return None


def of_validation(error: Exception, known: Iterable[str] = (), under: str = "") -> ApiError:
    """A body, or the part of it under a field, that has not the form that a route asks for.

    known   the fields that it may have at the top
    """
    # Whole numbers may be written as 16.0; of that, users need not be told.
    message, path, top = str(error).replace("int | float", "int"), under, True
    if place := _PLACE.search(message):
        message, top = message[: place.start()], not place["path"]
        path = ".".join(each for each in (under, place["path"]) if each)
    if isinstance(error.__cause__, OptionError):  # a body refused one of its fields
        message = message.removeprefix(f"{error.__cause__.option}: ")
        path = f"{path}.{error.__cause__.option}" if path else error.__cause__.option
    if unknown := _UNKNOWN_FIELD.search(message):
        name = unknown["name"]
        place_ = f"{path}.{name}" if path else name
        # Of a name of megabytes, even to look for what is like it takes long.
        hint = did_you_mean(name, known if top and len(name) < MOST_SAID else ())
        if name in MOVED and not under:
            hint = f"; it is called {MOVED[name]} here"
        return ApiError(400, f"{place_}: unknown field{hint}", param=place_, code="unknown_field")
    if missing := _MISSING_FIELD.search(message):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        message = "it is missing"
    return ApiError(400, f"{path}: {message}" if path else message, param=path or None)


def of_http(error: web.HTTPException) -> ApiError:
    """What aiohttp raises by itself: no such route, a method that is not allowed, a large body."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            message, code = "the body is larger than this server takes", "body_too_large"
        case web.HTTPExpectationFailed():
            message = "the header Expect asks for something else than 100-continue; leave it out"
            code = "expectation_failed"
        case web.HTTPNotFound():
            return no_route("", None)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{error.method} is not allowed here; allowed: {allowed}"
            code = "method_not_allowed"
        case _:
            message, code = error.reason or "the request failed", ""
    kind = INVALID if error.status < 500 else SERVER
    return ApiError(error.status, message, type_=kind, code=code or None)


def no_route(path: str, meant: str | None) -> ApiError:
    """A path that is not served. `meant` is one that is, and like it."""
    message = "there is no such route; /openapi.json has them all"
    if meant is not None:
        message = f"there is no route {path[:_MOST_PATH]}; it is {meant[:_MOST_PATH]} here"
    return ApiError(404, message, code="not_found")


def unsupported_encoding(given: str) -> ApiError:
    """A body that is packed in some other way than those that are undone here."""
    return ApiError(
        415,
        f"the content encoding {given!r} is not read here; send the body as it is, or packed by "
        "gzip or deflate",
        code="unsupported_encoding",
    )


def broken_body(reason: str) -> ApiError:
    """A body whose chunks, or whose compression, cannot be undone."""
    return ApiError(400, f"the body cannot be read: {reason}; send it again, or as it is")


def too_large(most: int) -> ApiError:
    """A body that is too large. `most` is in bytes."""
    return ApiError(
        413,
        f"the body is larger than the {most} bytes that this server takes; send less, or raise its "
        "limit: max_body, --max-body-bytes",
        code="body_too_large",
    )


def too_slow(part: str, seconds: float) -> ApiError:
    """A request of which a part, its head or its body, did not come in time."""
    return ApiError(
        408,
        f"the {part} of the request was not here after {seconds:g} s; send it faster, or raise the "
        "limit of this server: transfer, --transfer-timeout",
        code="request_timeout",
    )


def unknown_model(name: str, served: Iterable[str]) -> ApiError:
    """A request for a model that is not served here."""
    known = ", ".join(served)
    return ApiError(
        404,
        f"there is no model {name!r} here; served: {known}",
        param="model",
        code="model_not_found",
    )
