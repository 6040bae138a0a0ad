"""Which call answers which rows on a CPU."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.kernels.cpu_plan import Padded, Part, Shared, Single, parts_of
from tests.kernels.scenes import Branch, layout_of

BRANCHES = st.lists(st.builds(Branch, st.integers(1, 400), st.integers(0, 3)), max_size=12)


def plan(
    branches: list[Branch],
    *,
    window: int | None = None,
    scattered: bool = False,
    gather_rows: int = 1 << 16,
    row_values: int = 192,
) -> tuple[Part, ...]:
    layout, _ = layout_of(branches, scattered=scattered, padding=0, seed=0)
    return parts_of(
        layout, window, gather_rows=gather_rows, row_values=row_values, dtype=torch.float32
    )


def rows_of(part: Part) -> list[int]:
    rows = part.tails.rows if isinstance(part, Shared) else part.rows
    if rows.index is not None:
        return rows.index.tolist()
    return list(range(rows.first, rows.first + rows.count))


class TestParts:
    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(
        branches=BRANCHES.filter(bool),
        window=st.one_of(st.none(), st.integers(1, 50)),
        gather_rows=st.integers(1, 2000),
    )
    def test_every_query_row_is_answered_once(
        self, branches: list[Branch], window: int | None, gather_rows: int
    ) -> None:
        parts = plan(branches, window=window, gather_rows=gather_rows)

        answered = sorted(row for part in parts for row in rows_of(part))
        assert answered == list(range(sum(branch.new for branch in branches)))

    def test_a_lone_decode_on_contiguous_slots_copies_nothing(self) -> None:
        (part,) = plan([Branch(200, 1)])

        assert isinstance(part, Single)
        assert part.own.index is None

    def test_long_decodes_on_contiguous_slots_copy_nothing(self) -> None:
        parts = plan([Branch(900, 1), Branch(800, 1)])

        assert all(isinstance(part, Single) and part.own.index is None for part in parts)

    def test_long_decodes_on_scattered_slots_are_one_call(self) -> None:
        (part,) = plan([Branch(900, 1), Branch(800, 1)], scattered=True)

        assert isinstance(part, Padded)

    def test_decodes_of_similar_length_are_one_call(self) -> None:
        (part,) = plan([Branch(length, 1) for length in (250, 240, 260, 230)])

        assert isinstance(part, Padded)
        assert part.width == 261

    def test_a_much_longer_decode_is_not_padded_to(self) -> None:
        branches = [Branch(4000, 1), Branch(100, 1), Branch(90, 1)]

        parts = plan(branches, scattered=True)

        assert sorted(rows_of(part) for part in parts) == [[0], [1, 2]]

    def test_no_part_gathers_more_than_the_limit(self) -> None:
        parts = plan([Branch(200, 1)] * 8, gather_rows=450)

        gathered = [part.index_g.shape[0] for part in parts if isinstance(part, Padded)]
        assert gathered == [402] * 4

    def test_branches_over_one_prefix_read_it_once(self) -> None:
        branches = [Branch(1024, 1), *(Branch(20, 1, after=0) for _ in range(15))]

        (part,) = plan(branches)

        assert isinstance(part, Shared)
        assert part.prefix.length == 1024
        assert part.tails.width == 22

    def test_a_prefix_too_short_to_pay_is_read_by_each(self) -> None:
        (part,) = plan([Branch(40, 1), Branch(3, 1, after=0), Branch(3, 1, after=0)])

        assert isinstance(part, Padded)

    def test_two_branches_read_a_prefix_once_only_where_that_saves_much(self) -> None:
        short, long = ([Branch(c, 1), Branch(3, 1, after=0)] for c in (400, 800))

        found = [
            any(isinstance(part, Shared) for part in plan(branches, row_values=row))
            for branches, row in ((short, 192), (long, 192), (short, 1024))
        ]

        assert found == [False, True, True]

    def test_a_branch_that_shares_little_does_not_shorten_the_prefix_of_the_others(self) -> None:
        system, trunk = Branch(150, 1), Branch(1000, 1, after=0)
        branches = [system, trunk, *[Branch(5, 1, after=1)] * 6, Branch(30, 1, after=0)]

        parts = plan(branches)

        (shared,) = (part for part in parts if isinstance(part, Shared))
        assert shared.prefix.length == 151 + 1000
        assert rows_of(shared) == [1, 2, 3, 4, 5, 6, 7]

    def test_a_long_chunk_needs_no_mask(self) -> None:
        (part,) = plan([Branch(500, 300)])

        assert isinstance(part, Single)
        assert part.mask_qc is None

    def test_masks_of_a_windowed_prompt_stay_small(self) -> None:
        parts = plan([Branch(0, 4000)], window=500)

        sizes = [
            p.mask_qc.numel() for p in parts if isinstance(p, Single) and p.mask_qc is not None
        ]
        assert len(sizes) == 16
        assert max(sizes) <= 256 * 755
