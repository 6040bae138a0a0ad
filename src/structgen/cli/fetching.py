"""Fetching a model, with a progress bar where a person is watching.

Used   by `structgen pull`, and before an engine opens a known model that is not here yet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from structgen.models.pull import Progress, cached, known_model
from structgen.models.resolve import pull


def fetch(model: str) -> Path:
    """Fetch a model unless it is here; returns where it is. Raises `ModelError`."""
    with _bar() as progress:
        return pull(model, progress)


def fetch_if_known(model: str) -> None:
    """Fetch a model that has a name of its own and is not here; others are left to the engine."""
    known = known_model(model)
    if known is not None and cached(known) is None:
        fetch(model)


@contextmanager
def _bar() -> Iterator[Progress]:
    """A function that shows stage, bytes done and bytes in all on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Display

    columns = (TextColumn("{task.description:>8}"), BarColumn(), DownloadColumn())
    console = Console(file=sys.stderr)
    with Display(*columns, TransferSpeedColumn(), console=console) as display:
        stages: dict[str, TaskID] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = display.add_task(stage, total=total)
            display.update(stages[stage], completed=done)

        yield progress
