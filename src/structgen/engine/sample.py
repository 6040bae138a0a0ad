"""Logits to tokens: edits, grammar mask, temperature, filters, noise, log-probabilities.

Owns   the order in which these apply, and every rule about ties. Owns no state and no tensor.
Holds  the outcome of a row is a function of that row alone, bit for bit; a row that is not
       finite, or in which nothing is allowed, is reported and disturbs no other.
Used   by the worker, once a step.

A drawn row passes these stages in this order:
    1  edits: repetition penalty, frequency and presence penalty, bias, ban
    2  grammar mask
    3  temperature; 0 takes the largest and ends here
    4  top-k, top-p and min-p, and a draw from what they leave: see `kernels/draw.py`
Of equal values the lower id counts as the larger, everywhere.

A token at -inf has probability zero, which is no fault. NaN, +inf, or nothing above -inf is.

    R logit rows    N some of them    V vocabulary
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.core.batch import LogitEdit, Picked, SamplingRows
from structgen.kernels.choose import Sampler
from structgen.kernels.draw import Terms, draw, leaders, peaks, some
from structgen.kernels.noise import gumbel

# Rows whose log-softmax is held at once: bounds memory when a whole prompt is scored.
_SCORED_ROWS = 64

# A mask that allows no more tokens than this is worth a look at those alone.
_FEW = 4096
_BITS = np.array([byte.bit_count() for byte in range(256)], np.uint8)  # set in each byte

Top = tuple[tuple[int, float], ...]


def pick(
    logits_rv: Tensor,
    rows: SamplingRows,
    mask: Tensor | None = None,
    sampler: Sampler | None = None,
) -> Picked:
    """Draw a token or score the targets of each row.

    logits_rv   float32 [R, V]; not modified
    rows        what to do with each row; edits and mask of rows with a target are ignored
    mask        int32 [masks, ceil(V / 32)]: bit i of word w allows token 32 * w + i;
                needed if any `mask_row_r` is not -1
    sampler     does stages 2 to 4 on the device of the logits; None: torch does

    A broken row has token -1, log-probability NaN and nothing further. With k > V there are only
    V alternatives.
    """
    peak_r, token_r = peaks(logits_rv)
    broken_r = ~np.isfinite(peak_r)
    token_r = np.where(rows.target_r < 0, token_r, rows.target_r)
    shaped_r = _shaped(rows) & ~broken_r
    if mask is not None and mask.is_cpu and sampler is None:
        shaped_r &= ~_legal_peaks(rows, token_r, mask)
    if (drawn := np.flatnonzero(shaped_r)).size:
        token_r[drawn] = (
            _draw(logits_rv, rows, drawn, mask)
            if sampler is None
            else _draw_by(sampler, logits_rv, rows, drawn, mask)
        )
        broken_r |= token_r < 0
    token_r[broken_r] = -1
    logprob_r = np.full(token_r.shape, np.nan, np.float32)
    top: list[Top] = [()] * len(token_r)
    further: dict[int, tuple[float, ...]] = {}
    wanted = np.flatnonzero(((rows.target_r >= 0) | (rows.logprobs_r >= 0)) & ~broken_r)
    for start in range(0, len(wanted), _SCORED_ROWS):
        part = wanted[start : start + _SCORED_ROWS]
        logprob_r[part], tops, others = _score(logits_rv, rows, part, token_r[part])
        for row, alternatives in zip(part, tops, strict=True):
            top[row] = alternatives
        further |= others
    return Picked(token_r, logprob_r, tuple(top), broken_r, further)


def _shaped(rows: SamplingRows) -> NDArray[np.bool_]:
    """The drawn rows for which the argmax of the raw logits is not the answer."""
    shaped_r: NDArray[np.bool_] = (rows.temperature_r > 0) & (rows.top_k_r != 1)
    shaped_r |= rows.mask_row_r >= 0
    shaped_r[[edit.row for edit in rows.edits]] = True
    return shaped_r & (rows.target_r < 0)


def _legal_peaks(rows: SamplingRows, token_r: NDArray[np.int64], mask: Tensor) -> NDArray[np.bool_]:
    """The greedy rows whose likeliest token the mask allows: no other token can be drawn there."""
    legal_r: NDArray[np.bool_] = (rows.temperature_r == 0) | (rows.top_k_r == 1)
    legal_r &= (rows.mask_row_r >= 0) & (rows.target_r < 0)
    legal_r[[edit.row for edit in rows.edits]] = False
    token_n = token_r[legal_r]
    word_n = mask.numpy()[rows.mask_row_r[legal_r], token_n >> 5]
    legal_r[legal_r] = (word_n >> (token_n & 31).astype(np.int32)) & 1 == 1
    return legal_r


# ---------------------------------------------------------------- drawing


def _draw(
    logits_rv: Tensor, rows: SamplingRows, drawn: NDArray[np.int64], mask: Tensor | None
) -> NDArray[np.int64]:
    """Tokens of the rows `drawn`; -1 where edits and mask leave nothing, or nothing finite."""
    if mask is not None and mask.is_cpu and (few_n := _with_few(rows, drawn, mask)).any():
        token_n = np.empty(len(drawn), np.int64)
        token_n[few_n] = _draw_few(logits_rv, rows, drawn[few_n], mask)
        if not few_n.all():
            token_n[~few_n] = _draw(logits_rv, rows, drawn[~few_n], mask)
        return token_n
    x_nv = _edited(logits_rv, rows, drawn)
    if (mask_row_n := rows.mask_row_r[drawn]).max() >= 0:
        assert mask is not None, "rows are bound to a mask, but there is none"
        _constrain(x_nv, mask_row_n, mask)
    peak_n, token_n = peaks(x_nv)
    finite_n = np.isfinite(peak_n)
    token_n[~finite_n] = -1
    noisy_n = finite_n & (rows.temperature_r[drawn] > 0) & (rows.top_k_r[drawn] != 1)
    if noisy_n.any():
        token_n[noisy_n] = _sample(some(x_nv, noisy_n), peak_n[noisy_n], rows, drawn[noisy_n])
    return token_n


def _draw_by(
    sampler: Sampler,
    logits_rv: Tensor,
    rows: SamplingRows,
    drawn: NDArray[np.int64],
    mask: Tensor | None,
) -> NDArray[np.int64]:
    """As `_draw`, with everything after the edits left to the sampler."""
    whole = not rows.edits and len(drawn) == len(logits_rv)
    x_nv = logits_rv if whole else _edited(logits_rv, rows, drawn)
    return sampler(
        x_nv, rows.temperature_r[drawn], _terms(rows)[drawn], rows.mask_row_r[drawn], mask
    )


def _edited(logits_rv: Tensor, rows: SamplingRows, drawn: NDArray[np.int64]) -> Tensor:
    """The rows `drawn` after their edits [N, V]."""
    # A copy, because the raw logits are needed for log-probabilities afterwards.
    x_nv = logits_rv[torch.from_numpy(drawn).to(logits_rv.device)]
    place = {int(row): n for n, row in enumerate(drawn)}
    for edit in rows.edits:
        if edit.row in place:
            _edit(x_nv[place[edit.row]], edit)
    return x_nv


def _terms(rows: SamplingRows) -> Terms:
    return Terms(rows.top_k_r, rows.top_p_r, rows.min_p_r, rows.seed_r, rows.position_r)


def _with_few(rows: SamplingRows, drawn: NDArray[np.int64], mask: Tensor) -> NDArray[np.bool_]:
    """Which of the rows `drawn` have neither edits nor filters, and a mask that allows few tokens.

    Looking at those alone, a masked row costs less than one without a mask, noise above all.
    """
    plain_n: NDArray[np.bool_] = (rows.top_k_r[drawn] == 0) & (rows.top_p_r[drawn] == 1)
    plain_n &= rows.min_p_r[drawn] == 0
    plain_n |= (rows.temperature_r[drawn] == 0) | (rows.top_k_r[drawn] == 1)
    plain_n &= rows.mask_row_r[drawn] >= 0
    plain_n &= ~np.isin(drawn, [edit.row for edit in rows.edits])
    if plain_n.any():
        words = mask.numpy()[rows.mask_row_r[drawn[plain_n]]]
        count_n: NDArray[np.int64] = _BITS.take(words.view(np.uint8)).sum(axis=1, dtype=np.int64)
        plain_n[plain_n] = count_n <= _FEW
    return plain_n


def _draw_few(
    logits_rv: Tensor, rows: SamplingRows, drawn: NDArray[np.int64], mask: Tensor
) -> NDArray[np.int64]:
    """Draw from the tokens that masks allow; the same as if all others were sent to -inf."""
    words = mask.numpy()[rows.mask_row_r[drawn]]
    bits_nv = np.unpackbits(
        words.view(np.uint8), axis=1, count=logits_rv.shape[1], bitorder="little"
    )
    # Of one dimension because that is what numpy is fast in.
    row, token = np.divmod(np.flatnonzero(bits_nv.view(np.bool_)), logits_rv.shape[1])
    count_n = np.bincount(row, minlength=len(drawn))
    # Each row's tokens, ascending, in front; behind them what is never drawn.
    place = np.arange(len(row)) - np.repeat(np.cumsum(count_n) - count_n, count_n)
    id_nc = np.zeros((len(drawn), max(int(count_n.max()), 1)), np.int64)
    id_nc[row, place] = token
    host_nc = np.full(id_nc.shape, -np.inf, np.float32)
    host_nc[row, place] = logits_rv.numpy()[drawn[row], token]
    x_nc = torch.from_numpy(host_nc)
    peak_n, at_n = peaks(x_nc)
    finite_n = np.isfinite(peak_n)
    noisy_n = finite_n & (rows.temperature_r[drawn] > 0) & (rows.top_k_r[drawn] != 1)
    if noisy_n.any():
        chosen = drawn[noisy_n]
        z_nc = some(x_nc, noisy_n)
        # As in `_sample`.
        z_nc -= torch.from_numpy(peak_n[noisy_n])[:, None]
        z_nc /= torch.from_numpy(rows.temperature_r[chosen])[:, None]
        noise = gumbel(
            rows.seed_r[chosen], rows.position_r[chosen], torch.from_numpy(id_nc[noisy_n])
        )
        at_n[noisy_n] = peaks(noise.add_(z_nc))[1]
    token_n: NDArray[np.int64] = np.where(finite_n, id_nc[np.arange(len(drawn)), at_n], -1)
    return token_n


def _edit(x_v: Tensor, edit: LogitEdit) -> None:
    """Apply `edit` to one row in place, in the order that `LogitEdit` lays down."""
    if edit.repetition != 1.0 and edit.seen_ids.size:
        # Duplicates are harmless: each writes the same value, computed from the old one.
        seen = _on(edit.seen_ids, x_v)
        old = x_v[seen]
        x_v[seen] = torch.where(old < 0, old * edit.repetition, old / edit.repetition)
    if (edit.frequency or edit.presence) and edit.output_ids.size:
        count = _on(edit.output_counts, x_v).to(torch.float32)
        x_v[_on(edit.output_ids, x_v)] -= count * edit.frequency + edit.presence
    if edit.bias_ids.size:
        x_v.index_add_(0, _on(edit.bias_ids, x_v), _on(edit.bias_values, x_v))
    if edit.banned_ids.size:
        x_v.index_fill_(0, _on(edit.banned_ids, x_v), -torch.inf)


def _on(values: NDArray[Any], like: Tensor) -> Tensor:
    # Copies, because torch refuses to borrow read-only arrays without a warning.
    return torch.tensor(values, device=like.device)


@functools.cache
def _byte_bias(device: torch.device) -> Tensor:
    """What the eight bits of each byte add to eight logits: 0 or -inf, float32 [256, 8]."""
    bit = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bit == 0, -torch.inf)


def _constrain(x_nv: Tensor, mask_row_n: NDArray[np.int32], mask: Tensor) -> None:
    """Send every token that a row's mask does not allow to -inf, in place."""
    vocabulary = x_nv.shape[1]
    assert mask.shape[1] == -(-vocabulary // 32), "the mask is not as wide as the logits"
    bound = np.flatnonzero(mask_row_n >= 0)
    row = torch.from_numpy(mask_row_n[bound].astype(np.int64)).to(mask.device)
    # As bytes, in which bit i of word w is bit i % 8 of byte 4 * w + i / 8 on little-endian hosts.
    # One table look-up a byte and an addition take a third of the time of a boolean fill.
    byte = mask[row].view(torch.uint8).to(torch.int32)
    bias_nv = torch.nn.functional.embedding(byte, _byte_bias(mask.device)).flatten(1)
    if len(bound) == len(mask_row_n):
        x_nv += bias_nv[:, :vocabulary]
    else:
        x_nv[torch.from_numpy(bound).to(x_nv.device)] += bias_nv[:, :vocabulary]


def _sample(
    x_nv: Tensor, peak_n: NDArray[np.float32], rows: SamplingRows, row_n: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Draw from each row at its temperature, which is above 0; `x_nv` is overwritten.

    peak_n   the largest value of each row
    row_n    which of `rows` each is
    """
    # The peak goes first: then no temperature, however small, can make an infinity above zero.
    x_nv -= torch.from_numpy(peak_n).to(x_nv.device)[:, None]
    x_nv /= torch.from_numpy(rows.temperature_r[row_n]).to(x_nv.device)[:, None]
    return draw(x_nv, _terms(rows)[row_n])


# ---------------------------------------------------------------- log-probabilities


def _score(
    logits_rv: Tensor,
    rows: SamplingRows,
    wanted: NDArray[np.int64],
    token_n: NDArray[np.int64],
) -> tuple[NDArray[np.float32], list[Top], dict[int, tuple[float, ...]]]:
    """Log-probabilities under the raw logits of the wanted rows.

    Of a token in each, of the likeliest where they are wanted, and by row of its further targets.
    """
    # Like softmax, it treats each row alike however many there are.
    logprob_nv = torch.log_softmax(logits_rv[torch.from_numpy(wanted).to(logits_rv.device)], -1)
    token_n1 = torch.from_numpy(token_n).to(logits_rv.device)[:, None]
    chosen_n: NDArray[np.float32] = logprob_nv.gather(1, token_n1)[:, 0].cpu().numpy()
    top: list[Top] = [()] * len(wanted)
    count_n = rows.logprobs_r[wanted]
    if (ranked_n := count_n > 0).any():
        most = min(int(count_n.max()), logits_rv.shape[1])
        value_nw, id_nw = leaders(some(logprob_nv, ranked_n), most)
        for n, values, ids in zip(np.flatnonzero(ranked_n), value_nw, id_nw, strict=True):
            k = int(count_n[n])
            top[n] = tuple(zip(ids[:k].tolist(), values[:k].tolist(), strict=True))
    return chosen_n, top, _further(logprob_nv, rows, wanted)


def _further(
    logprob_nv: Tensor, rows: SamplingRows, wanted: NDArray[np.int64]
) -> dict[int, tuple[float, ...]]:
    """By row, where it has further targets: their log-probabilities."""
    place = {n: row for n, row in enumerate(wanted.tolist()) if row in rows.further}
    if not place:
        return {}
    ids = [rows.further[row] for row in place.values()]
    length = [len(each) for each in ids]
    # One look-up for all of them: a choice may have thousands of tokens, or a step many choices.
    n_f = _on(np.repeat(list(place), length), logprob_nv)
    found: list[float] = logprob_nv[n_f, _on(np.concatenate(ids), logprob_nv)].tolist()
    ends = np.cumsum(length).tolist()
    return {
        row: tuple(found[end - count : end])
        for row, end, count in zip(place.values(), ends, length, strict=True)
    }
