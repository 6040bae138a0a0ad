"""JSON that is still being written, as the value that it is so far.

Owns   one text that grows, and the value that its beginning stands for.
Holds  what is complete is there: members with a complete value or one that has begun, numbers and
       words when they have ended, strings as far as they go, an escape when all of it is there.
       A value that was handed out never changes; what is complete in it may stand in later ones.
Used   by `program`, for streams of objects.

The time is linear in the text: a value costs a copy of the containers that are still open, so
where these are long there is a new one only after as much more text.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any

_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANK = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])", re.DOTALL)
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_HIGH = re.compile(r"\\u[dD][89abAB]..")
_LOW = re.compile(r"\\u[dD][c-fC-F]..")
_SHARE = 8  # a copy may cost so many items for each new character, and is made at once below
_SMALL = 64


class Mode(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_ITEM = auto()  # a value, or the end of the array
    FIRST_KEY = auto()  # a key, or the end of the object
    KEY = auto()
    COLON = auto()
    AFTER = auto()  # a comma, or the end of the container
    STRING = auto()
    SCALAR = auto()
    DONE = auto()


class Partial:
    """One JSON text: `push` what comes, take the `value` when it is `due`."""

    def __init__(self) -> None:
        self._mode = Mode.VALUE
        self._open: list[dict[str, Any] | list[Any]] = []
        self._keys: list[str] = []  # of the open objects, those whose values have not ended
        self._strings: list[str] = []  # the string that is open, in pieces
        self._held = ""  # the beginning of an escape, or of a scalar
        self._is_key = False
        self._root: Any = None
        self._begun = self._changed = False
        self._weight = 0  # items of the open containers
        self._fresh = 0  # characters since the last value
        self._read = 0

    @property
    def due(self) -> bool:
        """Whether there is a new value to take that is worth its copy."""
        worth = self._weight <= _SMALL or self._weight <= self._fresh * _SHARE
        return self._changed and (worth or self._mode is Mode.DONE)

    @property
    def changed(self) -> bool:
        """Whether there is anything that the last value did not have."""
        return self._changed

    def value(self) -> Any:  # noqa: ANN401 - a JSON value
        """What the text stands for so far. Not to be asked before `changed` was first true."""
        assert self._begun, "nothing of the value is there"
        self._changed, self._fresh = False, 0
        if self._mode is Mode.DONE:
            return self._root
        inner: list[Any] = []
        if self._mode is Mode.STRING and not self._is_key:
            self._strings = ["".join(self._strings)]
            inner = [self._strings[0]]
        keys = list(self._keys)
        for container in reversed(self._open):
            copied = container.copy()
            if isinstance(copied, list):
                copied += inner
            elif inner:
                copied[keys.pop()] = inner[0]
            elif keys and self._awaits(container):
                keys.pop()  # its value has not begun
            inner = [copied]
        return inner[0]

    def push(self, text: str) -> None:
        """Read on. Raises `ValueError` where the text is no JSON."""
        self._fresh += len(text)
        text, at = self._held + text, 0
        self._read -= len(self._held)
        self._held = ""
        while at < len(text) and not self._held:
            at = self._step(text, at)
        self._read += len(text)

    def end(self) -> None:
        """The text has ended: so has a number that is all of it."""
        if self._mode is Mode.SCALAR and not self._open and _NUMBER.fullmatch(self._held):
            self._end_scalar(self._held, self._read)
            self._held = ""

    # ------------------------------------------------------------ reading

    def _step(self, text: str, at: int) -> int:
        """Read one thing; returns where the next begins."""
        if self._mode is Mode.STRING:
            return self._string(text, at)
        if self._mode is Mode.SCALAR:
            return self._scalar(text, at)
        found = _BLANK.match(text, at)
        assert found is not None, "it matches nothing, too"
        if (at := found.end()) == len(text):
            return at
        return self._sign(text[at], at)

    def _sign(self, sign: str, at: int) -> int:
        """Heed a sign of JSON's structure, or the beginning of a value."""
        match self._mode, sign:
            case ((Mode.VALUE | Mode.FIRST_ITEM), "{"):
                self._enter({}, Mode.FIRST_KEY)
            case ((Mode.VALUE | Mode.FIRST_ITEM), "["):
                self._enter([], Mode.FIRST_ITEM)
            case ((Mode.VALUE | Mode.FIRST_ITEM), '"'):
                self._begin_string(is_key=False)
            case (Mode.FIRST_ITEM, "]") | (Mode.FIRST_KEY, "}"):
                self._leave()
            case ((Mode.FIRST_KEY | Mode.KEY), '"'):
                self._begin_string(is_key=True)
            case Mode.COLON, ":":
                self._mode = Mode.VALUE
            case Mode.AFTER, ("," | "]" | "}"):
                self._go_on(sign, at)
            case ((Mode.VALUE | Mode.FIRST_ITEM), _) if _SCALAR.match(sign):
                self._mode = Mode.SCALAR
                return at  # it has no sign before it
            case _:
                raise self._malformed(sign, at)
        return at + 1

    def _go_on(self, sign: str, at: int) -> None:
        in_list = isinstance(self._open[-1], list)
        if sign == ",":
            self._mode = Mode.VALUE if in_list else Mode.KEY
        elif (sign == "]") == in_list:
            self._leave()
        else:
            raise self._malformed(sign, at)

    def _string(self, text: str, at: int) -> int:
        if found := _RUN.match(text, at):
            self._grow(found[0])
            return found.end()
        if text[at] == '"':
            self._end_string()
            return at + 1
        escape = _ESCAPE.match(text, at)
        if escape is None:
            if _OPEN_ESCAPE.fullmatch(text, at) is None:
                raise self._malformed(text[at], at)
            return self._hold(text, at)
        end = escape.end()
        if _HIGH.match(text, at):
            if (low := _LOW.match(text, end)) is not None:
                end = low.end()
            elif _OPEN_ESCAPE.fullmatch(text, end) or end == len(text):
                return self._hold(text, at)  # the other half may come
        self._grow(json.loads(f'"{text[at:end]}"'))
        return end

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        assert found is not None, "it begins with what was held"
        if found.end() == len(text) and found[0] not in _WORDS:
            return self._hold(text, at)
        self._end_scalar(found[0], at)
        return found.end()

    def _hold(self, text: str, at: int) -> int:
        """Keep the rest until more is there."""
        self._held = text[at:]
        return at

    # ------------------------------------------------------------ values

    def _begin_string(self, *, is_key: bool) -> None:
        self._mode, self._is_key, self._strings = Mode.STRING, is_key, []
        if not is_key:
            self._begun = self._changed = True

    def _grow(self, text: str) -> None:
        self._strings.append(text)
        self._changed |= not self._is_key

    def _end_string(self) -> None:
        text = "".join(self._strings)
        if self._is_key:
            self._keys.append(text)
            self._mode = Mode.COLON
        else:
            self._add(text, shown=True)

    def _end_scalar(self, text: str, at: int) -> None:
        if text not in _WORDS and _NUMBER.fullmatch(text) is None:
            raise self._malformed(text, at)
        self._add(json.loads(text), shown=False)

    def _enter(self, container: dict[str, Any] | list[Any], mode: Mode) -> None:
        self._open.append(container)
        self._weight += 1
        self._mode = mode
        self._begun = self._changed = True

    def _leave(self) -> None:
        container = self._open.pop()
        self._weight -= len(container) + 1
        self._add(container, shown=True)

    def _add(self, value: Any, *, shown: bool) -> None:  # noqa: ANN401 - a JSON value
        """A value has ended. `shown`: the values that were handed out had it so far."""
        self._begun = True
        self._changed |= not shown
        if not self._open:
            self._root, self._mode = value, Mode.DONE
            return
        container = self._open[-1]
        if isinstance(container, list):
            container.append(value)
        else:
            container[self._keys.pop()] = value
        self._weight += 1
        self._mode = Mode.AFTER

    def _awaits(self, container: object) -> bool:
        """Whether a key of this container, the last one, waits for its value."""
        waiting = self._mode in {Mode.COLON, Mode.VALUE, Mode.SCALAR}
        return waiting and container is self._open[-1]

    def _malformed(self, found: str, at: int) -> ValueError:
        where = self._read + at
        return ValueError(f"JSON cannot go on with {found!r:.20} at character {where}")
