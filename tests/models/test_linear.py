"""The one matrix product, in every form that a weight has on this machine."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from structgen.errors import UnsupportedError
from structgen.models.linear import linear, padded_rows, prepared, weight_bytes
from structgen.models.tensors import BlockWeight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["reordered", "plain"])
class TestAProduct:
    @pytest.mark.parametrize("rows", [1, 3, 16, 65])
    def test_is_that_of_torch_whatever_the_form(
        self, dtype: torch.dtype, shared: bool, rows: int
    ) -> None:
        torch.manual_seed(rows)
        matrix, bias = torch.randn(48, 80).to(dtype), torch.randn(48).to(dtype)
        x = torch.randn(rows, 80).to(dtype)

        found = linear(x, prepared(matrix, shared=shared), bias).float()

        wanted = functional.linear(x.double(), matrix.double(), bias.double()).float()
        assert (found - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()

    def test_has_the_memory_of_its_numbers(self, dtype: torch.dtype, shared: bool) -> None:
        matrix = torch.zeros(48, 80, dtype=dtype)

        assert weight_bytes(prepared(matrix, shared=shared)) == matrix.nbytes


class TestBlocks:
    def test_are_refused_by_name(self) -> None:
        weight = BlockWeight(torch.zeros(2, 18, dtype=torch.uint8), "Q4_0", (2, 32))

        with pytest.raises(UnsupportedError, match="Q4_0"):
            linear(torch.zeros(1, 32), weight)


class TestPaddedRows:
    def test_are_few_numbers(self) -> None:
        assert len({padded_rows(rows) for rows in range(1, 577)}) <= 26

    @pytest.mark.parametrize("rows", [0, 1, 2, 3, 9, 16, 17, 128, 129, 576, 5000])
    def test_hold_what_is_wanted_and_little_more(self, rows: int) -> None:
        padded = padded_rows(rows)

        assert rows <= padded <= max(2 * rows - 1, 16, rows + 31)
        assert padded_rows(padded) == padded
        assert padded - rows < max(8, rows)
