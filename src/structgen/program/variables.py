"""The variables of one state: values, how they were generated, and what failed.

Owns   name -> value, name -> completion, name -> error. Used by `State`, `Branches`, `Result`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from structgen.errors import PendingError, StateError, UnknownVariableError
from structgen.output.choices import ChoiceScore
from structgen.program.tasks import named
from structgen.request import Completion

Value = Any  # a variable holds whatever a program puts there


class Meta(Completion, frozen=True, kw_only=True):
    """How a variable was generated: the completion that went into the text, and what it cost.

    prefix_lost   the prompt did not continue the prompt before it on this state, because the chat
                  template changed what earlier turns said. The prompt was right, but its earlier
                  keys and values could not serve again.
    samples       of a `gen` with n: all completions, in order
    choices       of a `select`: every choice with its log-probabilities, score and probability
    by            of a `select`: how the scores became a decision; "sample" where it was drawn
    attempts      of a `gen` with retries: how many generations it took, that one included; the
                  usage here is that one's, the run's usage has all of them
    """

    prefix_lost: bool = False
    samples: tuple[Completion, ...] = ()
    choices: tuple[ChoiceScore, ...] = ()
    by: str = ""
    attempts: int = 1


class Variables:
    """Values by name."""

    __slots__ = ("_failures", "_metas", "_values", "awaited")

    def __init__(self) -> None:
        self.awaited: Collection[str] = ()  # names that are appended and not generated yet
        self._values: dict[str, Value] = {}
        self._metas: dict[str, Meta] = {}
        self._failures: dict[str, BaseException] = {}

    def copy(self) -> Variables:
        """The same variables, to be changed apart from these."""
        other = Variables()
        other._values = dict(self._values)
        other._metas = dict(self._metas)
        other._failures = dict(self._failures)
        return other

    def detached(self) -> Variables:
        """The same variables, to be kept: failures of the past hold no frame, so no backend."""
        other = self.copy()
        for name, error in self._failures.items():
            other.fail(name, _bare(error))
        return other

    def names(self) -> Collection[str]:
        """Names in the order in which they were set first."""
        return self._values.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._values and name not in self.awaited

    def read(self, name: str) -> Value:
        """The value.

        Raises `PendingError` for one that is appended but not generated yet, and
        `UnknownVariableError`, caused by what kept it from being set.
        """
        self._require_settled(name)
        if name in self._values:
            return self._values[name]
        failure = self._failures.get(name)
        raise UnknownVariableError(self._missing(name, failure)) from failure

    def meta(self, name: str) -> Meta:
        """How it was generated. Raises `UnknownVariableError` where it was not."""
        self._require_settled(name)
        if name in self._metas:
            return self._metas[name]
        if name in self._values:
            raise UnknownVariableError(
                f"{name!r} was assigned or joined, not generated: it has a value, but no meta"
            )
        failure = self._failures.get(name)
        raise UnknownVariableError(self._missing(name, failure)) from failure

    def write(self, name: str, value: Value, meta: Meta | None = None) -> None:
        """Set a value; `meta` says how it was generated."""
        self._values[name] = value
        self._failures.pop(name, None)
        if meta is None:
            self._metas.pop(name, None)
        else:
            self._metas[name] = meta

    def fail(self, name: str, error: BaseException) -> None:
        """Note what kept a value from being set; a value that it had before stays."""
        self._failures[name] = error

    def failed(self) -> Mapping[str, BaseException]:
        """What kept variables from being set, by name."""
        return self._failures

    def _require_settled(self, name: str) -> None:
        if name in self.awaited:
            raise PendingError(
                f"{name!r} has been appended but not generated yet; write `await s` before you "
                f"read s[{name!r}]"
            )

    def _missing(self, name: str, failure: BaseException | None) -> str:
        known = ", ".join(repr(each) for each in self._values)
        there = f"this state has {known}" if known else "this state has no variables"
        if failure is None:
            return (
                f"no variable {name!r}; {there} (a gen, select or stream sets one when it is "
                "awaited)"
            )
        reason = named(failure).removesuffix(": ")
        return f"no variable {name!r}, because generating it failed with {reason}; {there}"


def _bare(error: BaseException) -> BaseException:
    """A copy of an error without traceback and causes, or what it says where it has none."""
    try:
        bare = copy.copy(error)
    except Exception:  # noqa: BLE001 - whatever a foreign error does in its constructor
        bare = StateError(named(error))
    bare.__cause__ = bare.__context__ = None
    return bare.with_traceback(None)
