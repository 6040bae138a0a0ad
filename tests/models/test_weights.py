"""Every tensor of a checkpoint is accounted for; nothing is made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from structgen.errors import CheckpointError
from tests.models.families import (
    CASES,
    config_in,
    loaded,
    oracle,
    relative_error,
    saved,
    tokens,
)
from tests.models.harness import logits_of

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def edited(directory: Path, *, without: str = "", **added: Tensor) -> None:
    """Rewrite the weights file without one tensor and with others; `__` stands for a dot."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(without, None)
    tensors |= {name.replace("__", "."): tensor for name, tensor in added.items()}
    save_file(tensors, path, metadata={"format": "pt"})


class TestTensors:
    def test_that_are_missing_fail_the_load_with_their_names(self, tmp_path: Path) -> None:
        saved(CASES["llama"], tmp_path)
        edited(tmp_path, without=Q_PROJ)

        with pytest.raises(CheckpointError, match=f"has no {Q_PROJ}"):
            loaded(tmp_path)

    def test_that_nobody_uses_fail_the_load_with_their_names(self, tmp_path: Path) -> None:
        saved(CASES["llama"], tmp_path)
        edited(tmp_path, model__layers__0__self_attn__gate__weight=torch.ones(2))

        with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.self_attn\.gate\.we"):
            loaded(tmp_path)

    def test_of_a_bias_that_the_config_does_not_have_fail_the_load(self, tmp_path: Path) -> None:
        saved(CASES["llama with biases"], tmp_path)
        config = config_in(tmp_path) | {"attention_bias": False}

        with pytest.raises(CheckpointError, match=r"k_proj\.bias.* and 8 more, which Llama"):
            loaded(tmp_path, config)

    def test_known_to_be_harmless_are_passed_over(self, tmp_path: Path) -> None:
        model = saved(CASES["llama"], tmp_path)
        edited(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))

        ours = logits_of(loaded(tmp_path), tokens())

        assert relative_error(ours, oracle(model, tokens())) < 2e-5

    def test_of_another_shape_are_refused_with_both_shapes(self, tmp_path: Path) -> None:
        saved(CASES["llama"], tmp_path)
        config = config_in(tmp_path)
        del config["num_key_value_heads"]

        both = r"k_proj\.weight has shape \[16, 32\] in the file, but the config implies \[32, 32\]"
        with pytest.raises(CheckpointError, match=both):
            loaded(tmp_path, config)

    def test_of_another_vocabulary_are_refused_with_both_shapes(self, tmp_path: Path) -> None:
        saved(CASES["llama tied"], tmp_path)
        config = config_in(tmp_path) | {"vocab_size": 96}

        with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has shape \[97, 32\].*96"):
            loaded(tmp_path, config)


class TestHead:
    def test_that_is_neither_there_nor_tied_is_refused_by_name(self, tmp_path: Path) -> None:
        saved(CASES["llama tied"], tmp_path)
        config = config_in(tmp_path)
        del config["tie_word_embeddings"]

        with pytest.raises(CheckpointError, match=r"no lm_head\.weight.*tie_word_embeddings"):
            loaded(tmp_path, config)

    def test_is_the_embedding_where_the_family_ties_by_default(self, tmp_path: Path) -> None:
        model = saved(CASES["smollm3"], tmp_path)
        config = config_in(tmp_path)
        del config["tie_word_embeddings"]

        decoder = loaded(tmp_path, config)

        assert decoder.tied
        assert relative_error(logits_of(decoder, tokens()), oracle(model, tokens())) < 2e-5

    def test_stored_although_tied_is_shared_when_equal(self, tmp_path: Path) -> None:
        model = saved(CASES["llama tied"], tmp_path)
        edited(tmp_path, lm_head__weight=model.state_dict()["model.embed_tokens.weight"].clone())

        assert loaded(tmp_path).tied

    def test_stored_although_tied_is_used_with_a_warning_when_different(
        self, tmp_path: Path
    ) -> None:
        model = saved(CASES["llama"], tmp_path)
        config = config_in(tmp_path) | {"tie_word_embeddings": True}

        with pytest.warns(UserWarning, match=r"has another lm_head\.weight: using that"):
            decoder = loaded(tmp_path, config)

        assert relative_error(logits_of(decoder, tokens()), oracle(model, tokens())) < 2e-5


class TestRopeDivisors:
    """Llama 3 in GGUF: the scaling is a tensor, the metadata say nothing."""

    def test_stand_for_the_scaling_they_were_made_from(self, tmp_path: Path) -> None:
        model = saved(CASES["llama3"], tmp_path)
        plain_f = 5000.0 ** -(torch.arange(0, 8, 2).float() / 8)
        edited(tmp_path, rope_freqs__weight=plain_f / model.model.rotary_emb.inv_freq)
        config = config_in(tmp_path) | {"rope_parameters": {"rope_theta": 5000.0}}

        ours = logits_of(loaded(tmp_path, config), tokens())

        assert relative_error(ours, oracle(model, tokens())) < 2e-5

    def test_beside_a_scaling_in_the_config_are_refused(self, tmp_path: Path) -> None:
        saved(CASES["llama3"], tmp_path)
        edited(tmp_path, rope_freqs__weight=torch.ones(4))

        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight and rope type 'llama3'"):
            loaded(tmp_path)
