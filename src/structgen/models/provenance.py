"""Which characters of a rendered chat came from which turn.

Owns   the search; nothing is kept but the words that a template was seen to look for.
Holds  a stretch of a content is only reported at a place after this was checked: put a marker in
       its stead, render again, and the result is the real rendering with just that stretch
       replaced. So what a user typed cannot be mistaken for the template's own words, nor the
       other way round, however alike they are. Only what touches such a stretch, and reads the
       same on both sides, is added without that check.
Used   by `template`.

A template is a program and may do anything to a content: strip it, merge two turns, drop the
thinking of earlier turns. In the usual case it copies contents verbatim, and one more rendering
with a marker for each content proves all places at once. Where that fails, halves are tried, then
parts of one content between the words that the template itself contains (such as `</think>`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from structgen.errors import TemplateError

Render = Callable[[Sequence[str]], str]

# Private-use characters: templates have no reason to know them. A content might contain one, so
# the first that is in none is used.
_MARKS = tuple(map(chr, range(0xE000, 0xE100)))
# A content that is made to be hard to find costs this many renderings and is then given up.
_MOST_RENDERINGS = 200


class Span(NamedTuple):
    """`contents[turn][start:stop]` stands in the rendering at `at`."""

    turn: int
    start: int
    stop: int
    at: int

    @property
    def end(self) -> int:
        """Where it ends in the rendering."""
        return self.at + self.stop - self.start


class Found(NamedTuple):
    """What a search found.

    spans    in the order of the rendering, not overlapping
    proven   every text but white space was checked to be copied as it is, or left out whole
    """

    spans: list[Span]
    proven: bool


class _Stretch(NamedTuple):
    """A part of one content, and what it is expected to become."""

    turn: int
    start: int
    stop: int
    text: str


def marker(texts: Iterable[str]) -> str:
    """A character that is in none of the texts; raises `TemplateError` if there is none."""
    known = "".join(texts)
    for mark in _MARKS:
        if mark not in known:
            return mark
    raise TemplateError("the messages contain every private-use character from U+E000 to U+E0FF")


class Provenance:
    """Finds contents in the renderings of one template."""

    def __init__(self, words: Collection[str]) -> None:
        """`words`: the string constants with which the template compares and splits contents."""
        telling = sorted({word.strip() for word in words} - {""}, key=len, reverse=True)
        self._word = re.compile(f"({'|'.join(map(re.escape, telling)) or '(?!)'})")
        # (role, word) pairs whose replacement was seen to change what the template does. They
        # only save renderings, so it does not matter who adds to them, or when.
        self._telling: set[tuple[str, str]] = set()

    def search(
        self, render: Render, roles: Sequence[str], contents: Sequence[str], rendering: str
    ) -> Found:
        """Where the contents stand in `rendering`, which is `render(contents)`.

        A turn has no span where the template left its content out, and several where it kept
        only parts or wrote it more than once. An empty content has an empty span.
        """
        search = _Search(self, render, roles, contents, rendering)
        stretches = self._whole_or_parted(roles, contents)
        found: list[Span] = []
        for span in sorted(search.locate(stretches), key=_place):
            if not found or span.at >= found[-1].end:
                found.append(span)
        if search.failed:
            found = _with_likely(found, contents, rendering)
        spans = _grown(_merged(found, contents, rendering), contents, rendering)
        whole = sum(len(stretch.text.strip()) for stretch in stretches)
        length = sum(len(content.strip()) for content in contents)
        return Found(spans, not search.failed and whole >= length)

    def pieces(self, text: str) -> list[str]:
        """`text`, cut before and after each of the template's words."""
        return [piece for piece in self._word.split(text) if piece]

    def tells(self, role: str, word: str) -> None:
        """Remember that replacing this word in this role changes what the template does."""
        if self._word.fullmatch(word):
            self._telling.add((role, word))

    def _whole_or_parted(self, roles: Sequence[str], contents: Sequence[str]) -> list[_Stretch]:
        """Each content as one stretch, or as those between the words known to matter in it."""
        found: list[_Stretch] = []
        for turn, (role, content) in enumerate(zip(roles, contents, strict=True)):
            parts: list[_Stretch] = []
            begin = at = 0
            for piece in self.pieces(content) if self._telling else ():
                at += len(piece)
                if (role, piece) in self._telling:
                    parts += _core(turn, content, begin, at - len(piece))
                    begin = at
            parts += _core(turn, content, begin, len(content))
            found += parts or [_Stretch(turn, 0, len(content), content)]
        return found


def _core(turn: int, content: str, start: int, stop: int) -> list[_Stretch]:
    """The stretch without the white space at its ends, which templates strip; [] if empty."""
    text = content[start:stop]
    core = text.strip()
    start += len(text) - len(text.lstrip())
    return [_Stretch(turn, start, start + len(core), core)] if core else []


def _place(span: Span) -> tuple[int, int]:
    return span.at, span.end


class _Search:
    """One search; see the module's docstring for the method."""

    def __init__(
        self,
        provenance: Provenance,
        render: Render,
        roles: Sequence[str],
        contents: Sequence[str],
        rendering: str,
    ) -> None:
        self._provenance, self._render = provenance, render
        self._roles, self._contents, self._rendering = roles, contents, rendering
        self._mark = marker((*contents, rendering))
        self._marked = re.compile(f"{self._mark}([0-9]+){self._mark}")
        self._left = _MOST_RENDERINGS
        self.failed = False

    def locate(self, stretches: Sequence[_Stretch]) -> list[Span]:
        """Spans of those stretches that are copied verbatim."""
        if not stretches:
            return []
        if self._left <= 0:
            self.failed = True
            return []
        if (found := self._proven(stretches)) is not None:
            return found
        if len(stretches) > 1:
            half = len(stretches) // 2
            return self.locate(stretches[:half]) + self.locate(stretches[half:])
        return self._locate_parts(stretches[0])

    def _locate_parts(self, stretch: _Stretch) -> list[Span]:
        turn, start, stop, text = stretch
        if not text.strip():
            # White space that the template strips leaves an empty content in its place.
            return self._proven([_Stretch(turn, start, start, "")], until=stop) or []
        self.failed = True
        pieces = self._provenance.pieces(text)
        if len(pieces) == 1:
            self._provenance.tells(self._roles[turn], text)
            return []
        middle = start + len("".join(pieces[: len(pieces) // 2]))
        content = self._contents[turn]
        return self.locate(
            [*_core(turn, content, start, middle), *_core(turn, content, middle, stop)]
        )

    def _proven(self, stretches: Sequence[_Stretch], until: int | None = None) -> list[Span] | None:
        """Spans of all these stretches, or None if one of them is not simply copied.

        `until` makes the one stretch reach to there, although it becomes its shorter `text`.
        """
        self._left -= 1
        contents = list(self._contents)
        for index, stretch in reversed(list(enumerate(stretches))):
            content = contents[stretch.turn]
            stop = stretch.stop if until is None else until
            mark = f"{self._mark}{index}{self._mark}"
            contents[stretch.turn] = content[: stretch.start] + mark + content[stop:]
        try:
            probe = self._render(contents)
        except TemplateError:
            return None
        return self._aligned(self._marked.split(probe), stretches)

    def _aligned(self, probe: Sequence[str], stretches: Sequence[_Stretch]) -> list[Span] | None:
        """Spans if `probe` (text, index, text, index, ..., text) is the rendering, marked."""
        found: list[Span] = []
        at = 0
        for position, piece in enumerate(probe):
            if position % 2:
                turn, start, stop, text = stretches[int(piece)]
                found.append(Span(turn, start, stop, at))
            else:
                text = piece
            if not self._rendering.startswith(text, at):
                return None
            at += len(text)
        return found if at == len(self._rendering) else None


def _with_likely(spans: Sequence[Span], contents: Sequence[str], rendering: str) -> list[Span]:
    """Add turns of which nothing was found, where their text stands once between their neighbours.

    No proof, so that the caller has to check what is left.
    """
    found = list(spans)
    for turn, content in enumerate(contents):
        floor = max((span.end for span in found if span.turn < turn), default=0)
        ceiling = min((span.at for span in found if span.turn > turn), default=len(rendering))
        text = content.strip()
        if any(span.turn == turn for span in found) or not text:
            continue
        if rendering.count(text, floor, ceiling) == 1:
            start = content.index(text)
            at = rendering.index(text, floor, ceiling)
            found.append(Span(turn, start, start + len(text), at))
    return sorted(found, key=_place)


def _merged(spans: Sequence[Span], contents: Sequence[str], rendering: str) -> list[Span]:
    """Join spans of one turn between which content and rendering read the same."""
    found: list[Span] = []
    for span in spans:
        before = found[-1] if found else None
        if (
            before is not None
            and before.turn == span.turn
            and before.stop <= span.start
            and contents[span.turn][before.stop : span.start] == rendering[before.end : span.at]
        ):
            found[-1] = Span(span.turn, before.start, span.stop, before.at)
        else:
            found.append(span)
    return found


def _grown(spans: Sequence[Span], contents: Sequence[str], rendering: str) -> list[Span]:
    """Let spans grow over what touches them and reads the same in content and rendering.

    That is white space at the ends of a content, and words that could not be replaced. White
    space of which only a part is there belongs to the template.
    """
    found: list[Span] = []
    of_turn: list[list[Span]] = [[] for _ in contents]
    for span in spans:
        of_turn[span.turn].append(span)
    for index, span in enumerate(spans):
        turn, start, stop, at = span
        content, others = contents[turn], of_turn[turn]
        lowest = max((s.stop for s in others if s.stop <= start), default=0)
        highest = min((s.start for s in others if s.start >= stop), default=len(content))
        floor = found[-1].end if found else 0
        ceiling = spans[index + 1].at if index + 1 < len(spans) else len(rendering)
        if start < stop:
            before = _shared(content[lowest:start][::-1], rendering[floor:at][::-1])
            after = _shared(content[stop:highest], rendering[span.end : ceiling])
            start, at, stop = start - before, at - before, stop + after
        found.append(Span(turn, start, stop, at))
    return found


def _shared(content: str, rendering: str) -> int:
    """How many characters of `content` the rendering begins with, as `_grown` counts them."""
    count = 0
    for ours, theirs in zip(content, rendering, strict=False):
        if ours != theirs:
            break
        count += 1
    return count if count == len(content) else len(content[:count].rstrip())
