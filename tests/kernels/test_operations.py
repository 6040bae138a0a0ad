"""Operations of a deterministic engine: each element by itself, and what torch computes."""

from __future__ import annotations

import pytest
import torch

from structgen.kernels.operations import AlikeOperations, TorchOperations

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIKE = AlikeOperations().silu_and_multiply


class TestSiluAndMultiply:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_of_an_element_does_not_depend_on_the_others(self, dtype: torch.dtype) -> None:
        before = torch.get_num_threads()
        x = 5 * torch.randn(300, 2 * 130, generator=torch.Generator().manual_seed(0)).to(dtype)
        alone = torch.cat([ALIKE(row) for row in torch.split(x, 1)])
        try:
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                for rows in (2, 16, 33, 252, 253, 300):
                    assert torch.equal(ALIKE(x[:rows]), alone[:rows])
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_is_that_of_torch(self, dtype: torch.dtype) -> None:
        x = 30 * torch.randn(40, 2 * 50, generator=torch.Generator().manual_seed(0)).to(dtype)

        found, wanted = ALIKE(x), TorchOperations().silu_and_multiply(x)

        eps = torch.finfo(dtype).eps
        assert torch.allclose(found.float(), wanted.float(), rtol=4 * eps, atol=1e-30)
