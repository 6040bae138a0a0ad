"""The options that say what an output must be: a pattern, a schema or grammar, or its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from structgen.cli.failure import CommandError
from structgen.options import GenOptions

_PANEL = "Form of the output"

RegexOption = Annotated[
    str | None,
    typer.Option("--regex", metavar="PATTERN", help="All of it matches.", rich_help_panel=_PANEL),
]
SchemaOption = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|JSON",
        help="It is a JSON value that is valid under this; true: any JSON value.",
        rich_help_panel=_PANEL,
    ),
]
EbnfOption = Annotated[
    str | None,
    typer.Option(
        "--ebnf",
        metavar="FILE|EBNF",
        help="The grammar's rule root derives it.",
        rich_help_panel=_PANEL,
    ),
]


def constraint_options(regex: str | None, json_schema: str | None, ebnf: str | None) -> GenOptions:
    """The keywords of a generation for what was given; a file is read.

    Raises `CommandError` for a file that cannot be read, and for two of them at once.
    """
    given = {"--regex": regex, "--json-schema": json_schema, "--ebnf": ebnf}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise CommandError(f"{' and '.join(names)} cannot be combined; give one of them")
    if regex is not None:
        return {"regex": regex}
    if json_schema is not None:
        is_text = json_schema.lstrip()[:1] in {"{", "["} or json_schema in {"true", "false"}
        return {"json_schema": json_schema if is_text else _read("--json-schema", json_schema)}
    if ebnf is not None:
        return {"ebnf": ebnf if "::=" in ebnf else _read("--ebnf", ebnf)}
    return {}


def _read(option: str, name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{option} {name}: the file is no UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        what = (
            "a schema, which begins with {" if option == "--json-schema" else "a grammar with ::="
        )
        raise CommandError(f"{option} {name:.80}: {reason}; give a file, or {what}") from None
