"""`structgen serve`: from its options to a server that runs.

Holds  what the command line says is checked, and the sockets are bound and answered on, before
       torch is imported.
Used   by `app`.
"""

from __future__ import annotations

import contextlib
import gc
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from structgen.cli import leftovers, sockets, source
from structgen.cli.early import EarlyAnswers
from structgen.cli.engine import OpenEngine, run_guarded_loop, without_collections
from structgen.cli.failure import CommandError, blaming, report
from structgen.cli.serve_options import ENGINE_OPTIONS, SERVER_OPTIONS, ServeOptions
from structgen.errors import OptionError

if TYPE_CHECKING:
    from structgen.program.program import Program
    from structgen.server.config import ServerConfig
    from structgen.server.service import Service


def serve(model: str, options: ServeOptions, open_engine: OpenEngine) -> int:
    """Serve a model until a signal; the exit code."""
    left: list[str] = []
    threads = threading.enumerate()
    try:
        code = _served(model, options, open_engine, left)
    except (Exception, KeyboardInterrupt) as error:
        left += leftovers.threads_left(threads)
        if not left:
            raise
        code = report(error)
    else:
        left += leftovers.threads_left(threads)
    if left:
        leftovers.end_process(code, left)
    return code


def _served(model: str, options: ServeOptions, open_engine: OpenEngine, left: list[str]) -> int:
    options.check()
    tls = _tls(options)
    with sockets.listening(
        "127.0.0.1" if options.host is None else options.host,
        8000 if options.port is None else options.port,
        options.uds,
        scheme="https" if tls else "http",
    ) as address:
        typer.echo(f"listening on {address.url}, loading {model}")
        sys.stdout.flush()
        with _naming_flags(), EarlyAnswers(address.sockets, tls) as early:
            run = _loaded(model, options, open_engine, (address, tls), left)
            early.hand_over()
            return run()


def _loaded(
    model: str,
    options: ServeOptions,
    open_engine: OpenEngine,
    at: tuple[sockets.Listening, ssl.SSLContext | None],
    left: list[str],
) -> Callable[[], int]:
    """Import and read all that comes before the first request; what is left is to run it."""
    address, tls = at
    engine: Any = open_engine(model, **options.engine())
    with without_collections():
        from structgen.server.config import ServerConfig
        from structgen.server.observe.access_log import configure_logging
        from structgen.server.programs import log_exit
        from structgen.server.serving import run

    config = ServerConfig(**options.server())
    sockets.allow(config.connections)
    _warn_of_guests(address, config)
    programs = [each for target in options.programs or () for each in _programs(target)]

    def ready(service: Service) -> None:
        names = ", ".join(service.names)
        count = f"{len(programs)} program{'s' if len(programs) > 1 else ''}"
        served = f" and {count}" if programs else ""
        typer.echo(f"ready: serving {names}{served} at {address.url}")
        sys.stdout.flush()

    def serving() -> int:
        configure_logging(options.log_level, options.log_format)
        with _exporting(options.otlp_endpoint):
            main = run(
                engine, address.sockets, programs=programs, config=config, tls=tls, ready=ready
            )
            code = run_guarded_loop(main, log_exit, left)
        # The process ends now, and a last search for garbage in all that torch is takes a second.
        gc.freeze()
        return code

    return serving


@contextlib.contextmanager
def _naming_flags() -> Iterator[None]:
    """An option that is refused is called as the command line calls it."""
    try:
        yield
    except OptionError as error:
        field = {**ENGINE_OPTIONS, **SERVER_OPTIONS}.get(error.option)
        if field is None:
            raise
        said = str(error).removeprefix(f"{error.option}: ")
        raise CommandError(f"--{field.replace('_', '-')}: {said}") from None


def _programs(target: str) -> list[Program[..., Any]]:
    with blaming(source.split(target)[0]):
        return source.programs(target)


@contextlib.contextmanager
def _exporting(endpoint: str | None) -> Iterator[None]:
    """Send spans to an OTLP endpoint; what is left of them is sent at the end."""
    if endpoint is None:
        yield
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise CommandError(
            "--otlp-endpoint: install opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        ) from None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None:
        return None
    for flag, path in (("certfile", certificate), ("keyfile", key)):
        if path is not None and not path.is_file():
            raise CommandError(f"--ssl-{flag} {path}: no such file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password: one that is asked for at the terminal would let a server hang.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise CommandError(
            f"--ssl-certfile {certificate}: no certificate with its key in PEM, not encrypted: "
            f"{error.strerror or error}"
        ) from None
    return context


def _warn_of_guests(address: sockets.Listening, config: ServerConfig) -> None:
    if not config.api_keys and not address.is_local:
        sys.stderr.write(
            f"structgen: whoever reaches {address.url} may use it; add --api-key to choose who\n"
        )
