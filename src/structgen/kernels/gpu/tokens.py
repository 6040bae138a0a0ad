"""What every kernel over rows of logits does to a block of tokens: mask, temperature, noise.

Owns   nothing; these are inlined where they are called.
Holds  the words of the noise are those of `kernels/noise.py`, bit for bit.
Used   by `sample.py` and `threshold.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As in `kernels/noise.py`; Triton takes constants of the module only so.
_MULTIPLY_1 = tl.constexpr(0x7FEB352D)
_MULTIPLY_2 = tl.constexpr(0x846CA68B)
_SCALE = tl.constexpr((2**24 - 1) * 2.0**-55)


@triton.jit
def legal_logits(row_v, mask_w, mask_row, i, V, MASKED: tl.constexpr):
    """The raw logits of tokens i as float32, and the same with what is not allowed at -inf.

    NaN counts as infinity in the second: a maximum is free to drop a NaN.

    row_v, mask_w   where the row and its mask begin; a mask row below 0 allows everything
    i               a block of consecutive tokens from a multiple of 32 on; past V all is at -inf
    """
    x = tl.load(row_v + i, mask=i < V, other=-float("inf")).to(tl.float32)
    legal = tl.where(tl.abs(x) <= float("inf"), x, float("inf"))
    if MASKED:
        # Each word is loaded once and unpacked to its 32 tokens.
        BLOCK: tl.constexpr = i.shape[0]
        w = tl.min(i, 0) // 32 + tl.arange(0, BLOCK // 32)
        word = tl.load(mask_w + w, mask=(w < (V + 31) // 32) & (mask_row >= 0), other=-1)
        bit = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
        legal = tl.where(tl.reshape(bit, (BLOCK,)) != 0, legal, -float("inf"))
    return x, legal


@triton.jit
def tempered(legal, peak, temperature):
    """z of `draw.py`: first less the peak, then divided, each rounded as IEEE says."""
    return tl.div_rn(legal - peak, temperature + tl.zeros_like(legal))


@triton.jit
def noise_words(token, first, second):
    """The words of `kernels/noise.py` for int32 tokens, as uint32; the key as int32."""
    x = token.to(tl.uint32, bitcast=True) ^ first.to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= _MULTIPLY_1
    x ^= second.to(tl.uint32, bitcast=True)
    x ^= x >> 15
    x *= _MULTIPLY_2
    x ^= x >> 16
    return x


@triton.jit
def noise_of(token, first, second):
    """Gumbel noise, as `gumbel_of` maps words to it; needs a launch without fusion."""
    uniform = (noise_words(token, first, second) >> 1).to(tl.int32).to(tl.float32) + 0.5
    y = uniform * -_SCALE
    # log1p, which no kernel language has everywhere: log of the rounded sum, times what the
    # rounding cost (Kahan).
    w = 1.0 + y
    gap = tl.where(w == 1.0, 1.0, w - 1.0)
    log1p = tl.where(w == 1.0, y, tl.log(w) * tl.div_rn(y, gap))
    return -tl.log(-log1p)
