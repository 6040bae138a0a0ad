"""Compiles every kernel for a GPU that is not there, and says what came out.

    python -m structgen.kernels.gpu.aot --target sm_90

Owns   the list of call sites: each wrapper, on tensors that select each row of the config table.
Holds  a kernel is compiled by the call that the engine makes, so with the very types, alignments
       and strides it will have. A spill, a missing matrix instruction or too much shared memory is
       a fault, and the exit code is 1.
Used   by `tests/kernels/aot` and by hand. All compilers are in Triton's wheel; no driver is asked.

Of a CUDA kernel, spills are shown by its stack. One that is interpreted (TRITON_INTERPRET=1) is
not compiled: this needs a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from structgen.kernels.gpu.calls import CALLS
from structgen.kernels.gpu.config import ARCHITECTURES, SHARED_BYTES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What a product of matrices is made of.
_MATRIX = {"sm_80": r"\bHMMA\b", "sm_90": r"\bHGMMA\b", "gfx942": r"\bv_mfma_\w+"}
# A block of fewer rows than 64 does not fill the unit that sm_90 has for it.
_SMALL_MATRIX = {"sm_80": r"\bHMMA\b", "sm_90": r"\bHMMA\b", "gfx942": r"\bv_mfma_\w+"}
_NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def absent_device(target: GPUTarget) -> DriverBase:
    """A driver that owns no device: enough to compile for one, not to run on it."""
    answers: dict[str, Callable[..., Any]] = {
        "is_active": lambda _: False,
        "map_python_to_cpp_type": lambda _, name: name,
        "get_current_target": lambda _: target,
        "get_active_torch_device": lambda _: "cpu",
        # A number for each target: a kernel keeps what it compiled by device.
        "get_current_device": lambda _: list(TARGETS.values()).index(target),
        "get_current_stream": lambda _, __: 0,
        "get_benchmarker": lambda _: None,
    }
    driver_type: Callable[[], DriverBase] = type("AbsentDevice", (DriverBase,), answers)
    return driver_type()


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as it came out.

    call        the call site
    registers   of a thread; on gfx942 vector registers
    stack       bytes of a thread: what was spilled
    shared      bytes of a program
    matrix      how many matrix instructions the code has
    rows        rows of its block if it multiplies matrices, else 0
    """

    target: str
    call: str
    kernel: str
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    matrix: int
    rows: int

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, in words."""
        found = []
        if self.stack:
            found.append(f"spills {self.stack} bytes a thread")
        if self.shared > SHARED_BYTES[self.target]:
            found.append(f"takes {self.shared} bytes of shared memory")
        if self.rows and not self.matrix:
            found.append("has no matrix instruction")
        return found


def compile_all(target: str, names: list[str] | None = None) -> list[Compiled]:
    """Compile the call sites of these names, or all, for a target; one entry a distinct kernel."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 interprets kernels; unset it to compile them")
    found: list[Compiled] = []
    for call in CALLS:
        if names and call.kernel not in names:
            continue
        with _compiling(TARGETS[target]) as kernels:
            call.run(target)
        found += [_measured(target, call.name, kernel, call.rows) for kernel in kernels]
    return found


@contextlib.contextmanager
def _compiling(target: GPUTarget) -> Iterator[list[Any]]:
    """Inside, a launch compiles its kernel instead, and adds it to the list."""
    kernels: list[Any] = []

    def launcher(self: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            kernels.append(self.run(*args, grid=grid, warmup=True, **kwargs))

        return launch

    before = driver._active  # noqa: SLF001 - reading it otherwise would look for a device
    getitem = JITFunction.__getitem__
    driver.set_active(absent_device(target))
    JITFunction.__getitem__ = launcher
    try:
        yield kernels
    finally:
        JITFunction.__getitem__ = getitem
        driver._active = before  # noqa: SLF001 - as above


def _measured(target: str, call: str, kernel: Any, rows: int) -> Compiled:
    if target.startswith("sm_"):
        registers, stack, code = _of_cubin(kernel.asm["cubin"])
    else:
        registers, stack, code = _of_amdgcn(kernel.asm["amdgcn"])
    # On sm_90 a tall block must use the unit that takes 64 rows; a small one cannot.
    wanted = _MATRIX if rows >= 64 else _SMALL_MATRIX
    return Compiled(
        target=target,
        call=call,
        kernel=kernel.name,
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        registers=registers,
        stack=stack,
        shared=kernel.metadata.shared,
        matrix=len(re.findall(wanted[target], code)),
        # Of the kernels of one call only those that multiply matrices must have an instruction.
        rows=rows if "tt.dot" in kernel.asm["ttir"] else 0,
    )


def _of_cubin(cubin: bytes) -> tuple[int, int, str]:
    """Registers, stack and assembler of a CUDA kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _printed(_NVIDIA / "cuobjdump", "--dump-resource-usage", file.name)
        code = _printed(_NVIDIA / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage!r}")
    return int(found[1]), int(found[2]), code


def _printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _of_amdgcn(code: str) -> tuple[int, int, str]:
    """Vector registers, stack and assembler of a HIP kernel."""

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        if found is None:
            raise RuntimeError(f"the assembler says nothing of {name}")
        return int(found[1])

    stack = max(field("private_segment_fixed_size"), 4 * field("vgpr_spill_count"))
    return field("vgpr_count"), stack, code


_COLUMNS = ("target", "call", "kernel", "warps", "stages", "registers", "stack", "shared", "matrix")


def table(compiled: list[Compiled]) -> str:
    """One line a kernel."""
    lines = [_COLUMNS, *(tuple(str(getattr(one, c)) for c in _COLUMNS) for one in compiled)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(compiled: list[Compiled]) -> str:
    """One line a kernel and call, and of each target registers, stack, shared memory, matrix."""
    targets = list(dict.fromkeys(one.target for one in compiled))
    lines = [f"| call | kernel | {' | '.join(targets)} |", "|---|---" + "|--:" * len(targets) + "|"]
    cells = {
        (one.call, one.kernel, one.target): (
            f"{one.registers} / {one.stack} / {one.shared} / {one.matrix}"
        )
        for one in compiled
    }
    for call, kernel in dict.fromkeys((one.call, one.kernel) for one in compiled):
        found = [cells[call, kernel, target] for target in targets]
        lines.append(f"| {call} | `{kernel}` | {' | '.join(found)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if a kernel has a fault."""
    parser = argparse.ArgumentParser(prog="python -m structgen.kernels.gpu.aot")
    parser.add_argument("--target", action="append", choices=ARCHITECTURES, help="default: all")
    parser.add_argument("--kernel", action="append", help="a call site by kernel; default: all")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs")
    chosen = parser.parse_args(arguments)
    compiled = [
        one
        for target in chosen.target or ARCHITECTURES
        for one in compile_all(target, chosen.kernel)
    ]
    sys.stdout.write((markdown if chosen.markdown else table)(compiled) + "\n")
    faulty = [one for one in compiled if one.faults]
    for one in faulty:
        sys.stderr.write(f"{one.target} {one.call}: {one.kernel} {', '.join(one.faults)}\n")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
