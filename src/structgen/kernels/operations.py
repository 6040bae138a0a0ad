"""What a decoder computes beside matrix products and attention: norms and the activation.

Owns   the contract, and the implementation in torch, which runs everywhere.
Holds  a row's result is a function of that row alone. A GPU has its own implementation in
       `gpu/operations.py`, which rounds in the same places.
Used   by the decoder, which is given one when it is built.

Shape legend as in `kernels/attention.py`; h is the hidden size, i the intermediate size.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Operations(Protocol):
    """One implementation of a decoder's small operations."""

    def rms_norm(self, x_th: Tensor, weight_h: Tensor, eps: float) -> Tensor:
        """RMSNorm of each row, as a new tensor."""
        ...

    def add_rms_norm(self, x_th: Tensor, update_th: Tensor, weight_h: Tensor, eps: float) -> Tensor:
        """Add the update to `x_th` in place; the norm of the sum as a new tensor."""
        ...

    def norm_heads(self, qkv_tx: Tensor, weight_nd: Tensor, eps: float) -> None:
        """RMSNorm of each head of q and k in place; a weight for each head [H + K, D]."""
        ...

    def silu_and_multiply(self, both_ti: Tensor) -> Tensor:
        """SiLU of the first half of each row times its second half: [T, 2 i] to [T, i]."""
        ...


class TorchOperations:
    """The operations in few calls of torch: a decode of one token is bound by them."""

    def rms_norm(self, x_th: Tensor, weight_h: Tensor, eps: float) -> Tensor:
        """As `Operations` has it."""
        return functional.rms_norm(x_th, weight_h.shape, weight_h, eps)

    def add_rms_norm(self, x_th: Tensor, update_th: Tensor, weight_h: Tensor, eps: float) -> Tensor:
        """As `Operations` has it."""
        x_th += update_th
        return functional.rms_norm(x_th, weight_h.shape, weight_h, eps)

    def norm_heads(self, qkv_tx: Tensor, weight_nd: Tensor, eps: float) -> None:
        """As `Operations` has it; rounded before the weight and after it (Qwen3)."""
        count, dim = weight_nd.shape
        heads_tnd = qkv_tx.narrow(1, 0, count * dim).view(-1, count, dim)
        normed_tnd = functional.rms_norm(heads_tnd, (dim,), None, eps)
        heads_tnd.copy_(normed_tnd.mul_(weight_nd))

    def silu_and_multiply(self, both_ti: Tensor) -> Tensor:
        """As `Operations` has it."""
        gate_ti, up_ti = both_ti.chunk(2, dim=-1)
        return functional.silu(gate_ti).mul_(up_ti)


class AlikeOperations(TorchOperations):
    """Those in torch, where each element's bits depend on its own row alone."""

    def silu_and_multiply(self, both_ti: Tensor) -> Tensor:
        """As `Operations` has it.

        torch's SiLU takes the last few elements of a thread's share one by one, by another
        exponential than that of a vector; where shares end depends on rows and threads. Its `exp`
        has one way for all elements, and the other operations here are exact to the last bit
        either way.
        """
        gate_ti, up_ti = both_ti.chunk(2, dim=-1)
        gate_32 = gate_ti.float()
        # Far below zero the power overflows to infinity, and the quotient is the zero it should be.
        silu_32 = gate_32 / gate_32.neg().exp_().add_(1)
        return silu_32.to(both_ti.dtype).mul_(up_ti)
