"""The engine's options, checked, and how much memory becomes slots.

Used by `engine` and `loading`; the names here are the names that users write.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, TypedDict

import msgspec
import torch

from structgen.errors import OptionError
from structgen.options import unknown_option
from structgen.sampling import check_range

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MOST_THREADS = 1024  # far beyond that, OpenMP ends the process when it cannot start them
DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")
CONTROL_GROUP = Path("/sys/fs/cgroup")


class EngineOptions(TypedDict, total=False):
    """Keywords of `Engine`; see `EngineConfig` for what they mean and their defaults."""

    device: str
    dtype: DtypeName
    slots: int | None
    memory_fraction: float
    max_running: int
    max_waiting: int | None
    max_waiting_tokens: int | None
    chunk_size: int
    max_context: int | None
    radix: bool
    jump_forward: bool
    deterministic: bool
    seed: int
    threads: int | None
    worker: bool
    chat_template: str | Path | None
    compile_timeout: float
    xgrammar: bool


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one engine.

    device           cpu, cuda, or cuda:N for one GPU of several
    dtype            of weights and cache. auto: on a CPU float32 while the weights take at most
                     half of the memory, else bfloat16; on a GPU the checkpoint's own
    slots            tokens that the cache can hold; None: as many as `memory_fraction` allows
    memory_fraction  of the memory that is available after loading, for the cache, in (0, 0.9]
    max_running      requests computed in one step
    max_waiting      requests that may wait beyond those; one more is refused by an
                     `OverloadedError`. None: without a limit
    max_waiting_tokens  prompt tokens that may wait; a request that would be the only one to wait
                     always may. None: without a limit
    chunk_size       tokens of prompts, and tokens that are forced, computed in one step; those
                     that were drawn come on top
    max_context      tokens of prompt and output together; None: what the model was trained for
    radix            share prefixes between requests
    jump_forward     take tokens that a constraint leaves no choice about without drawing them;
                     they are written as the tokenizer writes the text
    deterministic    compute each token in one order of sums, whatever else is in its step: tokens
                     and log-probabilities of a request with a temperature of 0, or a seed, are the
                     same bits alone and in company, with the cache and without, however it is cut
                     into chunks; on this machine, with these options. On a CPU only
    seed             of requests that bring none: request n then draws from (seed, n)
    threads          of torch; None: torch's own choice, one per core or OMP_NUM_THREADS
    worker           compute in a worker thread; False computes in the event loop's own thread,
                     which blocks it: for scripts without other tasks, and for tests
    chat_template    file with a Jinja template to use in place of the model's own
    compile_timeout  seconds in which a constraint must compile, the wait for a place included; one
                     that takes longer is refused
    xgrammar         mask the JSON Schemas by xgrammar of which its masks are exact, and not by
                     llguidance; its import, when the engine loads, takes some 2.5 s

    Raises `OptionError` for values out of range.
    """

    device: str = "cpu"
    dtype: DtypeName = "auto"
    slots: int | None = None
    memory_fraction: float = 0.3
    max_running: int = 64
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    chunk_size: int = 512
    max_context: int | None = None
    radix: bool = True
    jump_forward: bool = True
    deterministic: bool = False
    seed: int = 0
    threads: int | None = None
    worker: bool = True
    chat_template: str | Path | None = None
    compile_timeout: float = 10.0
    xgrammar: bool = False

    def __post_init__(self) -> None:
        check_device(self.device)
        if not isinstance(self.dtype, str) or self.dtype not in {"auto", *DTYPES}:
            raise OptionError("dtype", f"expected auto, {', '.join(DTYPES)}; got {self.dtype!r}")
        self._check_counts()
        for name in ("radix", "jump_forward", "deterministic", "worker", "xgrammar"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(name, f"expected True or False, got {value!r}")
        if not isinstance(self.chat_template, str | Path | None):
            raise OptionError("chat_template", f"expected a path, got {self.chat_template!r}")
        fraction = self.memory_fraction
        if not isinstance(fraction, int | float) or not 0 < fraction <= 0.9:
            raise OptionError(
                "memory_fraction", f"must be above 0 and at most 0.9, got {fraction!r}"
            )

        check_range("compile_timeout", self.compile_timeout, 0.0, 1e6, open_low=True)

    def _check_counts(self) -> None:
        optional = {"slots", "max_context", "threads", "max_waiting", "max_waiting_tokens"}
        for name in (*sorted(optional), "max_running", "chunk_size", "seed"):
            value, least = getattr(self, name), 0 if name in {"seed", "max_waiting"} else 1
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                message = f"expected a whole number of at least {least}, got {value!r}"
                raise OptionError(name, message)
        if self.threads is not None and self.threads > MOST_THREADS:
            raise OptionError("threads", f"must be at most {MOST_THREADS}, got {self.threads}")


def check_device(device: object) -> None:
    """Raises `OptionError` for what names no device, and for a GPU that is not there."""
    if not isinstance(device, str) or not DEVICE.fullmatch(device):
        raise OptionError("device", f"expected cpu, cuda or cuda:0, got {device!r}")
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise OptionError(
            "device",
            f"{device} is asked for, and torch {torch.__version__} finds no GPU; install a build "
            "of torch for it and its driver, or use cpu",
        )
    if (number := torch.device(device).index or 0) >= (count := torch.cuda.device_count()):
        raise OptionError("device", f"there is no cuda:{number}; the last is cuda:{count - 1}")


def config_from(options: EngineOptions) -> EngineConfig:
    """Check keyword options. Raises `OptionError` for an unknown name or a bad value."""
    known = EngineConfig.__struct_fields__
    if unknown := sorted(set(options) - set(known)):
        raise unknown_option(unknown[0], known)
    return EngineConfig(**options)


def available_memory() -> int:
    """Bytes of main memory that can be had without swapping; control groups are heeded."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    used = CONTROL_GROUP / "memory.current"
    if used.exists() and (limit := _control_group_limit()) is not None:
        available = min(available, limit - int(used.read_text()))
    return max(available, 0)


def total_memory() -> int:
    """Bytes of main memory that this process could ever have; control groups are heeded."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _control_group_limit()
    return total if limit is None else min(total, limit)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes of the device's memory that can be had now, and that could ever be had."""
    if device.type == "cpu":
        return available_memory(), total_memory()
    free, total = torch.cuda.mem_get_info(device)
    # What torch holds and nobody uses can be had, too: loading leaves such blocks.
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + reserved, total


def _control_group_limit() -> int | None:
    file = CONTROL_GROUP / "memory.max"
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text.isdigit() else None


def choose_dtype(config: EngineConfig, weights: int, checkpoint: str, device: str) -> torch.dtype:
    """The dtype to compute in; `weights` counts the model's parameters."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device != "cpu":
        return DTYPES.get(checkpoint, torch.bfloat16)
    return torch.float32 if 4 * weights <= total_memory() / 2 else torch.bfloat16


def choose_slots(
    config: EngineConfig, slot_bytes: int, max_context: int, available: int, total: int
) -> int:
    """How many slots the cache gets; never more than `max_running` full contexts could use.

    slot_bytes   of one slot, over all layers
    available    bytes of memory that can be had now
    total        bytes of memory that could ever be had

    Raises `OptionError` for slots that no memory could hold, and if there is room for none.
    """
    if config.slots is not None:
        if config.slots * slot_bytes > total:
            raise OptionError(
                "slots",
                f"{config.slots} slots of {slot_bytes} bytes are more than the whole memory of "
                f"{total} bytes; {total // 2 // slot_bytes} would take half of it",
            )
        return config.slots
    affordable = int(available * config.memory_fraction) // slot_bytes
    if affordable < 1:
        raise OptionError(
            "memory_fraction",
            f"{config.memory_fraction:g} of the {available} bytes that are available does not "
            f"hold one token of {slot_bytes} bytes; free some memory or raise it",
        )
    return min(affordable, config.max_running * max_context)
