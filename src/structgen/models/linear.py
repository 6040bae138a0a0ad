"""The one matrix product: every projection of every model goes through `linear`.

Owns   the choice of arithmetic by the form a weight has. A packed or quantised form is one more
       case here, and no model changes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from structgen.errors import UnsupportedError
from structgen.models.checkpoint import BlockWeight, DenseWeight

Weight = DenseWeight | BlockWeight


def linear(x_ti: Tensor, weight: Weight, bias_o: Tensor | None = None) -> Tensor:
    """x [T, in] times the transpose of a weight [out, in], plus bias: [T, out], dtype of x."""
    if isinstance(weight, DenseWeight):
        return functional.linear(x_ti, weight.tensor, bias_o)
    raise UnsupportedError(
        f"products with {weight.kind} blocks are not supported; load the weight as dense"
    )
