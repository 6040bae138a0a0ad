"""Every attention implementation against the obvious reference, on poisoned pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgen.kernels import cpu_plan
from structgen.kernels.attention import AttentionType, LayerSpec
from structgen.kernels.choose import (
    KERNELS,
    deterministic_kernels_for,
    kernels_for,
    triton_kernels,
)
from structgen.kernels.cpu import CpuAttention
from structgen.kernels.cpu_fixed import FixedCpuAttention
from structgen.kernels.reference import ReferenceAttention
from tests.kernels.scenes import Branch, Scene, head_shape, outcome, scene

IMPLEMENTATIONS = [pytest.param(CpuAttention, id="cpu")]
# What differs in these is its own tests' matter: the contract is tried in fewer shapes.
ALL = [*IMPLEMENTATIONS, pytest.param(FixedCpuAttention, id="fixed")]
SHAPES = [(9, 3, 64), (8, 1, 128), (16, 16, 64)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}

STEPS = {
    "one token": [Branch(0, 1)],
    "a prompt": [Branch(0, 70)],
    "a short chunk": [Branch(100, 5)],
    "a long chunk": [Branch(90, 50)],
    "ragged decodes": [Branch(0, 1), Branch(300, 1), Branch(17, 1), Branch(299, 1), Branch(1, 1)],
    "decodes of very different length": [Branch(1500, 1), Branch(3, 1), Branch(2, 1)],
    "decodes and chunks": [Branch(40, 1), Branch(0, 33), Branch(12, 1), Branch(64, 40)],
    "branches over a prefix of this step": [
        Branch(0, 140),
        Branch(0, 1, after=0),
        Branch(0, 7, after=0),
        Branch(3, 1, after=0),
    ],
    "decodes over a cached prefix": [
        Branch(150, 1),
        Branch(4, 1, after=0),
        Branch(30, 1, after=0),
        Branch(20, 1, after=2),
        Branch(200, 1),
        Branch(0, 1, after=4),
    ],
    "a sequence without queries": [Branch(30, 0), Branch(5, 1, after=0), Branch(2, 1)],
}


@pytest.fixture(autouse=True, scope="module")
def eager() -> Iterator[None]:
    """Prefixes are shared where they are short, too, so that small scenes meet all parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_plan, "SAVED_VALUES", 0)
        yield


def distance(kind: AttentionType, step: Scene) -> float:
    """Largest difference of the real rows from the reference; NaN where any value is NaN."""
    real = int(step.layout.query_start_b1[-1])
    difference = outcome(kind, step).out_tx[:real] - outcome(ReferenceAttention, step).out_tx[:real]
    return difference.abs().max().item()


def same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Equal within the tolerance, NaN where the other has NaN."""
    return torch.allclose(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
@pytest.mark.parametrize("branches", STEPS.values(), ids=STEPS.keys())
class TestAttend:
    @pytest.mark.parametrize("heads", SHAPES, ids=str)
    def test_equals_the_reference_for_every_head_shape(
        self, kind: AttentionType, branches: list[Branch], heads: tuple[int, int, int]
    ) -> None:
        assert distance(kind, scene(branches, head_shape(*heads))) < TOLERANCE[torch.float32]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_equals_the_reference_in_low_precision(
        self, kind: AttentionType, branches: list[Branch], dtype: torch.dtype
    ) -> None:
        step = scene(branches, head_shape(9, 3, 64), dtype=dtype)

        assert distance(kind, step) < TOLERANCE[dtype]

    @pytest.mark.parametrize("window", [1, 16, 128])
    def test_equals_the_reference_in_a_sliding_window(
        self, kind: AttentionType, branches: list[Branch], window: int
    ) -> None:
        step = scene(branches, head_shape(4, 2, 32), spec=LayerSpec(window=window))

        assert distance(kind, step) < TOLERANCE[torch.float32]

    def test_equals_the_reference_on_contiguous_slots(
        self, kind: AttentionType, branches: list[Branch]
    ) -> None:
        step = scene(branches, head_shape(9, 3, 64), scattered=False)

        assert distance(kind, step) < TOLERANCE[torch.float32]

    def test_padding_rows_change_nothing_and_stay_finite(
        self, kind: AttentionType, branches: list[Branch]
    ) -> None:
        shape = head_shape(9, 3, 64)
        padded = scene(branches, shape, padding=3)

        result = outcome(kind, padded)

        assert distance(kind, padded) < TOLERANCE[torch.float32]
        assert bool(result.out_tx[-3:].isfinite().all())


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("branches", STEPS.values(), ids=STEPS.keys())
class TestAttendOfADeterministicEngine:
    def test_equals_the_reference(self, branches: list[Branch], window: int | None) -> None:
        step = scene(branches, head_shape(4, 2, 32), spec=LayerSpec(window=window), padding=2)

        result = outcome(FixedCpuAttention, step)

        assert distance(FixedCpuAttention, step) < TOLERANCE[torch.float32]
        assert bool(result.out_tx[-2:].isfinite().all())


@pytest.mark.parametrize("kind", ALL)
class TestWrite:
    @pytest.mark.parametrize("rotary", [True, False])
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_writes_what_the_reference_writes(
        self, kind: AttentionType, rotary: bool, dtype: torch.dtype
    ) -> None:
        step = scene(
            [Branch(20, 3), Branch(0, 9), Branch(700, 1)],
            head_shape(9, 3, 64),
            dtype=dtype,
            spec=LayerSpec(rotary=rotary),
        )

        result, expected = outcome(kind, step), outcome(ReferenceAttention, step)

        assert same(result.q_thd, expected.q_thd, TOLERANCE[dtype])
        assert same(result.k_pool_sx, expected.k_pool_sx, TOLERANCE[dtype])
        assert same(result.v_pool_sx, expected.v_pool_sx, 0.0)

    def test_touches_no_slot_but_its_own(self, kind: AttentionType) -> None:
        step = scene([Branch(20, 3), Branch(5, 1)], head_shape(9, 3, 64))

        result = outcome(kind, step)

        others = torch.ones(step.k_pool_sx.shape[0], dtype=torch.bool)
        others[torch.from_numpy(step.layout.slots_t)] = False
        assert same(result.k_pool_sx[others], step.k_pool_sx[others], 0.0)
        assert same(result.v_pool_sx[others], step.v_pool_sx[others], 0.0)


BRANCHES = st.lists(
    st.builds(
        Branch,
        cached=st.integers(0, 200),
        new=st.one_of(st.just(1), st.integers(0, 60)),
        after=st.one_of(st.none(), st.integers(0, 5)),
    ),
    min_size=1,
    max_size=6,
)


def possible(branches: list[Branch]) -> list[Branch]:
    """The same list, with `after` pointing backwards and at least one token per sequence."""
    return [
        Branch(
            b.cached,
            b.new or int(b.cached == 0),
            None if b.after is None or b.after >= i else b.after,
        )
        for i, b in enumerate(branches)
    ]


@pytest.mark.parametrize("kind", ALL)
class TestAnyStep:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        branches=BRANCHES,
        window=st.one_of(st.none(), st.integers(1, 300)),
        scattered=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_equals_the_reference(
        self,
        kind: AttentionType,
        branches: list[Branch],
        window: int | None,
        scattered: bool,
        seed: int,
    ) -> None:
        step = scene(
            possible(branches),
            head_shape(4, 2, 16),
            spec=LayerSpec(window=window),
            scattered=scattered,
            padding=1,
            seed=seed,
        )
        if step.layout.query_start_b1[-1] == 0:
            return

        assert distance(kind, step) < TOLERANCE[torch.float32]


class TestOneImplementationOverManySteps:
    def test_keeps_its_scratch_usable_in_and_out_of_inference_mode(self) -> None:
        shape = head_shape(9, 3, 64)
        step = scene([Branch(30, 1), Branch(20, 1)], shape)
        attention = CpuAttention(
            [step.k_pool_sx], [step.v_pool_sx], shape, [step.spec], step.cos_sin_pd
        )
        with torch.inference_mode():
            inside = attention.plan(step.layout)
            first = attention.attend(attention.write(step.qkv_tx, 0, inside), 0, inside)

        plan = attention.plan(step.layout)
        second = attention.attend(attention.write(step.qkv_tx, 0, plan), 0, plan)

        assert torch.equal(first, second)

    def test_layers_of_equal_window_share_their_part_of_the_plan(self) -> None:
        shape = head_shape(9, 3, 64)
        step = scene([Branch(30, 1), Branch(20, 1)], shape)
        layers = [LayerSpec(), LayerSpec(window=8), LayerSpec(), LayerSpec(window=4096)]
        pools = [step.k_pool_sx] * 4, [step.v_pool_sx] * 4

        plan = CpuAttention(*pools, shape, layers, step.cos_sin_pd).plan(step.layout)

        assert plan.parts_l[0] is plan.parts_l[2] is plan.parts_l[3]
        assert plan.parts_l[1] is not plan.parts_l[0]

    def test_accepts_read_only_layouts(self) -> None:
        shape = head_shape(9, 3, 64)
        step = scene([Branch(30, 1), Branch(20, 40)], shape)
        for array in (step.layout.slots_t, step.layout.positions_t, *step.layout.context_b):
            array.flags.writeable = False

        assert distance(CpuAttention, step) < TOLERANCE[torch.float32]


class TestChoosing:
    def test_the_cpu_has_its_own(self) -> None:
        assert kernels_for(torch.device("cpu")).attention is CpuAttention
        assert deterministic_kernels_for(torch.device("cpu")).attention is FixedCpuAttention

    def test_no_other_device_has_deterministic_ones(self) -> None:
        with pytest.raises(ValueError, match=r"no deterministic kernels for device 'cuda'.*cpu"):
            deterministic_kernels_for(torch.device("cuda"))

    def test_an_unknown_device_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"no kernels for device 'meta'.*cpu, cuda"):
            kernels_for(torch.device("meta"))

    def test_an_architecture_without_kernels_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"no kernels for 'sm_75'; .* sm_80.* the cpu"):
            triton_kernels("sm_75")

    def test_every_implementation_on_the_cpu_is_tested_here(self) -> None:
        tested, cpu = {case.values[0] for case in ALL}, torch.device("cpu")

        assert set(KERNELS) == {"cpu", "cuda"}, "a new device needs tests of its own"
        assert kernels_for(cpu).attention in tested
        assert deterministic_kernels_for(cpu).attention in tested
