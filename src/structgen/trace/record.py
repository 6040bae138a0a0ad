"""`record()`: everything that runs inside the block, as a `Trace`.

Owns   the listener that it adds to `events.LISTENERS`, and the fold that it feeds.
Used   by users, by the command line and by whatever shows runs.

    with record() as trace:
        await haiku.run(engine, "rain")
    sys.stdout.write(f"{trace}\\n")
    trace.save("haiku.json")
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from structgen.errors import OptionError
from structgen.events import LISTENERS, Event
from structgen.request import Usage
from structgen.sampling import check_whole
from structgen.trace.chrome import chrome_trace
from structgen.trace.fold import Fold
from structgen.trace.spans import RunSpan
from structgen.trace.tree import text_tree

TEXT_LIMIT = 2000


class Trace:
    """What has happened so far in the runs that are recorded.

    It can be read at any time, also while they run: what has not ended has no `end`.
    `str(trace)` is a text tree, one line for each span.
    """

    def __init__(self, text_limit: int = TEXT_LIMIT) -> None:
        """`record()` makes traces; `text_limit` is how many characters of each text are kept."""
        check_whole("text_limit", text_limit, low=0)
        self.began = time.time()
        self._fold = Fold(time.perf_counter(), text_limit)
        self._closed = False
        # Runs may report from several threads: each has a loop of its own, or `to_thread` has
        # taken the context there. Held for microseconds.
        self._lock = threading.Lock()

    @property
    def runs(self) -> tuple[RunSpan, ...]:
        """The runs as they are now, in the order in which they began.

        A run that another one started is found in that one, under the branch or program on which
        the task that started it had worked last.
        """
        with self._lock:
            return self._fold.freeze()

    @property
    def usage(self) -> Usage:
        """Tokens of all runs, those inside of others included."""
        with self._lock:
            return self._fold.usage()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file that ends in .json, in Chrome's Trace Event Format.

        https://ui.perfetto.dev and chrome://tracing show it. Raises `OptionError` for another
        ending and `OSError` where the file cannot be written.
        """
        file = Path(path)
        require_known_ending(file)
        # Escaped to ASCII: what a model or a user wrote need not be valid Unicode.
        file.write_text(json.dumps(chrome_trace(self)), encoding="ascii")

    def __str__(self) -> str:
        return text_tree(self)

    def __repr__(self) -> str:
        return f"<Trace of {len(self.runs)} runs>"

    # ------------------------------------------------------------ listening

    def listen(self, event: Event) -> None:
        """Take an event; this is the listener."""
        with self._lock:
            if not self._closed or self._fold.knows(event):
                self._fold.tell(event)

    def close(self) -> None:
        """From now on only runs that have begun are followed, with what they start."""
        self._closed = True


@contextmanager
def record(*, text_limit: int = TEXT_LIMIT) -> Iterator[Trace]:
    """Record all runs that start in this block, in tasks and threads made there too.

    text_limit   how many characters of each call's text are kept; 0 keeps none

    Traces nest: each block records what runs in it. A run that goes on after the block's end is
    followed to its own end.
    """
    trace = Trace(text_limit)
    listener = trace.listen
    LISTENERS.set((*LISTENERS.get(), listener))
    try:
        yield trace
    finally:
        trace.close()
        # Taken out, not reset by token: a fixture may leave the block in another context than it
        # entered it in, and blocks may end in any order.
        LISTENERS.set(tuple(each for each in LISTENERS.get() if each is not listener))


def require_known_ending(path: Path) -> None:
    """Raise `OptionError` for a file whose ending names no format that a trace is saved in."""
    if path.suffix.lower() != ".json":
        ending = f"ends in {path.suffix!r}" if path.suffix else "has no ending"
        raise OptionError(
            "path",
            f"{path} {ending}; a trace is saved as .json, in Chrome's trace format, which "
            "https://ui.perfetto.dev shows",
        )
