"""The weights of a decoder: which tensors its config implies, and their fused form in memory.

Owns   the names and shapes that a checkpoint of the Llama family must have, and the check that the
       file has these and nothing else.
Holds  every tensor of the file is used, known to be harmless, or the load fails with its name; no
       weight is ever made up. Parts of a fused matrix are read one at a time into their place.
Used   by `registry` (load) and `decoder` (the result).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structgen.errors import CheckpointError
from structgen.models.config import ModelConfig
from structgen.models.linear import Weight, prepared, weight_bytes
from structgen.models.tensors import BlockWeight, TensorSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# llama.cpp's name for the divisors of the rotary frequencies of Llama 3.
ROPE_DIVISORS = "rope_freqs.weight"
# Buffers that older checkpoints carry and the config implies anyway.
_HARMLESS = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; biases are None where the model has none.

    qkv          q, k and v stacked: [(H + 2K) * D, hidden]
    gate_up      gate and up stacked: [2 * intermediate, hidden]
    qk_norm_nd   RMSNorm weights of q's heads, then of k's: [H + K, D]
    """

    input_norm_h: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    qk_norm_nd: Tensor | None
    out: Weight
    out_bias: Tensor | None
    mlp_norm_h: Tensor
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a decoder. A tied head is the embedding itself, one matrix in memory."""

    embedding_vh: Tensor
    layers: tuple[LayerWeights, ...]
    norm_h: Tensor
    head: Weight
    rope_divisors_f: Tensor | None

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one matrix."""
        return not isinstance(self.head, BlockWeight) and self.head.tensor is self.embedding_vh

    @property
    def nbytes(self) -> int:
        """Memory of all of them; a tied head counts once."""
        found = self.embedding_vh.nbytes + self.norm_h.nbytes
        found += 0 if self.tied else weight_bytes(self.head)
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                value = getattr(layer, name)
                if isinstance(value, Tensor):
                    found += value.nbytes
                elif value is not None:
                    found += weight_bytes(value)
        return found


def load_weights(
    config: ModelConfig, source: TensorSource, *, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Check the whole checkpoint against its config, then read it.

    CheckpointError names the tensors that are missing or not accounted for, and both shapes of one
    that has another shape than the config implies. Nothing is read before all checks have passed.
    """
    _check(config, source)
    reader = _Reader(source, dtype, device)
    embedding_vh = reader.tensor(EMBEDDING)
    return Weights(
        embedding_vh=embedding_vh,
        layers=tuple(_layer(reader, config, layer) for layer in range(len(config.layers))),
        norm_h=reader.tensor("model.norm.weight"),
        head=_head(reader, config, embedding_vh),
        rope_divisors_f=reader.optional(ROPE_DIVISORS),
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a checkpoint of this config must hold."""
    shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(len(config.layers)):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.shape.head_dim
    q, kv = config.shape.heads * dim, config.shape.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    matrices = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.out_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, biased in matrices:
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (dim,)
        shapes["self_attn.k_norm.weight"] = (dim,)
    return shapes


def _check(config: ModelConfig, source: TensorSource) -> None:
    expected = expected_shapes(config)
    names = set(source.names())
    missing = sorted(expected.keys() - names)
    if missing:
        advice = ""
        if missing == [HEAD]:
            advice = "; if the head is the embedding, config.json must set tie_word_embeddings"
        raise CheckpointError(f"the checkpoint has no {_some(missing)}{advice}")
    optional: dict[str, tuple[int, ...]] = {ROPE_DIVISORS: (config.shape.head_dim // 2,)}
    if config.tied:
        optional[HEAD] = (config.vocab_size, config.hidden_size)
    known = expected | optional
    extra = sorted(name for name in names - known.keys() if not _HARMLESS.fullmatch(name))
    if extra:
        raise CheckpointError(
            f"the checkpoint holds {_some(extra)}, which {config.architecture} with this config "
            "does not use; refusing to ignore it"
        )
    for name in sorted(known.keys() & names):
        if source.shape(name) != known[name]:
            raise CheckpointError(
                f"{name} has shape {list(source.shape(name))} in the file, but the config implies "
                f"{list(known[name])}"
            )
    if ROPE_DIVISORS in names and config.rope.kind != "default":
        raise CheckpointError(
            f"the checkpoint has {ROPE_DIVISORS} and rope type {config.rope.kind!r}: "
            "the frequencies would be scaled twice"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


class _Reader:
    """Tensors by name, on the device and in the dtype of the model."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str) -> Tensor:
        return self._source.read(name, self._dtype).to(self._device)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self._source.names() else None

    def stacked(self, names: Sequence[str]) -> Tensor:
        shapes = [self._source.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        fused = torch.empty(rows, *shapes[0][1:], dtype=self._dtype, device=self._device)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            fused[row : row + shape[0]] = self._source.read(name, self._dtype)
            row += shape[0]
        return fused


def _layer(reader: _Reader, config: ModelConfig, layer: int) -> LayerWeights:
    at = f"model.layers.{layer}"
    qkv = [f"{at}.self_attn.{which}_proj" for which in "qkv"]
    gate_up = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]

    def matrix(parts: Sequence[str]) -> Weight:
        return prepared(reader.stacked([f"{part}.weight" for part in parts]))

    def bias(parts: Sequence[str], *, present: bool) -> Tensor | None:
        return reader.stacked([f"{part}.bias" for part in parts]) if present else None

    return LayerWeights(
        input_norm_h=reader.tensor(f"{at}.input_layernorm.weight"),
        qkv=matrix(qkv),
        qkv_bias=bias(qkv, present=config.qkv_bias),
        qk_norm_nd=_qk_norm(reader, config, at) if config.qk_norm else None,
        out=matrix([f"{at}.self_attn.o_proj"]),
        out_bias=bias([f"{at}.self_attn.o_proj"], present=config.out_bias),
        mlp_norm_h=reader.tensor(f"{at}.post_attention_layernorm.weight"),
        gate_up=matrix(gate_up),
        gate_up_bias=bias(gate_up, present=config.mlp_bias),
        down=matrix([f"{at}.mlp.down_proj"]),
        down_bias=bias([f"{at}.mlp.down_proj"], present=config.mlp_bias),
    )


def _qk_norm(reader: _Reader, config: ModelConfig, at: str) -> Tensor:
    q_d = reader.tensor(f"{at}.self_attn.q_norm.weight")
    k_d = reader.tensor(f"{at}.self_attn.k_norm.weight")
    shape = config.shape
    return torch.cat([q_d.expand(shape.heads, -1), k_d.expand(shape.kv_heads, -1)])


def _head(reader: _Reader, config: ModelConfig, embedding_vh: Tensor) -> Weight:
    """The head of its own, or the embedding.

    A config that ties the two over a file that holds both: equal ones are shared, different ones
    are both used, since the file is the better witness (transformers decides the same).
    """
    if not config.tied:
        return prepared(reader.tensor(HEAD))
    own_vh = reader.optional(HEAD)
    if own_vh is None or torch.equal(own_vh, embedding_vh):
        return prepared(embedding_vh, shared=True)
    warnings.warn(
        f"config.json ties the head to the embedding, but the file has another {HEAD}: using that",
        stacklevel=2,
    )
    return prepared(own_vh)
