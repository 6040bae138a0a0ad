"""The attention kernels against the oracle, on poisoned pools between guards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from structgen.kernels.attention import LayerSpec, Layout
from structgen.kernels.reference import ReferenceAttention
from tests.kernels.interp.harness import FAST, FIXED, TOLERANCE, attended, distance
from tests.kernels.interp.interpreter import products_in_order
from tests.kernels.scenes import Branch, Scene, head_shape, scene

SHAPES = [(9, 3, 64), (8, 1, 128), (32, 8, 128), (16, 16, 64)]
STEPS = {
    "one token": [Branch(0, 1)],
    "decodes about the edges of blocks": [Branch(n, 1) for n in (30, 31, 32, 63, 64, 0)],
    "a decode of several chunks": [Branch(149, 1), Branch(3, 1)],
    "drafted tokens": [Branch(100, 4), Branch(0, 3), Branch(62, 2)],
    "a prompt": [Branch(0, 37)],
    "chunks about the edges of blocks": [Branch(31, 5), Branch(32, 33), Branch(5, 9)],
    "decodes beside chunks": [Branch(40, 1), Branch(0, 12), Branch(70, 1), Branch(64, 6)],
    "branches over one prefix": [Branch(95, 1), *[Branch(n, 1, after=0) for n in (0, 3, 40, 7)]],
    "forks within forks": [
        Branch(69, 1),
        Branch(39, 1, after=0),
        Branch(49, 2, after=0),
        *[Branch(n, 1, after=1) for n in (0, 5)],
        *[Branch(n, 1, after=2) for n in (2, 36)],
        Branch(9, 1),
    ],
    "branches over a prefix of this step": [
        Branch(0, 40),
        Branch(0, 1, after=0),
        Branch(0, 6, after=0),
        Branch(3, 1, after=0),
    ],
}


def only(step: Scene, b: int) -> Scene:
    """The same step without its other sequences."""
    layout = step.layout
    rows = slice(*layout.query_start_b1[b : b + 2].tolist())
    alone = Layout(
        query_start_b1=np.array([0, rows.stop - rows.start]),
        context_b=(layout.context_b[b],),
        slots_t=layout.slots_t[rows],
        positions_t=layout.positions_t[rows],
    )
    return replace(step, layout=alone, qkv_tx=step.qkv_tx[rows])


@pytest.mark.parametrize("branches", STEPS.values(), ids=STEPS.keys())
class TestEveryStep:
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_equals_the_oracle(self, branches: list[Branch], dtype: torch.dtype) -> None:
        step = scene(branches, head_shape(9, 3, 64), dtype=dtype, padding=2)

        assert distance(step, FAST) < TOLERANCE[dtype]

    @pytest.mark.parametrize("window", [1, 33, 70])
    def test_equals_the_oracle_in_a_sliding_window(
        self, branches: list[Branch], window: int
    ) -> None:
        step = scene(branches, head_shape(4, 2, 16), spec=LayerSpec(window=window), padding=1)

        assert distance(step, FAST) < TOLERANCE[torch.float32]

    @pytest.mark.parametrize("window", [None, 70])
    def test_equals_the_oracle_where_plans_are_deterministic(
        self, branches: list[Branch], window: int | None
    ) -> None:
        step = scene(branches, head_shape(6, 2, 16), spec=LayerSpec(window=window))

        assert distance(step, FIXED) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
class TestEveryHeadShape:
    def test_equals_the_oracle(self, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        branches = [Branch(69, 1), Branch(3, 1, after=0), Branch(0, 5)]
        step = scene(branches, head_shape(*heads), dtype=dtype)

        assert distance(step, FAST) < TOLERANCE[dtype]


class TestDeterministicPlans:
    BRANCHES = (
        Branch(139, 1),
        *(Branch(n, 1, after=0) for n in (0, 3, 40)),
        Branch(70, 2, after=0),
        Branch(33, 1),
    )

    @pytest.mark.parametrize("b", range(len(BRANCHES)))
    def test_give_a_row_the_bits_it_has_alone(self, b: int) -> None:
        step = scene(list(self.BRANCHES), head_shape(6, 2, 16))
        pools = [step.k_pool_sx], [step.v_pool_sx]
        oracle = ReferenceAttention(*pools, step.shape, [step.spec], step.cos_sin_pd)
        oracle.write(step.qkv_tx, 0, step.layout)
        rows = slice(*step.layout.query_start_b1[b : b + 2].tolist())

        with products_in_order():
            together, _ = attended(step, FIXED)
            alone, _ = attended(only(step, b), FIXED)

        assert torch.equal(alone, together[rows])
