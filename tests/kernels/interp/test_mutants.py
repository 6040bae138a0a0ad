"""Whether the tests of the attention kernels would notice: kernels with one fault each.

A fault is a change of the source's text. Each must be found by the scenes here, by the same harness
that the tests use; but for the one that changes nothing that a result depends on.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from structgen.kernels.attention import LayerSpec
from structgen.kernels.gpu import block, extend, segment
from structgen.kernels.segment_plan import DIRECT
from tests.kernels.interp.harness import FAST, TOLERANCE, Setting, distance
from tests.kernels.interp.interpreter import BUILDER, overflow_checked
from tests.kernels.scenes import Branch, head_shape, scene

# Ends of ranges within blocks, chunks longer than blocks, a fork, drafts, a prompt over a prefix.
BRANCHES = [
    Branch(69, 1),
    Branch(3, 1, after=0),
    Branch(40, 1, after=0),
    Branch(20, 3),
    Branch(40, 30),
]
FAULTS = {
    "values are loaded past the end": (
        block,
        "v_nd = tl.load(v + slot[:, None] * stride_v + d[None, :], mask=held[:, None], other=0.0)",
        "v_nd = tl.load(v + slot[:, None] * stride_v + d[None, :])",
    ),
    "keys past the end have weight": (block, "seen = held[None, :] & ", "seen = "),
    "a row sees the token after it": (block, "n[None, :] < high_m", "n[None, :] <= high_m"),
    "a window is a token too short": (block, "n[None, :] >= low_m", "n[None, :] > low_m"),
    "the last block is skipped": (
        block,
        "range(begin, end, BLOCK_N)",
        "range(begin, end - BLOCK_N + 1, BLOCK_N)",
    ),
    "the sum is not rescaled": (block, "sum_m = sum_m * fade_m", "sum_m = sum_m"),
    "the output is not rescaled": (block, "acc_md = acc_md * fade_m[:, None]", "acc_md = acc_md"),
    "a row without keys is not guarded": (
        block,
        'tl.where(new_m == -float("inf"), 0.0, new_m)',
        "new_m",
    ),
    "exponents are natural": (block, "p_mn = tl.exp2(", "p_mn = tl.exp("),
    "heads are taken crosswise": (
        segment,
        "head = kv_head * GROUP + m % GROUP",
        "head = kv_head + m % GROUP * 2",
    ),
    "an item has a row too many": (segment, "live = token < count", "live = token <= count"),
    "partials of no row are stored": (segment, "o_md, mask=live[:, None])", "o_md)"),
    "the log of the sum is natural": (segment, "top_m + tl.log2(safe_m)", "top_m + tl.log(safe_m)"),
    "partials are added unweighted": (segment, "o_hd * weight_h[:, None]", "o_hd"),
    "a merge loses its first partial": (segment, "range(begin, end)", "range(begin + 1, end)"),
    "a merge is not divided by its sum": (
        segment,
        "acc_hd / tl.where(sum_h > 0.0, sum_h, 1.0)[:, None]",
        "acc_hd",
    ),
    "a padded merge is stored": (
        segment,
        "inside = (head < H) & (begin < end)",
        "inside = head < H",
    ),
    "a tile sees the tokens of its last row": (
        extend,
        "(position + 1) //",
        "(position + count) //",
    ),
    "a tile's window is a token too long": (extend, "high_m - window if", "high_m - window - 1 if"),
    "a tile in a window has no window": (extend, "high_m - window if", "high_m * 0 if"),
    "a tile ends before its last row": (extend, "end = position + count", "end = position + 1"),
}
# The weights of these keys are set to zero afterwards, whatever the product with them was.
HARMLESS = (
    block,
    "k_dn = tl.load(k + slot[None, :] * stride_k + d[:, None], mask=held[None, :], other=0.0)",
    "k_dn = tl.load(k + slot[None, :] * stride_k + d[:, None])",
)
Fault = tuple[ModuleType, str, str]


def changed(fault: Fault, folder: Path) -> Setting:
    """The kernels with this fault; they must be read from files, as the interpreter does."""
    module, text, instead = fault
    modules = {
        name: _copy(name, folder, module, text, instead) for name in (block, segment, extend)
    }
    return replace(FAST, segment=modules[segment], extend=modules[extend])


def _copy(
    original: ModuleType, folder: Path, faulty: ModuleType, text: str, instead: str
) -> ModuleType:
    assert original.__file__ is not None
    source = Path(original.__file__).read_text(encoding="utf-8")
    if original is faulty:
        assert text in source, f"the fault does not apply: {text}"
        source = source.replace(text, instead)
    name = original.__name__.rpartition(".")[2]
    source = source.replace("structgen.kernels.gpu.block", f"{folder.name}_block")
    path = folder / f"{folder.name}_{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a faulty copy of the kernels can be imported from."""
    place = tmp_path / re.sub(r"\W", "_", tmp_path.name)
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    yield place
    sys.modules.pop(f"{place.name}_block", None)


def found(setting: Setting) -> bool:
    """Whether any scene shows that these kernels are wrong."""
    for window in (None, 40):
        step = scene(BRANCHES, head_shape(6, 2, 16), spec=LayerSpec(window=window), padding=1)
        try:
            near = distance(step, setting) < TOLERANCE[torch.float32]
        except (AssertionError, RuntimeWarning, interpreter.InterpreterError):
            return True
        if not near:
            return True
    return False


class TestTheTests:
    def test_find_nothing_in_the_kernels_as_they_are(self) -> None:
        assert not found(FAST)

    @pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
    def test_find_every_fault(self, fault: Fault, folder: Path) -> None:
        assert found(changed(fault, folder))

    def test_do_not_find_what_changes_no_result(self, folder: Path) -> None:
        assert not found(changed(HARMLESS, folder))


class TestSlotsOfLargePools:
    """A pool of 2**31 components is not at hand: nothing of it is read, only addressed."""

    @pytest.fixture(autouse=True)
    def _unread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load = BUILDER.create_masked_load

        def of_integers(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
            if pointers.get_element_ty() != tl.float16:
                return load(self, pointers, mask, other, *rest)
            return interpreter.TensorHandle(np.zeros(pointers.data.shape, np.float16), tl.float16)

        monkeypatch.setattr(BUILDER, "create_masked_load", of_integers)

    def launch(self, kernels: ModuleType) -> None:
        item = torch.tensor([[0, 1, 0, 0, 3, DIRECT]], dtype=torch.int32)
        zero, end = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
        slots = torch.tensor([1, 40, 2], dtype=torch.int32)
        half = torch.zeros(16, dtype=torch.float16)
        parts = torch.zeros(16)
        strides = (16, 16, 2**27, 2**27, 16)
        sizes = {"H": 1, "GROUP": 1, "D": 16, "BLOCK_M": 16, "BLOCK_N": 16, "PRECISION": "ieee"}
        with overflow_checked():
            kernels._segment[1, 1](
                *(half, half, half, half, parts, parts, slots, zero, zero, end, item, 1.0),
                *strides,
                **sizes,
            )

    def test_are_addressed_in_64_bits(self) -> None:
        self.launch(segment)

    def test_would_be_missed_in_32(self, folder: Path) -> None:
        fault = (block, "other=0).to(tl.int64)", "other=0)")

        with pytest.raises(interpreter.InterpreterError, match="overflow"):
            self.launch(changed(fault, folder).segment)
