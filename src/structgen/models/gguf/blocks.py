"""The block formats of GGUF tensors, and how each becomes numbers.

Owns   the table of formats: elements and bytes of a block, and the function that decodes blocks.
Holds  decoding is exact in float32: the same values, bit for bit, as the reference in the `gguf`
       package. A format that is not in the table is refused by name when a file is opened.
Used   by `header` (sizes) and `source` (decoding).

Formats of Kawrakow and Gerganov (llama.cpp, `ggml-common.h`). In each, a row of a matrix is a
sequence of blocks, and a block is a scale or two and small integers.

Shape suffixes   N blocks   E elements of a block   G groups of a block   L lanes of a group
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

# Blocks are decoded some at a time: the intermediate tensors then stay in the processor's cache.
_ELEMENTS_AT_ONCE = 1 << 19

# Names of all formats, for messages; those that are not in `FORMATS` cannot be read.
_NAMED = (
    (0, "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K"),
    (16, "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"),
    (34, "TQ1_0 TQ2_0"),
    (39, "MXFP4 NVFP4 Q1_0"),
)
KIND_NAMES = {
    code: name for first, names in _NAMED for code, name in enumerate(names.split(), first)
}


class Format(msgspec.Struct, frozen=True):
    """One block format: `decode(u8[N, bytes]) -> f32[N, elements]`."""

    elements: int
    bytes: int
    decode: Callable[[Tensor], Tensor]


def dequantize(kind: str, rows_rb: Tensor, out: Tensor) -> None:
    """Decode rows of blocks, u8[rows, bytes per row], into `out` [rows, columns] of any dtype."""
    form = FORMATS[kind]
    blocks_nb = rows_rb.reshape(-1, form.bytes)
    out_ne = out.view(-1, form.elements)
    step = max(1, _ELEMENTS_AT_ONCE // form.elements)
    for start in range(0, blocks_nb.shape[0], step):
        out_ne[start : start + step] = form.decode(blocks_nb[start : start + step])


def _half(bytes_nb: Tensor) -> Tensor:
    """f16 numbers in pairs of bytes, as f32; [N, 2k] -> [N, k]."""
    return bytes_nb.contiguous().view(torch.float16).float()


def _nibbles(bytes_nb: Tensor) -> Tensor:
    """The low halves of all bytes, then the high halves; u8[N, k] -> u8[N, 2k]."""
    return torch.cat((bytes_nb & 15, bytes_nb >> 4), dim=-1)


def _f32(block_nb: Tensor) -> Tensor:
    return block_nb.contiguous().view(torch.float32)


def _f16(block_nb: Tensor) -> Tensor:
    return _half(block_nb)


def _bf16(block_nb: Tensor) -> Tensor:
    return block_nb.contiguous().view(torch.bfloat16).float()


# ---------------------------------------------------------------- 32 elements: scale, maybe offset


def _q8_0(block_nb: Tensor) -> Tensor:
    return block_nb[:, 2:].view(torch.int8).float().mul_(_half(block_nb[:, :2]))


def _q4_0(block_nb: Tensor) -> Tensor:
    return _nibbles(block_nb[:, 2:]).float().sub_(8).mul_(_half(block_nb[:, :2]))


def _q4_1(block_nb: Tensor) -> Tensor:
    scales_n2 = _half(block_nb[:, :4])
    return _nibbles(block_nb[:, 4:]).float().mul_(scales_n2[:, :1]).add_(scales_n2[:, 1:])


def _fifth_bits(bytes_n4: Tensor) -> Tensor:
    """Bit e of the four bytes, as 0 or 16; u8[N, 4] -> u8[N, 32]."""
    shifts_8 = torch.arange(8, dtype=torch.uint8)
    bits_n48 = (bytes_n4.unsqueeze(-1) >> shifts_8) & 1
    return bits_n48.flatten(1) << 4


def _q5_0(block_nb: Tensor) -> Tensor:
    quants_n32 = _nibbles(block_nb[:, 6:]) | _fifth_bits(block_nb[:, 2:6])
    return quants_n32.float().sub_(16).mul_(_half(block_nb[:, :2]))


def _q5_1(block_nb: Tensor) -> Tensor:
    scales_n2 = _half(block_nb[:, :4])
    quants_n32 = _nibbles(block_nb[:, 8:]) | _fifth_bits(block_nb[:, 4:8])
    return quants_n32.float().mul_(scales_n2[:, :1]).add_(scales_n2[:, 1:])


# ---------------------------------------------------------------- 256 elements: scaled scales


def _planes(bytes_nb: Tensor, width: int, bits: int) -> Tensor:
    """Fields of `bits` bits, one plane of `width` bytes and one shift after another.

    u8[N, k * width] -> u8[N, k, 8 / bits, width]
    """
    shifts_p1 = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(-1)
    planes = bytes_nb.reshape(bytes_nb.shape[0], -1, 1, width)
    return (planes >> shifts_p1) & ((1 << bits) - 1)


def _q2_k(block_nb: Tensor) -> Tensor:
    packed_n16 = block_nb[:, :16]
    d_n2 = _half(block_nb[:, 80:])
    quants_ngl = _planes(block_nb[:, 16:80], 32, 2).reshape(-1, 16, 16).float()
    scales_ng1 = (d_n2[:, :1] * (packed_n16 & 15).float()).unsqueeze(-1)
    offsets_ng1 = (d_n2[:, 1:] * (packed_n16 >> 4).float()).unsqueeze(-1)
    return quants_ngl.mul_(scales_ng1).sub_(offsets_ng1).flatten(1)


def _q3_k(block_nb: Tensor) -> Tensor:
    packed_n8, tops_n4 = block_nb[:, 96:104], block_nb[:, 104:108]
    low_n16 = _nibbles(packed_n8)
    high_n16 = _planes(tops_n4, 4, 2).flatten(1)
    scales_n16 = (low_n16 | (high_n16 << 4)).float().sub_(32).mul_(_half(block_nb[:, 108:]))
    low_ngl = _planes(block_nb[:, 32:96], 32, 2).reshape(-1, 16, 16)
    # The third bit is stored inverted: where it is 0, 4 is subtracted.
    high_ngl = _planes(block_nb[:, :32], 32, 1).reshape(-1, 16, 16)
    quants_ngl = (low_ngl | (high_ngl << 2)).float().sub_(4)
    return quants_ngl.mul_(scales_n16.unsqueeze(-1)).flatten(1)


def _six_bit_scales(block_nb: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of the eight groups of Q4_K and Q5_K, f32[N, 8, 1] each.

    Twelve bytes hold sixteen 6-bit numbers: the first four of each kind in the low six bits of
    bytes 0..7, the others split between bytes 8..11 and the top two bits of bytes 0..7.
    """
    d_n2 = _half(block_nb[:, :4])
    scales_n4, offsets_n4, rest_n4 = block_nb[:, 4:8], block_nb[:, 8:12], block_nb[:, 12:16]
    scales_n8 = torch.cat((scales_n4 & 63, (rest_n4 & 15) | ((scales_n4 >> 6) << 4)), dim=1)
    offsets_n8 = torch.cat((offsets_n4 & 63, (rest_n4 >> 4) | ((offsets_n4 >> 6) << 4)), dim=1)
    return (
        (d_n2[:, :1] * scales_n8.float()).unsqueeze(-1),
        (d_n2[:, 1:] * offsets_n8.float()).unsqueeze(-1),
    )


def _q4_k(block_nb: Tensor) -> Tensor:
    scales_n81, offsets_n81 = _six_bit_scales(block_nb)
    quants_ngl = _planes(block_nb[:, 16:], 32, 4).reshape(-1, 8, 32).float()
    return quants_ngl.mul_(scales_n81).sub_(offsets_n81).flatten(1)


def _q5_k(block_nb: Tensor) -> Tensor:
    scales_n81, offsets_n81 = _six_bit_scales(block_nb)
    high_ngl = _planes(block_nb[:, 16:48], 32, 1).reshape(-1, 8, 32)
    low_ngl = _planes(block_nb[:, 48:], 32, 4).reshape(-1, 8, 32)
    quants_ngl = (low_ngl | (high_ngl << 4)).float()
    return quants_ngl.mul_(scales_n81).sub_(offsets_n81).flatten(1)


def _q6_k(block_nb: Tensor) -> Tensor:
    scales_n16 = block_nb[:, 192:208].view(torch.int8).float().mul_(_half(block_nb[:, 208:]))
    low_ngl = _planes(block_nb[:, :128], 64, 4).reshape(-1, 16, 16)
    high_ngl = _planes(block_nb[:, 128:192], 32, 2).reshape(-1, 16, 16)
    quants_ngl = (low_ngl | (high_ngl << 4)).float().sub_(32)
    return quants_ngl.mul_(scales_n16.unsqueeze(-1)).flatten(1)


FORMATS = {
    "F32": Format(1, 4, _f32),
    "F16": Format(1, 2, _f16),
    "BF16": Format(1, 2, _bf16),
    "Q8_0": Format(32, 34, _q8_0),
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, _q4_1),
    "Q5_0": Format(32, 22, _q5_0),
    "Q5_1": Format(32, 24, _q5_1),
    "Q2_K": Format(256, 84, _q2_k),
    "Q3_K": Format(256, 110, _q3_k),
    "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k),
    "Q6_K": Format(256, 210, _q6_k),
}
