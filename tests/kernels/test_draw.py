"""Order statistics and draws of rows; what filters mean is specified in `engine/test_sample.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from structgen.kernels.draw import Terms, draw, leaders, peaks


def terms(count: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Terms:
    return Terms(
        top_k_n=np.full(count, top_k, np.int32),
        top_p_n=np.full(count, top_p, np.float32),
        min_p_n=np.full(count, min_p, np.float32),
        seed_n=np.arange(count, dtype=np.int64),
        position_n=np.arange(count, dtype=np.int64),
    )


def rising(seed: int, count: int, vocabulary: int, *, spread: float) -> NDArray[np.float32]:
    """Rows with many equal values, their largest at 0."""
    values = np.random.default_rng(seed).standard_normal((count, vocabulary)) * spread
    rounded: NDArray[np.float32] = np.round(values * 8).astype(np.float32) / np.float32(8)
    rounded -= rounded.max(axis=1, keepdims=True)
    return rounded


class TestPeaks:
    def test_are_the_first_of_equals(self) -> None:
        values, ids = peaks(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]))

        assert (values.tolist(), ids.tolist()) == ([3.0, 2.0], [1, 0])

    @pytest.mark.parametrize("place", [0, 1, 40])
    def test_are_nan_if_anything_is(self, place: int) -> None:
        row = torch.arange(50.0)
        row[place] = torch.nan

        assert np.isnan(peaks(row[None])[0][0])


class TestLeaders:
    @given(
        values=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
        count=st.integers(1, 40),
    )
    @settings(deadline=None)
    def test_come_by_falling_value_then_rising_id(self, values: list[int], count: int) -> None:
        count = min(count, len(values))
        expected = sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]

        found, ids = leaders(torch.tensor([values], dtype=torch.float32), count)

        assert ids[0].tolist() == expected
        assert found[0].tolist() == [values[token] for token in expected]

    def test_count_impossible_tokens_last(self) -> None:
        row = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])

        assert leaders(row, 3)[1].tolist() == [[1, 0, 2]]


class TestDraws:
    @pytest.mark.parametrize(
        ("top_p", "min_p"), [(0.02, 0.0), (0.5, 0.0), (0.97, 0.0), (0.9, 0.3), (1.0, 0.05)]
    )
    def test_from_wide_nuclei_are_those_of_a_full_sort(self, top_p: float, min_p: float) -> None:
        """A top-k that leaves everything but the last token takes the path that sorts."""
        z = rising(1, 60, 8000, spread=0.6)
        z[:, 4321] = -50.0

        tried = draw(torch.from_numpy(z), terms(60, top_p=top_p, min_p=min_p))
        sorted_ = draw(torch.from_numpy(z), terms(60, top_k=7999, top_p=top_p, min_p=min_p))

        assert tried.tolist() == sorted_.tolist()
        assert len(set(tried.tolist())) > 30

    def test_leave_the_rows_alone(self) -> None:
        z = rising(2, 4, 700, spread=0.1)
        given_rows = torch.from_numpy(z.copy())

        draw(given_rows, terms(4))
        draw(given_rows, terms(4, top_p=0.99))

        assert np.array_equal(given_rows.numpy(), z)
