"""RMSNorm of rows, of sums and of heads against torch, which rounds in the same places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from structgen.kernels.gpu.norm import add_rms_norm, norm_heads, rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One unit in the last place of the largest results, since a sum of squares has another order.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-5


def rows(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=0, atol=TOLERANCE[right.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestTheNorm:
    @pytest.mark.parametrize("size", [64, 576, 1024, 1100])
    def test_is_that_of_torch(self, dtype: torch.dtype, size: int) -> None:
        x_th, weight_h = rows(5, size, dtype), rows(1, size, dtype, 1)[0]

        found = rms_norm(x_th, weight_h, EPS, arch="sm_90")

        close(found, functional.rms_norm(x_th, (size,), weight_h, EPS))

    def test_of_a_sum_is_that_of_the_sum_as_it_is_kept(self, dtype: torch.dtype) -> None:
        x_th, update_th, weight_h = (
            rows(5, 576, dtype),
            rows(5, 576, dtype, 2),
            rows(1, 576, dtype)[0],
        )
        sum_th = x_th + update_th

        found = add_rms_norm(x_th, update_th, weight_h, EPS, arch="sm_90")

        assert torch.equal(x_th, sum_th)
        close(found, functional.rms_norm(sum_th, (576,), weight_h, EPS))

    @pytest.mark.parametrize(("heads", "dim"), [(12, 64), (3, 128), (20, 80)])
    def test_of_heads_is_that_of_the_decoder(
        self, dtype: torch.dtype, heads: int, dim: int
    ) -> None:
        qkv_tx, weight_nd = rows(4, (heads + 2) * dim, dtype), rows(heads, dim, dtype, 3)
        values_tx = qkv_tx[:, heads * dim :].clone()
        normed_tnd = functional.rms_norm(
            qkv_tx[:, : heads * dim].reshape(-1, heads, dim), (dim,), None, EPS
        )

        norm_heads(qkv_tx, weight_nd, EPS, arch="sm_90")

        close(qkv_tx[:, : heads * dim], (normed_tnd * weight_nd).flatten(1))
        assert torch.equal(qkv_tx[:, heads * dim :], values_tx)


class TestRows:
    def test_do_not_depend_on_their_neighbours(self) -> None:
        x_th, weight_h = rows(9, 576, torch.bfloat16), rows(1, 576, torch.bfloat16)[0]

        together = rms_norm(x_th, weight_h, EPS, arch="sm_90")

        alone = torch.cat([rms_norm(x_1h, weight_h, EPS, arch="sm_90") for x_1h in x_th.split(1)])
        assert torch.equal(together, alone)

    def test_may_lie_apart(self) -> None:
        wide_th, weight_h = rows(5, 700, torch.float32), rows(1, 576, torch.float32)[0]

        found = rms_norm(wide_th[:, :576], weight_h, EPS, arch="sm_90")

        assert torch.equal(
            found, rms_norm(wide_th[:, :576].contiguous(), weight_h, EPS, arch="sm_90")
        )

    def test_of_zeros_are_zeros(self) -> None:
        zeros_th = torch.zeros(2, 64)

        assert torch.equal(rms_norm(zeros_th, torch.ones(64), EPS, arch="sm_90"), zeros_th)

    def test_may_be_none(self) -> None:
        none_th, weight_h = torch.empty(0, 64), torch.ones(64)

        assert rms_norm(none_th, weight_h, EPS, arch="sm_90").shape == (0, 64)
        norm_heads(none_th, weight_h[None], EPS, arch="sm_90")

    def test_wider_than_any_block_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at most 16384 components, not 20000"):
            rms_norm(torch.ones(1, 20000), torch.ones(20000), EPS, arch="sm_90")
