"""The engine's options: what is accepted, what is refused by name, and what memory becomes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from structgen.engine import config as config_module
from structgen.engine.config import (
    EngineConfig,
    available_memory,
    choose_dtype,
    choose_slots,
    config_from,
    memory_of,
    total_memory,
)
from structgen.engine.engine import Engine
from structgen.engine.loading import load
from structgen.errors import OptionError
from structgen.kernels.choose import Kernels

GIB = 2**30


class TestOptions:
    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("device", "gpu"),
            ("device", "cuda:"),
            ("device", "cuda:-1"),
            ("device", "cuda:01"),
            ("device", None),
            ("dtype", "int8"),
            ("dtype", ["float32"]),
            ("dtype", torch.float32),
            ("slots", 0),
            ("slots", 1.5),
            ("slots", True),
            ("max_running", 0),
            ("max_running", None),
            ("max_waiting", -1),
            ("max_waiting", True),
            ("max_waiting_tokens", 0),
            ("max_waiting_tokens", "many"),
            ("chunk_size", -1),
            ("chunk_size", None),
            ("max_context", "long"),
            ("threads", 0),
            ("threads", 100_000),
            ("seed", -1),
            ("seed", None),
            ("radix", "no"),
            ("radix", None),
            ("jump_forward", 1),
            ("deterministic", 1),
            ("worker", 1),
            ("memory_fraction", 0),
            ("memory_fraction", 0.95),
            ("memory_fraction", float("nan")),
            ("memory_fraction", "half"),
            ("chat_template", 5),
            ("slotz", 5),
        ],
        ids=str,
    )
    def test_that_cannot_be_used_are_refused_by_name_at_once(self, option: str, value: Any) -> None:
        options: Any = {option: value}

        with pytest.raises(OptionError, match=f"^{option}: ") as caught:
            Engine("nothing is loaded yet", **options)
        assert caught.value.option == option

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("device", "cpu"),
            ("dtype", "bfloat16"),
            ("slots", None),
            ("threads", None),
            ("max_context", None),
            ("chunk_size", 10**30),
            ("max_running", 10**30),
            ("max_waiting", 0),
            ("max_waiting", None),
            ("max_waiting_tokens", 1),
            ("max_waiting_tokens", None),
            ("seed", 10**40),
            ("chat_template", "file.jinja"),
            ("chat_template", Path("folder/file.jinja")),
            ("memory_fraction", 0.9),
        ],
        ids=str,
    )
    def test_that_can_be_used_are_kept(self, option: str, value: Any) -> None:
        options: Any = {option: value}

        assert getattr(config_from(options), option) == value

    def test_of_an_unknown_name_are_listed(self) -> None:
        with pytest.raises(
            OptionError, match=r"did you mean slots\?.*; the options are chat_template, chunk"
        ):
            config_from({"slotz": 5})  # type: ignore[typeddict-unknown-key]  # what is tested

    async def test_beyond_what_the_model_was_made_for_are_refused(self, tiny_model: Path) -> None:
        with pytest.raises(OptionError, match=r"max_context: 513 is not between 1 and .* 512"):
            await Engine(tiny_model, slots=10, max_context=513).__aenter__()

    async def test_can_shorten_the_context(self, tiny_model: Path) -> None:
        async with Engine(tiny_model, slots=10, threads=1, max_context=5) as engine:
            assert engine.capabilities.max_context == 5


class TestTheDevice:
    def test_that_is_not_there_is_refused_at_once_with_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

        with pytest.raises(OptionError, match=r"device: cuda:1 .* finds no GPU; .* or use cpu"):
            Engine("nothing is loaded yet", device="cuda:1")

    def test_beyond_the_last_is_refused_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

        assert EngineConfig(device="cuda:1").device == "cuda:1"
        with pytest.raises(OptionError, match="device: there is no cuda:2; the last is cuda:1"):
            EngineConfig(device="cuda:2")

    def test_without_kernels_is_refused_before_a_model_is_read(self) -> None:
        def none(device: torch.device) -> Kernels:
            raise ValueError(f"no kernels for {device}")

        with pytest.raises(OptionError, match="device: no kernels for cpu"):
            load("there is no such model", EngineConfig(), kernels_of=none)

    def test_that_is_a_cpu_needs_no_triton(self) -> None:
        script = (
            "import sys, torch, structgen.engine.engine\n"
            "from structgen.kernels.choose import kernels_for\n"
            "kernels_for(torch.device('cpu'))\n"
            "sys.exit('triton' in sys.modules)\n"
        )

        subprocess.run([sys.executable, "-c", script], check=True)


class TestSlots:
    def slots(self, *, available: int = 8 * GIB, total: int = 16 * GIB, **options: Any) -> int:
        return choose_slots(EngineConfig(**options), 1024, 2048, available, total)

    def test_are_as_many_as_were_asked_for(self) -> None:
        assert self.slots(slots=77, available=0) == 77

    def test_are_a_share_of_the_memory_that_is_available(self) -> None:
        assert self.slots(memory_fraction=0.5, available=2**20) == 512

    def test_are_no_more_than_all_that_runs_could_use(self) -> None:
        assert self.slots(max_running=3) == 3 * 2048

    def test_that_no_memory_could_hold_are_refused_with_the_figures(self) -> None:
        with pytest.raises(OptionError, match="slots: 17000000 slots of 1024 bytes are more"):
            self.slots(slots=17_000_000)

    def test_that_find_no_room_are_refused(self) -> None:
        with pytest.raises(OptionError, match=r"memory_fraction: .* not hold one token of 1024"):
            self.slots(available=1000)

    @pytest.mark.parametrize("slots", [10**11, 10**30])
    async def test_are_refused_before_any_are_made(self, tiny_model: Path, slots: int) -> None:
        with pytest.raises(OptionError, match="more than the whole memory"):
            await Engine(tiny_model, slots=slots).__aenter__()


class TestMemory:
    def test_of_a_gpu_counts_blocks_that_torch_holds_and_nobody_uses(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (500, 2000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 90)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 60)

        assert memory_of(torch.device("cuda")) == (530, 2000)

    def test_that_is_available_is_part_of_all(self) -> None:
        assert 0 < available_memory() <= total_memory()

    def test_is_limited_by_a_control_group(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "memory.current").write_text("400\n")
        monkeypatch.setattr(config_module, "CONTROL_GROUP", tmp_path)

        assert (total_memory(), available_memory()) == (1000, 600)

    def test_is_not_limited_by_a_control_group_without_a_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "memory.max").write_text("max\n")
        (tmp_path / "memory.current").write_text("400\n")
        monkeypatch.setattr(config_module, "CONTROL_GROUP", tmp_path)

        assert total_memory() > 1000


class TestTheDtype:
    def test_is_what_was_asked_for(self) -> None:
        assert choose_dtype(EngineConfig(dtype="float16"), 1, "float32", "cpu") == torch.float16

    def test_on_a_cpu_is_float32_while_that_takes_half_of_the_memory(self) -> None:
        most = total_memory() // 8

        assert choose_dtype(EngineConfig(), most, "bfloat16", "cpu") == torch.float32
        assert choose_dtype(EngineConfig(), most + 1, "bfloat16", "cpu") == torch.bfloat16

    @pytest.mark.parametrize("saved", ["float16", "bfloat16", "float32"])
    def test_elsewhere_is_the_checkpoints(self, saved: str) -> None:
        assert choose_dtype(EngineConfig(), 1, saved, "cuda") == getattr(torch, saved)
