"""The decoder's small operations and the draw on a GPU: this folder's kernels of one architecture.

Owns   nothing but the architecture's name.
Used   by `kernels/choose.py`, which gives them to the decoder and the runner. References:
       `TorchOperations`, and `pick` of the engine without a sampler.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.draw import Terms
from structgen.kernels.gpu.activation import silu_and_multiply
from structgen.kernels.gpu.norm import add_rms_norm, norm_heads, rms_norm
from structgen.kernels.gpu.sample import row_terms, sample


class TritonOperations:
    """`Operations` in one launch each, on the current stream."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def rms_norm(self, x_th: Tensor, weight_h: Tensor, eps: float) -> Tensor:
        """As `Operations` has it."""
        return rms_norm(x_th, weight_h, eps, arch=self.arch)

    def add_rms_norm(self, x_th: Tensor, update_th: Tensor, weight_h: Tensor, eps: float) -> Tensor:
        """As `Operations` has it."""
        return add_rms_norm(x_th, update_th, weight_h, eps, arch=self.arch)

    def norm_heads(self, qkv_tx: Tensor, weight_nd: Tensor, eps: float) -> None:
        """As `Operations` has it."""
        norm_heads(qkv_tx, weight_nd, eps, arch=self.arch)

    def silu_and_multiply(self, both_ti: Tensor) -> Tensor:
        """As `Operations` has it."""
        return silu_and_multiply(both_ti, arch=self.arch)


class TritonSampler:
    """`Sampler` out of `gpu/sample.py`: rows are masked, filtered and drawn where they lie."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def __call__(
        self,
        logits_nv: Tensor,
        temperature_n: NDArray[np.float32],
        terms: Terms,
        mask_row_n: NDArray[np.int32],
        mask_mw: Tensor | None,
    ) -> NDArray[np.int64]:
        """As `Sampler` has it."""
        rows = row_terms(temperature_n, terms, mask_row_n, logits_nv.device)
        token_n: NDArray[np.int64] = (
            sample(logits_nv, rows, mask_mw, arch=self.arch).token_r.cpu().numpy()
        )
        return token_n
