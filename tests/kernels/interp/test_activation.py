"""SiLU times the up projection against torch, which rounds in the same places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from structgen.kernels.gpu.activation import silu_and_multiply

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class TestTheActivation:
    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    @pytest.mark.parametrize("size", [64, 1024, 1536])
    def test_is_that_of_the_decoder(self, dtype: torch.dtype, size: int) -> None:
        noise = torch.Generator().manual_seed(size)
        both_ti = (torch.randn(4, 2 * size, generator=noise) * 2).to(dtype)
        gate_ti, up_ti = both_ti.chunk(2, dim=-1)

        found = silu_and_multiply(both_ti, arch="sm_90")

        right = functional.silu(gate_ti).mul_(up_ti)
        torch.testing.assert_close(found, right, rtol=0, atol=TOLERANCE[dtype])

    def test_is_zero_far_below_zero_and_the_gate_far_above(self) -> None:
        both_ti = torch.tensor([[-500.0, -60.0, 0.0, 60.0, 500.0] + [1.0] * 5])

        # A power that overflows to infinity is what makes the quotient zero.
        with np.errstate(over="ignore"):
            found = silu_and_multiply(both_ti, arch="sm_90")[0]

        assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 60.0, 500.0], abs=1e-20)

    def test_reads_rows_that_lie_apart(self) -> None:
        wide_ti = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))

        found = silu_and_multiply(wide_ti[:, :128], arch="sm_90")

        assert torch.equal(found, silu_and_multiply(wide_ti[:, :128].contiguous(), arch="sm_90"))

    def test_takes_no_rows(self) -> None:
        assert silu_and_multiply(torch.empty(0, 128), arch="sm_90").shape == (0, 64)
