"""The engine's options, checked, and how much memory becomes slots.

Used by `engine` and `loading`; the names here are the names that users write.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypedDict

import msgspec
import torch

from structgen.errors import OptionError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class EngineOptions(TypedDict, total=False):
    """Keywords of `Engine`; see `EngineConfig` for what they mean and their defaults."""

    dtype: DtypeName
    slots: int | None
    memory_fraction: float
    max_running: int
    chunk_size: int
    max_context: int | None
    radix: bool
    seed: int
    threads: int | None
    worker: bool
    chat_template: str | Path | None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one engine.

    dtype            of weights and cache. auto: on a CPU float32 while the weights take at most
                     half of the memory, else bfloat16; on a GPU the checkpoint's own
    slots            tokens that the cache can hold; None: as many as `memory_fraction` allows
    memory_fraction  of the memory that is available after loading, for the cache, in (0, 0.9]
    max_running      requests computed in one step
    chunk_size       prompt tokens computed in one step; decoding tokens come on top
    max_context      tokens of prompt and output together; None: what the model was trained for
    radix            share prefixes between requests
    seed             of requests that bring none: request n then draws from (seed, n)
    threads          of torch; None: torch's own choice, one per core or OMP_NUM_THREADS
    worker           compute in a worker thread; False computes in the event loop's own thread,
                     which blocks it: for scripts without other tasks, and for tests
    chat_template    file with a Jinja template to use in place of the model's own

    Raises `OptionError` for values out of range.
    """

    dtype: DtypeName = "auto"
    slots: int | None = None
    memory_fraction: float = 0.3
    max_running: int = 64
    chunk_size: int = 512
    max_context: int | None = None
    radix: bool = True
    seed: int = 0
    threads: int | None = None
    worker: bool = True
    chat_template: str | Path | None = None

    def __post_init__(self) -> None:
        if self.dtype not in {"auto", *DTYPES}:
            raise OptionError("dtype", f"expected auto, {', '.join(DTYPES)}; got {self.dtype!r}")
        for name in ("slots", "max_running", "chunk_size", "max_context", "threads"):
            value = getattr(self, name)
            if value is None and name not in {"max_running", "chunk_size"}:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(name, f"expected a whole number of at least 1, got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise OptionError("seed", f"expected a whole number of at least 0, got {self.seed!r}")
        fraction = self.memory_fraction
        if not isinstance(fraction, int | float) or not 0 < fraction <= 0.9:
            raise OptionError("memory_fraction", f"must be in (0, 0.9], got {fraction!r}")


def config_from(options: EngineOptions) -> EngineConfig:
    """Check keyword options. Raises `OptionError` for an unknown name or a bad value."""
    known = EngineConfig.__struct_fields__
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(unknown[0], f"unknown option; the options are {', '.join(known)}")
    return EngineConfig(**options)


def available_memory() -> int:
    """Bytes of main memory that can be had without swapping; control groups are heeded."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)


def choose_dtype(config: EngineConfig, weights: int, checkpoint: str, device: str) -> torch.dtype:
    """The dtype to compute in; `weights` counts the model's parameters."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device != "cpu":
        return DTYPES.get(checkpoint, torch.bfloat16)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.float32 if 4 * weights <= total / 2 else torch.bfloat16


def choose_slots(config: EngineConfig, slot_bytes: int, max_context: int, available: int) -> int:
    """How many slots the cache gets; never more than `max_running` full contexts could use."""
    if config.slots is not None:
        return config.slots
    affordable = int(available * config.memory_fraction) // slot_bytes
    return max(1, min(affordable, config.max_running * max_context))
