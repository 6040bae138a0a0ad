"""Block sizes of every kernel, by architecture: a table, never a search at run time.

Owns   the table, and how much shared memory one program of an architecture may take.
Holds  every row compiles without a spill on its architecture; `aot.py` proves it. The rows are
       chosen by that proof and by the traffic of a block, not yet by a clock.
Used   by the wrappers of this folder, and by `aot.py`, which compiles the rows.

A search (autotune) would start differently on equal machines, and needs a device to start at all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Config:
    """One row: what a program of the kernel takes, and how it is compiled.

    block_m   rows of a program: query rows, heads or tokens
    block_n   columns at a time: keys, components or logits
    """

    block_m: int
    block_n: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        """The options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# Bytes of shared memory that one program may have.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
ARCHITECTURES = tuple(SHARED_BYTES)

# By (kernel, width, rows): the first row of a kernel that is as wide and as tall as asked for.
# `width` is the head dimension; of kernels over whole rows it is the length of the row.
_EVERYWHERE = {
    ("segment", 64, 16): Config(16, 64, 4, 3),
    ("segment", 64, 32): Config(32, 64, 4, 3),
    ("segment", 64, 64): Config(64, 64, 4, 3),
    ("segment", 64, 128): Config(128, 64, 8, 2),
    ("segment", 128, 16): Config(16, 64, 4, 3),
    ("segment", 128, 32): Config(32, 64, 4, 3),
    ("segment", 128, 64): Config(64, 64, 4, 3),
    ("segment", 128, 128): Config(128, 64, 8, 2),
    ("merge", 64, 1): Config(1, 64, 1, 2),
    ("merge", 128, 1): Config(1, 128, 1, 2),
    ("extend", 64, 64): Config(64, 64, 4, 3),
    ("extend", 128, 128): Config(128, 64, 8, 2),
    ("rope_write", 64, 1): Config(8, 64, 2, 2),
    ("rope_write", 128, 1): Config(8, 128, 4, 2),
    ("rope_write", 256, 1): Config(8, 256, 4, 2),
    ("norm", 1024, 1): Config(1, 1024, 4, 2),
    ("norm", 4096, 1): Config(1, 4096, 8, 2),
    ("norm", 16384, 1): Config(1, 16384, 16, 2),
    ("norm_heads", 64, 1): Config(16, 64, 4, 2),
    ("norm_heads", 128, 1): Config(16, 128, 4, 2),
    ("norm_heads", 256, 1): Config(16, 256, 8, 2),
    ("activation", 1 << 20, 1): Config(1, 1024, 4, 2),
    ("sample", 1 << 20, 1): Config(1, 2048, 8, 2),
    ("threshold", 1 << 20, 1): Config(1, 1024, 8, 2),
}
# Where the row above spills or takes too much shared memory.
_ONLY = {
    ("sm_80", "extend", 128, 128): Config(128, 32, 8, 3),
    ("gfx942", "extend", 128, 128): Config(64, 64, 4, 2),
}

CONFIGS: dict[tuple[str, str, int, int], Config] = {
    **{(arch, *key): config for arch in ARCHITECTURES for key, config in _EVERYWHERE.items()},
    **_ONLY,
}


@functools.cache
def config_for(arch: str, kernel: str, width: int, rows: int = 1) -> Config:
    """The row of the narrowest and then lowest block that holds `width` x `rows`.

    More rows than the tallest block has take the tallest, several times. ValueError names what
    there is if the table has no such architecture or kernel, or none so wide.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"no kernels for {arch!r}; there are some for: {', '.join(ARCHITECTURES)}")
    known = [key[2:] for key in CONFIGS if key[:2] == (arch, kernel)]
    if not known:
        kernels = ", ".join(sorted({key[1] for key in CONFIGS}))
        raise ValueError(f"no kernel {kernel!r}; there are: {kernels}")
    widths = sorted({key[0] for key in known if key[0] >= width})
    if not widths:
        widest = max(key[0] for key in known)
        raise ValueError(f"{kernel} takes rows of at most {widest} components, not {width}")
    heights = sorted(height for of_width, height in known if of_width == widths[0])
    height = next((height for height in heights if height >= rows), heights[-1])
    return CONFIGS[arch, kernel, widths[0], height]


def arch_of(device: torch.device) -> str:
    """The architecture of a device as the table names it, whether or not the table has it."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        # The name goes on with what is switched on, as in gfx942:sramecc+:xnack-.
        name: str = properties.gcnArchName
        return name.split(":", maxsplit=1)[0]
    return f"sm_{properties.major}{properties.minor}"
