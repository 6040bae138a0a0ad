"""Choosing among strings: every method against its definition, and never by the list's order."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.errors import OptionError, UnsupportedError
from structgen.output.choices import METHODS, Method, best, checked_choices, draw, weigh
from structgen.request import Score

always = settings(deadline=None, derandomize=True)

UNCONDITIONAL: Method = "unconditional_likelihood_normalized"
GREEDY: Method = "greedy_token_selection"

logprobs = st.floats(-60, 0).map(lambda value: round(value, 3))


def score(text: str, *each: float, tokens: tuple[int, ...] = ()) -> Score:
    """A choice; unless they are given, its tokens are those of no other choice."""
    own = tuple(1000 * int.from_bytes(text.encode()) + index for index in range(len(each)))
    return Score(text=text, tokens=tokens or own, logprobs=each)


@st.composite
def scored(draw_: st.DrawFn) -> tuple[list[Score], list[Score]]:
    """Choices, and the same without the prompt; what has the same tokens so far is as likely."""
    texts = draw_(
        st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)
    )
    prefixes = sorted({text[:end] for text in texts for end in range(1, len(text) + 1)})
    both = []
    for _ in range(2):
        likely = {prefix: draw_(logprobs) for prefix in prefixes}
        rows = [[likely[text[:end]] for end in range(1, len(text) + 1)] for text in texts]
        both.append(
            [
                score(text, *row, tokens=tuple(map(ord, text)))
                for text, row in zip(texts, rows, strict=True)
            ]
        )
    return both[0], both[1]


def exact(values: tuple[float, ...]) -> list[Fraction]:
    return [Fraction(value) for value in values]


def mean(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def by_definition(method: Method, given_: Score, bare: Score) -> Fraction:
    row = exact(given_.logprobs)
    match method:
        case "token_length_normalized":
            return mean(row)
        case "sum":
            return sum(row, Fraction(0))
        case "unconditional_likelihood_normalized":
            return mean([a - b for a, b in zip(row, exact(bare.logprobs), strict=True)])
        case "greedy_token_selection":
            return row[0]


def eliminated(scores: list[Score]) -> set[str]:
    """Which texts survive greedy selection, as SGLang's matrix has it, in exact numbers."""
    width = max(len(each.logprobs) for each in scores)
    # Means are rounded once, as ours are: whether two rows are equal must not hang on it.
    matrix = {
        each.text: exact(each.logprobs)
        + [Fraction(float(mean(exact(each.logprobs))))] * (width - len(each.logprobs))
        for each in scores
    }
    for column in range(width):
        top = max(row[column] for row in matrix.values())
        matrix = {text: row for text, row in matrix.items() if row[column] == top}
    return set(matrix)


def distribution(totals: list[float], temperature: float) -> list[Decimal]:
    """softmax in 60 digits, with exponents as large as they come."""
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, -(10**17), 10**17
        weights = [(Decimal(total) / Decimal(temperature)).exp() for total in totals]
        return [weight / sum(weights) for weight in weights]


def orders(items: list[Any]) -> Iterator[list[Any]]:
    for seed in range(5):
        yield random.Random(seed).sample(items, len(items))


def chosen(scores: list[Score], bare: list[Score], method: Method) -> str:
    weighed = weigh(scores, method, bare)
    return weighed[best(weighed, method)].text


class TestScores:
    @always
    @given(scored())
    def test_are_what_the_method_says(self, both: tuple[list[Score], list[Score]]) -> None:
        for method in METHODS:
            for given_, bare, weighed in zip(*both, weigh(both[0], method, both[1]), strict=True):
                assert weighed.score == pytest.approx(float(by_definition(method, given_, bare)))

    @always
    @given(scored())
    def test_keep_what_the_model_said(self, both: tuple[list[Score], list[Score]]) -> None:
        for given_, weighed in zip(both[0], weigh(both[0]), strict=True):
            assert (weighed.text, weighed.tokens) == (given_.text, given_.tokens)
            assert (weighed.logprobs, weighed.total) == (given_.logprobs, given_.total)

    @always
    @given(scored())
    def test_carry_the_exact_probabilities(self, both: tuple[list[Score], list[Score]]) -> None:
        right = distribution([each.total for each in both[0]], 1.0)

        for method in METHODS:
            found = [each.probability for each in weigh(both[0], method, both[1])]
            assert found == pytest.approx([float(each) for each in right], rel=1e-12, abs=1e-300)

    def test_of_the_field_case_differ_by_method(self) -> None:
        # sgl-project/sglang#523: the mean prefers the longer choice, whose end is certain.
        scores = [score(" YES", -9.4275, -2.8949), score(" NO", -10.8771)]

        assert chosen(scores, [], "token_length_normalized") == " YES"
        assert chosen(scores, [], "sum") == " NO"

    def test_of_what_is_impossible_are_still_numbers(self) -> None:
        never = [score("a", -math.inf), score("b", -math.inf, -1.0)]

        weighed = weigh(never, UNCONDITIONAL, never)

        assert [each.score for each in weighed] == [-math.inf, -math.inf]
        assert [each.probability for each in weighed] == [0.5, 0.5]
        assert weighed[best(weighed, UNCONDITIONAL)].text == "a"


class TestTheBest:
    @always
    @given(scored())
    def test_has_the_highest_score(self, both: tuple[list[Score], list[Score]]) -> None:
        for method in METHODS:
            if method != GREEDY:
                weighed = weigh(both[0], method, both[1])
                assert weighed[best(weighed, method)].score == max(each.score for each in weighed)

    @always
    @given(scored())
    def test_by_greedy_selection_is_left_over_by_the_matrix(
        self, both: tuple[list[Score], list[Score]]
    ) -> None:
        assert chosen(both[0], both[1], GREEDY) == min(eliminated(both[0]))

    def test_by_greedy_selection_goes_on_with_the_mean_of_what_has_ended(self) -> None:
        prefix = score("organ", -0.1, tokens=(1,))
        likelier = score("organism", -0.1, -0.05, tokens=(1, 2))
        less_likely = score("organic", -0.1, -0.3, tokens=(1, 3))

        assert chosen([prefix, likelier, less_likely], [], GREEDY) == "organism"
        assert chosen([prefix, less_likely], [], GREEDY) == "organ"

    @pytest.mark.parametrize(("third", "expected"), [(-0.4, "ab"), (-0.2, "abc")])
    def test_by_greedy_selection_takes_the_mean_of_all_tokens(
        self, third: float, expected: str
    ) -> None:
        ended = score("ab", -0.1, -0.5, tokens=(1, 2))
        longer = score("abc", -0.1, -0.5, third, tokens=(1, 2, 3))

        assert chosen([ended, longer], [], GREEDY) == expected

    def test_by_greedy_selection_does_not_hang_on_the_last_bits_of_a_shared_prefix(self) -> None:
        left = score("a", -0.1, -3.0, tokens=(1, 2))
        right = score("b", math.nextafter(-0.1, -1), -2.0, tokens=(1, 3))

        assert chosen([left, right], [], GREEDY) == "b"

        # Whatever the order: of those that share it, the smallest text has the value that counts.
        level = score("c", -0.1, -9.0, tokens=(7, 8))
        assert {chosen(each, [], GREEDY) for each in orders([left, right, level])} == {"b"}

    @always
    @given(scored())
    def test_does_not_depend_on_the_order(self, both: tuple[list[Score], list[Score]]) -> None:
        pairs = list(zip(*both, strict=True))
        for method in METHODS:
            found = {
                chosen([a for a, _ in order], [b for _, b in order], method)
                for order in orders(pairs)
            }
            assert len(found) == 1

    @pytest.mark.parametrize("method", METHODS)
    def test_of_equals_has_the_smallest_text(self, method: Method) -> None:
        scores = [score("b", -1.0, -2.0), score("a", -1.0, -2.0), score("c", -1.0, -2.0)]

        assert chosen(scores, scores, method) == "a"


class TestDrawing:
    @always
    @given(scored(), st.floats(0.01, 10), st.integers(0, 2**63 - 1))
    def test_does_not_depend_on_the_order(
        self, both: tuple[list[Score], list[Score]], temperature: float, seed: int
    ) -> None:
        found = set()
        for order in orders(both[0]):
            weighed = weigh(order)
            found.add(weighed[draw(weighed, temperature, seed)].text)

        assert len(found) == 1

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
    def test_follows_the_distribution(self, temperature: float) -> None:
        totals = [-1.0, -2.5, -2.0, -7.0]
        weighed = weigh([score(text, t) for text, t in zip("bdac", totals, strict=True)])
        drawn = Counter(draw(weighed, temperature, seed) for seed in range(4000))

        for index, probability in enumerate(map(float, distribution(totals, temperature))):
            spread = math.sqrt(probability * (1 - probability) / 4000)
            assert abs(drawn[index] / 4000 - probability) < 4 * spread + 1e-9

    def test_is_the_same_for_the_same_seed(self) -> None:
        weighed = weigh([score(text, -1.0) for text in "abcdefgh"])

        # Written down once: a run that is repeated with a later version draws the same.
        assert [draw(weighed, 1.0, seed) for seed in (0, 1, 2, 42, 2**63 - 1)] == [5, 1, 4, 3, 7]

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
    def test_is_the_best_at_temperatures_close_to_none(self, temperature: float) -> None:
        weighed = weigh([score("a", -1e6), score("b", -1e6 + 1), score("c", -1e308)])

        assert {draw(weighed, temperature, seed) for seed in range(50)} == {1}

    def test_is_even_at_temperatures_without_end(self) -> None:
        weighed = weigh([score("a", -1.0), score("b", -1e6), score("c", -math.inf)])

        assert {draw(weighed, 1e38, seed) for seed in range(50)} == {0, 1}

    def test_works_where_every_choice_is_very_unlikely(self) -> None:
        weighed = weigh([score("a", -1e5), score("b", -1e5)])

        assert {draw(weighed, 1.0, seed) for seed in range(50)} == {0, 1}

    def test_never_takes_what_is_impossible(self) -> None:
        weighed = weigh([score("a", -math.inf), score("b", -3.0), score("c", -math.inf)])

        assert {draw(weighed, 1.0, seed) for seed in range(200)} == {1}

    @pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, "hot"])
    def test_needs_a_temperature(self, temperature: Any) -> None:
        with pytest.raises(OptionError, match=r"^temperature: "):
            draw(weigh([score("a", -1.0)]), temperature, 0)


class TestWeighing:
    def test_refuses_unknown_methods_by_name(self) -> None:
        with pytest.raises(OptionError, match=r"^by: unknown 'mean'; the methods are token_"):
            weigh([score("a", -1.0)], "mean")  # type: ignore[arg-type] # the mistake under test

    def test_against_the_unconditional_likelihood_needs_it(self) -> None:
        with pytest.raises(OptionError, match="needs the choices' scores without"):
            weigh([score("a", -1.0)], UNCONDITIONAL)

    def test_against_other_tokens_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="'ab' was scored as 2 tokens, and 'ab' "):
            weigh([score("ab", -1.0, -2.0)], UNCONDITIONAL, [score("ab", -1.0)])

    def test_of_a_single_choice_is_certain(self) -> None:
        (only,) = weigh([score("a", -700.0)])

        assert (only.total, only.score, only.probability) == (-700.0, -700.0, 1.0)


class TestChoices:
    def test_are_strings_in_any_iterable(self) -> None:
        assert checked_choices(iter(["b", "a"])) == ("b", "a")

    @pytest.mark.parametrize(
        ("choices", "message"),
        [
            ("yes", "expected a list of strings, got 'yes'"),
            (b"yes", "expected a list of strings, got b'yes'"),
            ({"a": 1}, "expected a list of strings, got {'a': 1}"),
            ({"a"}, "expected a list of strings, got {'a'}"),
            (3, "expected a list of strings, got 3"),
            (None, "expected a list of strings, got None"),
            ([], "there must be at least one"),
            (["a", ""], "a choice must not be empty"),
            (["a", "b", "a"], "'a' stands there twice"),
            (["a", 1], "expected strings, got 1; write str"),
        ],
    )
    def test_are_refused_for_what_they_are_not(self, choices: Any, message: str) -> None:
        with pytest.raises(OptionError, match=f"^choices: {message}"):
            checked_choices(choices)
