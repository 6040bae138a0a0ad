"""The one matrix product: every projection of every model goes through `linear`.

Owns   the choice of arithmetic by the form a weight has, and that form: `prepared`. A quantised
       form is one more case here, and no model changes.
Used   by `weights` (prepared, once) and `decoder` (linear, in every step).

On a CPU products go to oneDNN, with matrices reordered once into the blocks that its kernels read.
torch's own choice, MKL, is as good on some processors and half as fast on others: 30 layers and the
head of a 135M model in float32, two cores of an AMD EPYC (Zen 4), take 45 ms against 25 for one
row, 74 against 30 for sixteen, 619 against 520 for 512.

`FixedRowsWeight` is for who wants a row's bits to be its own: see `row_blocks`.
"""

from __future__ import annotations

import functools

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from structgen.errors import UnsupportedError
from structgen.models.tensors import BlockWeight, DenseWeight


class OneDnnWeight(msgspec.Struct, frozen=True):
    """A matrix that oneDNN multiplies with: reordered into its blocks, or plain `[out, in]`."""

    tensor: Tensor


class FixedRowsWeight(msgspec.Struct, frozen=True):
    """A matrix multiplied with in blocks of rows: no row's result depends on the others.

    sizes   rows of a block, falling: those of which it is known that they give the same bits;
            ROW_BLOCK is among them
    """

    weight: DenseWeight | OneDnnWeight
    sizes: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        """The matrix."""
        return self.weight.tensor


Weight = DenseWeight | BlockWeight | OneDnnWeight | FixedRowsWeight
ROW_BLOCK = 16


def linear(x_ti: Tensor, weight: Weight, bias_o: Tensor | None = None) -> Tensor:
    """x [T, in] times the transpose of a weight [out, in], plus bias: [T, out], dtype of x."""
    match weight:
        case OneDnnWeight(tensor):
            return _product(x_ti, tensor, bias_o)
        case DenseWeight(tensor):
            return functional.linear(x_ti, tensor, bias_o)
        case FixedRowsWeight(inner, sizes):
            return _by_blocks(x_ti, inner, bias_o, sizes)
        case BlockWeight():
            raise UnsupportedError(
                f"products with {weight.kind} blocks are not supported; load the weight as dense"
            )


def prepared(matrix_oi: Tensor, *, shared: bool = False) -> Weight:
    """The form in which `linear` is fastest with this matrix on its device.

    shared   the matrix has another use: multiply with it as it is, so that it exists once
    """
    if matrix_oi.device.type != "cpu" or not _onednn_multiplies(matrix_oi.dtype):
        return DenseWeight(matrix_oi)
    return OneDnnWeight(matrix_oi if shared else _reordered(matrix_oi))


def padded_rows(rows: int) -> int:
    """The number of rows to multiply where `rows` are wanted: one of few.

    For every number of rows that it meets, oneDNN makes a kernel and keeps it with its scratch
    memory: four matrices of a 135M model met with 1 to 576 rows kept 2.2 GB, and went on growing.
    Powers of two to 16, multiples of 16 to 128 and of 32 beyond cost at most a few percent of work,
    and below 16 rows nothing that can be measured.
    """
    if rows <= 16:
        return 1 << (rows - 1).bit_length() if rows else 0
    step = 16 if rows <= 128 else 32
    return -(-rows // step) * step


def weight_bytes(weight: Weight) -> int:
    """Memory of a weight."""
    if isinstance(weight, BlockWeight):
        return weight.blocks.nbytes
    # Not `nbytes`: a reordered matrix has no storage that torch could measure.
    return weight.tensor.numel() * weight.tensor.element_size()


def row_blocks(rows: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes of the blocks that `rows` rows are cut into; the last may have rows to spare.

    None but the last is smaller than ROW_BLOCK, so that each begins where a multiple of it does:
    the first row of a block is aligned in memory alike.
    """
    blocks: list[int] = []
    for size in sizes:
        if size >= ROW_BLOCK:
            blocks += [size] * (rows // size)
            rows %= size
    if rows:
        blocks.append(min(size for size in sizes if size >= rows))
    return blocks


def _by_blocks(
    x_ti: Tensor, weight: DenseWeight | OneDnnWeight, bias_o: Tensor | None, sizes: tuple[int, ...]
) -> Tensor:
    rows = len(x_ti)
    blocks = row_blocks(rows, sizes)
    if blocks in ([], [rows]):
        return linear(x_ti, weight, bias_o)
    if (spare := sum(blocks) - rows) > 0:
        x_ti = functional.pad(x_ti, (0, 0, 0, spare))
    products = [linear(block_ti, weight, bias_o) for block_ti in torch.split(x_ti, blocks)]
    return products[0][:rows] if len(products) == 1 else torch.cat(products)[:rows]


# The operators that torch's own compiler emits for a linear layer on a CPU; they have no public
# names.


def _reordered(matrix_oi: Tensor) -> Tensor:
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix_oi)  # noqa: SLF001 - see above
    return reordered


def _product(x_ti: Tensor, matrix: Tensor, bias_o: Tensor | None) -> Tensor:
    operator = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - see above
    product: Tensor = operator(x_ti, matrix, bias_o, "none", [], "")
    return product


@functools.cache
def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN and oneDNN has kernels for `dtype` on this CPU."""
    try:
        _product(
            torch.zeros(1, 16, dtype=dtype), _reordered(torch.zeros(16, 16, dtype=dtype)), None
        )
    except (AttributeError, RuntimeError):
        # float16, for one, needs instructions that many processors lack; torch refuses then.
        return False
    return True
