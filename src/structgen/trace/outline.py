"""Text that a terminal can show: trees drawn with lines, texts made one line and cut to size.

Owns   nothing. Holds: what it returns has no control characters, whatever it was given.
Used   by `tree` and `plan`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

MORE = "…"
_LINES = str.maketrans(dict.fromkeys("│├└─…", " "))  # as wide as a space, and in every tree


def rails(depths: Sequence[int], room: int = 60) -> list[str]:
    """The lines before each row of a tree that is given by the depths of its rows.

    Parents come before their children and depth 0 has no lines. Of lines longer than `room` the
    last part is kept, which is what tells rows apart.
    """
    found: list[str] = []
    # From the last row up, so that it is known whether a sibling follows further down.
    follows: list[bool] = []
    for depth in reversed(depths):
        del follows[depth + 1 :]
        follows += [False] * (depth + 1 - len(follows))
        line = "".join("│  " if more else "   " for more in follows[1:depth])
        if depth:
            line += "├─ " if follows[depth] else "└─ "
        found.append(line if len(line) <= room else MORE + line[1 - room :])
        follows[depth] = True
    return found[::-1]


def one_line(text: str) -> str:
    """The text in one line: white space as single spaces, control characters escaped."""
    spaced = " ".join(text.split())
    if spaced.isprintable():
        return spaced
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in spaced)


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: wide characters two, combining ones none."""
    plain = text.translate(_LINES)
    return len(plain) if plain.isascii() else sum(_width(character) for character in plain)


def shorten(text: str, width: int) -> str:
    """The text, or as much of its beginning as fits into so many columns, and a sign of it."""
    if len(text) * 2 <= width or columns(text) <= width:
        return text
    kept, room = "", width - 1
    for character in text:
        room -= _width(character)
        if room < 0:
            break
        kept += character
    return kept.rstrip() + MORE


def pad(text: str, width: int) -> str:
    """The text with spaces behind it, up to so many columns."""
    return text + " " * (width - columns(text))


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
