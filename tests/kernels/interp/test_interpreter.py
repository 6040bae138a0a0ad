"""The interpreter computes what a device would, bfloat16 included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.interp.interpreter import overflow_checked


@triton.jit
def _product(a: Any, b: Any, out: Any, size: tl.constexpr) -> None:
    i = tl.arange(0, size)
    at = i[:, None] * size + i[None, :]
    result = tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee")
    tl.store(out + at, result.to(out.dtype.element_ty))


@triton.jit
def _cast(source: Any, out: Any, size: tl.constexpr) -> None:
    i = tl.arange(0, size)
    tl.store(out + i, tl.load(source + i).to(out.dtype.element_ty))


@triton.jit
def _doubled(source: Any, size: tl.constexpr) -> None:
    i = tl.arange(0, size)
    value = tl.load(source + i)
    tl.store(source + i, value + value)


@triton.jit
def _far(source: Any, stride: Any, size: tl.constexpr) -> None:
    i = tl.arange(0, size)
    tl.store(source + i, (i * stride) % 2)


class TestBfloat16:
    def test_products_are_those_of_float32(self) -> None:
        a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        out = torch.empty(16, 16)

        _product[(1,)](a, b, out, size=16)

        torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-5, rtol=1e-5)

    def test_casts_round_to_nearest_even(self) -> None:
        source = torch.randn(512, generator=torch.Generator().manual_seed(0))
        out = torch.empty(512, dtype=torch.bfloat16)

        _cast[(1,)](source, out, size=512)

        assert torch.equal(out, source.bfloat16())

    def test_other_arithmetic_is_refused(self) -> None:
        with pytest.raises(Exception, match="create_fadd on bfloat16: cast to float32 first"):
            _doubled[(1,)](torch.ones(16, dtype=torch.bfloat16), size=16)


class TestIntegers:
    def test_overflow_is_an_error_where_it_is_asked_for(self) -> None:
        with overflow_checked(), pytest.raises(Exception, match="overflow"):
            _far[(1,)](torch.zeros(16, dtype=torch.int32), 2**28, size=16)
