"""Matrix products whose rows have the same bits whatever rows stand beside them.

Owns   the sizes of blocks that a matrix is multiplied with, found by trying, once for each shape.
Holds  a row's result is that of a block of `ROW_BLOCK` rows, bit for bit: wherever the row stands
       in it, whatever the other rows are, and however many rows a step has.
Used   by `decoder`, for a deterministic engine; `linear` cuts the rows.

A library sums in an order that depends on the shape of a product, never on its numbers. So a fixed
number of rows is a fixed order, and another number of rows that gives equal bits for random numbers
has the same order. It may stand in: sixteen rows for one are a waste, and so are sixty-four
products for a prompt of 1,024. What was tried holds for this processor, library and number of
threads only, which is why nothing of it is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from structgen.errors import UnsupportedError
from structgen.models.linear import ROW_BLOCK, FixedRowsWeight, Weight, linear
from structgen.models.tensors import BlockWeight
from structgen.models.weights import LayerWeights, Weights

# Larger blocks are no faster. The head meets few rows, and is too large to be tried with many.
LAYER_SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
HEAD_SIZES = (32, 16, 8, 4, 2, 1)


def in_row_blocks(weights: Weights) -> Weights:
    """The same matrices, multiplied with in blocks of rows.

    To be called with as many threads as the products will have. UnsupportedError if products of
    this processor depend on where in a block a row stands.
    """
    found: dict[tuple[object, ...], tuple[int, ...]] = {}

    def fixed(weight: Weight, sizes: tuple[int, ...]) -> Weight:
        if isinstance(weight, FixedRowsWeight | BlockWeight):
            return weight  # the products of blocks are refused by `linear`
        key = (type(weight), weight.tensor.shape, sizes)
        if key not in found:
            columns, dtype = weight.tensor.shape[1], weights.embedding_vh.dtype
            found[key] = agreeing_sizes(lambda x: linear(x, weight), columns, dtype, sizes)
        return FixedRowsWeight(weight, found[key])

    def layer(each: LayerWeights) -> LayerWeights:
        return replace(
            each,
            qkv=fixed(each.qkv, LAYER_SIZES),
            out=fixed(each.out, LAYER_SIZES),
            gate_up=fixed(each.gate_up, LAYER_SIZES),
            down=fixed(each.down, LAYER_SIZES),
        )

    return replace(
        weights,
        layers=tuple(layer(each) for each in weights.layers),
        head=fixed(weights.head, HEAD_SIZES),
    )


def agreeing_sizes(
    product: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Those of `sizes` whose blocks give each row the bits that a block of ROW_BLOCK gives it.

    product   of rows [n, columns] with a matrix; each row is a random one, in two places

    UnsupportedError if not even blocks of ROW_BLOCK agree with themselves.
    """
    generator = torch.Generator().manual_seed(0)
    x_ti = torch.randn(sizes[0], columns, generator=generator).to(dtype)
    wanted_to = torch.cat([product(block_ti) for block_ti in torch.split(x_ti, ROW_BLOCK)])

    def agrees(size: int) -> bool:
        wanted, forwards, backwards = wanted_to[:size], x_ti[:size], x_ti[:size].flip(0)
        return torch.equal(product(forwards), wanted) and torch.equal(
            product(backwards).flip(0), wanted
        )

    agreeing = tuple(size for size in sizes if agrees(size))
    if ROW_BLOCK not in agreeing:
        raise UnsupportedError(
            "on this processor a row of a matrix product depends on the rows beside it; "
            "leave out deterministic=True, or use another dtype"
        )
    return agreeing
