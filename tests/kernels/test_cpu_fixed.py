"""Rows whose bits are their own: alone and beside others, in chunks and one by one, anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgen.kernels import cpu_fixed
from structgen.kernels.attention import LayerSpec, Layout
from structgen.kernels.cpu_fixed import FixedCpuAttention, chunks_agree
from structgen.kernels.cpu_fixed_plan import BLOCK, COLUMNS, Chunk, Lone, fixed_parts, padded_width
from tests.kernels.scenes import Branch, Scene, head_shape, layout_of, scene

SHAPES = [(9, 3, 64), (4, 2, 16), (8, 1, 16), (1, 1, 16), (14, 2, 8)]
STEP = [Branch(40, 1), Branch(110, 27), Branch(0, 1), Branch(500, 40), Branch(3, 2, after=1)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attention_of(step: Scene, *, moved: int = 0) -> FixedCpuAttention:
    """The attention of a scene, whose pools begin `moved` slots further on in memory."""
    pools = [torch.cat([pool_sx[:moved], pool_sx])[moved:] for pool_sx in pools_of(step)]
    return FixedCpuAttention([pools[0]], [pools[1]], step.shape, [step.spec], step.cos_sin_pd)


def pools_of(step: Scene) -> tuple[Tensor, Tensor]:
    return step.k_pool_sx.clone(), step.v_pool_sx.clone()


def part_of(layout: Layout, sequence: int, low: int, high: int) -> tuple[Layout, slice]:
    """Queries [low, high) of one sequence as a step of their own, and their rows of this one."""
    start, stop = layout.query_start_b1[sequence : sequence + 2].tolist()
    rows = slice(start + low, start + high)
    context = layout.context_b[sequence]
    return (
        Layout(
            np.array([0, high - low]),
            (context[: len(context) - (stop - start) + high],),
            layout.slots_t[rows],
            layout.positions_t[rows],
        ),
        rows,
    )


def cuts(queries: int, step: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, queries, step), queries]))


def assert_alike(step: Scene, size: int) -> None:
    """The whole step gives the bits of each sequence alone, in chunks of `size`."""
    whole, apart = attention_of(step), attention_of(step, moved=1)
    plan = whole.plan(step.layout)
    together_tx = whole.attend(whole.write(step.qkv_tx, 0, plan), 0, plan)
    for sequence, queries in enumerate(np.diff(step.layout.query_start_b1).tolist()):
        for low, high in cuts(queries, size):
            layout, rows = part_of(step.layout, sequence, low, high)
            small = apart.plan(layout)
            out_tx = apart.attend(apart.write(step.qkv_tx[rows], 0, small), 0, small)

            assert torch.equal(out_tx, together_tx[rows])


class TestARow:
    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("heads", SHAPES, ids=str)
    def test_has_the_bits_that_it_has_alone(self, heads: tuple[int, int, int], count: int) -> None:
        with threads(count):
            assert_alike(scene(STEP, head_shape(*heads), padding=2), 1 if count == 1 else 13)

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(
        branches=st.lists(
            st.builds(Branch, cached=st.integers(0, 700), new=st.integers(1, 40)), max_size=3
        ),
        window=st.none() | st.integers(1, 700),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        size=st.integers(1, 20),
    )
    def test_of_any_step_has_the_bits_that_it_has_alone(
        self, branches: list[Branch], window: int | None, dtype: torch.dtype, size: int
    ) -> None:
        spec = LayerSpec(window=window)

        assert_alike(
            scene([*branches, Branch(9, 1)], head_shape(4, 2, 16), dtype=dtype, spec=spec), size
        )


class TestAChunk:
    def test_is_answered_row_by_row_where_its_products_have_other_bits(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = scene(STEP, head_shape(4, 2, 16))
        usual = attention_of(step)
        monkeypatch.setattr(cpu_fixed, "chunks_agree", lambda *_: False)
        careful = attention_of(step)

        plans = [each.plan(step.layout) for each in (usual, careful)]

        assert {type(part) for part in plans[0].parts_l[0]} == {Chunk, Lone}
        assert {type(part) for part in plans[1].parts_l[0]} == {Lone}

    def test_is_tried_before_it_is_trusted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def otherwise(*given: Tensor) -> Tensor:
            return true(*given) + 1e-6  # type: ignore[arg-type]  # the last is a shape

        true = cpu_fixed.chunk_queries
        monkeypatch.setattr(cpu_fixed, "chunk_queries", otherwise)

        assert chunks_agree.__wrapped__(head_shape(4, 2, 16), torch.get_num_threads()) is False

    def test_refuses_a_processor_on_which_company_matters(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def by_count(q_nhd: Tensor, *given: Tensor) -> Tensor:
            return true(q_nhd, *given) + 1e-6 * len(q_nhd)  # type: ignore[arg-type]  # as above

        true = cpu_fixed.lone_queries
        monkeypatch.setattr(cpu_fixed, "lone_queries", by_count)

        with pytest.raises(ValueError, match="deterministic=True"):
            chunks_agree.__wrapped__(head_shape(4, 2, 16), torch.get_num_threads())


class TestColumns:
    def test_are_of_few_numbers_and_hold_what_is_seen(self) -> None:
        tokens = np.arange(1, 5000)
        width = padded_width(tokens)

        assert (width >= tokens).all()
        assert set(width.tolist()) == {*range(COLUMNS, BLOCK, COLUMNS), *range(BLOCK, 5121, BLOCK)}

    def test_of_rows_that_are_answered_together_are_alike_or_of_whole_blocks(self) -> None:
        layout, _ = layout_of(
            [Branch(length, 1) for length in (5, 100, 200, 300, 500, 600, 700, 5000)],
            scattered=True,
            padding=0,
            seed=0,
        )

        parts = fixed_parts(layout, None, gather_rows=1 << 16, chunks=True, pairs=False)

        rows = {part.width: part.rows_n.tolist() for part in parts if isinstance(part, Lone)}
        assert rows == {128: [0, 1], 256: [2], 384: [3], 1024: [5, 6, 4], 5120: [7]}
