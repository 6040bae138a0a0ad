"""Ids to text: against decoding and searching everything at once, over all ways to split it."""

from __future__ import annotations

import codecs
import itertools
import re

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from structgen.core.text import Piece, StopStrings, TextStream
from structgen.errors import ConstraintError


class Run(msgspec.Struct, frozen=True):
    """Everything that one stream gave out, in the order of its pieces."""

    pieces: list[Piece]
    withheld: list[str]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def last(self) -> Piece:
        return self.pieces[-1]


def stream(
    tokens: list[bytes],
    stops: tuple[str, ...] = (),
    patterns: tuple[str, ...] = (),
    *,
    min_tokens: int = 0,
    strips: bool = False,
) -> Run:
    """Push `tokens` until a stop ends the output, and flush if none does."""
    text = TextStream(tokens, stops, patterns, strips_first_space=strips, at_start=strips)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[Piece] = []
    withheld: list[str] = []
    decoded = ""
    for token, data in enumerate(tokens):
        pieces.append(text.push(token, allow_stop=token + 1 >= min_tokens))
        if pieces[-1].stop is not None:
            return Run(pieces, withheld)
        decoded += decoder.decode(data)
        given_out = "".join(piece.text for piece in pieces)
        assert decoded.startswith(given_out) or strips
        withheld.append(decoded[len(given_out) :])
    pieces.append(text.flush())
    return Run(pieces, withheld)


def whole(tokens: list[bytes]) -> str:
    return b"".join(tokens).decode("utf-8", errors="replace")


def finishers(tokens: list[bytes]) -> list[int]:
    """For each character of the whole text, the index of the token that finishes it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found: list[int] = []
    for token, data in enumerate(tokens):
        found += [token] * len(decoder.decode(data))
    return found + [len(tokens) - 1] * len(decoder.decode(b"", final=True))


def first_stop(
    tokens: list[bytes], stops: tuple[str, ...], min_tokens: int
) -> tuple[str, str | None]:
    """The text before the stop that is complete first (the longest of equals), and the stop."""
    text, finisher = whole(tokens), finishers(tokens)
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and finisher[end - 1] + 1 >= min_tokens:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def first_match(
    tokens: list[bytes], stops: tuple[str, ...], patterns: tuple[str, ...], min_tokens: int
) -> tuple[str, str | None]:
    """The same with patterns: of what ends first, that which begins first."""
    text, finisher = whole(tokens), finishers(tokens)
    for start, end in sorted(
        itertools.combinations(range(len(text) + 1), 2), key=lambda place: (place[1], place[0])
    ):
        if finisher[end - 1] + 1 >= min_tokens and (
            text[start:end] in stops
            or any(re.compile(pattern).fullmatch(text, start, end) for pattern in patterns)
        ):
            return text[:start], text[start:end]
    return text, None


def longest_beginning(text: str, stops: tuple[str, ...]) -> str:
    """The longest end of `text` that begins a stop without being all of it."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return next((text[at:] for at in range(len(text)) if text[at:] in beginnings), "")


@st.composite
def splits(draw: st.DrawFn, content: bytes) -> list[bytes]:
    places = draw(st.lists(st.integers(0, len(content)), max_size=12))
    edges = [0, *sorted(places), len(content)]
    return [content[a:b] for a, b in itertools.pairwise(edges)]


# Few characters, so that stops match often: of one, two, three and four bytes, and broken ones.
LETTERS = ("a", "b", "é", "ק", "…", "\ufffd", "😀", "👍🏽", " ")
BROKEN = (b"\xff", b"\xc3", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe2\x80", b"\x80", b"\xed\xa0\x80")
texts = st.lists(st.sampled_from(LETTERS), max_size=14).map("".join)
clean_tokens = texts.map(str.encode).flatmap(splits)
any_tokens = (
    st.lists(st.sampled_from([*map(str.encode, LETTERS), *BROKEN]), max_size=14)
    .map(b"".join)
    .flatmap(splits)
)
stop_sets = st.lists(
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4).map("".join), max_size=3
).map(tuple)
PATTERNS = (
    *("a+b", "b.*a", "é|ab", r"[^a-z\s]{2}", "😀.", "a(?:ab)*b", "\ufffd+é"),
    *(r"\w\W", r"\ba", "^.b"),
)
pattern_sets = st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2).map(tuple)
thorough = settings(max_examples=400, deadline=None)


class TestText:
    @given(tokens=any_tokens)
    @thorough
    def test_is_what_decoding_everything_at_once_gives(self, tokens: list[bytes]) -> None:
        assert stream(tokens).text == whole(tokens)

    @given(tokens=st.lists(st.binary(max_size=5), max_size=12))
    @thorough
    def test_of_random_bytes_is_too(self, tokens: list[bytes]) -> None:
        assert stream(tokens).text == whole(tokens)

    @given(tokens=clean_tokens)
    @thorough
    def test_never_has_a_replacement_character_of_ours(self, tokens: list[bytes]) -> None:
        pieces = stream(tokens).pieces

        assert sum(piece.text.count("\ufffd") for piece in pieces) == whole(tokens).count("\ufffd")

    @given(tokens=any_tokens)
    @thorough
    def test_holds_back_no_finished_character(self, tokens: list[bytes]) -> None:
        assert set(stream(tokens).withheld) <= {""}

    def test_waits_for_the_last_byte_of_an_emoji(self) -> None:
        run = stream([b"\xf0\x9f", b"\x98", b"\x80", b"!"])

        assert [piece.text for piece in run.pieces] == ["", "", "😀", "!", ""]

    def test_ends_dangling_bytes_with_one_replacement_character(self) -> None:
        run = stream(["😀".encode(), b"\xf0\x9f", b"\x98"])

        assert [piece.text for piece in run.pieces] == ["😀", "", "", "\ufffd"]

    def test_passes_a_written_replacement_character_through_at_once(self) -> None:
        run = stream(["\ufffd".encode(), b"a"])

        assert [piece.text for piece in run.pieces] == ["\ufffd", "a", ""]

    def test_skips_tokens_without_bytes(self) -> None:
        assert stream([b"\xf0\x9f", b"", b"\x98\x80"]).text == "😀"

    def test_joins_what_flush_adds_to_an_unsent_piece(self) -> None:
        text = TextStream([b"ab\xf0"], ("b\ufffdc",))

        piece = text.flush(text.push(0))

        assert piece == Piece("ab\ufffd", settled=1)

    def test_of_nothing_is_nothing(self) -> None:
        assert TextStream([]).flush() == Piece()


class TestLeadingSpace:
    def test_is_dropped_once_at_the_start_of_a_text(self) -> None:
        assert stream([b"  a", b" b"], strips=True).text == " a b"

    def test_is_dropped_if_it_is_a_token_of_its_own(self) -> None:
        assert stream([b"", b" ", b" a"], strips=True).text == " a"

    def test_is_kept_if_the_output_continues_a_text(self) -> None:
        text = TextStream([b" a"], strips_first_space=True, at_start=False)

        assert text.push(0).text == " a"

    def test_is_kept_by_tokenizers_that_add_none(self) -> None:
        text = TextStream([b" a"], strips_first_space=False, at_start=True)

        assert text.push(0).text == " a"

    def test_does_not_count_as_text_before_a_stop(self) -> None:
        run = stream([b" ", b"a", b"b"], ("ab",), strips=True)

        assert (run.text, run.last.settled, run.last.tail) == ("", 1, "")


class TestStops:
    @given(tokens=any_tokens, stops=stop_sets, min_tokens=st.integers(0, 6))
    @thorough
    @example(tokens=[b"a\xf0\x9f"], stops=("a\ufffd",), min_tokens=0)
    def test_cut_where_a_search_through_everything_would(
        self, tokens: list[bytes], stops: tuple[str, ...], min_tokens: int
    ) -> None:
        run = stream(tokens, stops, min_tokens=min_tokens)

        assert (run.text, run.last.stop) == first_stop(tokens, stops, min_tokens)

    @given(tokens=any_tokens, stops=stop_sets)
    @thorough
    def test_never_appear_in_the_text(self, tokens: list[bytes], stops: tuple[str, ...]) -> None:
        text = stream(tokens, stops).text

        assert [stop for stop in stops if stop in text] == []

    @given(tokens=any_tokens, stops=stop_sets, min_tokens=st.integers(0, 6))
    @thorough
    def test_hold_back_their_own_beginning_and_nothing_else(
        self, tokens: list[bytes], stops: tuple[str, ...], min_tokens: int
    ) -> None:
        run = stream(tokens, stops, min_tokens=min_tokens)

        given_out = ""
        for piece, withheld in zip(run.pieces, run.withheld, strict=False):
            given_out += piece.text
            assert withheld == longest_beginning(given_out + withheld, stops)

    @pytest.mark.parametrize(
        ("stops", "text", "kept", "stop"),
        [
            (("b",), "abc", "a", "b"),
            (("abcd", "bc"), "xabcd", "xa", "bc"),
            (("bc", "abc", "c"), "xabcd", "x", "abc"),
            (("aab",), "aaab", "a", "aab"),
            (("abc", "bd"), "abd", "a", "bd"),
            (("abc",), "abab", "abab", None),
            (("a",), "a", "", "a"),
            (("ab", "ab"), "ab", "", "ab"),
        ],
    )
    def test_end_the_output_when_the_first_is_complete(
        self, stops: tuple[str, ...], text: str, kept: str, stop: str | None
    ) -> None:
        for size in range(1, len(text) + 1):
            pieces = [text[at : at + size].encode() for at in range(0, len(text), size)]

            run = stream(pieces, stops)

            assert (run.text, run.last.stop) == (kept, stop)

    def test_may_span_many_tokens(self) -> None:
        tokens = [b" ", b"9", b",", b" ", b"1", b"0", b",", b" ", b"1", b"1"]

        run = stream(tokens, ("10, 1",))

        assert [piece.text for piece in run.pieces] == [" ", "9", ",", " ", "", "", "", "", ""]
        assert (run.text, run.last.stop) == (" 9, ", "10, 1")
        assert (run.last.settled, run.last.tail) == (4, "")

    def test_are_passed_over_while_they_do_not_count(self) -> None:
        run = stream([b"ab", b"ab", b"ab"], ("ab",), min_tokens=2)

        assert (run.text, run.last.settled) == ("ab", 1)

    def test_count_by_the_token_that_completes_them(self) -> None:
        run = stream([b"a", b"b"], ("ab",), min_tokens=2)

        assert (run.text, run.last.stop) == ("", "ab")

    def test_that_were_passed_over_stay_so(self) -> None:
        run = stream([b"xab", b"c"], ("ab",), min_tokens=2)

        assert (run.text, run.last.stop) == ("xabc", None)

    def test_may_begin_in_one_that_was_passed_over(self) -> None:
        run = stream([b"aa", b"a"], ("aa",), min_tokens=2)

        assert (run.text, run.last.stop, run.last.tail) == ("a", "aa", "a")

    def test_that_never_come_cost_no_text(self) -> None:
        run = stream([b"abc", b"ab"], ("abcd", "bx"))

        assert run.text == "abcab"
        assert run.last.settled == 2


class TestStopPatterns:
    @given(tokens=any_tokens, stops=stop_sets, patterns=pattern_sets, min_tokens=st.integers(0, 6))
    @settings(max_examples=200, deadline=None)
    @example(tokens=[b"a\xf0\x9f"], stops=(), patterns=("a[^a]",), min_tokens=0)
    @example(tokens=[b"xab"], stops=("b",), patterns=("ab",), min_tokens=0)
    @example(tokens=[b"xab"], stops=("xab",), patterns=("ab",), min_tokens=0)
    @example(tokens=[b"xabc"], stops=("abc",), patterns=("xab",), min_tokens=0)
    def test_cut_where_trying_everything_would(
        self,
        tokens: list[bytes],
        stops: tuple[str, ...],
        patterns: tuple[str, ...],
        min_tokens: int,
    ) -> None:
        run = stream(tokens, stops, patterns, min_tokens=min_tokens)

        assert (run.text, run.last.stop) == first_match(tokens, stops, patterns, min_tokens)

    @given(tokens=any_tokens, stops=stop_sets, patterns=pattern_sets, min_tokens=st.integers(0, 6))
    @settings(max_examples=200, deadline=None)
    def test_leave_tokens_and_a_tail_that_make_the_text(
        self,
        tokens: list[bytes],
        stops: tuple[str, ...],
        patterns: tuple[str, ...],
        min_tokens: int,
    ) -> None:
        run = stream(tokens, stops, patterns, min_tokens=min_tokens)

        settled = [piece.settled for piece in run.pieces]
        assert whole(tokens[: run.last.settled]) + run.last.tail == run.text
        assert settled == sorted(settled)

    @given(tokens=any_tokens, patterns=pattern_sets)
    @settings(max_examples=200, deadline=None)
    def test_say_whether_text_and_tokens_end_together(
        self, tokens: list[bytes], patterns: tuple[str, ...]
    ) -> None:
        text, given_out = TextStream(tokens, (), patterns), ""

        for token in range(len(tokens)):
            piece = text.push(token)
            if piece.stop is not None:
                break
            given_out += piece.text
            assert text.partial == (decoded_so_far(tokens[: piece.settled]) != given_out)

    @given(tokens=any_tokens, stops=stop_sets)
    @settings(max_examples=200, deadline=None)
    def test_that_are_stop_strings_cut_and_hold_as_these_do(
        self, tokens: list[bytes], stops: tuple[str, ...]
    ) -> None:
        patterns = tuple(re.escape(stop) for stop in stops)

        assert stream(tokens, (), patterns) == stream(tokens, stops)

    @pytest.mark.parametrize(
        ("stops", "patterns", "text", "kept", "stop"),
        [
            ((), (r"\n+",), "a\n\n", "a", "\n"),
            ((), ("1[0-9], 1",), " 9, 10, 11", " 9, ", "10, 1"),
            (("11",), ("1[0-9], 1",), " 9, 10, 11", " 9, ", "10, 1"),
            (("0, 1",), ("1[0-9], 1",), " 9, 10, 11", " 9, ", "10, 1"),
            ((", 10, 1",), ("1[0-9], 1",), " 9, 10, 11", " 9", ", 10, 1"),
            (("0,",), ("1[0-9], 1",), " 9, 10, 11", " 9, 1", "0,"),
            ((), ("^a",), "ba", "ba", None),
            ((), ("😀.", "b😀"), "ab😀!", "a", "b😀"),
        ],
    )
    def test_end_the_output_when_the_first_is_complete(
        self,
        stops: tuple[str, ...],
        patterns: tuple[str, ...],
        text: str,
        kept: str,
        stop: str | None,
    ) -> None:
        data = text.encode()
        for size in range(1, len(data) + 1):
            pieces = [data[at : at + size] for at in range(0, len(data), size)]

            run = stream(pieces, stops, patterns)

            assert (run.text, run.last.stop) == (kept, stop)

    def test_hold_back_what_may_be_a_match(self) -> None:
        run = stream([b"x<", b"b", b">y", b"<", b"i>"], (), ("<[^>]*i>",))

        assert [piece.text for piece in run.pieces] == ["x", "", "<b>y", "", ""]
        assert (run.last.stop, run.last.settled, run.last.tail) == ("<i>", 3, "")

    def test_hold_back_the_bytes_of_an_emoji_with_it(self) -> None:
        run = stream([b"a\xf0", b"\x9f\x98\x80", b"b", b"!"], (), ("😀+!",))

        assert [piece.text for piece in run.pieces] == ["a", "", "😀b", "!", ""]

    def test_give_out_what_they_hold_when_the_output_ends(self) -> None:
        run = stream([b"xa", b"bc", b"\n"], (), (r"a[^z]*z",))

        assert [piece.text for piece in run.pieces] == ["x", "", "", "abc\n"]
        assert (run.last.settled, run.last.stop) == (3, None)

    def test_that_were_passed_over_may_go_on(self) -> None:
        run = stream([b"a", b"b", b"b"], (), ("ab+",), min_tokens=3)

        assert (run.text, run.last.stop) == ("", "abb")

    def test_are_refused_when_the_stream_is_made(self) -> None:
        with pytest.raises(ConstraintError, match=r"stop_regex '\(\?=a\)': .*looking ahead"):
            TextStream([], (), ("(?=a)",))

    def test_cost_no_text_where_they_never_come(self) -> None:
        tokens = [b"word %d, " % n for n in range(400)]

        run = stream(tokens, (), (r"w.*z", "[0-9]+;"))

        assert run.text == whole(tokens)
        assert run.last.settled == 400


class TestKeptTokens:
    @given(tokens=any_tokens, stops=stop_sets, min_tokens=st.integers(0, 6))
    @thorough
    def test_and_the_tail_make_the_text(
        self, tokens: list[bytes], stops: tuple[str, ...], min_tokens: int
    ) -> None:
        run = stream(tokens, stops, min_tokens=min_tokens)

        assert whole(tokens[: run.last.settled]) + run.last.tail == run.text

    @given(tokens=clean_tokens, stops=stop_sets)
    @thorough
    def test_are_as_many_as_end_with_a_character_before_the_stop(
        self, tokens: list[bytes], stops: tuple[str, ...]
    ) -> None:
        run = stream(tokens, stops)

        # The last piece is of the token that completes the stop, or of the flush: of none kept.
        starts = [b"".join(tokens[:count]) for count in range(len(run.pieces))]
        fitting = [s for s in starts if run.text.encode().startswith(s) and is_valid(s)]
        assert run.last.settled == len(starts) - 1 - starts[::-1].index(fitting[-1])

    @given(tokens=any_tokens, stops=stop_sets, min_tokens=st.integers(0, 6))
    @thorough
    def test_settle_for_good(
        self, tokens: list[bytes], stops: tuple[str, ...], min_tokens: int
    ) -> None:
        run = stream(tokens, stops, min_tokens=min_tokens)

        settled = [piece.settled for piece in run.pieces]
        assert settled == sorted(settled)

    @given(tokens=clean_tokens, stops=stop_sets)
    @thorough
    def test_settle_no_earlier_than_their_text_is_given_out(
        self, tokens: list[bytes], stops: tuple[str, ...]
    ) -> None:
        run = stream(tokens, stops)

        given_out = ""
        for piece in run.pieces:
            given_out += piece.text
            if stops:
                assert given_out.startswith(whole(tokens[: piece.settled]))

    @given(tokens=any_tokens, stops=stop_sets)
    @thorough
    def test_end_where_the_text_does_unless_that_is_partial(
        self, tokens: list[bytes], stops: tuple[str, ...]
    ) -> None:
        text, given_out = TextStream(tokens, stops), ""

        for token in range(len(tokens)):
            piece = text.push(token)
            if piece.stop is not None:
                break
            given_out += piece.text
            settled = decoded_so_far(tokens[: piece.settled])
            unfinished = not stops and is_unfinished(tokens[: piece.settled])
            assert text.partial == (settled != given_out or unfinished)

    @given(tokens=any_tokens)
    @thorough
    def test_settle_at_once_where_nothing_can_stop_them(self, tokens: list[bytes]) -> None:
        *pushed, flushed = stream(tokens).pieces

        assert [piece.settled for piece in pushed] == list(range(1, len(tokens) + 1))
        assert flushed.settled == len(tokens)

    def test_settle_with_the_text_after_a_false_alarm(self) -> None:
        run = stream([b"a", b"b", b"c"], ("abd",))

        assert [piece.settled for piece in run.pieces] == [0, 0, 3, 3]
        assert [piece.text for piece in run.pieces] == ["", "", "abc", ""]

    def test_leave_a_tail_where_a_stop_begins_inside_a_token(self) -> None:
        run = stream([b"one", b" two\n", b"\nthree"], ("\n\n",))

        assert (run.text, run.last.settled, run.last.tail) == ("one two", 1, " two")

    def test_never_end_inside_a_character(self) -> None:
        run = stream([b"a", b"\xf0\x9f", b"\x98\x80stop"], ("stop",))

        assert (run.text, run.last.settled, run.last.tail) == ("a😀", 1, "😀")

    def test_leave_a_tail_that_was_given_out_before_the_stop(self) -> None:
        run = stream([b"ab", b"cd\xf0\x9f", b"\x98\x80!"], ("😀",))

        assert [piece.text for piece in run.pieces] == ["ab", "cd", ""]
        assert (run.last.settled, run.last.tail) == (1, "cd")


def decoded_so_far(tokens: list[bytes]) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(tokens))


def is_unfinished(tokens: list[bytes]) -> bool:
    """Whether the bytes end inside a character."""
    return decoded_so_far(tokens) != whole(tokens)


def is_valid(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


class TestStopStrings:
    def test_take_time_in_proportion_to_the_text(self) -> None:
        """The pair that makes naive searching quadratic: counted in steps, not in seconds."""
        stops = Counting(("a" * 500 + "b",))
        stops.looked_up = 0

        node, read, _ = stops.scan(0, "a" * 5000, allow=True)

        assert (stops.held(node), read) == (500, 5000)
        assert stops.looked_up <= 2 * 5000


class Counting(StopStrings):
    """Counts the edges that are looked at."""

    looked_up = 0

    def step(self, node: int, character: str) -> int:
        while node and character not in self._next[node]:
            self.looked_up += 1
            node = self._fail[node]
        self.looked_up += 1
        return super().step(node, character)
