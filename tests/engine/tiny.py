"""A tiny random Llama with a byte tokenizer, written as a checkpoint directory.

Loads in milliseconds and computes in microseconds: for everything about the engine that does not
depend on what a model knows. Every character is one token per UTF-8 byte, so lengths are easy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tiny_model(
    folder: Path,
    *,
    max_context: int = 512,
    intermediate_size: int = 96,
    added: Mapping[str, bool] = MappingProxyType({}),
    template: str = CHATML,
) -> Path:
    """Write config, weights, tokenizer and template; returns the folder.

    added   further tokens from id 259 on, and whether each is flagged special
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL) + len(added),
        hidden_size=48,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_context,
        initializer_range=0.5,  # wide logits: greedy choices far from ties
        bos_token_id=None,
        eos_token_id=258,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    for spelling, special in added.items():
        token = AddedToken(spelling, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder
