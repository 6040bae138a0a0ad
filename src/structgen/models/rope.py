"""Rotary frequencies of a checkpoint: what config.json says about them, and the table it means.

Owns   the five scalings that the Llama family uses, in the formulas of transformers:
       default   RoFormer (Su et al. 2021)
       linear    position interpolation (kaiokendev; Chen et al. 2023)
       dynamic   NTK-aware base (bloc97, emozilla)
       llama3    three bands of wavelengths (Llama 3.1)
       yarn      NTK by parts with attention temperature (Peng et al. 2023)
Holds  frequencies never depend on the length of a request: rotated keys are cached and shared.
Used   by `config` (reading) and `registry` (the table).

Both spellings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from structgen.errors import CheckpointError

_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# `finetuned` marks how a yarn checkpoint was made; it changes no number.
_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        }
    ),
}


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding of a model.

    kind               default, linear, dynamic, llama3 or yarn
    theta              base of the frequencies
    positions          `max_position_embeddings` of the config
    factor             by which the context was extended; 1 for default
    original           tokens of context before the extension (llama3, yarn)
    low, high          factors that bound the bands of llama3
    attention_factor   on cosines and sines (yarn)
    beta_fast, beta_slow, truncate   the ramp of yarn, in rotations over the original context
    """

    kind: str
    theta: float
    positions: int
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def longest_context(self) -> int:
        """Tokens that the frequencies are made for, extension included."""
        if self.kind in {"linear", "dynamic"}:
            return int(self.positions * self.factor)
        if self.kind == "yarn":
            return max(self.positions, int(self.original * self.factor))
        return self.positions


def read_rope(config: Mapping[str, Any], *, default_theta: float, positions: int) -> Rope:
    """What a config.json says about rotary embedding.

    default_theta   base where the config has none; used with a warning that names it
    positions       `max_position_embeddings`

    CheckpointError for an unknown rope type, a key that its type does not know, and partial
    rotation. Where values are given twice the dictionary wins, as in transformers.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _KEYS:
        known = ", ".join(_KEYS)
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported (known: {known})")
    unknown = sorted(set(given) - _ALWAYS - _KEYS[kind])
    if unknown:
        raise CheckpointError(
            f"config.json: rope type {kind!r} has no parameter {unknown[0]!r} that is known here"
        )
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {partial} is not supported, only 1.0 "
            "(rotation of whole heads)"
        )
    theta = _theta(given, config, default_theta)
    values = {key: value for key, value in given.items() if value is not None}
    if kind == "default":
        return Rope(kind, theta, positions)
    if kind in {"linear", "dynamic"}:
        return Rope(kind, theta, positions, factor=_number(values, "factor", kind))
    original = int(
        config.get("original_max_position_embeddings")
        or values.get("original_max_position_embeddings")
        or positions
    )
    if kind == "llama3":
        return Rope(
            kind,
            theta,
            positions,
            factor=_number(values, "factor", kind),
            original=original,
            low=_number(values, "low_freq_factor", kind),
            high=_number(values, "high_freq_factor", kind),
        )
    return _yarn(values, theta, positions, original)


def rotary_table(
    rope: Rope, head_dim: int, max_context: int, divisors_f: Tensor | None = None
) -> Tensor:
    """Cosines, then sines, of every position: f32[max_context, head_dim], factors included.

    max_context   tokens a sequence may have. `dynamic` frequencies are those of a sequence of
                  just this length, at every length: cached keys were rotated once and are read by
                  requests of any length. Up to `rope.positions` that is no scaling at all.
    divisors_f    divisors of the frequencies, as llama.cpp stores them for Llama 3
    """
    inverse_f = _inverse_frequencies(rope, head_dim, max_context)
    if divisors_f is not None:
        inverse_f = inverse_f / divisors_f.float()
    angles_pf = torch.arange(max_context, dtype=torch.float32)[:, None] * inverse_f
    return torch.cat([angles_pf.cos(), angles_pf.sin()], dim=-1) * rope.attention_factor


def _theta(given: Mapping[str, Any], config: Mapping[str, Any], default: float) -> float:
    theta = given.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        warnings.warn(
            f"config.json has no rope_theta; using {default}, the default of this family. "
            "If the model writes nonsense, this is why.",
            stacklevel=2,
        )
        return default
    return float(theta)


def _number(values: Mapping[str, Any], key: str, kind: str) -> float:
    if key not in values:
        raise CheckpointError(f"config.json: rope type {kind!r} needs {key!r}")
    return float(values[key])


def _yarn(values: Mapping[str, Any], theta: float, positions: int, original: int) -> Rope:
    factor = float(values.get("factor") or positions / original)
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = values.get("mscale"), values.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _temperature(factor, mscale) / _temperature(factor, all_dim)
        else:
            attention_factor = _temperature(factor, 1.0)
    return Rope(
        "yarn",
        theta,
        positions,
        factor=factor,
        original=original,
        attention_factor=float(attention_factor),
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
    )


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _inverse_frequencies(rope: Rope, dim: int, max_context: int) -> Tensor:
    theta = rope.theta
    if rope.kind == "dynamic":
        # Growth of the base that keeps the longest wavelength in range of the longest sequence.
        length = max(max_context, rope.positions)
        growth = rope.factor * length / rope.positions - (rope.factor - 1)
        theta = theta * growth ** (dim / (dim - 2))
    inverse_f = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    if rope.kind == "linear":
        return inverse_f / rope.factor
    if rope.kind == "llama3":
        return _llama3_bands(rope, inverse_f)
    if rope.kind == "yarn":
        return _yarn_ramp(rope, inverse_f, dim)
    return inverse_f


def _llama3_bands(rope: Rope, inverse_f: Tensor) -> Tensor:
    """Short wavelengths stay, long ones are stretched by the factor, the band between blends."""
    wavelength_f = 2 * math.pi / inverse_f
    stretched_f = inverse_f / rope.factor
    blend_f = (rope.original / wavelength_f - rope.low) / (rope.high - rope.low)
    blended_f = (1 - blend_f) * stretched_f + blend_f * inverse_f
    result_f = torch.where(wavelength_f > rope.original / rope.low, stretched_f, blended_f)
    return torch.where(wavelength_f < rope.original / rope.high, inverse_f, result_f)


def _yarn_ramp(rope: Rope, inverse_f: Tensor, dim: int) -> Tensor:
    """A ramp over the components, from those that turn often to those that hardly turn."""

    def component(rotations: float) -> float:
        turns = rope.original / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = component(rope.beta_fast), component(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp_f = ((torch.arange(dim // 2).float() - low) / width).clamp(0, 1)
    return inverse_f / rope.factor * ramp_f + inverse_f * (1 - ramp_f)
