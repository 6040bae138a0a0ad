"""What a config.json means: the sizes and switches of a decoder of the Llama family.

Owns   `ModelConfig`, and `FAMILIES`: where Llama, Mistral, Qwen 2 and 3 and SmolLM3 differ.
Holds  what the decoder cannot compute is refused here by the name of its field. Defaults are those
       of transformers; sizes have none.
Used   by `registry`; GGUF metadata comes in the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from structgen.errors import CheckpointError
from structgen.kernels.attention import HeadShape, LayerSpec
from structgen.models.rope import Rope, read_rope


class Family(msgspec.Struct, frozen=True):
    """How one architecture departs from Llama.

    architecture, model_type   as config.json writes them
    theta          rope base where the config is silent
    tied           default of `tie_word_embeddings`
    qkv_bias       True: always; None: as `attention_bias` says, for q, k, v and o; False: never
    mlp_bias       whether the config may ask for biases in the MLP
    qk_norm        RMSNorm on each head of q and k before rotation
    head_dim       default; None: hidden_size / num_attention_heads
    windows        no sliding windows; one on all layers; or on some, by `layer_types`
    skips_rotary   some layers have no rotary embedding (NoPE), by `no_rope_layers`
    """

    architecture: str
    model_type: str
    theta: float = 10000.0
    tied: bool = False
    qkv_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    windows: Literal["none", "all", "some"] = "none"
    skips_rotary: bool = False


_LLAMA = Family("LlamaForCausalLM", "llama", mlp_bias=True)
_MISTRAL = Family("MistralForCausalLM", "mistral", qkv_bias=False, windows="all")
_QWEN2 = Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, windows="some")
_QWEN3 = Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, head_dim=128, windows="some")
_SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    theta=2000000.0,
    tied=True,
    mlp_bias=True,
    windows="some",
    skips_rotary=True,
)
FAMILIES = {family.architecture: family for family in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _SMOLLM3)}

# Fields that change what a decoder computes, in ways this one does not know. A checkpoint that sets
# one of them is of another kind, whatever its architecture is called.
_FOREIGN_FIELDS = (
    "quantization_config",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "text_config",
    "vision_config",
    "audio_config",
    "is_encoder_decoder",
    "add_cross_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "clip_qkv",
)


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder of the Llama family, fully specified.

    architecture   as in config.json
    norm_eps       of every RMSNorm
    tied           the output matrix is the embedding
    layers         one spec per layer
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    shape: HeadShape
    norm_eps: float
    rope: Rope
    layers: tuple[LayerSpec, ...]
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def max_context(self) -> int:
        """Tokens of context where nobody asks: all that costs no quality at shorter lengths."""
        return self.rope.positions if self.rope.kind == "dynamic" else self.rope.longest_context


def family_of(config: Mapping[str, Any]) -> Family:
    """The family a config.json belongs to; CheckpointError names what is not supported.

    Named by `architectures`; a config without them by `model_type`. Both must agree.
    """
    named = config.get("architectures") or []
    model_type = config.get("model_type")
    if len(named) > 1:
        raise CheckpointError(f"config.json names several architectures: {', '.join(named)}")
    by_type = {family.model_type: family for family in FAMILIES.values()}
    family = FAMILIES.get(named[0]) if named else by_type.get(str(model_type))
    if family is None:
        what = f"architecture {named[0]!r}" if named else f"model type {model_type!r}"
        raise CheckpointError(f"{what} is not supported; known: {', '.join(FAMILIES)}")
    if model_type not in {None, family.model_type}:
        raise CheckpointError(
            f"config.json says architecture {family.architecture!r} but model_type {model_type!r}"
        )
    return family


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """A config.json as a ModelConfig; CheckpointError names the field that stands in the way."""
    family = family_of(config)
    _refuse_foreign(config)
    positions = _size(config, "max_position_embeddings")
    attention_bias = bool(config.get("attention_bias"))
    tied = config.get("tie_word_embeddings")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        shape=_head_shape(config, family),
        norm_eps=_norm_eps(config),
        rope=read_rope(config, default_theta=family.theta, positions=positions),
        layers=_layers(config, family),
        tied=family.tied if tied is None else bool(tied),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm,
    )


def _refuse_foreign(config: Mapping[str, Any]) -> None:
    for field in _FOREIGN_FIELDS:
        if config.get(field):
            raise CheckpointError(f"config.json sets {field!r}, which is not supported")
    activation = config.get("hidden_act") or "silu"
    if activation not in {"silu", "swish"}:
        raise CheckpointError(
            f"config.json: hidden_act {activation!r} is not supported, only 'silu'"
        )


def _size(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if value is None:
        raise CheckpointError(f"config.json has no {field!r}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {field!r} is {value!r}, not a positive whole number")
    return value


def _norm_eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps")
    if not isinstance(value, float | int) or value <= 0:
        raise CheckpointError(f"config.json: 'rms_norm_eps' is {value!r}, not a positive number")
    return float(value)


def _head_shape(config: Mapping[str, Any], family: Family) -> HeadShape:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    grouped = config.get("num_key_value_heads") is not None
    kv_heads = _size(config, "num_key_value_heads") if grouped else heads
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly"
        )
    if config.get("head_dim") is not None:
        dim = _size(config, "head_dim")
    elif family.head_dim is not None:
        dim = family.head_dim
    elif hidden % heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden} is not a multiple of {heads} attention heads, "
            "and there is no 'head_dim'"
        )
    else:
        dim = hidden // heads
    if dim % 2:
        raise CheckpointError(f"config.json: head_dim {dim} is odd, so it cannot be rotated")
    return HeadShape(heads, kv_heads, dim, dim**-0.5)


def _layers(config: Mapping[str, Any], family: Family) -> tuple[LayerSpec, ...]:
    count = _size(config, "num_hidden_layers")
    rotary = _rotary_layers(config, count) if family.skips_rotary else [True] * count
    if family.windows == "none":
        windows: list[int | None] = [None] * count
    elif family.windows == "all":
        windows = [_window(config)] * count
        _refuse_mixed(config.get("layer_types"))
    else:
        windows = _some_windows(config, family, rotary)
    return tuple(map(LayerSpec, windows, rotary))


def _window(config: Mapping[str, Any]) -> int | None:
    given = config.get("sliding_window") is not None
    return _size(config, "sliding_window") if given else None


def _refuse_mixed(layer_types: list[str] | None) -> None:
    if layer_types and len(set(layer_types)) > 1:
        raise CheckpointError("config.json: mixed 'layer_types' are not supported for Mistral")


def _some_windows(
    config: Mapping[str, Any], family: Family, rotary: list[bool]
) -> list[int | None]:
    """Windows on the layers that `layer_types` names, else on those that the family's rule does."""
    count = len(rotary)
    window = _window(config) if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if types is not None:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != count:
            reason = f"holds {unknown[0]!r}" if unknown else f"has {len(types)} entries for {count}"
            raise CheckpointError(f"config.json: 'layer_types' {reason}, which is not supported")
        sliding = [kind == "sliding_attention" for kind in types]
    elif family.skips_rotary:
        sliding = [not turned for turned in rotary]
    else:
        first = config.get("max_window_layers", 28)
        sliding = [layer >= first for layer in range(count)]
    return [window if slides else None for slides in sliding]


def _rotary_layers(config: Mapping[str, Any], count: int) -> list[bool]:
    """SmolLM3: 1 in `no_rope_layers` keeps the rotation; by default each fourth layer has none."""
    given = config.get("no_rope_layers")
    if given is None:
        interval = config.get("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if len(given) != count:
        raise CheckpointError(
            f"config.json: 'no_rope_layers' has {len(given)} entries for {count} layers"
        )
    return [bool(keeps) for keeps in given]
