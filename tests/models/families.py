"""Tiny random checkpoints of every supported family, written by transformers itself.

transformers is the oracle here: it makes the weights, writes the files, and computes the logits
that ours must equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from structgen.models.decoder import Decoder
from structgen.models.registry import build
from structgen.models.safetensors_file import SafetensorsSource

# Length of the sequences compared: longer than the windows, not than the tiny contexts.
TOKENS = 48
_TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large enough that attention is far from uniform and every switch shows in the logits.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Tiny:
    """A family member by its departures from a tiny config; `max_context` as for `build`."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    max_context: int | None = None


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **parameters}}


CASES = {
    "llama": Tiny("llama"),
    "llama tied": Tiny("llama", {"tie_word_embeddings": True}),
    "llama with biases": Tiny("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": Tiny("llama", {"head_dim": 16}),
    "llama without groups": Tiny("llama", {"num_key_value_heads": 4}),
    "llama with one kv head": Tiny("llama", {"num_key_value_heads": 1}),
    "mistral": Tiny("mistral", {"sliding_window": 7}),
    "mistral without window": Tiny("mistral", {"sliding_window": None}),
    "qwen2": Tiny("qwen2"),
    "qwen2 tied": Tiny("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with upper windows": Tiny(
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen2 with unused windows": Tiny("qwen2", {"sliding_window": 5, "max_window_layers": 1}),
    "qwen3": Tiny("qwen3", {"head_dim": 16}),
    "qwen3 with biases and windows": Tiny(
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": Tiny("smollm3", {"num_hidden_layers": 5}),
    "smollm3 untied with biases": Tiny(
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3 with windows": Tiny(
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6},
    ),
    "linear": Tiny("llama", rope("linear", factor=4.0)),
    "dynamic, not extended": Tiny("llama", rope("dynamic", factor=2.0)),
    "dynamic, extended": Tiny(
        "llama", {**rope("dynamic", factor=4.0), "max_position_embeddings": 16}, TOKENS
    ),
    "llama3": Tiny(
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "yarn": Tiny("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "yarn with every parameter": Tiny(
        "llama",
        {
            "head_dim": 32,
            **rope(
                "yarn",
                factor=2.0,
                original_max_position_embeddings=64,
                beta_fast=4.0,
                beta_slow=0.8,
                mscale=0.7,
                mscale_all_dim=0.4,
                truncate=False,
            ),
        },
    ),
    "yarn with its own temperature": Tiny(
        "llama",
        rope("yarn", factor=2.0, original_max_position_embeddings=64, attention_factor=1.3),
    ),
}


def model_of(tiny: Tiny) -> PreTrainedModel:
    """The model with seeded random weights, norms and biases included."""
    config = AutoConfig.for_model(tiny.model_type, **{**_TINY, **tiny.options})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        # transformers leaves these two calls untyped.
        from_config: Any = AutoModelForCausalLM.from_config
        model: Any = from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.3)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def saved(tiny: Tiny, directory: Path, **options: Any) -> PreTrainedModel:
    """The model, also written to `directory` as transformers writes it."""
    model = model_of(tiny)
    model.save_pretrained(directory, **options)
    return model


def config_in(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def old_spelling(tiny: Tiny, directory: Path) -> dict[str, Any]:
    """The config as transformers 4 wrote it: `rope_theta` and `rope_scaling`, rules in place of
    lists that spell out what they give.
    """
    config = config_in(directory)
    for derived in {"layer_types", "no_rope_layers"} - tiny.options.keys():
        config.pop(derived, None)
    parameters = dict(config.pop("rope_parameters"))
    config["rope_theta"] = parameters.pop("rope_theta")
    scaled = parameters["rope_type"] != "default"
    config["rope_scaling"] = parameters if scaled else None
    return config


def loaded(
    directory: Path,
    config: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    max_context: int | None = None,
) -> Decoder:
    """Our decoder over the files, with the config beside them or another one."""
    return build(
        config or config_in(directory),
        SafetensorsSource(directory),
        dtype=dtype,
        device=torch.device("cpu"),
        max_context=max_context,
    )


def tokens(count: int = TOKENS) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def oracle(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """f32[T, V]: what transformers computes for the whole sequence."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the range of the oracle's logits."""
    return ((ours - theirs).abs().max() / (theirs.max() - theirs.min())).item()
