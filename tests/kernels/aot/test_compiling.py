"""Every call site compiles for every architecture, without a spill, from every row of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from structgen.kernels.gpu import config
from structgen.kernels.gpu.aot import Compiled, compile_all, main, markdown
from structgen.kernels.gpu.calls import CALLS
from structgen.kernels.gpu.config import ARCHITECTURES, Config

Key = tuple[str, str, int, int]


class Recorded(dict[Key, Config]):
    """The table, which remembers what rows were taken."""

    def __init__(self, table: dict[Key, Config]) -> None:
        super().__init__(table)
        self.taken: set[Key] = set()

    def __getitem__(self, key: Key) -> Config:
        self.taken.add(key)
        return super().__getitem__(key)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    table = Recorded(config.CONFIGS)
    monkeypatch.setattr(config, "CONFIGS", table)
    config.config_for.cache_clear()
    yield table
    config.config_for.cache_clear()


def compiled(**changes: Any) -> Compiled:
    sound = Compiled(
        target="sm_90",
        call="a call",
        kernel="_kernel",
        warps=4,
        stages=2,
        registers=100,
        stack=0,
        shared=1024,
        matrix=8,
        rows=64,
    )
    return replace(sound, **changes)


class TestEveryCall:
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("target", ARCHITECTURES)
    def test_compiles_without_a_fault(self, target: str) -> None:
        assert [
            (one.call, one.kernel, one.faults) for one in compile_all(target) if one.faults
        ] == []

    @pytest.mark.parametrize("target", ARCHITECTURES)
    def test_together_they_take_every_row_of_the_table(
        self, target: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def launcher(self: Any, grid: Any) -> Callable[..., None]:
            del self, grid
            return lambda *_, **__: None

        monkeypatch.setattr(JITFunction, "__getitem__", launcher)
        for call in CALLS:
            call.run(target)

        assert {key for key in recorded if key[0] == target} - recorded.taken == set()


class TestAFault:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"stack": 16}, ["spills 16 bytes a thread"]),
            ({"shared": 240_000}, ["takes 240000 bytes of shared memory"]),
            ({"matrix": 0}, ["has no matrix instruction"]),
            ({"matrix": 0, "rows": 0}, []),
            ({}, []),
        ],
    )
    def test_is_said_in_words(self, changes: dict[str, Any], words: list[str]) -> None:
        assert compiled(**changes).faults == words

    def test_fails_the_command(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(config.SHARED_BYTES, "sm_90", -1)

        code = main(["--target", "sm_90", "--kernel", "merge"])

        assert code == 1
        assert "merge 9 x 64: _merge takes" in capsys.readouterr().err

    def test_is_not_looked_for_where_kernels_are_interpreted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")

        with pytest.raises(RuntimeError, match="unset it to compile them"):
            compile_all("sm_90")


class TestTheTable:
    def test_is_one_line_a_kernel(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--target", "sm_80", "--kernel", "merge"]) == 0

        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3
        assert lines[1].split()[:6] == ["sm_80", "merge", "9", "x", "64", "_merge"]

    def test_has_a_column_a_target_in_the_docs(self) -> None:
        lines = markdown([compiled(), compiled(target="sm_80", stack=8)]).splitlines()

        assert lines[0] == "| call | kernel | sm_90 | sm_80 |"
        assert lines[2:] == ["| a call | `_kernel` | 100 / 0 / 1024 / 8 | 100 / 8 / 1024 / 8 |"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("sm_75", "norm", 64), "no kernels for 'sm_75'; there are some for: sm_80, sm_90"),
            (("sm_90", "convolution", 64), "no kernel 'convolution'; there are: activation"),
            (("sm_90", "segment", 256), "segment takes rows of at most 128 components, not 256"),
        ],
    )
    def test_refuses_what_it_does_not_have(
        self, arguments: tuple[str, str, int], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            config.config_for(*arguments)

    def test_has_the_lowest_block_that_holds_the_rows(self) -> None:
        heights = [config.config_for("sm_90", "segment", 64, rows).block_m for rows in (1, 17, 999)]

        assert heights == [16, 32, 128]
