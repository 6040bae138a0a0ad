"""A GGUF file's metadata as a `config.json`, and its tensor names as Hugging Face names.

Owns   the list of architectures that are read from GGUF, and what their keys mean.
Holds  a key or tensor that changes what the model computes is translated or refused by name,
       never skipped. The rotary factors that llama.cpp stores as a tensor become the
       `llama3` rope parameters that they were made from, and are checked against them.
Used   by `source` and by `checkpoint`.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from structgen.errors import CheckpointError

_LOG = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# llama.cpp rotates neighbouring pairs in these and stores the rows of q and k accordingly.
INTERLEAVED = frozenset({"llama", "mistral", "smollm3"})

ROPE_FACTORS = "rope_freqs.weight"
_DEFAULT_THETA = 10000.0
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Keys below `{architecture}.` that are understood; other keys in these families would change
# what the model computes.
_ATTENTION = {"head_count", "head_count_kv", "layer_norm_rms_epsilon", "key_length"}
_ATTENTION |= {"value_length", "sliding_window", "causal"}
_ROPE = {"freq_base", "dimension_count", "scale_linear", "scaling.type", "scaling.factor"}
_ROPE |= {"scaling.original_context_length", "scaling.finetuned", "scaling.attn_factor"}
_ROPE |= {"scaling.yarn_ext_factor", "scaling.yarn_attn_factor"}
_ROPE |= {"scaling.yarn_beta_fast", "scaling.yarn_beta_slow"}
_FAMILIES = {"attention": _ATTENTION, "rope": _ROPE, "expert": frozenset[str]()}
# Scale factors that are only read if they change nothing.
_NEUTRAL = (
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
)


def hugging_face_names(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Hugging Face name to GGUF name; raises `CheckpointError` for a tensor of no known role."""
    found: dict[str, str] = {}
    for name in names:
        if name == ROPE_FACTORS:
            continue
        block = _BLOCK_NAME.fullmatch(name)
        if name in _TOP:
            found[_TOP[name]] = name
        elif block and block[2] in _IN_BLOCK:
            found[f"model.layers.{block[1]}.{_IN_BLOCK[block[2]]}.{block[3]}"] = name
        else:
            raise CheckpointError(
                f"{path}: tensor {name!r} has no place in a model of the Llama family"
            )
    return found


class _Keys:
    """The metadata below one architecture's prefix."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self.path, self.architecture = path, architecture
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: metadata '{self.architecture}.{key}' {what}")

    def number(self, key: str, default: float | None = None) -> float:
        """A number; raises `CheckpointError` if absent without a default, or of another type."""
        value = self.values.get(key, default)
        if value is None:
            raise self.fail(key, "is missing")
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # one value a layer, all the same
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(key, f"is {value!r}, where one number is supported")
        return decimal(value) if isinstance(value, float) else value

    def count(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """A whole number of at least `low`, as `number`."""
        value = self.number(key, default)
        if not low <= value < 1 << 31 or value != int(value):
            raise self.fail(key, f"is {value}, where a whole number from {low} on is expected")
        return int(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, as `number`."""
        value = float(self.number(key, default))
        if not 0 < value < math.inf:
            raise self.fail(key, f"is {value}, where a number above 0 is expected")
        return value

    def refuse_unknown(self) -> None:
        for key, value in self.values.items():
            family, _, rest = key.partition("." if "." in key else "_")
            known = _FAMILIES.get(family)
            if known is not None and rest not in known and value:
                raise self.fail(key, f"(= {value!r}) is not supported")
        for key in _NEUTRAL:
            if self.values.get(key, 1) != 1:
                raise self.fail(key, f"(= {self.values[key]!r}) is not supported")


def decimal(value: float) -> float:
    """The short decimal number of which `value` is the float32 rounding, if there is one.

    GGUF stores 1e-5 as the nearest float32; a `config.json` has 1e-5 itself.
    """
    if not math.isfinite(value):
        return value
    short = float(f"{value:.7g}")
    try:
        same = struct.pack("<f", short) == struct.pack("<f", value)
    except OverflowError:
        return value
    return short if same else value


def config_from(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: list[float] | None = None,
) -> dict[str, Any]:
    """The metadata as a `config.json`.

    shapes         of the tensors, by GGUF name: they tell vocabulary, tied head and biases
    rope_factors   content of `rope_freqs.weight`, if the file has it

    Raises `CheckpointError` naming the path and the key that is missing or not supported.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: the architecture {architecture!r} is not supported; "
            f"supported in GGUF are {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(path, metadata, architecture)
    keys.refuse_unknown()
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing")
    heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    head_dim = _head_dim(keys, hidden // heads)
    model_type, class_name = ARCHITECTURES[architecture]
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": _layers(keys, shapes),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "rope_parameters": _rope(keys, head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in shapes,
        **_token_ids(metadata),
        **_variants(keys, shapes),
    }


def _layers(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> int:
    layers = keys.count("block_count")
    present = len({name.split(".")[1] for name in shapes if name.startswith("blk.")})
    if layers != present:
        raise keys.fail("block_count", f"is {layers}, but the file has tensors of {present} blocks")
    return layers


def _head_dim(keys: _Keys, implied: int) -> int:
    head_dim = keys.count("attention.key_length", implied)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.count(key, head_dim)) != head_dim:
            raise keys.fail(key, f"is {other}, which differs from the {head_dim} of a head")
    return head_dim


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    ids["pad"] = metadata.get("tokenizer.ggml.padding_token_id")
    return {f"{name}_token_id": token for name, token in ids.items() if isinstance(token, int)}


def _variants(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What distinguishes the members of the family: biases, window, layers without rotation."""
    found: dict[str, Any] = {}
    if keys.architecture != "qwen2":  # which always has them, and no key for it
        found["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if keys.architecture in {"llama", "smollm3"}:
        found["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    if window := keys.count("attention.sliding_window", 0, low=0):
        if keys.architecture not in {"llama", "mistral"}:
            raise keys.fail("attention.sliding_window", f"(= {window}) is not supported")
        model_type, class_name = ARCHITECTURES["mistral"]
        found |= {"model_type": model_type, "architectures": [class_name]}
        found["sliding_window"] = window
    if keys.architecture == "smollm3":
        # No key tells it: llama.cpp, too, leaves every fourth layer of this model unrotated.
        layers = range(_layers(keys, shapes))
        found["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in layers]
    return found


# ---------------------------------------------------------------- rotary embedding


def _rope(keys: _Keys, head_dim: int, factors: list[float] | None) -> dict[str, Any]:
    theta = keys.positive("rope.freq_base", _DEFAULT_THETA)
    if "rope.freq_base" not in keys.values:
        _LOG.warning(
            "%s has no '%s.rope.freq_base'; rope_theta is taken to be %g",
            keys.path,
            keys.architecture,
            theta,
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = keys.values.get("rope.scaling.type", "none")
    if (linear := keys.positive("rope.scale_linear", 1.0)) != 1.0 and kind == "none":
        rope |= {"rope_type": "linear", "factor": linear}
    match kind:
        case "none":
            pass
        case "linear":
            rope |= {"rope_type": "linear", "factor": keys.positive("rope.scaling.factor")}
        case "yarn":
            rope |= _yarn(keys)
        case _:
            raise keys.fail("rope.scaling.type", f"(= {kind!r}) is not supported")
    if factors is not None and set(factors) != {1.0}:
        if rope["rope_type"] != "default":
            raise keys.fail("rope.scaling.type", f"(= {kind!r}) together with {ROPE_FACTORS!r}")
        rope |= _llama3(keys, head_dim, theta, factors)
    return rope


def _yarn(keys: _Keys) -> dict[str, Any]:
    found = {
        "rope_type": "yarn",
        "factor": keys.positive("rope.scaling.factor"),
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if (key := f"rope.scaling.yarn_{name}") in keys.values:
            found[name] = keys.positive(key)
    return found


def llama3_factors(theta: float, head_dim: int, rope: Mapping[str, Any]) -> list[float]:
    """By how much the `llama3` rope type slows each frequency (Llama 3.1, Meta, 2024).

    Long waves are slowed by the whole factor, short ones not at all, and those between by a
    factor whose inverse runs linearly in the number of turns within the original context.
    """
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for pair in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (
            2 * math.pi * theta ** (pair / head_dim)
        )
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - share) / rope["factor"] + share))
    return found


def _llama3(keys: _Keys, head_dim: int, theta: float, factors: list[float]) -> dict[str, Any]:
    """The `llama3` parameters that give these factors; raises `CheckpointError` if none do."""
    trained = keys.count("rope.scaling.original_context_length", 8192)
    candidates = [(4.0, trained), (4.0, 8192)]
    # Factors below 1 are certainly not of this kind, and could not be divided by.
    if plausible := min(factors) > 0.99 and max(factors) < math.inf:
        candidates.append(_fitted(theta, head_dim, factors))
    for high, original in candidates if plausible else ():
        rope = {
            "rope_type": "llama3",
            "factor": decimal(max(factors)),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        expected = llama3_factors(theta, head_dim, rope)
        if len(factors) == len(expected) and all(
            math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)
        ):
            return rope
    raise CheckpointError(
        f"{keys.path}: the factors in tensor {ROPE_FACTORS!r} are not those of llama3 rope "
        "scaling, the only kind of such factors that is supported"
    )


def _fitted(theta: float, head_dim: int, factors: list[float]) -> tuple[float, int]:
    """`high_freq_factor` and original context, with `low_freq_factor` 1, from the factors.

    Between both ends the share is a line in the turns per token, `slope * turns - offset`, with
    slope = original / (high - 1) and offset = 1 / (high - 1). Multiplying low, high and original
    by one number changes nothing, so low may be taken as 1.
    """
    longest = max(factors)
    points = [
        (theta ** (-2 * index / head_dim) / (2 * math.pi), (1 / f - 1 / longest))
        for index, f in enumerate(factors)
        if 1.0 < f < longest
    ]
    if len(points) < 2:
        return 4.0, 8192
    (turns_a, share_a), (turns_b, share_b) = points[0], points[-1]
    slope = (share_a - share_b) / (turns_a - turns_b) / (1 - 1 / longest)
    offset = slope * turns_a - share_a / (1 - 1 / longest)
    if not (math.isfinite(slope) and offset > 0):
        return 4.0, 8192
    high = 1 + 1 / offset
    return round(high, 3), max(1, round(slope / offset))
