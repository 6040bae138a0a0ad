"""The fused rotation and write against the float64 reference, over poisoned pools."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from structgen.kernels.attention import LayerSpec
from structgen.kernels.gpu.rope_write import rope_write
from structgen.kernels.reference import ReferenceAttention
from tests.kernels.scenes import Branch, Scene, head_shape, scene

# One unit in the last place of values around 4.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
BRANCHES = [Branch(cached=5, new=3), Branch(cached=0, new=4), Branch(cached=9, new=1)]


def written(step: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """q and both pools as the kernel leaves them."""
    k_pool_sx, v_pool_sx = step.k_pool_sx.clone(), step.v_pool_sx.clone()
    q_thd = rope_write(
        step.qkv_tx,
        step.cos_sin_pd,
        torch.from_numpy(step.layout.positions_t),
        torch.from_numpy(step.layout.slots_t),
        k_pool_sx,
        v_pool_sx,
        step.shape,
        rotary=step.spec.rotary,
        arch="sm_90",
    )
    return q_thd, k_pool_sx, v_pool_sx


def expected(step: Scene) -> tuple[Tensor, Tensor, Tensor]:
    k_pool_sx, v_pool_sx = step.k_pool_sx.clone(), step.v_pool_sx.clone()
    reference = ReferenceAttention(
        [k_pool_sx], [v_pool_sx], step.shape, [step.spec], step.cos_sin_pd
    )
    return reference.write(step.qkv_tx, 0, step.layout), k_pool_sx, v_pool_sx


class TestTheFusedWrite:
    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 128), (4, 2, 80), (2, 2, 16)]
    )
    def test_writes_what_the_reference_writes(
        self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
    ) -> None:
        step = scene(BRANCHES, head_shape(heads, kv_heads, dim), dtype=dtype, padding=2)

        for found, right in zip(written(step), expected(step), strict=True):
            # Slot 0 took one of the padded rows, whichever came last.
            torch.testing.assert_close(
                found[1:], right[1:], rtol=0, atol=TOLERANCE[dtype], equal_nan=True
            )

    def test_copies_values_bit_for_bit(self) -> None:
        step = scene(BRANCHES, head_shape(4, 2, 64), dtype=torch.bfloat16)
        step.qkv_tx[2, -1], step.qkv_tx[3, -2], step.qkv_tx[4, -3] = torch.inf, -0.0, 3e38

        v_pool_sx = written(step)[2]

        slots_t = torch.from_numpy(step.layout.slots_t)
        assert torch.equal(
            v_pool_sx[slots_t].view(torch.int16), step.qkv_tx[:, -128:].view(torch.int16)
        )

    def test_leaves_other_slots_alone(self) -> None:
        step = scene(BRANCHES, head_shape(9, 3, 64))
        others = torch.ones(len(step.k_pool_sx), dtype=torch.bool)
        others[torch.from_numpy(step.layout.slots_t)] = False

        _, k_pool_sx, v_pool_sx = written(step)

        for found, before in ((k_pool_sx, step.k_pool_sx), (v_pool_sx, step.v_pool_sx)):
            assert torch.equal(found[others].view(torch.int32), before[others].view(torch.int32))

    def test_does_not_rotate_where_a_layer_has_no_rotation(self) -> None:
        step = scene(BRANCHES, head_shape(4, 2, 64), spec=LayerSpec(rotary=False))

        q_thd, k_pool_sx, _ = written(step)

        assert torch.equal(q_thd.flatten(1), step.qkv_tx[:, :256])
        assert torch.equal(
            k_pool_sx[torch.from_numpy(step.layout.slots_t)], step.qkv_tx[:, 256:384]
        )

    def test_reads_rows_that_lie_apart(self) -> None:
        step = scene(BRANCHES, head_shape(4, 2, 64))
        wide_tx = torch.full((len(step.qkv_tx), step.qkv_tx.shape[1] + 24), torch.nan)
        wide_tx[:, : step.qkv_tx.shape[1]] = step.qkv_tx
        apart = Scene(
            step.layout,
            wide_tx[:, : step.qkv_tx.shape[1]],
            step.k_pool_sx,
            step.v_pool_sx,
            step.shape,
            step.spec,
            step.cos_sin_pd,
        )
        q_thd, k_pool_sx, _ = written(apart)

        right_q_thd, right_k_pool_sx, _ = written(step)
        assert torch.equal(q_thd, right_q_thd)
        assert torch.equal(k_pool_sx[1:].nan_to_num(), right_k_pool_sx[1:].nan_to_num())

    def test_takes_positions_and_slots_of_either_width(self) -> None:
        step = scene(BRANCHES, head_shape(4, 2, 64))
        k_pool_sx, v_pool_sx = step.k_pool_sx.clone(), step.v_pool_sx.clone()

        q_thd = rope_write(
            step.qkv_tx,
            step.cos_sin_pd,
            torch.from_numpy(step.layout.positions_t).int(),
            torch.from_numpy(step.layout.slots_t).int(),
            k_pool_sx,
            v_pool_sx,
            step.shape,
            rotary=True,
            arch="sm_90",
        )

        assert torch.equal(q_thd, written(step)[0])

    def test_takes_no_rows(self) -> None:
        step = scene(BRANCHES, head_shape(4, 2, 64))
        none = torch.empty(0, dtype=torch.int64)

        q_thd = rope_write(
            step.qkv_tx[:0],
            step.cos_sin_pd,
            none,
            none,
            step.k_pool_sx,
            step.v_pool_sx,
            step.shape,
            rotary=True,
            arch="sm_90",
        )

        assert q_thd.shape == (0, 4, 64)
