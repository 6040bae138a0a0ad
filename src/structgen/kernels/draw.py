"""Draws from rows of tempered logits, whole or filtered by top-k, top-p and min-p.

Owns   the order of the filters and every rule about ties. Owns no state.
Holds  a row's draw is a function of that row and its terms alone, bit for bit; it is the token
       with the largest logit + Gumbel noise among those that the filters keep, so a filter that
       keeps the token of the unfiltered draw does not change it.
Used   by `engine/sample.py`, and as the reference for kernels that draw on other devices.

The filters, in the order of transformers, on z = (logit - largest logit of the row) / temperature:
    top-k   the k largest
    top-p   of these, renormalised, the shortest prefix (largest first) whose mass reaches p: a
            token stays while the mass before it is less than p
    min-p   of these, the tokens at least min_p times as likely as the likeliest
Of equal values the lower id counts as the larger, everywhere; so exactly k tokens survive top-k,
top-k of 1 is greedy, and the likeliest token always survives. A token at -inf never does.

Sorting a row costs 40 times as much as finding its 64 largest, so no row is sorted for its
filters alone. A prefix of the order usually decides. Where a top-p leaves a wider one, tokens are
tried by falling score instead: whether one is inside needs only the mass of the larger ones.

    N rows    V vocabulary    W width of a prefix of the sorted row
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgen.kernels.noise import gumbel

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

# Prefixes of the sorted row to try, and the widest that a row without a top-k is worth.
_WIDTHS = (64, 512, 4096)
_WIDEST_OPEN = 512
# Rows whose noise is made at once: a dozen passes over it should find it in the cache.
_NOISY_ROWS = 8


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of each row's draw, on the host.

    top_k_n           i32; 0 for no limit
    top_p_n, min_p_n  f32; 1 and 0 for no limit
    seed_n            i64
    position_n        i64; the noise counter
    """

    top_k_n: NDArray[np.int32]
    top_p_n: Floats
    min_p_n: Floats
    seed_n: NDArray[np.int64]
    position_n: NDArray[np.int64]

    def __getitem__(self, index: Tokens | Flags | slice) -> Terms:
        return Terms(
            self.top_k_n[index],
            self.top_p_n[index],
            self.min_p_n[index],
            self.seed_n[index],
            self.position_n[index],
        )

    def noise(self, tokens: Tensor) -> Tensor:
        """Gumbel noise of tokens [C], or of other tokens in each row [N, C]."""
        return gumbel(self.seed_n, self.position_n, tokens)


def peaks(x_nv: Tensor) -> tuple[Floats, Tokens]:
    """The largest value of each row and its lowest id; the value is NaN if the row has one."""
    if x_nv.is_cpu:
        # numpy's argmax is vectorised and torch's is not: 3 against 42 us for 49,152 values.
        host_nv = x_nv.numpy()
        id_n = host_nv.argmax(axis=1)
        return host_nv[np.arange(len(id_n)), id_n], id_n
    value_n, index_n = x_nv.max(dim=1)
    return value_n.cpu().numpy(), index_n.cpu().numpy()


def leaders(x_nv: Tensor, count: int) -> tuple[Floats, Tokens]:
    """The `count` largest values of each row and their ids, by falling value, then rising id."""
    if count == x_nv.shape[1]:
        values, indices = torch.sort(x_nv, dim=1, descending=True, stable=True)
        return values.cpu().numpy(), indices.cpu().numpy()
    # One more than asked shows whether the last place is shared; topk breaks ties at random.
    values, indices = torch.topk(x_nv, count + 1, dim=1)
    value_nw, id_nw = values.cpu().numpy(), indices.cpu().numpy()
    for n in np.flatnonzero(value_nw[:, count - 1] == value_nw[:, count]):
        last = value_nw[n, count]
        above = int((value_nw[n] > last).sum())
        # Those above are all there, in front; of the equals the lowest ids belong behind them.
        equals = (x_nv[n] == float(last)).nonzero()[: count - above, 0]
        id_nw[n, above:count] = equals.cpu().numpy()
    value_nw, id_nw = value_nw[:, :count], id_nw[:, :count]
    order_nw = np.lexsort((id_nw, -value_nw), axis=1)
    return np.take_along_axis(value_nw, order_nw, 1), np.take_along_axis(id_nw, order_nw, 1)


def some(x_nv: Tensor, chosen_n: Flags) -> Tensor:
    """The chosen rows; the tensor itself, uncopied, if that is all of them."""
    return x_nv if chosen_n.all() else x_nv[torch.from_numpy(chosen_n).to(x_nv.device)]


def draw(z_nv: Tensor, terms: Terms) -> Tokens:
    """Draw a token from each row.

    z_nv   float32; logits less the row's largest, over a temperature: the largest is 0
    """
    filtered_n = (terms.top_k_n > 0) & (terms.top_k_n < z_nv.shape[1])
    filtered_n |= (terms.top_p_n < 1) | (terms.min_p_n > 0)
    token_n = np.empty(len(filtered_n), np.int64)
    if filtered_n.any():
        token_n[filtered_n] = _draw_filtered(some(z_nv, filtered_n), terms[filtered_n])
    if not filtered_n.all():
        token_n[~filtered_n] = _draw_free(some(z_nv, ~filtered_n), terms[~filtered_n])
    return token_n


def _draw_free(z_nv: Tensor, terms: Terms) -> Tokens:
    everything = _everything(z_nv)
    token_n = np.empty(len(z_nv), np.int64)
    for start in range(0, len(z_nv), _NOISY_ROWS):
        part = slice(start, start + _NOISY_ROWS)
        token_n[part] = peaks(terms[part].noise(everything).add_(z_nv[part]))[1]
    return token_n


def _everything(z_nv: Tensor) -> Tensor:
    return torch.arange(z_nv.shape[1], dtype=torch.int32, device=z_nv.device)


def _draw_filtered(z_nv: Tensor, terms: Terms) -> Tokens:
    vocabulary = z_nv.shape[1]
    limit_n = np.where(terms.top_k_n > 0, np.minimum(terms.top_k_n, vocabulary), vocabulary)
    unlimited_n = limit_n == vocabulary
    mass_n = _masses(z_nv, unlimited_n & (terms.top_p_n < 1))
    token_n = np.empty(len(limit_n), np.int64)
    open_n = np.ones(len(limit_n), np.bool_)
    for width in (*(width for width in _WIDTHS if width < vocabulary), vocabulary):
        # A row with a limit waits for a prefix that holds it; one without may be decided by any.
        now_n = open_n & np.where(unlimited_n, width <= _WIDEST_OPEN, limit_n <= width)
        if not now_n.any():
            continue
        now = np.flatnonzero(now_n)
        value_nw, id_nw = leaders(some(z_nv, now_n), width)
        kept_n, decided_n = _kept(value_nw, limit_n[now], mass_n[now], terms[now])
        done = now[decided_n]
        if done.size:
            token_n[done] = _draw_prefix(
                value_nw[decided_n], id_nw[decided_n], kept_n[decided_n], terms[done]
            )
        open_n[done] = False
    for n in np.flatnonzero(open_n):
        token_n[n] = _draw_nucleus(z_nv[n : n + 1], mass_n[n], terms[n : n + 1])
    return token_n


def _masses(z_nv: Tensor, wanted_n: Flags) -> NDArray[np.float64]:
    """The sum of exp(z) over each wanted row; 0 for others."""
    mass_n = np.zeros(len(wanted_n), np.float64)
    if wanted_n.any():
        # The largest z is 0, so its probability is 1 / mass. Unlike a plain sum, softmax adds up
        # each row in the same order however many rows there are.
        peak_n = torch.softmax(some(z_nv, wanted_n), dim=-1).amax(dim=-1)
        mass_n[wanted_n] = 1.0 / peak_n.cpu().numpy().astype(np.float64)
    return mass_n


def _floors(terms: Terms) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(terms.min_p_n.astype(np.float64))


def _kept(
    z_nw: Floats, limit_n: NDArray[np.int32], mass_n: NDArray[np.float64], terms: Terms
) -> tuple[NDArray[np.int64], Flags]:
    """How many tokens at the front of each row pass its filters, and whether that is decided.

    z_nw      the W largest of each row, falling
    limit_n   top-k, V for none
    mass_n    sum of exp(z) over the row, 0 where the mass of the first `limit_n` counts

    A row is undecided if tokens past the prefix might pass as well.
    """
    count, width = z_nw.shape
    reach_nw = np.cumsum(np.exp(z_nw, dtype=np.float64), axis=1)
    before_nw = np.zeros_like(reach_nw)
    before_nw[:, 1:] = reach_nw[:, :-1]
    inside_n = np.minimum(limit_n, width)
    mass_n = np.where(mass_n > 0, mass_n, reach_nw[np.arange(count), inside_n - 1])
    top_p_n = terms.top_p_n.astype(np.float64)
    # Rounding must not let a p of 1 drop the last token.
    bound_n = np.where(top_p_n < 1, top_p_n * mass_n, np.inf)
    keep_nw = (np.arange(width) < inside_n[:, None]) & (before_nw < bound_n[:, None])
    keep_nw &= (z_nw >= _floors(terms)[:, None]) & (z_nw > -np.inf)
    # A p that is zero as a float32 still leaves the likeliest.
    keep_nw[:, 0] = True
    # Each condition holds for a prefix of the row, so the first that fails ends them all.
    decided_n = ~keep_nw[:, -1] | (limit_n <= width) | (reach_nw[:, -1] >= bound_n)
    return keep_nw.sum(axis=1), decided_n


def _draw_prefix(z_nw: Floats, id_nw: Tokens, kept_n: NDArray[np.int64], terms: Terms) -> Tokens:
    """Draw from the first `kept_n` tokens of each sorted row."""
    width = int(kept_n.max())
    z_nw, id_nw = z_nw[:, :width], id_nw[:, :width]
    score_nw = z_nw + terms.noise(torch.from_numpy(id_nw)).numpy()
    score_nw[np.arange(width) >= kept_n[:, None]] = -np.inf
    best_nw = score_nw == score_nw.max(axis=1, keepdims=True)
    lowest_n: Tokens = np.where(best_nw, id_nw, np.iinfo(np.int64).max).min(axis=1)
    return lowest_n


def _draw_nucleus(z_1v: Tensor, mass: float, terms: Terms) -> int:
    """Draw from a row without top-k, of which top-p or min-p leave many tokens.

    Tokens are tried by falling score; the first one inside is the draw. One that is outside rules
    out all that come after it in the order, so few are tried: about log(1 / p) before the last.
    """
    score_v = terms.noise(_everything(z_1v)).add_(z_1v)[0].cpu().numpy()
    z_v = z_1v[0].cpu().numpy()
    weight_v = np.exp(z_v)
    top_p = float(terms.top_p_n[0])
    bound = top_p * mass if top_p < 1 else np.inf
    score_v[z_v < _floors(terms)[0]] = -np.inf
    while True:
        token = int(score_v.argmax())
        equals = np.flatnonzero(z_v[:token] == z_v[token]).size
        larger = weight_v[z_v > z_v[token]].sum(dtype=np.float64)
        if larger + equals * float(weight_v[token]) < bound:
            return token
        score_v[z_v < z_v[token]] = -np.inf
        score_v[token:][z_v[token:] == z_v[token]] = -np.inf
