"""The variables of one state: values, how they were generated, and what failed.

Owns   name -> value, name -> completion, name -> error. Used by `State`, `Branches`, `Result`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from structgen.errors import UnknownVariableError
from structgen.request import Completion

Value = Any  # a variable holds whatever a program puts there


class Meta(Completion, frozen=True, kw_only=True):
    """How a variable was generated: the completion, and what it cost the cache.

    `prefix_lost` is true where the prompt did not continue the prompt before it on this state,
    because the chat template changed what earlier turns said. The prompt was right, but its
    earlier keys and values could not serve again.
    """

    prefix_lost: bool = False


class Variables:
    """Values by name."""

    __slots__ = ("_failures", "_metas", "_values")

    def __init__(self) -> None:
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

    def names(self) -> Collection[str]:
        """Names in the order in which they were set first."""
        return self._values.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def read(self, name: str) -> Value:
        """The value. Raises `UnknownVariableError`, caused by what kept it from being set."""
        if name in self._values:
            return self._values[name]
        failure = self._failures.get(name)
        raise UnknownVariableError(self._missing(name, failure)) from failure

    def meta(self, name: str) -> Meta:
        """How it was generated. Raises `UnknownVariableError` where it was not."""
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

    def _missing(self, name: str, failure: BaseException | None) -> str:
        known = ", ".join(repr(each) for each in self._values)
        there = f"this state has {known}" if known else "this state has no variables"
        if failure is None:
            return f"no variable {name!r}; {there}"
        reason = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
        return f"no variable {name!r}, because generating it failed with {reason}; {there}"
