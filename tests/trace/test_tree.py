"""A trace as text: one line for each span, never too wide, the same each time."""

from __future__ import annotations

import pytest

from structgen.errors import OptionError
from structgen.trace.fold import Fold
from structgen.trace.outline import columns, one_line, rails, shorten
from structgen.trace.tree import text_tree
from tests.trace.stories import Shown, Story, folded, forked, usage

FORKED = """\
               prompt cached   new  waited   first       ms
run haiku         120     88    18                      160
├─ gen haiku       20      0     8     5.0    20.0     40.0 stop
├─ branch 0        30     29     4                     50.0
│  └─ gen why      30     29     4     0.0    14.5     29.0 stop
├─ branch 1        30     29     4                     50.0
│  └─ gen why      30     29     4     0.0    19.5     39.0 stop
└─ gen title       40     30     2     0.0    15.0     30.0 length
1 run, 4 calls    120     88    18                      160"""


def lines(text: str) -> list[str]:
    return text.splitlines()


class TestTheTextTree:
    def test_shows_each_span_and_the_totals(self) -> None:
        shown = "\n".join(line.rstrip() for line in lines(text_tree(Shown(folded(forked)))))

        assert shown == FORKED

    def test_of_no_runs_says_so(self) -> None:
        assert text_tree(Shown(())) == "no runs"

    def test_shows_what_runs_and_what_failed(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0)
            story.ask(1, 1, "good")
            story.ask(1, 2, "bad")
            story.answer(2, 2, reason=None, error="DeadlineError: not finished\nwithin 1 s")

        shown = lines(text_tree(Shown(folded(tell))))

        assert shown[1].endswith(" running")
        assert shown[2].endswith(" running")
        assert shown[3].endswith(" DeadlineError: not finished within 1 s")

    def test_shows_inline_programs_and_runs_in_runs(self) -> None:
        def tell(fold: Fold) -> None:
            outer, inner = Story(fold.tell), Story(fold.tell, "r2")
            outer.start(0)
            outer.enter(1, "title")
            inner.start(2, "judge", parent="r1")
            inner.call(3, 4, 1, usage=usage(5, 0, 1))
            inner.finish(5, "judge", prompt=5, new=1)
            outer.finish(6, prompt=7, new=2)

        shown = [line[:24].rstrip() for line in lines(text_tree(Shown(folded(tell))))]
        totals = lines(text_tree(Shown(folded(tell))))[-1].split()

        labels = ["run haiku", "└─ program title", "   └─ run judge", "      └─ gen"]
        assert [
            line[: len(label)] for line, label in zip(shown[1:-1], labels, strict=True)
        ] == labels
        # Those of a run are not counted again in the run that started it.
        assert totals == ["2", "runs,", "1", "call", "12", "0", "3", "6000"]

    @pytest.mark.parametrize("width", [72, 80, 100, 200])
    def test_is_never_wider_than_asked_for(self, width: int) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0, "p" * 300)
            for state in range(1, 60):
                story.fork(0, state, (0,) * state, parent=state - 1)
            story.ask(0, 1, "漢字" * 100, state=59)
            story.answer(10**9, 1, reason=None, error="E" * 300, usage=usage(10**9, 10**9))

        shown = lines(text_tree(Shown(folded(tell)), width))

        assert max(columns(line) for line in shown) <= width

    def test_has_no_control_characters(self) -> None:
        def tell(fold: Fold) -> None:
            story = Story(fold.tell)
            story.start(0, "red \x1b[31m")
            story.call(0, 1, 1, "turned \u202e around\n")

        shown = text_tree(Shown(folded(tell)))

        assert all(character.isprintable() or character == "\n" for character in shown)
        assert r"red \x1b[31m" in shown

    def test_refuses_a_width_that_shows_nothing(self) -> None:
        with pytest.raises(OptionError, match="width: must be at least 72, got 20"):
            text_tree(Shown(()), 20)


class TestRails:
    def test_draw_the_tree_that_the_depths_say(self) -> None:
        assert rails([0, 1, 2, 2, 1, 2, 0, 1]) == [
            "",
            "├─ ",
            "│  ├─ ",
            "│  └─ ",
            "└─ ",
            "   └─ ",
            "",
            "└─ ",
        ]

    def test_keep_the_end_where_there_is_no_room(self) -> None:
        assert rails([0, 1, 2, 3, 4], room=8)[-1] == "…    └─ "


class TestAText:
    def test_in_one_line_has_no_breaks(self) -> None:
        assert one_line(" a\n\tb\x00 ") == r"a b\x00"

    def test_that_fits_is_left(self) -> None:
        assert shorten("abc", 3) == "abc"

    def test_is_cut_by_columns(self) -> None:
        assert (shorten("abcd", 3), shorten("漢字漢", 5)) == ("ab…", "漢字…")

    def test_with_combining_marks_takes_the_columns_of_its_letters(self) -> None:
        assert columns("e\u0301") == 1
