"""What a server is told: names, keys, limits, times. The engine's own options are the engine's.

Used by everything in `server`, and by `structgen serve`, whose flags these are.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from structgen.errors import OptionError
from structgen.output.reasoning import Family, check_family
from structgen.sampling import check_range, check_whole

ToolForm = Literal["auto", "json", "hermes"]
MIB = 1 << 20


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a server.

    names                what clients may call the model; empty: the engine's own names for it
    api_keys             who sends one of these, as `Authorization: Bearer KEY`, may use it; empty:
                         everybody may
    admin_keys           who sends one of these may flush the cache, and all else; empty: whoever
                         may use it
    key_concurrency      requests that one key may have at a time; one more is answered by 429
    key_requests         requests that one key may send in a minute
    key_tokens           tokens, of prompts and outputs, that one key may use in a minute
    max_body             bytes of a body, unpacked; a larger one is answered by 413. The event loop
                         stands still while one is decoded: for 1 to 6 ms a MiB
    max_choices          prompts x n of one request
    request_timeout      seconds after which a generation that has not ended is ended, with 504
    seed                 of requests that bring none, as if each had it in its body: equal ones then
                         get equal answers, whatever came between. None: each draws anew
    retries              times that an answer which is whole, but breaks its own constraint (an open
                         object with a key twice), is made again, where it is not streamed
    drain                seconds that requests have to end once the server was told to stop
    stall                seconds without a step, while there is work, after which it is not ready
    transfer             seconds in which a request has to come, its head and its body each (else
                         408), and in which a client has to take what was written for it
    idle                 seconds that a connection may wait for its next request; longer than those
                         of a proxy, which else may use one that is being closed
    connections          that may be open; one more is answered by 503, and closed
    keep_alive           seconds of silence after which a stream gets a comment, `: ping`
    allowed_origins      of pages that may call it, as CORS has them; "*" for all
    reasoning            family of the model, whose reasoning is set apart from its answer
    tool_form            how tool calls are written: as the model's template does where it has
                         tools (hermes: `<tool_call>` tags), or as plain JSON

    Raises `OptionError` for values out of range.
    """

    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    key_concurrency: int | None = None
    key_requests: int | None = None
    key_tokens: int | None = None
    max_body: int = 8 * MIB
    max_choices: int = 256
    request_timeout: float | None = None
    seed: int | None = None
    retries: int = 2
    drain: float = 30.0
    stall: float = 30.0
    transfer: float = 60.0
    idle: float = 75.0
    connections: int = 1000
    keep_alive: float = 15.0
    allowed_origins: tuple[str, ...] = ()
    reasoning: Family | None = None
    tool_form: ToolForm = "auto"

    def __post_init__(self) -> None:
        for name in ("names", "api_keys", "admin_keys", "allowed_origins"):
            value = getattr(self, name)
            if isinstance(value, str) or any(not isinstance(e, str) or not e for e in value):
                raise OptionError(name, "expected a sequence of strings that are not empty")
            msgspec.structs.force_setattr(self, name, tuple(value))
        for name in ("key_concurrency", "key_requests", "key_tokens"):
            check_whole(name, getattr(self, name), low=1, optional=True)
            if getattr(self, name) is not None and not self.api_keys:
                raise OptionError(name, "it limits each API key, and there are none; add one")
        check_whole("max_body", self.max_body, low=1)
        check_whole("max_choices", self.max_choices, low=1)
        check_whole("connections", self.connections, low=1)
        check_whole("retries", self.retries, low=0)
        check_whole("seed", self.seed, low=0, high=2**63 - 1, optional=True)
        timeout = self.request_timeout
        check_range("request_timeout", timeout, 0.0, 1e9, open_low=True, optional=True)
        check_range("drain", self.drain, 0.0, 1e9)
        for name in ("stall", "transfer", "idle", "keep_alive"):
            check_range(name, getattr(self, name), 0.0, 1e9, open_low=True)
        if self.reasoning is not None:
            check_family(self.reasoning)
        if self.tool_form not in {"auto", "json", "hermes"}:
            raise OptionError("tool_form", f"expected auto, json or hermes, got {self.tool_form!r}")
