"""Draws of the kernels are those of the CPU path, token for token, ties and masks included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from structgen.core.batch import Picked, SamplingRows
from structgen.engine.sample import pick
from structgen.kernels.draw import Terms
from structgen.kernels.gpu.sample import Sampled, row_terms, sample
from structgen.kernels.gpu.tokens import noise_of, noise_words
from structgen.kernels.noise import gumbel, keys, words

CPU = torch.device("cpu")
# Several blocks of the search, with a last one that is not full.
VOCABULARY = 1100
SIZE = 2**14


def sampling_rows(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_seed: int = 0,
    mask_row_r: NDArray[np.int32] | None = None,
) -> SamplingRows:
    """Rows that differ in seed and position."""
    return SamplingRows(
        target_r=np.full(count, -1, np.int64),
        temperature_r=np.full(count, temperature, np.float32),
        top_k_r=np.full(count, top_k, np.int32),
        top_p_r=np.full(count, top_p, np.float32),
        min_p_r=np.full(count, min_p, np.float32),
        seed_r=np.arange(count, dtype=np.int64) * 2**40 + first_seed,
        position_r=np.arange(count, dtype=np.int64) * 7,
        logprobs_r=np.zeros(count, np.int32),
        mask_row_r=np.full(count, -1, np.int32) if mask_row_r is None else mask_row_r,
    )


def drawn(logits_rv: Tensor, rows: SamplingRows, mask_mw: Tensor | None = None) -> Sampled:
    terms = Terms(rows.top_k_r, rows.top_p_r, rows.min_p_r, rows.seed_r, rows.position_r)
    packed = row_terms(rows.temperature_r, terms, rows.mask_row_r, CPU)
    return sample(logits_rv, packed, mask_mw, arch="sm_90")


def logits(count: int, vocabulary: int = VOCABULARY, *, seed: int = 0, grain: int = 0) -> Tensor:
    """Random rows; with a grain many values are equal."""
    noise = torch.Generator().manual_seed(seed)
    values_rv = torch.randn(count, vocabulary, generator=noise) * 2.5
    return (values_rv * grain).round() / grain if grain else values_rv


def mask_of(allowed_mv: NDArray[np.bool_]) -> Tensor:
    padding = -allowed_mv.shape[1] % 32
    padded = np.pad(allowed_mv, ((0, 0), (0, padding)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def assert_same(found: Sampled, right: Picked) -> None:
    assert found.token_r.tolist() == right.tokens_r.tolist()
    np.testing.assert_allclose(found.logprob_r.numpy(), right.logprobs_r, rtol=2e-6, atol=2e-6)


@triton.jit
def _noise(key_2: Any, word_out: Any, noise_out: Any, base: Any, size: tl.constexpr) -> None:
    i = tl.arange(0, size)
    token = (base + i).to(tl.int32)
    tl.store(word_out + i, noise_words(token, tl.load(key_2), tl.load(key_2 + 1)))
    tl.store(noise_out + i, noise_of(token, tl.load(key_2), tl.load(key_2 + 1)))


def noise_at(base: int, position: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Words and noise of SIZE tokens from `base` on."""
    key_2r = torch.from_numpy(keys(np.array([seed]), np.array([position])).view(np.int32))
    word_c, noise_c = torch.empty(SIZE, dtype=torch.int32), torch.empty(SIZE)
    _noise[(1,)](key_2r, word_c, noise_c, base, size=SIZE)
    return word_c, noise_c


class TestTheNoise:
    @pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 1, 2**63 - 1])
    @pytest.mark.parametrize("base", [0, 151_000])
    def test_has_the_words_of_the_cpu_and_its_values(self, seed: int, base: int) -> None:
        seed_r, position_r = np.array([seed]), np.array([2**31 + 5])

        word_c, noise_c = noise_at(base, 2**31 + 5, seed=seed)

        tokens_c = torch.arange(base, base + SIZE)
        assert torch.equal(word_c, words(seed_r, position_r, tokens_c)[0])
        right_c = gumbel(seed_r, position_r, tokens_c)[0]
        torch.testing.assert_close(noise_c, right_c, rtol=1e-6, atol=1e-6)

    def test_draws_by_the_probabilities(self) -> None:
        """One launch makes the noise of many draws; within a row tokens are independent too."""
        probability = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
        score = noise_at(0, 7, seed=11)[1].numpy()[:16_380].reshape(-1, 5) + np.log(probability)

        drawn_5 = np.bincount(score.argmax(axis=1), minlength=5)

        expected = len(score) * probability
        assert ((drawn_5 - expected) ** 2 / expected).sum() < 18.5  # level 1e-3


class TestDraws:
    @pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 7.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_without_filters_are_those_of_the_cpu(
        self, temperature: float, dtype: torch.dtype
    ) -> None:
        logits_rv = logits(5, 5000, seed=1).to(dtype)
        rows = sampling_rows(5, temperature=temperature)

        assert_same(drawn(logits_rv, rows), pick(logits_rv.float(), rows))

    @pytest.mark.parametrize(
        ("top_k", "top_p", "min_p"),
        [
            *((1, 1.0, 0.0), (2, 1.0, 0.0), (50, 1.0, 0.0), (1099, 1.0, 0.0), (9999, 1.0, 0.0)),
            *((0, 0.05, 0.0), (0, 0.5, 0.0), (0, 0.95, 0.0), (0, 0.0, 0.0)),
            *((0, 1.0, 0.2), (0, 1.0, 1.0), (40, 0.9, 0.02), (300, 0.6, 0.0)),
        ],
    )
    @pytest.mark.parametrize("grain", [0, 2])
    def test_with_filters_are_those_of_the_cpu(
        self, top_k: int, top_p: float, min_p: float, grain: int
    ) -> None:
        logits_rv = logits(3, seed=top_k, grain=grain)
        rows = sampling_rows(
            3, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, first_seed=grain
        )

        assert_same(drawn(logits_rv, rows), pick(logits_rv, rows))

    @pytest.mark.parametrize("terms", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {}], ids=str)
    def test_from_equal_logits_keep_the_lowest_ids(self, terms: dict[str, Any]) -> None:
        logits_rv = torch.zeros(8, 11)
        rows = sampling_rows(8, **terms)

        found = drawn(logits_rv, rows)

        assert_same(found, pick(logits_rv, rows))
        if "top_k" in terms:
            assert set(found.token_r.tolist()) <= {0, 1, 2}

    def test_from_equal_logits_in_two_blocks_keep_the_lowest_ids(self) -> None:
        logits_rv = torch.full((8, VOCABULARY), -20.0)
        logits_rv[:, 1000:] = 0.0
        rows = sampling_rows(8, top_k=50)

        found = drawn(logits_rv, rows)

        assert_same(found, pick(logits_rv, rows))
        assert all(1000 <= token < 1050 for token in found.token_r.tolist())

    def test_with_mixed_terms_are_those_of_the_cpu(self) -> None:
        count = 6
        logits_rv = logits(count, seed=5)
        rows = sampling_rows(count)
        rows.temperature_r[:] = np.linspace(0, 2, count)
        rows.top_k_r[::2] = np.arange(1, 4) * 9
        rows.top_p_r[::3] = 0.7
        rows.min_p_r[1::3] = 0.1

        assert_same(drawn(logits_rv, rows), pick(logits_rv, rows))

    def test_do_not_depend_on_their_neighbours(self) -> None:
        logits_rv, rows = logits(3, seed=6), sampling_rows(3, top_p=0.9)

        together = drawn(logits_rv, rows)

        for r in range(3):
            alone = sampling_rows(1, top_p=0.9)
            alone.seed_r[:], alone.position_r[:] = rows.seed_r[r], rows.position_r[r]
            found = drawn(logits_rv[r : r + 1], alone)
            assert found.token_r[0] == together.token_r[r]
            assert found.logprob_r[0] == together.logprob_r[r]

    def test_leave_the_logits_alone(self) -> None:
        logits_rv = logits(2)
        before_rv = logits_rv.clone()

        drawn(logits_rv, sampling_rows(2, top_k=5))

        assert torch.equal(logits_rv, before_rv)

    def test_of_no_rows_are_none(self) -> None:
        assert drawn(torch.empty(0, 100), sampling_rows(0)).token_r.shape == (0,)


class TestMasks:
    @pytest.mark.parametrize("share", [0.5, 0.01])
    @pytest.mark.parametrize(
        "terms", [{}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.8}], ids=str
    )
    def test_bind_the_rows_that_name_them(self, share: float, terms: dict[str, Any]) -> None:
        allowed_mv = np.random.default_rng(3).random((3, VOCABULARY)) < share
        mask_row_r = np.array([2, -1, 0, 1, 0, -1], np.int32)
        logits_rv = logits(6, seed=9)
        rows = sampling_rows(6, mask_row_r=mask_row_r, **terms)

        found = drawn(logits_rv, rows, mask_of(allowed_mv))

        assert_same(found, pick(logits_rv, rows, mask_of(allowed_mv)))
        for token, mask_row in zip(found.token_r.tolist(), mask_row_r.tolist(), strict=True):
            assert mask_row < 0 or allowed_mv[mask_row, token]

    @pytest.mark.parametrize("token", [0, 31, 32, 1023, 1099])
    def test_of_one_token_leave_no_other(self, token: int) -> None:
        allowed_mv = np.zeros((1, VOCABULARY), np.bool_)
        allowed_mv[0, token] = True
        rows = sampling_rows(3, top_p=0.9, mask_row_r=np.zeros(3, np.int32))

        found = drawn(logits(3), rows, mask_of(allowed_mv))

        assert found.token_r.tolist() == [token] * 3

    def test_whose_last_word_goes_on_past_the_vocabulary_allow_nothing_there(self) -> None:
        mask_mw = torch.full((1, 4), -1, dtype=torch.int32)
        logits_rv = torch.full((4, 128), torch.inf)[:, :100]
        logits_rv[:] = logits(4, 100)

        rows = sampling_rows(4, mask_row_r=np.zeros(4, np.int32))

        assert_same(drawn(logits_rv, rows, mask_mw), pick(logits_rv.contiguous(), rows, mask_mw))


class TestBrokenRows:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("terms", [{}, {"temperature": 0.0}, {"top_k": 9}], ids=str)
    def test_are_reported_and_disturb_no_other(self, value: float, terms: dict[str, Any]) -> None:
        logits_rv, rows = logits(3, 4200), sampling_rows(3, **terms)
        logits_rv[1, 4100] = value

        with np.errstate(invalid="ignore"):
            found = drawn(logits_rv, rows)

        assert found.token_r[1] == -1
        assert torch.isnan(found.logprob_r[1])
        assert_same(found, pick(logits_rv, rows))

    def test_have_nothing_above_minus_infinity(self) -> None:
        logits_rv, rows = logits(2, 300), sampling_rows(2, top_p=0.5)
        logits_rv[0] = -torch.inf

        with np.errstate(invalid="ignore"):
            assert_same(drawn(logits_rv, rows), pick(logits_rv, rows))

    def test_are_those_in_which_nothing_is_allowed(self) -> None:
        mask_mw = torch.zeros(1, 10, dtype=torch.int32)
        rows = sampling_rows(2, top_p=0.5, mask_row_r=np.array([0, -1], np.int32))

        with np.errstate(invalid="ignore"):
            found = drawn(logits(2, 300), rows, mask_mw)

        assert found.token_r[0] == -1
        assert found.token_r[1] >= 0

    def test_are_not_those_with_impossible_tokens(self) -> None:
        logits_rv, rows = logits(4, 300), sampling_rows(4, top_k=250, top_p=0.9)
        logits_rv[:, ::2] = -torch.inf

        assert_same(drawn(logits_rv, rows), pick(logits_rv, rows))
