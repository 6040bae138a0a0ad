"""Rotary position embedding (RoFormer, Su et al. 2021) in the half-split form, in few torch ops.

Owns   the rotation of queries and keys; component i is paired with component i + D / 2.
Used   by attention implementations; the table of angles comes from the model.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_rows(
    cos_sin_pd: Tensor, positions_t: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for the rows of a step, both [T, 1, D], once for all layers.

    cos_sin_pd    [positions, D], float32: D / 2 cosines, then D / 2 sines
    dtype         of the queries: angles are exact in float32 and rounded last, as transformers does

    The second result holds -sin in its first half and sin in its second, so that a rotation is two
    products and a sum without looking at the halves again.
    """
    cos_tf, sin_tf = cos_sin_pd.index_select(0, positions_t).chunk(2, dim=-1)
    cos_td = torch.cat([cos_tf, cos_tf], dim=-1)
    signed_td = torch.cat([-sin_tf, sin_tf], dim=-1)
    return cos_td.to(dtype).unsqueeze(1), signed_td.to(dtype).unsqueeze(1)


def rotate(x_tnd: Tensor, cos_t1d: Tensor, signed_t1d: Tensor) -> Tensor:
    """Rotate every head of x [T, N, D] by its row's angles, as `rotary_rows` gives them."""
    # Rolling by half a head swaps the halves: three ops in all, where slicing them takes seven.
    swapped_tnd = torch.roll(x_tnd, x_tnd.shape[-1] // 2, -1)
    return torch.addcmul(x_tnd * cos_t1d, swapped_tnd, signed_t1d)
