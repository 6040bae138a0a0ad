"""The commands of `structgen` and their help; what they do is in `running`."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from structgen.cli.constraint import EbnfOption, RegexOption, SchemaOption, constraint_options
from structgen.cli.engine import Opening, run_loop
from structgen.cli.failure import CommandError, blaming
from structgen.cli.options import DEFAULT_MODEL, Options, expand
from structgen.cli.serve_options import ServeOptions

app = typer.Typer(
    name="structgen",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DEMO = Path(__file__).parents[1] / "examples" / "tips.py"

Arguments = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="NAME=VALUE", help="An argument of the program; repeatable."),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE.json",
        help="Record the run into a file that Perfetto and chrome://tracing show.",
    ),
]
Tree = Annotated[bool, typer.Option("--tree", help="Write what happened in the run as a tree.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Write the version.")] = False,
) -> None:
    """Structured language-model programs, with the engine in the same process."""
    if version:
        typer.echo(f"structgen {importlib.metadata.version('structgen-lm')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@expand
def run(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="FILE[:PROGRAM]", help="A Python file with a program in it.")
    ],
    *,
    arg: Arguments = None,
    trace: Trace = None,
    tree: Tree = False,
    options: Options,
) -> None:
    """Run a program; write its text, its value and what it cost."""
    _run(context, target, arg or (), options, trace=trace, tree=tree)


@app.command()
@expand
def demo(
    context: typer.Context,
    *,
    arg: Arguments = None,
    trace: Trace = None,
    tree: Tree = False,
    options: Options,
) -> None:
    """Run the example: a prompt that forks into branches and joins again."""
    _run(context, str(DEMO), arg or (), options, trace=trace, tree=tree)


@app.command()
@expand
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to answer or continue; - reads stdin.")],
    *,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer as a chat, or continue the text as it is.",
            show_default="chat if the model has a template",
        ),
    ] = None,
    regex: RegexOption = None,
    json_schema: SchemaOption = None,
    ebnf: EbnfOption = None,
    options: Options,
) -> None:
    """Generate from a prompt and write the output as it comes."""
    from structgen.cli import running
    from structgen.cli.outcome import report

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise CommandError(running.NOTHING)
    form = constraint_options(regex, json_schema, ebnf)
    options.sampling()
    opening = Opening.of(context.obj, options.model, options.engine())
    outcome = run_loop(running.generate(text, options, opening, chat=chat, form=form))
    complete = report.is_complete(outcome)
    typer.echo(report.to_json(outcome, complete=complete) if options.json else "")
    if options.verbose and not options.json:
        report.show_cost(outcome, sys.stderr)
    if form:
        report.check_complete(outcome)


@app.command()
@expand
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A known name, a hub id, a folder or a .gguf file.")
    ] = DEFAULT_MODEL,
    *,
    options: ServeOptions,
) -> int:
    """Serve a model, and programs, over HTTP: OpenAI's routes and more."""
    from structgen.cli import serve as serving

    return serving.serve(model, options, context.obj)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A known name or a hub id.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model ahead of its first use; write where it is."""
    from structgen.cli.fetching import fetch

    typer.echo(fetch(model))


def _run(
    context: typer.Context,
    target: str,
    pairs: Sequence[str],
    options: Options,
    *,
    trace: Path | None,
    tree: bool,
) -> None:
    from structgen.cli import arguments, running, source
    from structgen.cli.outcome import report
    from structgen.cli.outcome.recording import Recording

    recording = Recording(trace, tree=tree, json=options.json)
    file, name = source.split(target)
    with recording.kept():
        with blaming(file):
            options.sampling()
            program = source.program_in(file, name)
            keywords = arguments.keywords(program.function, pairs, program.bound)
            opening = Opening.of(context.obj, options.model, options.engine())
            outcome = run_loop(running.run(program, keywords, options, opening))
        if options.json:
            typer.echo(report.to_json(outcome))
        else:
            report.show(outcome)
