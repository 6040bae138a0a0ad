"""A GPU's row of small operations against torch's, through the calls that the decoder makes."""

from __future__ import annotations

import torch

from structgen.kernels.choose import triton_kernels
from structgen.kernels.operations import TorchOperations

EPS = 1e-5


def test_the_operations_are_those_of_torch() -> None:
    noise = torch.Generator().manual_seed(0)
    x_th, update_th = torch.randn(3, 48, generator=noise), torch.randn(3, 48, generator=noise)
    weight_h, weight_nd = torch.randn(48, generator=noise), torch.randn(2, 16, generator=noise)

    results = []
    for operations in (triton_kernels("sm_90").operations, TorchOperations()):
        sum_th, qkv_tx = x_th.clone(), x_th.clone()
        normed_th = operations.rms_norm(x_th, weight_h, EPS)
        added_th = operations.add_rms_norm(sum_th, update_th, weight_h, EPS)
        operations.norm_heads(qkv_tx, weight_nd, EPS)
        results.append(
            [normed_th, added_th, sum_th, qkv_tx, operations.silu_and_multiply(update_th)]
        )

    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)
