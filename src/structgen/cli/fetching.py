"""Fetching a model, with a progress bar on stderr once there is something to fetch.

Used   by `structgen pull`, and by the other commands before they open an engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from structgen.errors import ModelNotFoundError
from structgen.models.pull import KNOWN
from structgen.models.resolve import pull, resolve
from structgen.options import nearest

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def fetch(model: str) -> Path:
    """Fetch a model unless it is here; returns where it is. Raises `ModelError`."""
    with _suggesting(model), _Bar() as bar:
        return pull(model, bar.advance)


def locate(model: str) -> Path:
    """Where a model is, fetched if that is needed and possible. Raises `ModelError`."""
    with _suggesting(model), _Bar() as bar:
        return resolve(model, progress=bar.advance)


@contextmanager
def _suggesting(model: str) -> Iterator[None]:
    """A model that is not found is compared with those that are here."""
    try:
        yield
    except ModelNotFoundError as error:
        near = nearest(model, [name for known in KNOWN for name in known.names])
        near = near or _neighbour(Path(model).expanduser())
        if near is None:
            raise
        raise ModelNotFoundError(f"{error}; did you mean {near}?") from error


def _neighbour(path: Path) -> str | None:
    """The model beside a path that does not exist whose name is nearest to it."""
    try:
        models = [] if path.exists() else [e.name for e in path.parent.iterdir() if _is_model(e)]
    except OSError:
        return None  # a folder that cannot be read suggests nothing; the error says what matters
    near = nearest(path.name, models)
    return None if near is None else str(path.parent / near)


def _is_model(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" or (path / "config.json").is_file()


class _Bar:
    """Shows stages of work in bytes; until the first it shows, and imports, nothing."""

    def __init__(self) -> None:
        self._display: Progress | None = None
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._display.stop()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of a stage are done."""
        if self._display is None:
            self._display = _display()
            self._display.start()
        if stage not in self._stages:
            self._stages[stage] = self._display.add_task(stage, total=total)
        self._display.update(self._stages[stage], completed=done)


def _display() -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description:>8}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        console=Console(file=sys.stderr),
    )
