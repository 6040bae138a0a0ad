"""A trace as a text tree for a terminal: one line for each span, and a line of totals.

Owns   nothing: a function of the spans. Plain text, the same for the same spans.
Used   by `Trace` and the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from structgen.request import Usage
from structgen.sampling import check_whole
from structgen.trace.outline import columns, one_line, pad, rails, shorten
from structgen.trace.spans import (
    BranchSpan,
    CallSpan,
    FrameSpan,
    Placed,
    Recorded,
    RunSpan,
    Span,
    latest,
    own_frame,
    title,
    total,
    walk,
)

WIDTH, LEAST_WIDTH = 100, 72
HEADS = ("prompt", "cached", "new", "waited", "first", "ms")
WIDTHS = (6, 6, 5, 7, 7, 8)
_FIGURES = sum(WIDTHS) + len(WIDTHS)
_ENDING = 10  # least columns for how a span ended
RUNNING = "running"


class Row(NamedTuple):
    """One line of the table, before it is laid out."""

    label: str
    figures: tuple[str, ...]
    ending: str


def text_tree(trace: Recorded, width: int = WIDTH) -> str:
    """The tree, no line longer than `width` columns.

    prompt, cached, new   tokens: of the prompt, of them cached, generated
    waited                in the queue until something of the call was computed, milliseconds
    first                 from the call's start to its first text, milliseconds
    ms                    from start to end

    Raises `OptionError` for a width below 72.
    """
    check_whole("width", width, low=LEAST_WIDTH)
    placed = walk(trace.runs)
    if not placed:
        return "no runs"
    usages, depths = _usages(placed), _depths(placed)
    shown = [index for index, depth in enumerate(depths) if depth is not None]
    lines = rails([depth for depth in depths if depth is not None], room=width // 3)
    rows = [
        _row(placed[index].span, usages[index], rail)
        for index, rail in zip(shown, lines, strict=True)
    ]
    rows = [Row("", HEADS, ""), *rows, _totals(placed)]
    label_width = min(max(columns(row.label) for row in rows), width - _FIGURES - _ENDING - 1)
    return "\n".join(_line(row, label_width, width) for row in rows)


def _depths(placed: Sequence[Placed]) -> list[int | None]:
    """The depth of each line; None for a run's own frame, since the run's line says it all."""
    own = [_is_own_frame(placed, each) for each in placed]
    hidden: list[int] = []
    for each in placed:
        above = each.parent
        hidden.append(hidden[above] + own[above] if above >= 0 else 0)
    return [
        None if is_own else each.depth - less
        for each, is_own, less in zip(placed, own, hidden, strict=True)
    ]


def _is_own_frame(placed: Sequence[Placed], each: Placed) -> bool:
    run = placed[each.run].span
    return isinstance(run, RunSpan) and each.span is own_frame(run)


def _usages(placed: Sequence[Placed]) -> list[Usage]:
    """Of each span the tokens of the calls in it; those of a run that it started are not its."""
    found = [each.span.usage if isinstance(each.span, CallSpan) else Usage() for each in placed]
    for index in range(len(placed) - 1, -1, -1):
        span, parent = placed[index].span, placed[index].parent
        if isinstance(span, RunSpan):
            found[index] = span.usage
        else:
            found[parent] += found[index]
    return found


def _row(span: Span, usage: Usage, rail: str) -> Row:
    waited = first = ""
    ending = RUNNING if span.end is None else ""
    match span:
        case CallSpan():
            waited = _milliseconds(span.waited)
            first = "" if span.first_token is None else _milliseconds(span.first_token - span.start)
            ending = span.error or span.reason or ending
        case RunSpan() | FrameSpan():
            ending = span.error or ending
        case BranchSpan():
            pass
    took = "" if span.end is None else _milliseconds(span.end - span.start)
    return Row(rail + one_line(title(span)), (*_counts(usage), waited, first, took), ending)


def _totals(placed: Sequence[Placed]) -> Row:
    runs = [each.span for each in placed if isinstance(each.span, RunSpan)]
    calls = sum(isinstance(each.span, CallSpan) for each in placed)
    took = latest(placed) - min(run.start for run in runs)
    label = f"{_plural(len(runs), 'run')}, {_plural(calls, 'call')}"
    usage = total(run.usage for run in runs)
    return Row(label, (*_counts(usage), "", "", _milliseconds(took)), "")


def _line(row: Row, label_width: int, width: int) -> str:
    label = pad(shorten(row.label, label_width), label_width)
    figures = " ".join(
        f"{figure:>{size}}" for figure, size in zip(row.figures, WIDTHS, strict=True)
    )
    line = f"{label} {figures}"
    return shorten(f"{line} {one_line(row.ending)}".rstrip(), width)


def _counts(usage: Usage) -> tuple[str, str, str]:
    return str(usage.prompt_tokens), str(usage.cached_tokens), str(usage.completion_tokens)


def _milliseconds(seconds: float) -> str:
    figure = max(seconds, 0.0) * 1000
    return f"{figure:.1f}" if figure < 100 else f"{figure:.0f}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
