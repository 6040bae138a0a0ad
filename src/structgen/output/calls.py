r"""How a model writes calls of functions, and how that is read while it is still being written.

Owns   the forms of a call.
Holds  what fits a form's term is read by its reader, and how the text is split into pushes makes no
       difference to what is read. No part of a form's own markup is ever given out.
Used   by `tools`, for programs, and by the server, for the tools of a chat.

    json     {"name": "weather", "arguments": {"city": "Ulm"}}, and several as an array of them. An
             answer instead of a call begins with neither `{` nor `[`.
    hermes   the same object in a line between the lines `<tool_call>` and `</tool_call>`, several
             one after the other. Text may stand before the first.

The layout of a call is fixed up to its arguments, as Python's `json.dumps` has it. The tags are
those of NousResearch's Hermes models, which Qwen's took over.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from structgen.output.reasoning import held_back, reasoned, tags_of
from structgen.terms import Json, Pattern, Term, either, repeat, sequence, text

ANSWER = r"[^\[{\s](.|\n)*"  # what no call begins with
OPENING, CLOSING = "<tool_call>", "</tool_call>"  # of Hermes

_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '
_BETWEEN = ", "  # calls of an array
_OUTSIDE, _QUOTED = re.compile(r'[{}\[\]"]'), re.compile(r'["\\]')

Waiting = Generator[None, None, None]
"""What reads a text that is still coming: it yields where it needs more."""


class CallPiece(msgspec.Struct, frozen=True):
    """The next piece of a call.

    index       of the call in its output
    name        of the function, in the first piece of each call; "" in the others
    arguments   the next piece of the JSON text of its arguments
    """

    index: int
    name: str = ""
    arguments: str = ""


class Written(msgspec.Struct, frozen=True):
    """A call that was written before; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class CallForm(Protocol):
    """A way to write calls. `functions` is from the name to the JSON Schema of the arguments."""

    def calls(self, functions: Mapping[str, str]) -> Term:
        """The form of an output that is calls, at least one."""
        ...

    def calls_or_text(self, functions: Mapping[str, str], family: str | None = None) -> Term:
        """The form of an output that may be an answer instead, in free text.

        family   of the model, whose reasoning may stand before both
        """
        ...

    def reader(self, *, answers: bool) -> CallReader:
        """A reader of one output; `answers`: it may be an answer instead."""
        ...

    def written(self, before: str, calls: Sequence[Written]) -> str:
        """Calls as the model wrote them behind a text, without that text."""
        ...

    def told(self) -> str:
        """How to write calls, for a model that was not trained to."""
        ...


class JsonForm(msgspec.Struct, frozen=True):
    """Calls as JSON.

    array     calls stand in an array, also one
    several   there may be several
    """

    array: bool = True
    several: bool = True

    def calls(self, functions: Mapping[str, str]) -> Term:
        """See `CallForm.calls`."""
        one = _one(functions)
        if not self.array:
            return one
        return sequence("[", one, repeat(sequence(_BETWEEN, one)) if self.several else "", "]")

    def calls_or_text(self, functions: Mapping[str, str], family: str | None = None) -> Term:
        """See `CallForm.calls_or_text`."""
        tags = tags_of(family)
        answer = ANSWER if tags is None or tags.inside else _answer(tags.opening)
        return reasoned(family, either(self.calls(functions), Pattern(answer)))

    def reader(self, *, answers: bool) -> CallReader:
        """See `CallForm.reader`."""
        return _JsonReader(answers=answers, array=self.array)

    def written(self, before: str, calls: Sequence[Written]) -> str:
        """See `CallForm.written`."""
        found = _BETWEEN.join(map(_object, calls))
        found = f"[{found}]" if self.array or len(calls) > 1 else found
        return f"\n{found}" if before else found

    def told(self) -> str:
        """See `CallForm.told`."""
        form = f'{_NAME}NAME{_ARGUMENTS}{{"ARGUMENT": VALUE}}}}'
        what = "a JSON array of calls" if self.array else "a call as JSON"
        return f"To call, write {what} and nothing else: {f'[{form}]' if self.array else form}"


class HermesForm(msgspec.Struct, frozen=True):
    """Calls in tags. `several`: there may be more than one."""

    several: bool = True

    def calls(self, functions: Mapping[str, str]) -> Term:
        """See `CallForm.calls`."""
        one = sequence(f"{OPENING}\n", _one(functions), f"\n{CLOSING}")
        return sequence(one, repeat(sequence("\n", one))) if self.several else one

    def calls_or_text(self, functions: Mapping[str, str], family: str | None = None) -> Term:
        """See `CallForm.calls_or_text`. No reasoning has the tag of a call in it."""
        tags = tags_of(family)
        free = text(OPENING if tags is None or tags.inside else (OPENING, tags.opening))
        answer = either(sequence(free, self.calls(functions)), free)
        if tags is None:
            return answer
        thought = sequence(text((tags.closing, OPENING)), tags.closing)
        if tags.inside:
            return sequence(thought, answer)
        return sequence(repeat(sequence(free, tags.opening, thought)), answer)

    def reader(self, *, answers: bool) -> CallReader:
        """See `CallForm.reader`."""
        return _HermesReader(answers=answers)

    def written(self, before: str, calls: Sequence[Written]) -> str:
        """See `CallForm.written`."""
        found = "\n".join(f"{OPENING}\n{_object(call)}\n{CLOSING}" for call in calls)
        return f"\n{found}" if before else found

    def told(self) -> str:
        """See `CallForm.told`."""
        call = f'{_NAME}NAME{_ARGUMENTS}{{"ARGUMENT": VALUE}}}}'
        return f"To call one, write:\n{OPENING}\n{call}\n{CLOSING}"


def tools_text(functions: Iterable[Mapping[str, Any]]) -> str:
    """Functions as text, a JSON object a line; each has a name, a description and parameters."""
    return "\n".join(json.dumps(each, ensure_ascii=False) for each in functions)


def _one(functions: Mapping[str, str]) -> Term:
    """A call of one of the functions."""
    return either(
        *(
            sequence(f"{_NAME}{name}{_ARGUMENTS}", Json(schema), "}")
            for name, schema in functions.items()
        )
    )


def _object(call: Written) -> str:
    name = json.dumps(call.name, ensure_ascii=False)[1:-1]
    return f"{_NAME}{name}{_ARGUMENTS}{call.arguments}}}"


def _answer(apart: str) -> str:
    r"""`ANSWER`, but for texts that begin with `apart`: what is behind it would be reasoning.

    Such a text has the first characters of `apart` and then another one, or ends there: of `<t`,
    these are `[^<]...` and `<([^t]...)?`.
    """
    found = ""
    for character in reversed(apart[1:]):
        same, other = re.escape(character), _other_than(character)
        found = rf"({other}(.|\n)*|{same}{found})?" if found else rf"({other}(.|\n)*)?"
    return rf"[^\[{{\s{_in_class(apart[0])}](.|\n)*|{re.escape(apart[0])}{found}"


def _other_than(character: str) -> str:
    return f"[^{_in_class(character)}]"


def _in_class(character: str) -> str:
    return f"\\{character}" if character in "\\]^-[" else character


# ---------------------------------------------------------------- reading


class CallReader(ABC):
    """Reads one output, push by push. Call `flush` at its end, and nothing after it."""

    def __init__(self, *, answers: bool) -> None:
        """`answers`: there may be text besides calls."""
        self._answers = answers
        self._held = ""
        self._text: list[str] = []
        self._pieces: list[CallPiece] = []
        self._reading = self._read()

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """What of the text is an answer, and what belongs to calls, as far as that is certain."""
        if text:
            self._held += text
            next(self._reading)
        return self._taken()

    def flush(self) -> tuple[str, list[CallPiece]]:
        """What was held back, once the output has ended.

        A call that broke off before its name was whole is nothing.
        """
        self._reading.close()
        self._end()
        return self._taken()

    @abstractmethod
    def _read(self) -> Waiting:
        """Read from the beginning; never ends."""

    def _end(self) -> None:  # noqa: B027 - most have nothing left to give
        """Give out what is certain now that nothing more comes."""

    def _taken(self) -> tuple[str, list[CallPiece]]:
        found = "".join(self._text), self._pieces
        self._text, self._pieces = [], []
        return found

    def _skip(self, markup: str) -> Waiting:
        while len(self._held) < len(markup):
            yield
        assert self._held.startswith(markup), "the term lets nothing else through"
        self._held = self._held[len(markup) :]

    def _call(self, index: int) -> Waiting:
        yield from self._skip(_NAME)
        while '"' not in self._held:
            yield
        name = self._held.partition('"')[0]
        self._held = self._held[len(name) :]
        self._pieces.append(CallPiece(index, name))
        yield from self._skip(_ARGUMENTS)
        looking = _ObjectEnd()
        while (end := looking.find(self._held)) is None:
            self._argue(index, len(self._held))
            yield
        self._argue(index, end)
        yield from self._skip("}")

    def _argue(self, index: int, length: int) -> None:
        """So much of what is held is the next piece of a call's arguments."""
        piece, self._held = self._held[:length], self._held[length:]
        if self._pieces and self._pieces[-1].index == index:
            last = self._pieces.pop()
            self._pieces.append(CallPiece(index, last.name, last.arguments + piece))
        elif piece:
            self._pieces.append(CallPiece(index, arguments=piece))


class _JsonReader(CallReader):
    """Reads a call as an object, or several as an array, or all of it as an answer."""

    def __init__(self, *, answers: bool, array: bool) -> None:
        super().__init__(answers=answers)
        self._array = array

    def _read(self) -> Waiting:
        if self._held[0] != ("[" if self._array else "{"):
            while True:
                # Where there are no answers, it is a tag of reasoning that broke off.
                self._text.append(self._held if self._answers else "")
                self._held = ""
                yield
        if self._array:
            yield from self._skip("[")
        index = 0
        yield from self._call(index)
        while self._array:
            while not self._held:
                yield
            if self._held[0] == "]":
                break
            yield from self._skip(_BETWEEN)
            index += 1
            yield from self._call(index)
        while True:  # nothing follows
            yield


class _HermesReader(CallReader):
    """Reads calls in tags, and text before the first.

    White space that is all of the text is no answer, and the last newline before a tag belongs to
    the tag: `HermesForm.written` puts it back.
    """

    def __init__(self, *, answers: bool) -> None:
        super().__init__(answers=answers)
        self._before = answers
        self._said = False

    def _read(self) -> Waiting:
        while self._before:
            before, tag, _ = self._held.partition(OPENING)
            if tag:
                self._say(before.removesuffix("\n"))
                self._held = self._held[self._held.index(tag) :]
                self._before = False
            else:
                certain = len(before) - held_back(before, (OPENING, f"\n{OPENING}"))
                if self._say(before[:certain]):
                    self._held = before[certain:]
                yield
        index = 0
        while True:
            yield from self._skip(f"{OPENING}\n")
            yield from self._call(index)
            yield from self._skip(f"\n{CLOSING}")
            yield from self._skip("\n")
            index += 1

    def _end(self) -> None:
        if self._before:
            self._text.append(self._held)

    def _say(self, text: str) -> bool:
        """Give out text, unless all of it so far is white space."""
        self._said = self._said or bool(text.strip())
        if self._said:
            self._text.append(text)
        return self._said


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """The index in this piece behind the object's last bracket, None if that has not come."""
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while sign := (_QUOTED if self._quoted else _OUTSIDE).search(text, at):
            at = sign.end()
            match sign[0]:
                case '"':
                    self._quoted = not self._quoted
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if not self._depth:
                        return at
        return None
