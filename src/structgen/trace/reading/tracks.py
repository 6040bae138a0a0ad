"""Steps of several states at once, each laid down where it belongs.

Owns   the plan while it grows: a track for each state and for each fork, and the Python blocks that
       are open.
Holds  a block appears on a track only when something in it is said there: so a loop that works on
       the branches of a fork stands in the fork, and not in the program that forked it.
Used   by `reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from structgen.trace.steps import Block, Conditional, Fork, Hole, Loop, Opaque, Step, every

Build: TypeAlias = Callable[[dict[str, tuple[Step, ...]]], Step]


class Container:
    """A step that has steps, before they are known.

    source   the Python that it is, for when it turns out to hold nothing but Python
    names    variables that a loop binds
    """

    __slots__ = ("build", "names", "source")

    def __init__(self, build: Build, source: str = "") -> None:
        self.build, self.source = build, source
        self.names: frozenset[str] = frozenset()

    @classmethod
    def around(cls, build: Callable[[tuple[Step, ...]], Step], source: str = "") -> Container:
        """A container with one list."""
        return cls(lambda lists: build(lists.get("body", ())), source)

    @classmethod
    def loop(cls, header: str, names: Iterable[str] = ()) -> Container:
        """A loop that binds these names."""
        made = cls.around(lambda body: Loop(header, body), header)
        made.names = frozenset(names)
        return made

    @classmethod
    def conditional(cls, test: str) -> Container:
        """A conditional with the lists "then" and "otherwise"."""
        return cls(
            lambda lists: Conditional(test, lists.get("then", ()), lists.get("otherwise", ())),
            f"if {test}",
        )

    @classmethod
    def block(cls, header: str) -> Container:
        """Other Python around steps."""
        return cls.around(lambda body: Block(header, body), header)


class Frame:
    """A container that is open.

    only    the one track that it concerns, None for all
    never   tracks that it does not concern, with their single branches
    """

    __slots__ = ("container", "never", "only", "slot")

    def __init__(
        self, container: Container, slot: str, only: Track | None, never: Iterable[Track]
    ) -> None:
        self.container, self.slot, self.only, self.never = container, slot, only, {*never}

    def concerns(self, track: Track) -> bool:
        """Whether it is to be seen on a track."""
        return self.only in {None, track} and track.family not in self.never


class Grown:
    """A container with what was laid down in it; an `optional` one without that is left out."""

    __slots__ = ("container", "lists", "optional")

    def __init__(self, container: Container, *, optional: bool = False) -> None:
        self.container, self.optional = container, optional
        self.lists: dict[str, list[Step | Grown]] = {}

    @property
    def left_out(self) -> bool:
        """Whether the plan does not show it."""
        return self.optional and not any(self.lists.values())


class Track:
    """The steps of one state, or of each branch of a fork."""

    def __init__(self, items: list[Step | Grown], base: tuple[Frame, ...]) -> None:
        """`base` are the frames that were open when the state was made."""
        self.items, self.base = items, base
        self.family = self
        self.open: list[tuple[Frame, Grown]] = []
        self._singles: dict[int, Track] = {}

    def single(self, index: int) -> Track:
        """The track of one branch alone."""
        if index not in self._singles:
            header = f"branch {index}"
            grown = Grown(Container.around(lambda body: Block(header, body)), optional=True)
            self.items.append(grown)
            track = self._singles[index] = Track(grown.lists.setdefault("body", []), self.base)
            track.family = self.family
        return self._singles[index]


class Stage:
    """All tracks, and the frames that are open."""

    def __init__(self) -> None:
        self.main = Track([], ())
        self._frames: list[Frame] = []
        self.laid = 0

    def lay(self, track: Track, step: Step) -> None:
        """Lay a step down at the end of a track, inside of what is open."""
        self._reach(track).append(step)
        self.laid += 1

    def show(self, track: Track) -> None:
        """What is open is to be seen on a track, even if nothing is said in it."""
        self._reach(track)
        self.laid += 1

    def fork(self, track: Track, count: int | Hole) -> Track:
        """Lay down a fork; returns the track of its branches."""
        grown = Grown(Container.around(lambda body: Fork(count, body)))
        self._reach(track).append(grown)
        self.laid += 1
        return Track(grown.lists.setdefault("body", []), tuple(self._frames))

    def spread(self, name: str, track: Track) -> None:
        """The loop that binds `name` goes over the branches of a track: each does its part once."""
        for frame in reversed(self._frames):
            if name in frame.container.names:
                frame.never.add(track.family)
                return

    @contextmanager
    def within(
        self,
        container: Container,
        slot: str = "body",
        *,
        only: Track | None = None,
        never: tuple[Track, ...] = (),
    ) -> Iterator[None]:
        """What is laid down in this block is in that container."""
        self._frames.append(Frame(container, slot, only, never))
        try:
            yield
        finally:
            self._frames.pop()

    def steps(self) -> tuple[Step, ...]:
        """The plan."""
        return _frozen(self.main.items)

    def _reach(self, track: Track) -> list[Step | Grown]:
        """The innermost list that is open on a track; what has been left is closed."""
        shared = 0
        for mine, theirs in zip(track.base, self._frames, strict=False):
            if mine is not theirs:
                break
            shared += 1
        frames = [frame for frame in self._frames[shared:] if frame.concerns(track)]
        same = 0
        for (mine, _), theirs in zip(track.open, frames, strict=False):
            if mine.container is not theirs.container:
                break
            same += 1
            if mine.slot != theirs.slot:
                break
        kept = [
            (frame, grown) for frame, (_, grown) in zip(frames, track.open[:same], strict=False)
        ]
        items = track.items
        for frame, grown in kept:
            items = grown.lists.setdefault(frame.slot, [])
        for frame in frames[same:]:
            grown = Grown(frame.container)
            items.append(grown)
            kept.append((frame, grown))
            items = grown.lists.setdefault(frame.slot, [])
        track.open = kept
        return items


def _frozen(items: list[Step | Grown]) -> tuple[Step, ...]:
    shown = [item for item in items if not (isinstance(item, Grown) and item.left_out)]
    return tuple(_built(item) if isinstance(item, Grown) else item for item in shown)


def _built(grown: Grown) -> Step:
    lists = {slot: _frozen(items) for slot, items in grown.lists.items()}
    step = grown.container.build(lists)
    steps = [each for listed in lists.values() for each in every(listed)]
    python = [each for each in steps if isinstance(each, Opaque)]
    if not grown.container.source or len(python) < len(steps):
        return step
    # Nothing is said in it: one line of Python tells as much.
    body = python[0].source if len(python) == 1 else "..."
    return Opaque(
        f"{grown.container.source}: {body}",
        touches=any(each.touches for each in python),
        ends=any(each.ends for each in python),
    )
