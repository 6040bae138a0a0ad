"""What is read from a config.json, and what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from structgen.errors import CheckpointError
from structgen.kernels.attention import LayerSpec
from structgen.models.config import FAMILIES, ModelConfig, read_config

TYPES = {architecture: family.model_type for architecture, family in FAMILIES.items()}


def config(architecture: str = "LlamaForCausalLM", /, **changes: Any) -> dict[str, Any]:
    """A small complete config; a change to None takes the field away."""
    fields = {
        "architectures": [architecture],
        "model_type": TYPES.get(architecture),
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        **changes,
    }
    return {field: value for field, value in fields.items() if value is not None}


def read(architecture: str = "LlamaForCausalLM", /, **changes: Any) -> ModelConfig:
    return read_config(config(architecture, **changes))


class TestArchitecture:
    @pytest.mark.parametrize("architecture", FAMILIES)
    def test_is_found_by_its_name(self, architecture: str) -> None:
        assert read(architecture).architecture == architecture

    @pytest.mark.parametrize(("architecture", "model_type"), TYPES.items())
    def test_is_found_by_model_type_alone(self, architecture: str, model_type: str) -> None:
        assert read(architectures=None, model_type=model_type).architecture == architecture

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"architectures": ["GPT2LMHeadModel"]},
                "'GPT2LMHeadModel' is not supported; known:",
            ),
            ({"architectures": None, "model_type": "gemma3"}, "model type 'gemma3'"),
            ({"architectures": None, "model_type": None}, "model type None"),
            ({"model_type": "mixtral"}, "'LlamaForCausalLM' but model_type 'mixtral'"),
            ({"architectures": ["LlamaForCausalLM", "X"]}, "several architectures"),
        ],
    )
    def test_that_is_unknown_is_refused_by_name(
        self, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            read(**changes)


class TestFields:
    @pytest.mark.parametrize(
        "field",
        [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "rms_norm_eps",
        ],
    )
    def test_that_must_be_there_are_named_when_missing(self, field: str) -> None:
        with pytest.raises(CheckpointError, match=field):
            read_config(config(**{field: None}))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
            ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
            ({"num_local_experts": 8}, "'num_local_experts'"),
            ({"num_experts": 8}, "'num_experts'"),
            ({"vision_config": {"depth": 1}}, "'vision_config'"),
            ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
            ({"hidden_size": "32"}, "'hidden_size' is '32', not a positive whole number"),
            ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
            ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
            ({"hidden_size": 30}, "hidden_size 30 is not a multiple of 4"),
            ({"head_dim": 7}, "head_dim 7 is odd"),
            ({"rms_norm_eps": -1.0}, "'rms_norm_eps' is -1.0"),
        ],
    )
    def test_that_cannot_be_computed_are_refused_by_name(
        self, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            read(**changes)

    def test_head_dim_is_derived_where_it_is_missing(self) -> None:
        assert read().shape.head_dim == 8

    def test_key_value_heads_are_all_heads_where_they_are_missing(self) -> None:
        assert read(num_key_value_heads=None).shape.kv_heads == 4

    @pytest.mark.parametrize("architecture", FAMILIES)
    def test_the_head_is_tied_by_default_only_in_smollm3(self, architecture: str) -> None:
        assert read(architecture).tied == (architecture == "SmolLM3ForCausalLM")


class TestWindows:
    def test_of_mistral_are_on_every_layer(self) -> None:
        layers = read("MistralForCausalLM", sliding_window=9).layers

        assert layers == (LayerSpec(window=9),) * 4

    def test_of_llama_are_not_used(self) -> None:
        assert read(sliding_window=9).layers == (LayerSpec(),) * 4

    def test_of_qwen_need_their_switch(self) -> None:
        layers = read("Qwen2ForCausalLM", sliding_window=9, max_window_layers=1).layers

        assert layers == (LayerSpec(),) * 4

    def test_of_qwen_start_at_max_window_layers(self) -> None:
        layers = read(
            "Qwen3ForCausalLM", sliding_window=9, use_sliding_window=True, max_window_layers=3
        ).layers

        assert layers == (LayerSpec(), LayerSpec(), LayerSpec(), LayerSpec(window=9))

    def test_of_smollm3_are_on_the_layers_without_rotary_embedding(self) -> None:
        layers = read("SmolLM3ForCausalLM", sliding_window=9, use_sliding_window=True).layers

        assert layers == (*(LayerSpec(),) * 3, LayerSpec(window=9, rotary=False))

    @pytest.mark.parametrize(
        ("architecture", "changes", "message"),
        [
            ("Qwen2ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
            ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "1 entries for 4"),
            (
                "MistralForCausalLM",
                {"layer_types": ["full_attention", "sliding_attention"] * 2},
                "mixed 'layer_types'",
            ),
            ("MistralForCausalLM", {"sliding_window": 0}, "'sliding_window' is 0"),
            ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "'no_rope_layers' has 1 entries"),
        ],
    )
    def test_of_other_kinds_are_refused_by_name(
        self, architecture: str, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            read(architecture, **changes)
