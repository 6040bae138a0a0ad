"""The transcript: what was said on a state so far.

Owns   an immutable chain of segments: prompt parts and the places where roles open and close.
Holds  a segment never changes and is never merged with a later one, so whatever was sent from
       here, or stood here at a fork, stays the beginning of everything that follows.
Used   by `State` (which appends), `Branches` (fork and join) and `prompt` (which lays it out).

A `Transcript` is a cursor on the chain. Forking copies the cursor and shares the chain. Text
that was appended since the last seal waits beside the chain and becomes one segment, because
one piece of text has better tokens than many.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from structgen.errors import RoleError
from structgen.request import Part, Prompt, Text, Tokens


class Opened(msgspec.Struct, frozen=True):
    """A role opens here."""

    role: str


class Closed(msgspec.Struct, frozen=True):
    """The open role closes here."""


Said = Part | Opened | Closed


class Segment(msgspec.Struct, frozen=True):
    """One thing that was said, and the segment before it."""

    before: Segment | None
    said: Said


class Transcript:
    """A cursor on a chain of segments."""

    __slots__ = ("_head", "_loose", "role")

    def __init__(self, head: Segment | None = None, role: str | None = None) -> None:
        """`role` is the role that is open at `head`, if any."""
        self._head = head
        self._loose: list[str] = []
        self.role = role

    def append(self, text: str) -> None:
        """Add text; it joins the text before it unless that has been sealed."""
        if text:
            self._loose.append(text)

    def write(self, parts: Prompt) -> None:
        """Add parts as they are, such as the tokens that a model wrote."""
        self.seal()
        for part in parts:
            self._say(part)

    def open(self, role: str) -> None:
        """Open a role. Raises `RoleError` inside another one."""
        if self.role is not None:
            raise RoleError(
                f"{role}() inside the role {self.role!r}: roles do not nest; leave the block of "
                f"{self.role!r} first (on a branch: the block that was open at the fork)"
            )
        self.seal()
        self._say(Opened(role))
        self.role = role

    def close(self) -> None:
        """Close the open role."""
        assert self.role is not None, "no role is open"
        self.seal()
        self._say(Closed())
        self.role = None

    def seal(self) -> Segment | None:
        """End the text that is still growing, and return the last segment."""
        if self._loose:
            text = "".join(self._loose)
            self._loose.clear()
            self._say(Text(text))
        return self._head

    def fork(self) -> Transcript:
        """A second cursor at the same place."""
        return Transcript(self.seal(), self.role)

    def ends_with_one_space(self) -> bool:
        """Whether the text that still grows ends with a space that stands alone, after text."""
        text = "".join(self._loose)
        if text == " ":
            return self._head is not None and isinstance(self._head.said, Text | Tokens)
        return text.endswith(" ") and not text[-2].isspace()

    def without_last_space(self) -> Transcript:
        """A second cursor at the same place, whose growing text lacks its last character."""
        other = Transcript(self._head, self.role)
        other.append("".join(self._loose)[:-1])
        return other

    def drop_last_space(self) -> None:
        """Take the last character of the growing text back."""
        self._loose[:] = ["".join(self._loose)[:-1]]

    def is_at(self, segment: Segment | None) -> bool:
        """Whether nothing was said after `segment`."""
        return self._head is segment and not self._loose

    def said(self, since: Segment | None = None) -> list[Said]:
        """What was said after `since` (which must lie on this chain), or in all, in order."""
        found: list[Said] = [Text("".join(self._loose))] if self._loose else []
        segment = self._head
        while segment is not since:
            assert segment is not None, "the segment is not on this chain"
            found.append(segment.said)
            segment = segment.before
        found.reverse()
        return found

    def repeat(self, said: Sequence[Said]) -> None:
        """Say again what was said on a branch, segment by segment, with its exact tokens."""
        self.seal()
        for each in said:
            self._say(each)

    def _say(self, said: Said) -> None:
        self._head = Segment(self._head, said)
