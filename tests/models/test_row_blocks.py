"""Products in blocks of rows: a row's bits are its own, or the processor is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from structgen.errors import UnsupportedError
from structgen.models.linear import (
    ROW_BLOCK,
    FixedRowsWeight,
    OneDnnWeight,
    linear,
    prepared,
    row_blocks,
    weight_bytes,
)
from structgen.models.row_blocks import LAYER_SIZES, agreeing_sizes
from structgen.models.tensors import DenseWeight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fixed(matrix_oi: Tensor, *, shared: bool) -> FixedRowsWeight:
    weight = prepared(matrix_oi, shared=shared)
    assert isinstance(weight, DenseWeight | OneDnnWeight)
    sizes = agreeing_sizes(
        lambda x: linear(x, weight), matrix_oi.shape[1], matrix_oi.dtype, LAYER_SIZES
    )
    return FixedRowsWeight(weight, sizes)


@pytest.mark.parametrize("shared", [False, True], ids=["reordered", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestARowOfAProduct:
    def test_has_the_same_bits_among_any_number_in_any_place(
        self, dtype: torch.dtype, shared: bool
    ) -> None:
        torch.manual_seed(0)
        weight = fixed(torch.randn(48, 200).to(dtype), shared=shared)
        bias = torch.randn(48).to(dtype)
        x = torch.randn(300, 200).to(dtype)

        alone = torch.cat([linear(row, weight, bias) for row in torch.split(x, 1)])

        for rows in (*range(20), 33, 47, 128, 145, 299):
            for some in (slice(0, rows), slice(300 - rows, 300)):
                assert torch.equal(linear(x[some], weight, bias), alone[some])

    def test_is_that_of_torch(self, dtype: torch.dtype, shared: bool) -> None:
        torch.manual_seed(0)
        matrix, x = torch.randn(48, 80).to(dtype), torch.randn(37, 80).to(dtype)
        weight = fixed(matrix, shared=shared)

        wanted = functional.linear(x.double(), matrix.double()).float()
        difference = (linear(x, weight).float() - wanted).norm()
        assert difference <= 4 * torch.finfo(dtype).eps * wanted.norm()
        assert weight_bytes(weight) == matrix.nbytes


class TestSizes:
    def test_that_sum_in_another_order_are_not_used(self) -> None:
        matrix_io = torch.randn(80, 48, generator=torch.Generator().manual_seed(0))

        def product(x_ti: Tensor) -> Tensor:
            if len(x_ti) in {1, 64}:
                return x_ti[:, :40] @ matrix_io[:40] + x_ti[:, 40:] @ matrix_io[40:]
            return torch.stack([row_i @ matrix_io for row_i in x_ti])

        found = agreeing_sizes(product, 80, torch.float32, LAYER_SIZES)

        assert found == (256, 128, 32, 16, 8, 4, 2)

    def test_are_none_where_a_row_depends_on_its_place(self) -> None:
        def product(x_ti: Tensor) -> Tensor:
            return x_ti * (1 + 1e-6 * torch.arange(len(x_ti))[:, None])

        with pytest.raises(UnsupportedError, match="deterministic=True"):
            agreeing_sizes(product, 80, torch.float32, LAYER_SIZES)

    @pytest.mark.parametrize("sizes", [LAYER_SIZES, (64, 16, 2), (ROW_BLOCK,)], ids=str)
    def test_cut_any_number_of_rows_at_whole_blocks(self, sizes: tuple[int, ...]) -> None:
        for rows in range(1000):
            blocks = row_blocks(rows, sizes)

            assert rows <= sum(blocks) < rows + ROW_BLOCK
            assert set(blocks) <= set(sizes)
            assert all(size % ROW_BLOCK == 0 for size in blocks[:-1])
