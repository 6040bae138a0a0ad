"""The options that several commands share: on what they generate, how, and what they report."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import msgspec
import typer
from typer.models import OptionInfo

from structgen.errors import OptionError
from structgen.options import GenOptions
from structgen.sampling import Sampling

DEFAULT_MODEL = "smollm2-135m"
_SAMPLING, _ENGINE = "Sampling defaults", "Engine"


def _sampling(text: str) -> OptionInfo:
    option: OptionInfo = typer.Option(help=text, rich_help_panel=_SAMPLING)
    return option


def _engine(text: str, *names: str) -> OptionInfo:
    option: OptionInfo = typer.Option(
        *names, help=text, rich_help_panel=_ENGINE, show_default=False
    )
    return option


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One field for each option; None means that the model or the engine chooses."""

    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A known name, a hub id, a folder or a .gguf file."),
    ] = DEFAULT_MODEL
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Write the defaults in force to stderr.")
    ] = False

    max_tokens: Annotated[int | None, _sampling("Most tokens of one generation.")] = None
    temperature: Annotated[float | None, _sampling("0 is greedy.")] = None
    top_p: Annotated[float | None, _sampling("Draw from the likeliest tokens of this mass.")] = None
    top_k: Annotated[int | None, _sampling("Draw from the k likeliest tokens; 0: from all.")] = None
    min_p: Annotated[float | None, _sampling("Least probability, of the likeliest's.")] = None
    seed: Annotated[int | None, _sampling("Makes a run repeatable.")] = None

    dtype: Annotated[
        str | None, _engine("float32, bfloat16 or float16; auto: what fits the memory.")
    ] = None
    slots: Annotated[int | None, _engine("Tokens that the cache holds; else from memory.")] = None
    max_running: Annotated[int | None, _engine("Most requests in a step.")] = None
    chunk_size: Annotated[int | None, _engine("Most prompt tokens in a step.")] = None
    max_context: Annotated[int | None, _engine("Most tokens of prompt and output.")] = None
    threads: Annotated[int | None, _engine("Threads that compute; else one a core.")] = None
    chat_template: Annotated[
        Path | None, _engine("A Jinja file in place of the model's own template.")
    ] = None
    radix: Annotated[
        bool | None, _engine("Share cached prefixes; on, unless told not to.", "--radix/--no-radix")
    ] = None

    jump_forward: Annotated[
        bool | None,
        _engine(
            "Take what a constraint leaves no choice about undrawn; on, unless told not to.",
            "--jump-forward/--no-jump-forward",
        ),
    ] = None
    compile_timeout: Annotated[
        float | None, _engine("Seconds in which a constraint must compile; 10, unless given.")
    ] = None

    def sampling(self) -> GenOptions:
        """The sampling options that were given. Raises `OptionError` for one out of range."""
        given = self._given("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
        if given.get("max_tokens") == 0:
            raise OptionError("max_tokens", "must be at least 1, got 0")  # nothing would come of it
        Sampling(**given)
        return cast("GenOptions", given)

    def engine(self) -> dict[str, Any]:
        """The engine's options that were given."""
        names = ("dtype", "slots", "max_running", "chunk_size", "max_context", "threads")
        return self._given(*names, "chat_template", "radix", "jump_forward", "compile_timeout")

    def _given(self, *names: str) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def expand(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's parameter `options` by an option for each field of its type."""
    parameters = _parameters(command)
    own = [p for p in parameters if p.name != "options"]
    (type_,) = (p.annotation for p in parameters if p.name == "options")
    hints = get_type_hints(type_, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in msgspec.structs.fields(type_)
    ]

    @functools.wraps(command)
    def expanded(**values: Any) -> object:
        shares = {parameter.name: values.pop(parameter.name) for parameter in shared}
        return command(options=type_(**shares), **values)

    # typer reads both; the annotations of the command itself may be strings.
    expanded.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]  # a function can have one
    expanded.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}
    return expanded


def _parameters(command: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(command, eval_str=True).parameters.values())
