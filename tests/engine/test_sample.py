"""Picking tokens: against a slow oracle row by row, against transformers, and statistically."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from structgen.core.batch import LogitEdit, Picked, SamplingRows
from structgen.engine.sample import pick
from structgen.kernels.noise import gumbel

Logits = NDArray[np.float32]
INFINITY = np.float32(np.inf)


class Row(msgspec.Struct, frozen=True):
    """What to do with one row, with the defaults of a greedy one."""

    target: int = -1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    logprobs: int = -1
    mask_row: int = -1


def rows_of(*rows: Row, edits: tuple[LogitEdit, ...] = ()) -> SamplingRows:
    def column(name: str, dtype: type) -> NDArray[Any]:
        return np.array([getattr(row, name) for row in rows], dtype)

    return SamplingRows(
        target_r=column("target", np.int64),
        temperature_r=column("temperature", np.float32),
        top_k_r=column("top_k", np.int32),
        top_p_r=column("top_p", np.float32),
        min_p_r=column("min_p", np.float32),
        seed_r=column("seed", np.int64),
        position_r=column("position", np.int64),
        logprobs_r=column("logprobs", np.int32),
        mask_row_r=column("mask_row", np.int32),
        edits=edits,
    )


def edit(row: int = 0, **changes: Any) -> LogitEdit:
    none: dict[str, Any] = {
        "seen_ids": [],
        "repetition": 1.0,
        "output_ids": [],
        "output_counts": [],
        "frequency": 0.0,
        "presence": 0.0,
        "bias_ids": [],
        "bias_values": [],
        "banned_ids": [],
    }
    filled = none | changes
    for name, value in filled.items():
        if isinstance(value, list):
            filled[name] = np.array(value, np.float32 if name == "bias_values" else np.int64)
    return LogitEdit(row=row, **filled)


def packed(*allowed: set[int], vocabulary: int) -> Tensor:
    """A bitmask that allows these tokens in its rows."""
    mask = np.zeros((len(allowed), -(-vocabulary // 32)), np.uint32)
    for words, tokens in zip(mask, allowed, strict=True):
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(mask.view(np.int32))


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(np.array(rows, np.float32))


def picked_token(logits: Any, row: Row, **options: Any) -> int:
    edits = options.pop("edits", ())
    return int(pick(tensor(logits), rows_of(row, edits=edits), **options).tokens_r[0])


def random_logits(seed: int, *shape: int, spread: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


# ---------------------------------------------------------------- the oracle


def edited(x: Logits, change: LogitEdit) -> Logits:
    x = x.copy()
    for token in set(change.seen_ids.tolist()):
        factor = np.float32(change.repetition)
        x[token] = x[token] * factor if x[token] < 0 else x[token] / factor
    for token, count in zip(change.output_ids, change.output_counts, strict=True):
        x[token] -= np.float32(count) * np.float32(change.frequency) + np.float32(change.presence)
    for token, bias in zip(change.bias_ids, change.bias_values, strict=True):
        x[token] += bias
    for token in change.banned_ids:
        x[token] = -np.inf
    return x


def survivors(z: Logits, row: Row) -> tuple[list[int], float]:
    """Tokens that the filters keep, and how near any of them came to falling the other way."""
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    if row.top_k:
        order = order[: row.top_k]
    weights = [math.exp(z[token]) for token in order]
    total, before, margin = math.fsum(weights), 0.0, 1.0
    kept = []
    for place, (token, weight) in enumerate(zip(order, weights, strict=True)):
        in_p = row.top_p == 1 or before < np.float32(row.top_p) * total or place == 0
        in_min_p = not row.min_p or z[token] >= math.log(np.float32(row.min_p))
        if in_p and in_min_p and z[token] > -np.inf:
            kept.append(token)
        if place > 0 and row.top_p < 1:
            margin = min(margin, float(abs(before / total - np.float32(row.top_p))))
        before += weight
    return kept, margin


def oracle(logits: Logits, row: Row, change: LogitEdit | None, allowed: set[int] | None) -> int:
    """The token to draw; -1 for a broken row, -2 if rounding may decide."""
    if np.isnan(logits).any() or logits.max() in {INFINITY, -INFINITY}:
        return -1
    x = logits if change is None else edited(logits, change)
    if allowed is not None:
        x = np.array([v if t in allowed else -np.inf for t, v in enumerate(x)], np.float32)
    if x.max() == -INFINITY:
        return -1
    temperature = np.float32(row.temperature)
    if temperature == 0:
        return int(x.argmax())
    with np.errstate(over="ignore"):
        z = ((x - x.max()) / temperature).astype(np.float32)
    kept, margin = survivors(z, row)
    if margin < 1e-5:
        return -2
    noise = gumbel(np.array([row.seed]), np.array([row.position]), torch.arange(len(z)))
    score = z + noise[0].numpy()
    return min(kept, key=lambda token: (-score[token], token))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Logits, Row, LogitEdit | None, set[int] | None]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocabulary = draw(st.sampled_from([1, 2, 3, 7, 32, 33, 63, 64, 65, 200, 700, 5000]))
    logits = (rng.standard_normal(vocabulary) * draw(st.sampled_from([0.1, 1, 4]))).astype("f")
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2  # ties
    if draw(st.booleans()):
        logits[rng.random(vocabulary) < 0.4] = -np.inf
    row = Row(
        temperature=draw(st.sampled_from([0.0, 1e-40, 1e-3, 0.5, 1.0, 1.7, 50.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 40, 64, 65, 300, 4096, 9999])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-30, 0.1, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-3, 0.05, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**63 - 1)),
        position=draw(st.integers(0, 2**20)),
    )

    def some(share: float) -> list[int]:
        return [int(t) for t in np.flatnonzero(rng.random(vocabulary) < share)]

    change = None
    if draw(st.booleans()):
        output, bias = some(0.2), some(0.1)
        change = edit(
            seen_ids=some(0.3) + some(0.1),
            repetition=draw(st.sampled_from([1.0, 0.5, 1.3])),
            output_ids=output,
            output_counts=[int(n) for n in rng.integers(1, 9, len(output))],
            frequency=draw(st.sampled_from([0.0, 0.7, -1.0])),
            presence=draw(st.sampled_from([0.0, 0.5, -2.0])),
            bias_ids=bias,
            bias_values=rng.uniform(-100, 100, len(bias)).tolist(),
            banned_ids=some(draw(st.sampled_from([0.0, 0.2, 1.0]))),
        )
    allowed = set(some(draw(st.sampled_from([0.0, 0.3, 0.9])))) if draw(st.booleans()) else None
    return logits, row, change, allowed


class TestEveryRow:
    @given(case=cases())
    @settings(max_examples=300, deadline=None)
    def test_gets_the_token_of_the_oracle(
        self, case: tuple[Logits, Row, LogitEdit | None, set[int] | None]
    ) -> None:
        logits, row, change, allowed = case
        expected = oracle(logits, row, change, allowed)
        mask = None if allowed is None else packed(allowed, vocabulary=len(logits))
        row = row if mask is None else msgspec.structs.replace(row, mask_row=0)

        picked = pick(tensor(logits), rows_of(row, edits=(change,) if change else ()), mask)

        assert expected == -2 or picked.tokens_r[0] == expected
        assert picked.broken_r[0] == (picked.tokens_r[0] < 0)


class TestTransformers:
    """Its processors, chained in its order, then the same noise."""

    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p", "min_p"),
        [
            (0.7, 0, 1.0, 0.0),
            (1.0, 5, 1.0, 0.0),
            (1.3, 0, 0.8, 0.0),
            (1.0, 0, 1.0, 0.1),
            (0.9, 20, 0.7, 0.0),
            (1.5, 300, 0.95, 0.02),
            (4.0, 0, 0.99, 0.0),
        ],
    )
    def test_keeps_the_same_tokens(
        self, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        from transformers.generation import logits_process as theirs

        logits = tensor(*random_logits(1, 40, 1000))
        ids: Any = None  # none of these looks at them
        scores = theirs.TemperatureLogitsWarper(temperature)(ids, logits)
        if top_k:
            scores = theirs.TopKLogitsWarper(top_k)(ids, scores)
        if top_p < 1:
            scores = theirs.TopPLogitsWarper(top_p)(ids, scores)
        if min_p:
            scores = theirs.MinPLogitsWarper(min_p)(ids, scores)
        noise = gumbel(np.arange(40), np.arange(40), torch.arange(1000))
        rows = [
            Row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=n, position=n)
            for n in range(40)
        ]

        picked = pick(logits, rows_of(*rows))

        assert picked.tokens_r.tolist() == (scores + noise).argmax(dim=1).tolist()

    def test_penalises_repetition_the_same_way(self) -> None:
        from transformers.generation import logits_process as theirs

        logits = tensor(random_logits(2, 300))
        seen = np.random.default_rng(0).integers(0, 300, 200)
        scores = theirs.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(seen)[None], logits)

        picked = pick(logits, rows_of(Row(), edits=(edit(seen_ids=seen.tolist(), repetition=1.7),)))

        assert picked.tokens_r[0] == scores.argmax()


class TestGreedy:
    def test_takes_the_largest(self) -> None:
        logits = random_logits(3, 5, 49_152)

        picked = pick(tensor(*logits), rows_of(*[Row()] * 5))

        assert picked.tokens_r.tolist() == logits.argmax(axis=1).tolist()

    def test_takes_the_lowest_id_of_equals(self) -> None:
        assert picked_token([0, 5, 1, 5, 5], Row()) == 1
        assert picked_token(np.zeros(1000), Row()) == 0

    def test_ignores_filters(self) -> None:
        assert picked_token([0, 5, 1], Row(top_k=3, top_p=0.1, min_p=0.5)) == 1

    def test_reports_nothing_that_was_not_wanted(self) -> None:
        picked = pick(tensor([0, 5, 1]), rows_of(Row()))

        assert np.isnan(picked.logprobs_r).all()
        assert picked.top == ((),)
        assert not picked.broken_r.any()

    def test_returns_arrays_of_the_contract(self) -> None:
        picked = pick(tensor([0, 5], [1, 0]), rows_of(Row(), Row(temperature=1.0)))

        assert picked.tokens_r.dtype == np.int64
        assert picked.logprobs_r.dtype == np.float32
        assert picked.broken_r.dtype == np.bool_

    def test_takes_an_empty_batch(self) -> None:
        assert pick(torch.empty(0, 7), rows_of()).tokens_r.shape == (0,)


class TestSampling:
    """Draws at many positions follow the distribution that the filters define."""

    COUNT = 40_000
    PROBABILITY = (0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01)

    def counts(self, row: Row, *, shuffle: bool = True) -> NDArray[np.int64]:
        """How often each token was drawn, likeliest first, however the ids are laid out."""
        order = np.random.default_rng(5).permutation(8) if shuffle else np.arange(8)
        logits = np.empty(8, np.float32)
        logits[order] = np.log(self.PROBABILITY) + 3
        rows = rows_of(*[row] * self.COUNT)
        rows = msgspec.structs.replace(rows, position_r=np.arange(self.COUNT))

        picked = pick(tensor(logits).expand(self.COUNT, 8), rows)
        return np.bincount(picked.tokens_r, minlength=8)[order]

    def chi_square(self, row: Row, expected: list[float]) -> float:
        counts = self.counts(row)
        share = np.array(expected) / sum(expected)
        assert counts[len(share) :].sum() == 0
        wanted = share * self.COUNT
        return float(((counts[: len(share)] - wanted) ** 2 / wanted).sum())

    def test_at_temperature_one(self) -> None:
        assert self.chi_square(Row(temperature=1.0), list(self.PROBABILITY)) < 24.3

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_at_other_temperatures(self, temperature: float) -> None:
        expected = [p ** (1 / temperature) for p in self.PROBABILITY]

        assert self.chi_square(Row(temperature=temperature), expected) < 24.3

    def test_with_top_k(self) -> None:
        assert self.chi_square(Row(temperature=1.0, top_k=3), [0.4, 0.2, 0.15]) < 13.8

    def test_with_top_p(self) -> None:
        assert self.chi_square(Row(temperature=1.0, top_p=0.7), [0.4, 0.2, 0.15]) < 13.8

    def test_with_min_p(self) -> None:
        assert self.chi_square(Row(temperature=1.0, min_p=0.3), [0.4, 0.2, 0.15]) < 13.8

    def test_with_top_p_of_what_top_k_left(self) -> None:
        """0.6 of everything would need two tokens; of the first two, one."""
        assert self.chi_square(Row(temperature=1.0, top_k=2, top_p=0.6), [0.4]) == 0

    def test_with_filters_on_the_tempered_distribution(self) -> None:
        # At temperature 0.5 the squares count: 0.16 of 0.2510 in all, 0.2 with the second.
        row = Row(temperature=0.5, top_p=0.7)

        assert self.chi_square(row, [0.4**2, 0.2**2]) < 10.9

    def test_does_not_depend_on_how_tokens_are_numbered(self) -> None:
        logits = random_logits(8, 100)
        order = np.random.default_rng(1).permutation(100)
        drawn = [picked_token(logits, Row(temperature=1.0, top_k=9, seed=s)) for s in range(20)]
        again = [
            picked_token(logits[order], Row(temperature=1.0, top_k=9, seed=s)) for s in range(20)
        ]

        kept = set(np.argsort(-logits)[:9].tolist())
        assert set(drawn) <= kept
        assert {int(order[token]) for token in again} <= kept

    def test_repeats_for_the_same_seed_and_position(self) -> None:
        logits = random_logits(9, 500)
        row = Row(temperature=1.0, seed=2**63 - 1, position=77)

        assert picked_token(logits, row) == picked_token(logits, row)

    @pytest.mark.parametrize("field", ["seed", "position"])
    def test_varies_with_seed_and_position(self, field: str) -> None:
        logits = random_logits(9, 500, spread=0.1)
        rows = [msgspec.structs.replace(Row(temperature=1.0), **{field: n}) for n in range(50)]

        assert len({picked_token(logits, row) for row in rows}) > 30

    def test_draws_the_unfiltered_token_if_the_filters_keep_it(self) -> None:
        logits = random_logits(10, 60, 3000)
        free = [Row(temperature=1.0, seed=n) for n in range(60)]
        few = [msgspec.structs.replace(row, top_k=40) for row in free]
        kept = np.argsort(-logits, axis=1)[:, :40]

        unfiltered = pick(tensor(*logits), rows_of(*free)).tokens_r
        filtered = pick(tensor(*logits), rows_of(*few)).tokens_r

        inside = (kept == unfiltered[:, None]).any(axis=1)
        assert inside.sum() > 20
        assert (filtered == unfiltered)[inside].all()


class TestFilters:
    def test_of_top_k_one_is_greedy_even_among_equals(self) -> None:
        for seed in range(20):
            assert picked_token([1, 7, 7, 7], Row(temperature=5.0, top_k=1, seed=seed)) == 1

    def test_keep_the_lowest_ids_of_equals_at_the_edge(self) -> None:
        logits = np.full(300, 2.0)
        logits[250] = 3.0
        rows = [Row(temperature=9.0, top_k=4, seed=seed) for seed in range(200)]

        tokens = pick(tensor(*[logits] * 200), rows_of(*rows)).tokens_r

        assert set(tokens.tolist()) == {0, 1, 2, 250}

    def test_of_top_p_cut_equals_by_id_too(self) -> None:
        rows = [Row(temperature=1.0, top_p=0.5, seed=seed) for seed in range(100)]

        tokens = pick(tensor(*[np.zeros(4)] * 100), rows_of(*rows)).tokens_r

        assert set(tokens.tolist()) == {0, 1}

    def test_of_min_p_keep_all_equals(self) -> None:
        rows = [Row(temperature=1.0, min_p=1.0, seed=seed) for seed in range(100)]

        tokens = pick(tensor(*[[4, 1, 4, 4]] * 100), rows_of(*rows)).tokens_r

        assert set(tokens.tolist()) == {0, 2, 3}

    @pytest.mark.parametrize(
        "row",
        [
            Row(temperature=1.0, top_p=1e-45),
            Row(temperature=1.0, top_p=1e-60),
            Row(temperature=1e-45),
            Row(temperature=1e-60),
            Row(temperature=1e-38, top_p=0.5, min_p=0.5, top_k=2),
        ],
    )
    def test_always_leave_the_likeliest(self, row: Row) -> None:
        assert picked_token([1.0, 30.0, 2.0, -1e30], row) == 1

    def test_may_ask_for_more_tokens_than_there_are(self) -> None:
        free, wide = Row(temperature=1.0, seed=4), Row(temperature=1.0, seed=4, top_k=10_000)
        logits = random_logits(11, 90)

        assert picked_token(logits, wide) == picked_token(logits, free)

    def test_never_let_an_impossible_token_through(self) -> None:
        logits = [-np.inf, 0.0, -np.inf, 0.0]
        rows = [Row(temperature=80.0, top_k=k, seed=s) for k in (0, 3) for s in range(100)]

        tokens = pick(tensor(*[logits] * 200), rows_of(*rows)).tokens_r

        assert set(tokens.tolist()) == {1, 3}

    @pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
    def test_widen_until_the_mass_is_covered(self, spread: float) -> None:
        """Flat rows need thousands of tokens: far more than the first prefix holds."""
        logits = random_logits(12, 20_000, spread=spread) + 1
        row = Row(temperature=1.0, top_p=0.9)
        rows = [msgspec.structs.replace(row, seed=seed) for seed in range(30)]
        x = logits - logits.max()
        kept = set(survivors(x, row)[0])

        tokens = pick(tensor(*[logits] * 30), rows_of(*rows)).tokens_r

        free = x + gumbel(np.arange(30), np.zeros(30, np.int64), torch.arange(20_000)).numpy()
        expected = [max(kept, key=lambda token: score[token]) for score in free]
        assert tokens.tolist() == expected


class TestEdits:
    def test_divide_positive_and_multiply_negative_logits_of_seen_tokens(self) -> None:
        change = edit(seen_ids=[0, 2, 0], repetition=2.0)

        assert picked_token([6.0, 3.5, -1.0, 0.0], Row(), edits=(change,)) == 1
        assert picked_token([6.0, 2.5, -1.0, 0.0], Row(), edits=(change,)) == 0
        assert picked_token([-9.0, -2.5, -1.0, -9.0], Row(), edits=(change,)) == 2
        assert picked_token([-9.0, -1.5, -1.0, -9.0], Row(), edits=(change,)) == 1

    def test_subtract_frequency_per_occurrence_and_presence_once(self) -> None:
        change = edit(output_ids=[0, 2], output_counts=[3, 1], frequency=0.5, presence=0.25)

        assert picked_token([5.0, 3.26, 0.0], Row(), edits=(change,)) == 1
        assert picked_token([5.0, 3.24, 0.0], Row(), edits=(change,)) == 0
        assert picked_token([0.0, 4.26, 5.0], Row(), edits=(change,)) == 1
        assert picked_token([0.0, 4.24, 5.0], Row(), edits=(change,)) == 2

    def test_add_bias_as_often_as_it_is_given(self) -> None:
        change = edit(bias_ids=[1, 1, 2], bias_values=[2.0, 2.0, 3.0])

        assert picked_token([3.5, 0.0, 0.0], Row(), edits=(change,)) == 1

    def test_ban_whatever_the_bias(self) -> None:
        change = edit(bias_ids=[1], bias_values=[100.0], banned_ids=[1])

        assert picked_token([1.0, 50.0, 0.0], Row(), edits=(change,)) == 0

    def test_apply_to_their_own_rows(self) -> None:
        logits = tensor(*[[3.0, 2.0, 1.0]] * 4)
        edits = (edit(1, banned_ids=[0]), edit(3, banned_ids=[0, 1]))

        picked = pick(logits, rows_of(*[Row()] * 4, edits=edits))

        assert picked.tokens_r.tolist() == [0, 1, 0, 2]

    def test_come_before_the_temperature(self) -> None:
        change = edit(bias_ids=[0], bias_values=[1.0])
        rows = [Row(temperature=0.01, seed=seed) for seed in range(20)]
        edits = tuple(msgspec.structs.replace(change, row=n) for n in range(20))

        tokens = pick(tensor(*[[0.0, 0.5]] * 20), rows_of(*rows, edits=edits)).tokens_r

        assert set(tokens.tolist()) == {0}

    def test_do_not_touch_the_reported_distribution(self) -> None:
        logits = [2.0, 1.0, 0.0]
        row = Row(temperature=0.1, logprobs=3, mask_row=0)
        change = edit(banned_ids=[0], bias_ids=[2], bias_values=[9.0])

        picked = pick(tensor(logits), rows_of(row, edits=(change,)), packed({0, 2}, vocabulary=3))

        total = math.log(sum(math.exp(x) for x in logits))
        assert picked.tokens_r[0] == 2
        assert picked.logprobs_r[0] == pytest.approx(0.0 - total, rel=1e-6)
        assert [token for token, _ in picked.top[0]] == [0, 1, 2]
        assert [p for _, p in picked.top[0]] == pytest.approx([x - total for x in logits])

    def test_accept_read_only_arrays(self) -> None:
        change = edit(seen_ids=[1], repetition=2.0, banned_ids=[0])
        change.seen_ids.flags.writeable = False
        change.banned_ids.flags.writeable = False

        assert picked_token([9.0, 3.0, 2.0], Row(), edits=(change,)) == 2


class TestMasks:
    @pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 100, 1000])
    def test_allow_exactly_their_tokens(self, vocabulary: int) -> None:
        rng = np.random.default_rng(vocabulary)
        allowed = [set(np.flatnonzero(rng.random(vocabulary) < 0.3).tolist()) for _ in range(20)]
        logits = random_logits(13, 20, vocabulary)

        picked = pick(
            tensor(*logits),
            rows_of(*[Row(mask_row=n) for n in range(20)]),
            packed(*allowed, vocabulary=vocabulary),
        )

        best = [
            max(tokens, key=lambda t: x[t], default=-1)
            for tokens, x in zip(allowed, logits, strict=True)
        ]
        assert picked.tokens_r.tolist() == best

    def test_bind_the_rows_that_name_them(self) -> None:
        mask = packed({2}, {1}, vocabulary=3)
        rows = [Row(mask_row=1), Row(), Row(mask_row=0), Row(mask_row=1), Row()]

        picked = pick(tensor(*[[3.0, 2.0, 1.0]] * 5), rows_of(*rows), mask)

        assert picked.tokens_r.tolist() == [1, 0, 2, 1, 0]

    def test_read_the_last_bit_of_a_word(self) -> None:
        mask = packed({31, 63}, vocabulary=64)

        assert picked_token(np.arange(64), Row(mask_row=0), mask=mask) == 63

    def test_bind_samples_too(self) -> None:
        mask = packed({5, 400}, vocabulary=500)
        rows = [Row(temperature=9.0, mask_row=0, seed=s, top_k=s % 3 * 50) for s in range(100)]

        tokens = pick(tensor(*random_logits(14, 100, 500)), rows_of(*rows), mask).tokens_r

        assert set(tokens.tolist()) == {5, 400}

    @pytest.mark.parametrize("count", [0, 1, 7, 4096, 4097, 8999, 9000])
    @pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
    def test_draw_as_if_all_other_logits_were_infinitely_low(
        self, count: int, temperature: float
    ) -> None:
        rng = np.random.default_rng(count)
        logits = np.round(random_logits(15, 12, 9000), 1)  # with ties
        allowed = [set(rng.choice(9000, count, replace=False).tolist()) for _ in range(12)]
        rows = [Row(temperature=temperature, seed=n, position=n, mask_row=n) for n in range(12)]
        rows[3] = msgspec.structs.replace(rows[3], top_k=1)
        rows[4] = msgspec.structs.replace(rows[4], top_k=50)
        rows[5] = msgspec.structs.replace(rows[5], top_p=0.9)
        rows[6] = msgspec.structs.replace(rows[6], mask_row=-1)
        biased = (edit(7, bias_ids=np.array([3]), bias_values=np.array([4.0], np.float32)),)
        masked = np.full_like(logits, -np.inf)
        for n, tokens in enumerate(allowed):
            free = range(9000) if n == 6 else sorted(tokens)
            masked[n, free] = logits[n, free]
        bare = [msgspec.structs.replace(row, mask_row=-1) for row in rows]

        mask = packed(*allowed, vocabulary=9000)
        picked = pick(tensor(*logits), rows_of(*rows, edits=biased), mask)
        expected = pick(tensor(*masked), rows_of(*bare, edits=biased))

        assert picked.tokens_r.tolist() == expected.tokens_r.tolist()
        assert picked.broken_r.tolist() == expected.broken_r.tolist()


class TestLogprobs:
    def test_are_those_of_the_raw_logits(self) -> None:
        logits = random_logits(15, 6, 2000)
        exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
        rows = [Row(temperature=t, logprobs=0, seed=3) for t in (0.0, 0.5, 1.0, 2.0, 3.0, 4.0)]

        picked = pick(tensor(*logits), rows_of(*rows))

        expected = exact[np.arange(6), picked.tokens_r]
        assert picked.logprobs_r == pytest.approx(expected, abs=1e-5)
        assert picked.top == ((),) * 6

    def test_name_the_likeliest_best_first(self) -> None:
        logits = random_logits(16, 300)
        best = np.argsort(-logits)[:20].tolist()

        picked = pick(tensor(logits, logits), rows_of(Row(logprobs=20), Row(logprobs=3)))

        assert [token for token, _ in picked.top[0]] == best
        assert picked.top[1] == picked.top[0][:3]
        assert picked.top[0][0][1] == picked.logprobs_r[0]

    def test_name_equals_by_rising_id(self) -> None:
        picked = pick(tensor(np.zeros(400)), rows_of(Row(logprobs=5)))

        assert [token for token, _ in picked.top[0]] == [0, 1, 2, 3, 4]

    def test_name_no_more_tokens_than_there_are(self) -> None:
        picked = pick(tensor([1.0, 2.0]), rows_of(Row(logprobs=20)))

        assert [token for token, _ in picked.top[0]] == [1, 0]

    def test_of_targets_score_them(self) -> None:
        logits = [2.0, 1.0, 0.0]
        total = math.log(sum(math.exp(x) for x in logits))

        picked = pick(tensor(logits, logits), rows_of(Row(target=1), Row(target=2, logprobs=1)))

        assert picked.tokens_r.tolist() == [1, 2]
        assert picked.logprobs_r == pytest.approx([1 - total, 0 - total], rel=1e-6)
        assert picked.top[0] == ()
        assert picked.top[1][0][0] == 0

    def test_of_targets_ignore_masks_and_edits(self) -> None:
        rows = rows_of(Row(target=0, mask_row=0), edits=(edit(banned_ids=[0]),))

        picked = pick(tensor([5.0, 1.0]), rows, packed({1}, vocabulary=2))

        assert picked.tokens_r[0] == 0
        assert picked.logprobs_r[0] == pytest.approx(-math.log1p(math.exp(-4.0)), rel=1e-5)

    def test_of_an_impossible_target_are_minus_infinity(self) -> None:
        picked = pick(tensor([0.0, -np.inf]), rows_of(Row(target=1)))

        assert picked.logprobs_r[0] == -np.inf
        assert not picked.broken_r[0]

    def test_of_further_targets_stand_beside_their_row(self) -> None:
        x = random_logits(4, 150, 30)
        x[7, 3] = np.nan
        x[8, 5] = -INFINITY
        rows = rows_of(*(Row(target=row % 30 if row % 3 else -1) for row in range(150)))
        further = {row: np.array([5, 1, 5][: 1 + row % 3]) for row in range(150) if row % 3}
        picked = pick(tensor(*x), msgspec.structs.replace(rows, further=further))
        logprob = torch.log_softmax(tensor(*x), -1).numpy()

        assert picked.further.keys() == further.keys() - {7}
        for row, found in picked.further.items():
            assert found == pytest.approx(logprob[row, further[row]].tolist(), abs=1e-6)
        assert picked.further[8][0] == -math.inf

    def test_of_more_rows_than_are_scored_at_once(self) -> None:
        logits = random_logits(17, 150, 40)
        targets = np.random.default_rng(3).integers(0, 40, 150)
        exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))

        picked = pick(tensor(*logits), rows_of(*[Row(target=int(t)) for t in targets]))

        assert picked.logprobs_r == pytest.approx(exact[np.arange(150), targets], abs=1e-5)


def varied(count: int, vocabulary: int) -> tuple[Logits, list[Row], list[LogitEdit | None]]:
    """Rows of every sort, mixed."""
    rng = np.random.default_rng(18)
    rows = [
        Row(
            target=int(rng.choice([-1, -1, -1, 5])),
            temperature=float(rng.choice([0.0, 0.8, 1.0, 2.0])),
            top_k=int(rng.choice([0, 0, 1, 50, 600])),
            top_p=float(rng.choice([1.0, 1.0, 0.3, 0.95])),
            min_p=float(rng.choice([0.0, 0.0, 0.1])),
            seed=int(rng.integers(0, 2**63)),
            position=n,
            logprobs=int(rng.choice([-1, 0, 1, 5])),
            mask_row=int(rng.choice([-1, -1, 0, 1])),
        )
        for n in range(count)
    ]
    logits = random_logits(19, count, vocabulary)
    logits[::7, :100] = 1.0
    edits = [edit(n, seen_ids=[1, 2], repetition=1.4) if n % 3 == 0 else None for n in range(count)]
    return logits, rows, edits


class TestBatchMates:
    """A row never feels the others, to the last bit."""

    COUNT, VOCABULARY = 30, 49_152

    @staticmethod
    @functools.cache
    def mask() -> Tensor:
        rng = np.random.default_rng(20)
        halves = [np.flatnonzero(rng.random(49_152) < 0.5).tolist() for _ in "ab"]
        return packed(*map(set, halves), vocabulary=49_152)

    def outcome(self, chosen: list[int]) -> list[tuple[Any, ...]]:
        logits, rows, edits = varied(self.COUNT, self.VOCABULARY)
        moved = [
            msgspec.structs.replace(change, row=place)
            for place, row in enumerate(chosen)
            if (change := edits[row])
        ]
        picked = pick(
            torch.from_numpy(logits[chosen]),
            rows_of(*[rows[row] for row in chosen], edits=tuple(moved)),
            self.mask(),
        )
        logprobs = picked.logprobs_r.view(np.int32).tolist()
        return list(zip(picked.tokens_r.tolist(), logprobs, picked.top, strict=True))

    @pytest.fixture(params=[1, 2], ids="{} threads".format)
    def threads(self, request: pytest.FixtureRequest) -> Iterator[int]:
        """With several, torch adds up a lone row in other pieces than one among many."""
        before = torch.get_num_threads()
        torch.set_num_threads(request.param)
        yield request.param
        torch.set_num_threads(before)

    @pytest.mark.usefixtures("threads")
    def test_change_nothing(self) -> None:
        together = self.outcome(list(range(self.COUNT)))

        alone = [self.outcome([row])[0] for row in range(self.COUNT)]
        assert alone == together

    def test_change_nothing_by_their_order_or_number(self) -> None:
        together = self.outcome(list(range(self.COUNT)))
        chosen = np.random.default_rng(21).permutation(self.COUNT)[:17].tolist()

        assert self.outcome(chosen) == [together[row] for row in chosen]


class TestBrokenRows:
    GOOD = (1.0, 4.0, 2.0)

    def outcome(self, *logits: Any, row: Row, mask: Tensor | None = None) -> Picked:
        return pick(tensor(*logits), rows_of(*[row] * len(logits)), mask)

    @pytest.mark.parametrize(
        "row",
        [
            Row(logprobs=2),
            Row(temperature=1.0, logprobs=2),
            Row(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, logprobs=2),
            Row(target=1, logprobs=2),
        ],
        ids=["greedy", "sampled", "filtered", "scored"],
    )
    @pytest.mark.parametrize(
        "bad",
        [
            (np.nan, 4.0, 2.0),
            (1.0, 4.0, np.nan),
            (np.inf, 4.0, 2.0),
            (np.inf, -np.inf, np.nan),
            (-np.inf, -np.inf, -np.inf),
        ],
        ids=str,
    )
    def test_are_flagged_and_disturb_nobody(self, row: Row, bad: Any) -> None:
        alone = self.outcome(self.GOOD, row=row)

        picked = self.outcome(self.GOOD, bad, self.GOOD, row=row)

        assert picked.broken_r.tolist() == [False, True, False]
        assert picked.tokens_r[[0, 2]].tolist() == alone.tokens_r.tolist() * 2
        assert picked.logprobs_r[[0, 2]].tolist() == alone.logprobs_r.tolist() * 2
        assert (picked.tokens_r[1], picked.top[1]) == (-1, ())
        assert np.isnan(picked.logprobs_r[1])

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_are_those_in_which_nothing_is_allowed(self, temperature: float) -> None:
        mask = packed(set(), {1}, vocabulary=3)
        rows = [Row(temperature=temperature, mask_row=n, logprobs=1) for n in (0, 1)]

        picked = pick(tensor(self.GOOD, self.GOOD), rows_of(*rows), mask)

        assert picked.broken_r.tolist() == [True, False]
        assert picked.tokens_r.tolist() == [-1, 1]
        assert picked.top[0] == ()

    def test_are_those_in_which_everything_is_banned(self) -> None:
        change = edit(banned_ids=[0, 1, 2])

        picked = pick(tensor(self.GOOD), rows_of(Row(), edits=(change,)))

        assert picked.broken_r.tolist() == [True]

    def test_are_those_whose_allowed_tokens_are_impossible(self) -> None:
        row = Row(mask_row=0)

        picked = self.outcome((-np.inf, 4.0), row=row, mask=packed({0}, vocabulary=2))

        assert picked.broken_r.tolist() == [True]

    def test_do_not_include_rows_with_impossible_tokens(self) -> None:
        picked = self.outcome((-np.inf, 4.0, -np.inf), row=Row(temperature=1.0, logprobs=3))

        assert not picked.broken_r[0]
        assert picked.tokens_r[0] == 1
        assert picked.top[0] == ((1, 0.0), (0, -math.inf), (2, -math.inf))


class TestTheLogits:
    def test_are_left_as_they_were(self) -> None:
        logits, rows, edits = varied(30, 500)
        given = torch.from_numpy(logits.copy())
        mask = packed(set(range(250)), set(range(100, 500)), vocabulary=500)

        pick(given, rows_of(*rows, edits=tuple(e for e in edits if e)), mask)

        assert np.array_equal(given.numpy(), logits)

    def test_may_come_from_inference_mode(self) -> None:
        with torch.inference_mode():
            logits = tensor([1.0, 2.0]) * 2
        rows = rows_of(
            Row(temperature=1.0, logprobs=1), edits=(edit(bias_ids=[0], bias_values=[9]),)
        )

        assert pick(logits, rows).logprobs_r[0] < 0
