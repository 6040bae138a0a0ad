"""What moves when a state is used: its place in the transcript and in the program.

Owns   a transcript, variables, the default options, and the one operation that may run.
Holds  a cursor changes only inside an operation of its own, and only when that succeeds: what
       fails or is cancelled leaves no trace but the reason for it.
Used   by `State`, the face of it that programs see, and by `Pieces` and `Branches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio.lowlevel

from structgen.chat import Role
from structgen.errors import ConcurrentUseError, PromptError, TemplateError
from structgen.program.run import ForkScope, Run, derived_seed
from structgen.program.variables import Meta, Variables
from structgen.request import Completion, Lineage, Prompt, Request, Text
from structgen.transcript.chain import Transcript
from structgen.transcript.layout import NO_CHAT, extends, lay_out


class Cursor:
    """A place in a transcript, and all that belongs to it."""

    __slots__ = (
        "_calls",
        "_closing",
        "_place",
        "_scope",
        "_sent",
        "branch",
        "busy",
        "options",
        "run",
        "transcript",
        "variables",
    )

    def __init__(self, run: Run, options: Mapping[str, Any]) -> None:
        """The cursor of a program's first state; `fork` makes the others."""
        self.run = run
        self.options = options
        self.transcript = Transcript()
        self.variables = Variables()
        self.branch: tuple[int, ...] = ()
        self.busy: str | None = None
        self._closing = False  # the role closes when the running operation ends
        self._scope: ForkScope | None = None
        self._place: tuple[int, ...] = ()  # like `branch`, but forks of one state differ too
        self._calls = 0  # generations and forks made here, failed ones included
        self._sent: Prompt = ()  # the last prompt, with what came of it

    # ------------------------------------------------------------ one operation at a time

    def require_idle(self, action: str) -> None:
        """Raise `StateClosedError` after the program, `ConcurrentUseError` inside an operation."""
        self.run.require_open(action)
        if self.busy is not None:
            raise ConcurrentUseError(
                f"{action} while {self.busy} runs on the same State; await that first, or "
                "fork() the state before it to work in parallel"
            )

    async def begin(self, operation: str) -> None:
        """Begin the operation that now has the cursor."""
        if self.run.ended:
            # A task that outlived its program and retries for ever must not block the loop.
            await anyio.lowlevel.checkpoint()
        self.require_idle(operation)
        self.busy = operation

    def end(self) -> None:
        """End it."""
        self.busy = None
        if self._closing:
            self._closing = False
            self.transcript.close()

    # ------------------------------------------------------------ roles

    def open(self, role: Role) -> None:
        """Open a role. Raises `RoleError` inside another, `TemplateError` without a template."""
        self.require_idle(f"{role}()")
        if self.run.chat is None:
            raise TemplateError(NO_CHAT)
        self.transcript.open(role)

    def close(self) -> bool:
        """Close the role, now or when the running operation ends; returns whether it was now."""
        if self.busy is not None and not self.run.ended:
            self._closing = True
            return False
        self.transcript.close()
        return True

    # ------------------------------------------------------------ generating

    @contextmanager
    def noting(self, name: str | None) -> Iterator[None]:
        """Remember what kept the variable `name` from being set."""
        try:
            yield
        except BaseException as error:
            if isinstance(name, str):
                self.variables.fail(name, error)
            raise

    def ask(self, name: str | None, options: Mapping[str, Any]) -> tuple[Request, bool]:
        """The request of a generation here, and whether its prompt lost its beginning."""
        merged = {**self.options, **options}
        place = (*self._place, self._calls)
        self._calls += 1
        if "seed" not in options and merged.get("seed") is not None:
            merged["seed"] = derived_seed(merged["seed"], place)
        layout = lay_out(self.transcript.said(), self.run.chat)
        if not layout.parts:
            raise PromptError(
                "there is nothing to continue: append some text to the state before gen() "
                "or stream(), such as s += '...' or s.user('...')"
            )
        lineage = Lineage(
            run=self.run.id,
            scope=self._scope.innermost if self._scope is not None else 0,
            branch=self.branch,
            parent="" if name is None else variable_name(name),
        )
        request = self.run.request(layout.parts, merged, lineage)
        lost = layout.rewritten or not extends(layout.parts, self._sent)
        # From here on the text of this prompt stays a part of its own: its tokens are cached.
        self.transcript.seal()
        self._sent = layout.parts
        return request, lost

    def commit(self, name: str | None, completion: Completion, *, prefix_lost: bool) -> str:
        """Append a completion and set its variable; returns the text."""
        parts = completion.parts
        if completion.text and not completion.tokens:
            parts = (Text(completion.text),)  # the stop began in the first token, or no tokens
        self.transcript.write(parts)
        self._sent = (*self._sent, *parts)
        if name is not None:
            fields = {field: getattr(completion, field) for field in completion.__struct_fields__}
            self.variables.write(name, completion.text, Meta(prefix_lost=prefix_lost, **fields))
        return completion.text

    # ------------------------------------------------------------ forking

    def fork(self, n: int) -> tuple[list[Cursor], ForkScope]:
        """Cursors that go on from here, and their scope."""
        self.require_idle("fork()")
        scope = ForkScope(self.run, self._scope)
        children = [self._child(index, scope) for index in range(n)]
        self._calls += 1
        return children, scope

    def _child(self, index: int, scope: ForkScope) -> Cursor:
        child = Cursor(self.run, self.options)
        child.transcript = self.transcript.fork()
        child.variables = self.variables.copy()
        child.branch = (*self.branch, index)
        child._place = (*self._place, self._calls, index)
        child._scope = scope
        child._sent = self._sent
        return child


def variable_name(name: object) -> str:
    """Check the name of a variable."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a variable is a str, got {name!r}")
    return name
