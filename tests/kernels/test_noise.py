"""The sampling noise: bit-exact against plain integers, and statistically what it claims to be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.noise import gumbel, gumbel_of, words

Rows = NDArray[np.int64]

WORD = 2**32 - 1
EULER = 0.5772156649015329
# For seeds 0, 42, 2**63 - 1 at positions 0, 7, 99 and tokens 0, 1, 49151: a run that is repeated
# with a later version draws the same tokens only while these stay.
GOLDEN_WORDS = [
    [1272024909, -1938192988, -2074793593],
    [240925892, -602228241, -1671450410],
    [618652143, 2101860598, -1821400944],
]
GOLDEN_NOISE = [
    [1.0463616847991943, 0.22854839265346527, 0.3180282711982727],
    [2.8519840240478516, -0.6752694845199585, 0.05789180472493172],
    [1.8608973026275635, 0.39731132984161377, 0.15334010124206543],
]


def mixed(x: int, middle: int = 0) -> int:
    """lowbias32 on plain integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD ^ middle
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def plain_word(seed: int, position: int, token: int) -> int:
    """The hash written down once more, on unsigned words."""
    keys = []
    for key in (0x243F6A88, 0x13198A2E):
        for word in (seed & WORD, seed >> 32, position & WORD):
            key = mixed(key ^ word) + 0x9E3779B9 & WORD  # noqa: PLW2901 - a chain, link by link
        keys.append(key)
    return mixed(token ^ keys[0], keys[1])


def rows(*values: int) -> Rows:
    return np.array(values, np.int64)


def noise(seeds: Rows, positions: Rows, tokens: Tensor) -> NDArray[np.float64]:
    return gumbel(seeds, positions, tokens).numpy().astype(np.float64)


def correlation(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Pearson's r in units of its standard error under independence."""
    return float(np.corrcoef(left.ravel(), right.ravel())[0, 1]) * math.sqrt(left.size)


class TestWords:
    SEEDS = (0, 1, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 123456789012345678, 2**63 - 1)
    TOKENS = (0, 1, 2, 31, 49151, 151935, 2**31 - 1)

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("position", [0, 1, 1023, 2**31 + 5])
    def test_are_those_of_plain_integers(self, seed: int, position: int) -> None:
        found = words(rows(seed), rows(position), torch.tensor(self.TOKENS))

        unsigned = [word & WORD for word in found[0].tolist()]
        assert unsigned == [plain_word(seed, position, token) for token in self.TOKENS]

    def test_never_change(self) -> None:
        found = words(rows(0, 42, 2**63 - 1), rows(0, 7, 99), torch.tensor([0, 1, 49151]))

        assert found.tolist() == GOLDEN_WORDS

    def test_are_distinct_within_a_row(self) -> None:
        found = words(rows(7), rows(3), torch.arange(200_000))

        assert len(np.unique(found.numpy())) == 200_000

    def test_depend_on_both_halves_of_the_seed(self) -> None:
        low, high, both = words(rows(1, 2**32, 2**32 + 1), rows(0, 0, 0), torch.arange(64))

        assert not (low == high).any()
        assert not (low == both).any()
        assert not (high == both).any()

    def test_use_every_bit_equally(self) -> None:
        found = words(np.arange(64), np.arange(64) * 3, torch.arange(4096)).numpy()

        share = np.array([(found >> bit & 1).mean() for bit in range(32)])
        assert np.abs(share - 0.5).max() < 5 * 0.5 / math.sqrt(found.size)

    @pytest.mark.parametrize("bit", [0, 1, 5, 15])
    def test_flip_half_their_bits_when_one_bit_of_the_token_flips(self, bit: int) -> None:
        tokens = torch.arange(2**15)
        seeds, positions = np.arange(32), np.arange(32)

        flips = words(seeds, positions, tokens) ^ words(seeds, positions, tokens ^ (1 << bit))

        share = np.array([(flips.numpy() >> out & 1).mean() for out in range(32)])
        assert np.abs(share - 0.5).max() < 0.01


class TestNoise:
    def test_never_changes(self) -> None:
        found = gumbel(rows(0, 42, 2**63 - 1), rows(0, 7, 99), torch.tensor([0, 1, 49151]))

        assert found.numpy() == pytest.approx(np.array(GOLDEN_NOISE), rel=1e-6)

    def test_is_finite_for_every_extreme_word(self) -> None:
        extremes = torch.tensor([0, 1, -1, -2, 2**31 - 1, -(2**31), -64, -129], dtype=torch.int32)

        found = gumbel_of(extremes)

        assert found.min() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-3)
        assert found.max() == pytest.approx(32 * math.log(2), rel=1e-3)

    def test_of_a_token_does_not_depend_on_what_else_is_asked_for(self) -> None:
        everything = gumbel(np.arange(5), np.arange(5) + 9, torch.arange(50_001))
        tokens = torch.tensor([[50_000, 3, 17], [1, 0, 49_999]])

        few = gumbel(rows(4, 2), rows(13, 11), tokens)

        assert torch.equal(few, everything[[4, 2]].gather(1, tokens))

    def test_takes_tokens_of_either_width(self) -> None:
        narrow = torch.arange(100, dtype=torch.int32)

        assert torch.equal(
            gumbel(rows(1), rows(2), narrow), gumbel(rows(1), rows(2), narrow.long())
        )

    def test_takes_no_rows_and_no_tokens(self) -> None:
        none = torch.empty(0, dtype=torch.int64)

        assert gumbel(rows(), rows(), torch.arange(5)).shape == (0, 5)
        assert gumbel(rows(1, 2), rows(0, 0), none).shape == (2, 0)

    def test_has_the_mean_and_variance_of_a_gumbel(self) -> None:
        found = noise(np.arange(32), np.arange(32) * 7, torch.arange(32_768))

        assert found.mean() == pytest.approx(EULER, abs=5 * 1.2825 / math.sqrt(found.size))
        assert found.var() == pytest.approx(math.pi**2 / 6, rel=0.01)

    def test_has_the_distribution_of_a_gumbel(self) -> None:
        found = np.sort(noise(rows(3), rows(5), torch.arange(200_000))[0])

        distance = np.abs(np.exp(-np.exp(-found)) - (np.arange(found.size) + 0.5) / found.size)
        # Kolmogorov-Smirnov at the level 1e-4.
        assert distance.max() < 2.23 / math.sqrt(found.size)

    def test_has_the_upper_tail_of_a_gumbel(self) -> None:
        found = noise(np.arange(256), np.zeros(256, np.int64), torch.arange(32_768))
        expected = found.size * -math.expm1(-math.exp(-13))

        assert (found > 13).sum() == pytest.approx(expected, abs=5 * math.sqrt(expected))


class TestNeighbours:
    SEEDS = np.arange(257) * 1000
    TOKENS = torch.arange(4096)

    def test_of_a_token_are_uncorrelated(self) -> None:
        found = noise(self.SEEDS, self.SEEDS, self.TOKENS)

        for lag in (1, 2, 64, 1024):
            assert abs(correlation(found[:, lag:], found[:, :-lag])) < 4.5

    def test_of_a_position_are_uncorrelated(self) -> None:
        found = noise(np.full(257, 5), np.arange(257), self.TOKENS)

        for lag in (1, 2, 16, 128):
            assert abs(correlation(found[lag:], found[:-lag])) < 4.5

    @pytest.mark.parametrize("step", [1, 2**31, 2**32, 2**40])
    def test_of_a_seed_are_uncorrelated(self, step: int) -> None:
        found = noise(np.arange(257) * step, np.full(257, 11), self.TOKENS)

        assert abs(correlation(found[1:], found[:-1])) < 4.5

    def test_on_the_diagonal_are_uncorrelated(self) -> None:
        """Seed and position do not add up: (s, p + 1) is not (s + 1, p)."""
        left = noise(np.arange(256), np.arange(256) + 1, self.TOKENS)
        right = noise(np.arange(256) + 1, np.arange(256), self.TOKENS)

        assert abs(correlation(left, right)) < 4.5


class TestDraws:
    @pytest.mark.parametrize("vary", ["seed", "position"])
    def test_follow_the_probabilities(self, vary: str) -> None:
        probability = np.array([0.5, 0.25, 0.1, 0.08, 0.04, 0.02, 0.009, 0.001])
        count = 200_000
        moving, fixed = np.arange(count), np.full(count, 77)
        seeds, positions = (moving, fixed) if vary == "seed" else (fixed, moving)

        score = noise(seeds, positions, torch.arange(8)) + np.log(probability)

        drawn = np.bincount(score.argmax(axis=1), minlength=8)
        chi_square = ((drawn - count * probability) ** 2 / (count * probability)).sum()
        assert chi_square < 24.3  # 7 degrees of freedom, level 1e-3

    def test_at_neighbouring_positions_are_independent(self) -> None:
        count = 160_000
        score = noise(np.full(count, 1), np.arange(count), torch.arange(4))
        drawn = score.argmax(axis=1)

        pairs = np.bincount(drawn[0::2] * 4 + drawn[1::2], minlength=16)

        expected = count / 2 / 16
        assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # 15 degrees of freedom, 1e-3
