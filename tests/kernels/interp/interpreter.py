"""Triton's interpreter made trustworthy for bfloat16, and about twice as fast.

As it comes, it computes on the bit patterns of bfloat16 as if they were integers, and cuts off
where hardware rounds. Here products go through float32, casts round to nearest even, and any other
arithmetic on bfloat16 is refused: kernels load, multiply (`tl.dot`) and store it, nothing else.

It patches what it finds in Triton 3.6 .. 3.9, and fails by name where that is not what it expects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")
BUILDER: Any = interpreter.InterpreterBuilder
ARITHMETIC = (
    *("create_fadd", "create_fmul", "create_fsub", "create_fdiv", "create_frem", "create_fma"),
    *("create_maximumf", "create_maxnumf", "create_minimumf", "create_minnumf"),
    *("create_fcmpOGT", "create_fcmpOLT", "create_fcmpOGE", "create_fcmpOLE"),
)


def prepare() -> None:
    """Patch the interpreter, once a process; RuntimeError where kernels would be compiled."""
    if not triton.__version__.startswith(KNOWN):
        raise RuntimeError(
            f"the interpreter of Triton {triton.__version__} is not known here; "
            f"read tests/kernels/interp/interpreter.py against it, then add its version"
        )
    interpreted = isinstance(triton.jit(_nothing), interpreter.InterpretedFunction)
    if not interpreted:
        raise RuntimeError(
            "Triton compiles in this process; set TRITON_INTERPRET=1 before python starts"
        )
    _patch_bfloat16()
    _patch_speed()


def _nothing() -> None:
    pass


def _patch_bfloat16() -> None:
    dot, cast, convert = BUILDER.create_dot, BUILDER.cast_impl, BUILDER.create_fp_to_fp

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if _narrows(source, target):
            return interpreter.TensorHandle(rounded(source.data), tl.bfloat16)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if _narrows(source, target):
            return interpreter.TensorHandle(rounded(source.data), tl.bfloat16)
        return convert(self, source, target, mode)

    BUILDER.create_dot, BUILDER.cast_impl, BUILDER.create_fp_to_fp = (
        create_dot,
        cast_impl,
        create_fp_to_fp,
    )
    for name in ARITHMETIC:
        setattr(BUILDER, name, _refusing(name, getattr(BUILDER, name)))


def _refusing(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(self: Any, *operands: Any) -> Any:
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            raise TypeError(f"{name} on bfloat16: cast to float32 first")
        return operation(self, *operands)

    return refuse


def _narrows(source: Any, target: Any) -> bool:
    return bool(source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16)


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each value, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _patch_speed() -> None:
    """Skip what costs most and finds nothing: overflow checks that stay silent without `debug`,
    and patching the language again for every call between kernels of one launch.
    """
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()

    def patch_once(function: Any) -> Any:
        # What is patched follows from which language modules the function sees.
        seen = frozenset(
            name
            for name, module in (("tl", tl), ("core", tl.core))
            if any(value is module for value in function.__globals__.values())
        )
        if seen in patched:
            return contextlib.nullcontext()
        patched.add(seen)
        return patch(function)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_once


@contextlib.contextmanager
def overflow_checked() -> Iterator[None]:
    """Inside, 32-bit integer arithmetic that overflows is an error instead of a wrapped value."""
    builder = interpreter.interpreter_builder
    before = builder.options
    builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=True)
    try:
        yield
    finally:
        builder.options = before


@contextlib.contextmanager
def products_in_order() -> Iterator[None]:
    """Inside, a product sums in one order whatever the row, as the matrix units of a device do.

    What the linear algebra under numpy gives for a row depends on where in the matrix it stands.
    """

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        del self, precision
        left, right = _widened(a).data[:, :, None], _widened(b).data[None]
        return interpreter.TensorHandle((left * right).sum(axis=1) + d.data, d.dtype.scalar)

    before = BUILDER.create_dot
    BUILDER.create_dot = create_dot
    try:
        yield
    finally:
        BUILDER.create_dot = before
