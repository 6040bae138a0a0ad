"""One line for each call, in the log `structgen.access`: who, what, how long, what it cost.

Holds  no body, no query, no key: whoever reads logs learns nothing that was said. Questions about
       the server itself, that monitors send by the second, are only logged where DEBUG is.
Used   by `call`, at the end of each; `configure_logging` by who runs a server.
"""

from __future__ import annotations

import logging
import time
import traceback
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from structgen.output.values import readable

if TYPE_CHECKING:
    from structgen.server.call import Call
    from structgen.server.errors import ApiError

LogFormat = Literal["text", "json"]
_EXPECTED = {"not_ready", "shutting_down"}  # monitors are told so many times, in a server's life
_log = logging.getLogger("structgen.access")


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is logged of one call.

    id           as its answer's header X-Request-Id has it
    status       499 where the client left before it was answered
    seconds      until it was answered; first_token until there was one; waited in the queue
    tenant       names the key that it came with
    finishes     why each generation ended
    error        code or type of what it was answered by, if that was an error
    """

    id: str
    remote: str
    method: str
    path: str
    status: int
    seconds: float
    tenant: str = ""
    program: str = ""
    first_token: float | None = None
    waited: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finishes: tuple[str, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        """For people: the call, then what there is to say of it."""
        more = msgspec.to_builtins(self)
        head = " ".join(str(more.pop(name)) for name in ("remote", "method", "path", "status"))
        if self.finishes:
            more["finishes"] = ",".join(self.finishes)
        return f"{head} {' '.join(f'{name}={value}' for name, value in more.items())}"


def traceback_of(error: BaseException) -> str:
    """An error with its traceback as a log can hold it: a message may have halves of characters."""
    return readable("".join(traceback.format_exception(error)))


def log_call(call: Call, status: int, seconds: float) -> None:
    """Log a call that ended."""
    failure, usage = call.failure, call.usage
    expected = failure is None or failure.code in _EXPECTED
    level = logging.DEBUG if call.access == "open" and expected else logging.INFO
    if not _log.isEnabledFor(level):
        return
    line = Line(
        id=call.id,
        remote=call.request.remote or "-",
        method=call.request.method,
        path=call.request.rel_url.raw_path,
        status=status,
        seconds=round(seconds, 4),
        tenant=call.holder.tenant if call.holder else "",
        program=call.program,
        first_token=_rounded(call.first_token),
        waited=_rounded(call.waited),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        finishes=tuple(call.finishes),
        error="" if failure is None else failure.code or failure.type,
    )
    _log.log(level, "%s", line, extra={"line": line})


def log_refusal(
    id_: str, error: ApiError, *, remote: str | None, method: str = "-", path: str = "-"
) -> None:
    """Log what no route took: another path or method, what is no HTTP, what did not come."""
    line = Line(
        id=id_,
        remote=remote or "-",
        method=method,
        path=path,
        status=error.status,
        seconds=0.0,
        error=error.code or error.type,
    )
    _log.info("%s", line, extra={"line": line})


def configure_logging(level: str, form: LogFormat) -> None:
    """Write this process's logs to stderr. For a process that is a server and nothing else."""
    output = logging.StreamHandler()
    output.setFormatter(_Json() if form == "json" else _Text())
    output.addFilter(_bearable)
    logging.basicConfig(level=level.upper(), handlers=[output], force=True)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _bearable(record: logging.LogRecord) -> bool:
    """Whoever speaks no HTTP to the port gets a line, and no traceback of our own code."""
    if record.name == "aiohttp.server" and record.exc_info:
        error = record.exc_info[1]
        if isinstance(error, HttpProcessingError | RequestPayloadError):
            reason = " ".join(str(error).split())
            record.msg, record.args = "a client sent no valid HTTP: %.200s", (reason,)
            record.exc_info = record.exc_text = None
    return True


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")


class _Json(logging.Formatter):
    """A record as one line of JSON; what a call's line has stands beside the rest."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line = getattr(record, "line", None)
        if isinstance(line, Line):
            found |= msgspec.to_builtins(line)
        else:
            found["message"] = record.getMessage()
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(found).decode()
