"""The GPU's implementation of the attention contract, as an engine would call it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from structgen.kernels.attention import HeadShape, LayerSpec, Layout
from structgen.kernels.gpu.attention import TritonAttention
from structgen.kernels.reference import ReferenceAttention
from tests.kernels.interp.harness import TOLERANCE
from tests.kernels.scenes import Branch, Scene, head_shape, outcome, scene

KINDS = [
    pytest.param(partial(TritonAttention, arch="sm_90"), id="fast"),
    pytest.param(partial(TritonAttention, arch="sm_90", deterministic=True), id="deterministic"),
]
STEPS = {
    "a decode": [Branch(70, 1)],
    "decodes, drafts and prompts": [Branch(40, 1), Branch(0, 20), Branch(12, 3), Branch(64, 18)],
    "branches over a long prefix": [Branch(299, 1), *[Branch(n, 1, after=0) for n in (0, 3, 40)]],
}


def attention_over(step: Scene, layers: list[LayerSpec]) -> TritonAttention:
    pools = [step.k_pool_sx] * len(layers), [step.v_pool_sx] * len(layers)
    return TritonAttention(*pools, step.shape, layers, step.cos_sin_pd, arch="sm_90")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branches", STEPS.values(), ids=STEPS.keys())
class TestAttention:
    @pytest.mark.parametrize("window", [None, 33])
    def test_equals_the_reference(
        self, kind: partial[TritonAttention], branches: list[Branch], window: int | None
    ) -> None:
        step = scene(branches, head_shape(4, 2, 16), spec=LayerSpec(window=window), padding=2)

        result, expected = outcome(kind, step), outcome(ReferenceAttention, step)

        real = int(step.layout.query_start_b1[-1])
        difference = (result.out_tx - expected.out_tx)[:real].norm() / expected.out_tx.norm()
        assert float(difference) < TOLERANCE[torch.float32]
        assert bool(result.out_tx[real:].isfinite().all())
        torch.testing.assert_close(
            result.k_pool_sx, expected.k_pool_sx, atol=1e-6, rtol=1e-5, equal_nan=True
        )


class TestPlans:
    def test_are_shared_by_layers_of_equal_window(self) -> None:
        step = scene([Branch(30, 1), Branch(20, 1)], head_shape(4, 2, 16))
        layers = [LayerSpec(), LayerSpec(window=8), LayerSpec(), LayerSpec(window=4096)]

        plan = attention_over(step, layers).plan(step.layout)

        assert plan.lists_l[0] is plan.lists_l[2] is plan.lists_l[3]
        assert plan.lists_l[1] is not plan.lists_l[0]

    def test_begin_at_sixteen_bytes_so_that_no_step_compiles_anew(self) -> None:
        step = scene([Branch(30, 1), Branch(20, 1), Branch(3, 5)], head_shape(4, 2, 16))

        (lists,) = attention_over(step, [LayerSpec()]).plan(step.layout).lists_l

        arrays = [lists.table_c, lists.order_n, lists.low_n, lists.high_n, lists.tiles_i5]
        arrays += [items for _, items in lists.buckets]
        assert [tensor.storage_offset() % 4 for tensor in arrays] == [0] * len(arrays)


class TestRefusals:
    def over(self, shape: HeadShape, arch: str | None) -> None:
        pools = [torch.zeros(8, shape.kv_heads * shape.head_dim)]
        TritonAttention(pools, pools, shape, [LayerSpec()], torch.zeros(8, 16), arch=arch)

    def test_a_cpu_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="runs on CUDA devices and the pools are on 'cpu'"):
            self.over(head_shape(4, 2, 64), None)

    def test_heads_that_are_no_power_of_two_are_refused(self) -> None:
        with pytest.raises(ValueError, match="heads of 16, 32, 64 or 128 components, not 80"):
            self.over(head_shape(4, 2, 80), "sm_90")

    def test_groups_that_fill_no_block_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at most 64 query heads to a key/value head, not 72"):
            self.over(head_shape(72, 1, 64), "sm_90")


class TestStepAfterStep:
    def test_gives_what_each_step_gives_by_itself(self) -> None:
        """A prompt, its branches, and a fork's decodes; one ends, another is admitted."""
        shape = head_shape(4, 2, 16)
        branches = [Branch(299, 1), *[Branch(n, 1, after=0) for n in (0, 3, 40)], Branch(20, 30)]
        last = scene(branches, shape)
        slots = [np.append(context, [0] * 4) for context in last.layout.context_b]
        grown = len(last.k_pool_sx)
        pools = [torch.randn(grown + 20, 32) for _ in range(2)]
        layers, angles_pd = [LayerSpec(), LayerSpec(window=33)], last.cos_sin_pd
        kept = TritonAttention(pools[:1] * 2, pools[1:] * 2, shape, layers, angles_pd, arch="sm_90")
        for turn, alive in enumerate(([0, 1, 2, 4], [0, 1, 2, 4], [0, 2, 3, 4], [3, 2])):
            contexts = []
            for b in alive:
                length = len(last.layout.context_b[b]) + turn
                slots[b][length - 1] = grown + 4 * b + turn if turn else slots[b][length - 1]
                contexts.append(slots[b][:length])
            rows = np.zeros(len(alive), np.int64)
            starts, origins = np.arange(len(alive) + 1), tuple(slots[b] for b in alive)
            layout = Layout(starts, tuple(contexts), rows, rows, origins)
            q_thd = torch.randn(len(alive), 4, 16)
            fresh = TritonAttention(
                pools[:1] * 2, pools[1:] * 2, shape, layers, angles_pd, arch="sm_90"
            )

            plan, alone = kept.plan(layout), fresh.plan(layout)

            for layer in range(2):
                assert torch.equal(
                    kept.attend(q_thd, layer, plan), fresh.attend(q_thd, layer, alone)
                )
