"""The options of `structgen serve`: what they are called, and what they mean to whom.

Used   by `app`, whose help lists them, and by `serve`. Imports little: help must not wait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from typer.models import OptionInfo

from structgen.cli.failure import CommandError

_ADDRESS, _ACCESS, _LIMITS = "Address", "Access", "Limits"
_ENGINE, _CHAT, _WATCHING = "Engine", "Chat", "Watching it"
_ELSEWHERE = "Of other servers' command lines; one value each"
LogLevel = Literal["debug", "info", "warning", "error"]
# What other servers let one choose, and there is one of here: the values that say just that.
_ONE_CHOICE = {
    "page_size": (("1",), "pages of the cache are single tokens"),
    "schedule_policy": (("lpm",), "requests are started by priority, then longest cached prefix"),
    "load_format": (("auto",), "the format is told by the files: safetensors or GGUF"),
}
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")  # auto: the CPU
# From what the engine and the server call their options to what the command line calls them.
ENGINE_OPTIONS = {
    "slots": "max_total_tokens",
    "max_running": "max_running_requests",
    "max_waiting": "max_queued_requests",
    "max_waiting_tokens": "max_queued_tokens",
    "chunk_size": "chunked_prefill_size",
    "max_context": "max_model_len",
    "dtype": "dtype",
    "threads": "threads",
    "compile_timeout": "compile_timeout",
    "chat_template": "chat_template",
}
SERVER_OPTIONS = {
    "names": "served_model_name",
    "api_keys": "api_key",
    "admin_keys": "admin_api_key",
    "key_concurrency": "key_concurrency",
    "key_requests": "key_requests_per_minute",
    "key_tokens": "key_tokens_per_minute",
    "max_body": "max_body_bytes",
    "request_timeout": "request_timeout",
    "seed": "seed",
    "transfer": "transfer_timeout",
    "idle": "idle_timeout",
    "connections": "max_connections",
    "drain": "drain_timeout",
    "stall": "stall_timeout",
    "allowed_origins": "allowed_origins",
    "reasoning": "reasoning_parser",
    "tool_form": "tool_call_parser",
}


def _option(panel: str, text: str, *names: str, **more: Any) -> OptionInfo:
    option: OptionInfo = typer.Option(
        *names, help=text, rich_help_panel=panel, **{"show_default": False, **more}
    )
    return option


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One field for each option; None means that the server or the engine chooses."""

    host: Annotated[str | None, _option(_ADDRESS, "Where to listen; 127.0.0.1, unless given.")] = (
        None
    )
    port: Annotated[
        int | None, _option(_ADDRESS, "8000, unless given; 0 takes one that is free.")
    ] = None
    uds: Annotated[
        Path | None, _option(_ADDRESS, "A Unix socket, in place of a host and a port.")
    ] = None
    ssl_certfile: Annotated[
        Path | None, _option(_ADDRESS, "Serve HTTPS with this certificate (PEM).")
    ] = None
    ssl_keyfile: Annotated[
        Path | None, _option(_ADDRESS, "Its private key, where it is not in the same file.")
    ] = None

    served_model_name: Annotated[
        list[str] | None, _option(_ACCESS, "What clients call the model; repeatable.")
    ] = None
    programs: Annotated[
        list[str] | None,
        _option(
            _ACCESS,
            "Serve the programs of a Python file or module, or the one that is named; repeatable.",
            metavar="FILE|MODULE[:PROGRAM]",
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        _option(_ACCESS, "Only who sends one may use it; repeatable.", envvar="STRUCTGEN_API_KEY"),
    ] = None
    admin_api_key: Annotated[
        list[str] | None,
        _option(
            _ACCESS, "Only who sends one may flush the cache.", envvar="STRUCTGEN_ADMIN_API_KEY"
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _option(_ACCESS, "Origin of web pages that may call it, or *; repeatable. None else."),
    ] = None

    max_queued_requests: Annotated[
        int | None, _option(_LIMITS, "Most requests that wait; others are refused by 503.")
    ] = None
    max_queued_tokens: Annotated[
        int | None, _option(_LIMITS, "Most prompt tokens that wait; others are refused by 503.")
    ] = None
    request_timeout: Annotated[
        float | None, _option(_LIMITS, "Most seconds of a generation, or of a program's run.")
    ] = None
    drain_timeout: Annotated[
        float | None,
        _option(_LIMITS, "Seconds that calls have to end after SIGTERM or Ctrl-C; else 30."),
    ] = None
    stall_timeout: Annotated[
        float | None, _option(_LIMITS, "Seconds without a step until /health says so; else 30.")
    ] = None
    max_body_bytes: Annotated[
        int | None, _option(_LIMITS, "Largest body of a request; else 8 MiB.")
    ] = None
    transfer_timeout: Annotated[
        float | None,
        _option(
            _LIMITS, "Seconds in which a request must come, and be taken what is sent; else 60."
        ),
    ] = None
    idle_timeout: Annotated[
        float | None,
        _option(_LIMITS, "Seconds that a connection may wait for a request; else 75."),
    ] = None
    max_connections: Annotated[
        int | None, _option(_LIMITS, "Most open connections; others are refused by 503; else 1000.")
    ] = None
    key_concurrency: Annotated[
        int | None, _option(_LIMITS, "Requests of one API key at a time; others get 429.")
    ] = None
    key_requests_per_minute: Annotated[
        int | None, _option(_LIMITS, "Requests of one API key in a minute; others get 429.")
    ] = None
    key_tokens_per_minute: Annotated[
        int | None, _option(_LIMITS, "Tokens of one API key in a minute; then it gets 429.")
    ] = None

    max_running_requests: Annotated[int | None, _option(_ENGINE, "Most requests in a step.")] = None
    max_total_tokens: Annotated[
        int | None, _option(_ENGINE, "Tokens that the cache holds; else from memory.")
    ] = None
    chunked_prefill_size: Annotated[
        int | None, _option(_ENGINE, "Most prompt tokens in a step.")
    ] = None
    max_model_len: Annotated[int | None, _option(_ENGINE, "Most tokens of prompt and output.")] = (
        None
    )
    device: Annotated[str | None, _option(_ENGINE, "cpu, cuda or cuda:N; else the CPU.")] = None
    dtype: Annotated[
        str | None, _option(_ENGINE, "float32, bfloat16 or float16; auto: what fits the memory.")
    ] = None
    threads: Annotated[int | None, _option(_ENGINE, "Threads that compute; else one a core.")] = (
        None
    )
    seed: Annotated[
        int | None, _option(_ENGINE, "Seed of requests that bring none; else each draws anew.")
    ] = None
    disable_radix_cache: Annotated[
        bool, _option(_ENGINE, "Do not share cached prefixes.", "--disable-radix-cache")
    ] = False
    disable_jump_forward: Annotated[
        bool,
        _option(_ENGINE, "Draw what constraints leave no choice about.", "--disable-jump-forward"),
    ] = False
    deterministic: Annotated[
        bool,
        _option(
            _ENGINE,
            "A request's tokens and log-probabilities never depend on others; slower.",
            "--deterministic",
        ),
    ] = False
    compile_timeout: Annotated[
        float | None, _option(_ENGINE, "Seconds in which a constraint must compile; else 10.")
    ] = None
    grammar_backend: Annotated[
        str | None, _option(_ENGINE, "llguidance, or xgrammar for the schemas it is exact on.")
    ] = None

    chat_template: Annotated[
        Path | None, _option(_CHAT, "A Jinja file in place of the model's own template.")
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _option(
            _CHAT, "Set reasoning apart: deepseek-r1, qwen3, gpt-oss or kimi, as the model is."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None, _option(_CHAT, "How tool calls are written: auto, hermes or json.")
    ] = None

    log_level: Annotated[LogLevel, _option(_WATCHING, "What to log.", show_default=True)] = "info"
    log_format: Annotated[
        Literal["text", "json"], _option(_WATCHING, "How to write it.", show_default=True)
    ] = "text"
    otlp_endpoint: Annotated[
        str | None, _option(_WATCHING, "Send traces there, by OTLP over HTTP.", metavar="URL")
    ] = None

    page_size: Annotated[str | None, _option(_ELSEWHERE, "1.")] = None
    schedule_policy: Annotated[str | None, _option(_ELSEWHERE, "lpm.")] = None
    load_format: Annotated[str | None, _option(_ELSEWHERE, "auto.")] = None

    def check(self) -> None:
        """Raise `CommandError` for what can be told to be wrong without the engine."""
        if self.uds is not None and (self.host, self.port) != (None, None):
            raise CommandError("--uds is in place of --host and --port; drop it or them")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise CommandError("--ssl-keyfile: add its --ssl-certfile")
        for name, (values, reason) in _ONE_CHOICE.items():
            given = getattr(self, name)
            if given is not None and given not in values:
                flag = name.replace("_", "-")
                raise CommandError(
                    f"--{flag} {given}: {reason}; leave it out, or write {' or '.join(values)}"
                )
        if self.device is not None and not _DEVICE.fullmatch(self.device):
            raise CommandError(f"--device {self.device}: expected cpu, cuda or cuda:0")
        if self.grammar_backend not in {None, "llguidance", "xgrammar"}:
            raise CommandError(
                f"--grammar-backend {self.grammar_backend}: expected llguidance or xgrammar"
            )
        for origin in self.allowed_origins or ():
            if origin != "*" and "://" not in origin:
                raise CommandError(
                    f"--allowed-origins {origin}: write * or an origin as browsers send it, "
                    "https://example.org"
                )

    def engine(self) -> dict[str, Any]:
        """The engine's options that were given."""
        return {
            **self._given(ENGINE_OPTIONS),
            **({"device": self.device} if self.device not in {None, "auto"} else {}),
            **({"radix": False} if self.disable_radix_cache else {}),
            **({"jump_forward": False} if self.disable_jump_forward else {}),
            **({"deterministic": True} if self.deterministic else {}),
            **({"xgrammar": True} if self.grammar_backend == "xgrammar" else {}),
        }

    def server(self) -> dict[str, Any]:
        """The server's options that were given."""
        return self._given(SERVER_OPTIONS)

    def _given(self, names: Mapping[str, str]) -> dict[str, Any]:
        values = {name: getattr(self, field) for name, field in names.items()}
        return {name: value for name, value in values.items() if value is not None}
