"""What moves when a state is used: its place in the transcript and in the program.

Owns   a transcript, variables, the default options, the queue of expressions that wait to be
       awaited, and the one operation that may run.
Holds  a cursor changes only inside an operation of its own, and only when that succeeds: what
       fails or is cancelled leaves no trace but the reason for it.
Used   by `State`, the face of it that programs see, by `operations`, `Pieces` and `Branches`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import anyio.lowlevel
import msgspec

from structgen.chat import Role
from structgen.errors import (
    ConcurrentUseError,
    PendingError,
    PromptError,
    RoleError,
    StateError,
    TemplateError,
)
from structgen.events import VariableSet
from structgen.options import merged
from structgen.program.expression import (
    CloseRole,
    CloseScope,
    Expression,
    Gen,
    OpenRole,
    OpenScope,
    Select,
    Words,
    atoms,
)
from structgen.program.generation import Caller
from structgen.program.run import ForkScope, Place, Run, derived_seed
from structgen.program.variables import Meta, Value, Variables
from structgen.request import Lineage, Prompt, Request, prompt_text
from structgen.sampling import DEFAULT_MAX_TOKENS
from structgen.transcript.chain import Closed, Opened, Segment, Transcript
from structgen.transcript.layout import NO_CHAT, Layout, extends, lay_out


class Question(msgspec.Struct, frozen=True):
    """The requests of one call, one a sample, and whether their prompt lost its beginning."""

    requests: tuple[Request, ...]
    caller: Caller
    prefix_lost: bool


class Cursor:
    """A place in a transcript, and all that belongs to it."""

    __slots__ = (
        "_base",
        "_calls",
        "_closing",
        "_layers",
        "_opened",
        "_role_ahead",
        "_scope",
        "_sent",
        "branch",
        "busy",
        "chat",
        "number",
        "options",
        "pending",
        "place",
        "run",
        "transcript",
        "variables",
    )

    def __init__(self, run: Run, options: Mapping[str, Any]) -> None:
        """The cursor of a program's first state; `fork` makes the others."""
        self.run = run
        self.chat = run.chat  # with the tools that were given to it here
        self.options = self._base = options
        self._layers: list[tuple[object, Mapping[str, Any]]] = []  # blocks of `using`
        self.transcript = Transcript()
        self.variables = Variables()
        self.branch: tuple[int, ...] = ()
        self.place: Place = ()  # like `branch`, but forks of one state differ too
        self.number = next(run.states)
        self.busy: str | None = None
        self.pending: deque[Expression] = deque()
        self._role_ahead: Role | None = None  # the role in which the pending expressions end
        self._closing = False  # the role closes when the running operation ends
        # Variable scopes: number, name, and where they begin.
        self._opened: list[tuple[int, str, Segment | None]] = []
        self._scope: ForkScope | None = None
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

    def require_settled(self, action: str) -> None:
        """Raise `PendingError` while expressions wait to be awaited."""
        if self.pending:
            raise PendingError(
                f"{action} of a state on which {self.waiting()} was appended but not run yet; "
                "write `await s` first"
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
            self._close()

    # ------------------------------------------------------------ appending

    def append(self, expression: Expression) -> None:
        """Append an expression: what needs no model at once, the rest when the state is awaited.

        All of it or, where it is refused, nothing. Raises `RoleError` for a role inside a role,
        whether it is open or only appended, and `TemplateError` for a role without a template.
        """
        self.require_idle("append()")
        parts = tuple(atoms(expression))
        self._require_roles(parts)
        for atom in parts:
            if self.pending or isinstance(atom, Gen | Select):
                self._queue(atom)
            else:
                self.apply(atom)
        if self.pending:
            self._announce()  # once: the names are read anew each time

    def apply(self, atom: Expression) -> None:
        """Do what needs no model."""
        match atom:
            case Words(text):
                self.transcript.append(text)
            case OpenRole(role):
                self.transcript.open(role)
            case CloseRole():
                self.transcript.close()
            case OpenScope(name, number):
                self._opened.append((number, name, self.transcript.seal()))
            case CloseScope(name, number):
                self._close_scope(name, number)
            case _:
                raise AssertionError(atom)

    def _close_scope(self, name: str, number: int) -> None:
        if number not in {each for each, _, _ in self._opened}:
            raise StateError(f"the beginning of var_scope({name!r}) was dropped by discard()")
        last, inner, start = self._opened[-1]
        if last != number:
            raise StateError(
                f"var_scope({name!r}) ends inside var_scope({inner!r}): scopes end in the "
                "reverse of the order in which they began"
            )
        self._opened.pop()
        self.write(name, _text_of(self.transcript, start))

    def leave_scope(self, name: str, number: int, error: BaseException) -> None:
        """A variable scope was left by an error: its variable is not set."""
        opening = OpenScope(name, number)
        if opening in self.pending:
            self.pending = deque(each for each in self.pending if each != opening)
            self._announce()
        self._opened = [each for each in self._opened if each[0] != number]
        self.variables.fail(name, error)

    def done(self, atom: Expression) -> None:
        """The first of the pending expressions has been run."""
        if self.pending and self.pending[0] is atom:
            self.pending.popleft()
            if not self.pending or isinstance(atom, Gen | Select | CloseScope):
                self._announce()

    def discard(self) -> None:
        """Forget what is pending."""
        closing = {each.number for each in self.pending if isinstance(each, CloseScope)}
        self._opened = [each for each in self._opened if each[0] not in closing]
        self.pending.clear()
        self._announce()

    def waiting(self) -> str:
        """What is pending, in words."""
        calls = [str(each) for each in self.pending if isinstance(each, Gen | Select)]
        return ", ".join(calls) or "an expression"

    def _queue(self, atom: Expression) -> None:
        if not self.pending:
            self._role_ahead = self.role
        if isinstance(atom, OpenRole):
            self._role_ahead = atom.role
        elif isinstance(atom, CloseRole):
            self._role_ahead = None
        self.pending.append(atom)

    def _announce(self) -> None:
        """Tell the run and the variables what is pending."""
        named = [each.name for each in self.pending if isinstance(each, Gen | Select)]
        scopes = [each.name for each in self.pending if isinstance(each, CloseScope)]
        self.variables.awaited = [name for name in (*named, *scopes) if name]
        self.run.unsettled(self, self._describe if self.pending else None)

    def _describe(self) -> str:
        where = f"branch {list(self.branch)}" if self.branch else "the first state"
        return f"{self.waiting()} on {where}"

    @property
    def role(self) -> Role | None:
        """The role that is open after all that was appended."""
        if self.pending:
            return self._role_ahead
        return cast("Role | None", self.transcript.role)  # it takes any word for a role

    def _require_roles(self, parts: Sequence[Expression]) -> None:
        """Refuse roles that cannot be opened or ended here, before anything is appended."""
        inside = self.role
        for atom in parts:
            if isinstance(atom, OpenRole):
                if self.chat is None:
                    raise TemplateError(NO_CHAT)
                if inside is not None:
                    raise RoleError(
                        f"{atom.role}() inside the role {inside!r}: roles do not nest; leave the "
                        f"block of {inside!r} first (on a branch: the block that was open at the "
                        "fork)"
                    )
                inside = atom.role
            elif isinstance(atom, CloseRole):
                if inside != atom.role:
                    there = f"inside the role {inside!r}" if inside else "outside of any role"
                    raise RoleError(f"{atom.role}_end() {there}: end the role that was begun")
                inside = None

    # ------------------------------------------------------------ roles

    def close(self) -> bool:
        """Close the role, now or when the running operation ends; returns whether it was now."""
        if self.busy is not None and not self.run.ended:
            self._closing = True
            return False
        self._close()
        return True

    def _close(self) -> None:
        role = self.role
        if role is None:
            return
        if self.pending and not self.run.ended:
            self._queue(CloseRole(role))  # no name is pending that was not before
        elif self.transcript.role is not None:
            self.transcript.close()

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

    def ask(self, call: Gen) -> Question:
        """The requests of a generation here."""
        constraint = call.form.constraint if call.form is not None else None
        options = merged(self.options, call.options, bound=constraint is not None)
        place = (*self.place, self._calls)
        self._calls += 1
        layout = self.prompt(str(call))
        _keep_budget(options, self.run.left())
        requests: list[Request] = []
        for sample in range(call.samples or 1):
            seed = options.get("seed")
            own = dict(options)
            if seed is not None and call.options.get("seed") is None:
                own["seed"] = derived_seed(seed, place)
            if own.get("seed") is not None and sample:
                own["seed"] = derived_seed(own["seed"], (sample,))
            lineage = self.lineage(call.name)
            requests.append(
                self.run.request(layout.parts, own, lineage=lineage, constraint=constraint)
            )
        lost = layout.rewritten or not extends(layout.parts, self._sent)
        self.sent(layout.parts)
        caller = Caller(self.place, self.number, call.name or "", call.reasoning)
        return Question(tuple(requests), caller, lost)

    def prompt(self, action: str) -> Layout:
        """What was said, as the prompt of an action. Raises `PromptError` if that is nothing."""
        return self.prompt_of(self.transcript, action)

    def prompt_of(self, transcript: Transcript, action: str) -> Layout:
        """The same for another transcript."""
        layout = lay_out(transcript.said(), self.chat)
        if not layout.parts:
            raise PromptError(
                f"there is nothing to continue: append some text to the state before {action}, "
                "such as s += '...' or s.user('...')"
            )
        return layout

    def sent(self, parts: Prompt) -> None:
        """A prompt was sent, or what came of it was appended."""
        # From here on the text of this prompt stays a part of its own: its tokens are cached.
        self.transcript.seal()
        self._sent = parts

    def call_seed(self, seed: int | None) -> int | None:
        """The seed of a draw here: as given, or derived from that of the run."""
        place = (*self.place, self._calls)
        self._calls += 1
        if seed is None and (base := self.options.get("seed")) is not None:
            return derived_seed(base, place)
        return seed

    def lineage(self, name: str | None) -> Lineage:
        """Where a request of this cursor comes from."""
        return Lineage(
            run=self.run.id,
            scope=self._scope.innermost if self._scope is not None else 0,
            branch=self.branch,
            parent=name or "",
        )

    def commit(self, parts: Prompt) -> None:
        """Append what a model wrote."""
        self.transcript.write(parts)
        self._sent = (*self._sent, *parts)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Take back all that was said in the block if it is left by an error."""
        transcript, chat, sent = self.transcript, self.chat, self._sent
        self.transcript = transcript.fork()
        try:
            yield
        except BaseException:
            self.transcript, self.chat, self._sent = transcript, chat, sent
            raise

    def write(self, name: str | None, value: Value, meta: Meta | None = None) -> None:
        """Set a variable, if it has a name."""
        if name is None:
            return
        self.variables.write(name, value, meta)
        if self.run.heard:
            self.run.tell(VariableSet, state=self.number, name=name, value=value)

    # ------------------------------------------------------------ default options

    @contextmanager
    def using(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Default options inside a block, which come before those of blocks that began earlier."""
        layer = (object(), options)
        self._layers.append(layer)
        self._merge()
        try:
            yield
        finally:
            # By its identity: blocks of two tasks may end in any order.
            self._layers = [each for each in self._layers if each is not layer]
            self._merge()

    def _merge(self) -> None:
        self.options = {**self._base}
        for _, options in self._layers:
            self.options = merged(self.options, options)

    # ------------------------------------------------------------ forking

    def fork(self, n: int) -> tuple[list[Cursor], ForkScope]:
        """Cursors that go on from here, and their scope."""
        self.require_idle("fork()")
        self.require_settled("fork()")
        place = (*self.place, self._calls)
        scope = ForkScope(self.run, self._scope, place)
        children = [self._child(index, scope) for index in range(n)]
        self._calls += 1
        return children, scope

    def _child(self, index: int, scope: ForkScope) -> Cursor:
        child = Cursor(self.run, self.options)
        child.chat = self.chat
        child.transcript = self.transcript.fork()
        child.variables = self.variables.copy()
        child.branch = (*self.branch, index)
        child.place = (*scope.place, index)
        child._scope = scope
        child._sent = self._sent
        self.run.branch_opened(child.number, self.number, child.branch)
        return child


def _keep_budget(options: dict[str, Any], left: int | None) -> None:
    """Lower `max_tokens` to what the budget leaves: nobody may read what goes beyond it."""
    if left is not None and (options.get("max_tokens") or DEFAULT_MAX_TOKENS) > left:
        options["max_tokens"] = left
        options["min_tokens"] = min(options.get("min_tokens") or 0, left)


def _text_of(transcript: Transcript, start: Segment | None) -> str:
    said = transcript.said(since=start)
    return prompt_text([each for each in said if not isinstance(each, Opened | Closed)])
