"""Sampling noise as a pure function of (seed, position, token).

Owns   the hash from a triple to a 32-bit word, and the map from words to Gumbel noise.
Holds  the noise of a triple never depends on batch mates, order, shape or device; noise is finite.
Used   by `engine/sample.py`, and as the reference for kernels that draw on other devices.

The hash uses only 32-bit xor, add, multiply (wrapping) and logical right shift, so that any
kernel language can repeat its words bit for bit. Seed and position are absorbed into a 64-bit key
a row; a token then costs one round of the `lowbias32` mixer (Chris Wellons, hash-prospector),
with half of the key put in before it and the other half in its middle. Counter-based noise is the
idea of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

The key is made on the host, where seeds and positions are: a few numbers a row are not worth a
launch each. All the work per token is torch's, on the device of the tokens.

    R rows    C tokens of a row
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Multipliers of lowbias32; its shifts are 16, 15 and 16.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B
_GOLDEN = 0x9E3779B9
# Two chains that start apart make the two halves of a row's key.
_CHAINS = (0x243F6A88, 0x13198A2E)
# (1 - 2**-24) * 2**-31, exact in float32: the largest 31-bit word, which rounds up to 2**31 as a
# float, still maps below 1.
_SCALE = (2**24 - 1) * 2.0**-55


def keys(seed_r: NDArray[np.int64], position_r: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Both key words of each row, [2, R]; arguments as of `words`."""
    key_2r = np.repeat(np.array(_CHAINS, np.uint32)[:, None], len(seed_r), axis=1)
    # The casts keep the low 32 bits.
    for word_r in (seed_r, seed_r >> 32, position_r):
        key_2r ^= word_r.astype(np.uint32)
        key_2r ^= key_2r >> np.uint32(16)
        key_2r *= np.uint32(_MULTIPLY_1)
        key_2r ^= key_2r >> np.uint32(15)
        key_2r *= np.uint32(_MULTIPLY_2)
        key_2r ^= key_2r >> np.uint32(16)
        key_2r += np.uint32(_GOLDEN)
    return key_2r


def words(seed_r: NDArray[np.int64], position_r: NDArray[np.int64], tokens: Tensor) -> Tensor:
    """Hash each (seed, position, token) to a 32-bit word; int32 [R, C], sign bit included.

    seed_r       [R] on the host, 0 .. 2**63 - 1
    position_r   [R] on the host; its low 32 bits count
    tokens       int64 or int32, [C] for the same tokens in every row, or [R, C]

    Within a row distinct tokens have distinct words.
    """
    key_2r1 = torch.from_numpy(keys(seed_r, position_r).view(np.int32))[:, :, None]
    first_r1, second_r1 = key_2r1.to(tokens.device)
    x_rc: Tensor = tokens.to(torch.int32) ^ first_r1
    # torch has no unsigned arithmetic: products wrap all the same, but right shifts copy the
    # sign bit, and the copies have to be masked off.
    x_rc ^= (x_rc >> 16) & 0xFFFF
    x_rc *= _MULTIPLY_1
    x_rc ^= second_r1
    x_rc ^= (x_rc >> 15) & 0x1FFFF
    x_rc *= _MULTIPLY_2 - 2**32
    x_rc ^= (x_rc >> 16) & 0xFFFF
    return x_rc


def gumbel_of(word_rc: Tensor) -> Tensor:
    """Standard Gumbel noise of uniformly distributed int32 words: float32, in [-2.82, 22.19].

    The uniform in between has 31 bits and is as fine as float32 near 0, which is where large
    noise comes from; so rare tokens are drawn as rarely as they should be. It never is 0 or 1.
    """
    uniform_rc = ((word_rc >> 1) & 0x7FFFFFFF).to(torch.float32).add_(0.5)
    return uniform_rc.mul_(-_SCALE).log1p_().neg_().log_().neg_()


def gumbel(seed_r: NDArray[np.int64], position_r: NDArray[np.int64], tokens: Tensor) -> Tensor:
    """Gumbel noise of each (seed, position, token), float32 [R, C]; arguments as of `words`.

    The argmax of log-probabilities plus this noise is a draw from them (Gumbel-max: Gumbel 1954;
    Maddison et al., "A* sampling", 2014).
    """
    return gumbel_of(words(seed_r, position_r, tokens))
