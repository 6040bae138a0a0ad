"""GGUF files written for tests by the `gguf` package: tiny models, tiny vocabularies.

The mapping of names and the interleaving of q and k are written out here again, the way
llama.cpp's converter does it, so that the reader is not tested against itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    ".input_layernorm": ".attn_norm",
    ".post_attention_layernorm": ".ffn_norm",
    ".self_attn.q_proj": ".attn_q",
    ".self_attn.k_proj": ".attn_k",
    ".self_attn.v_proj": ".attn_v",
    ".self_attn.o_proj": ".attn_output",
    ".self_attn.q_norm": ".attn_q_norm",
    ".self_attn.k_norm": ".attn_k_norm",
    ".mlp.gate_proj": ".ffn_gate",
    ".mlp.up_proj": ".ffn_up",
    ".mlp.down_proj": ".ffn_down",
}
# A byte-level vocabulary of no merges: every character of ASCII, three words and two controls.
WORDS = ["Ġa", "th", "the"]
CONTROLS = ["<|end|>", "<|start|>"]
TOKENS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"] + WORDS + CONTROLS
MERGES = ["Ġ a", "t h", "th e"]


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """First and second half of each head's rows, one row from each in turn."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def metadata_of(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config: Any = model.config
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if head_dim := getattr(config, "head_dim", None):
        values["attention.key_length"] = values["attention.value_length"] = head_dim
        values["rope.dimension_count"] = head_dim
    if architecture == "llama" and getattr(config, "sliding_window", None):
        values["attention.sliding_window"] = config.sliding_window
    return {f"{architecture}.{key}": value for key, value in values.items()}


def tensors_of(model: PreTrainedModel, *, interleave: bool) -> dict[str, np.ndarray[Any, Any]]:
    config: Any = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = tensor
        for part, count in heads.items():
            if interleave and part in name:
                rows = interleaved(tensor, count)
        found[gguf_name(name)] = rows.contiguous().numpy()
    return found


VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 3],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": len(TOKENS) - 2,
    "tokenizer.ggml.bos_token_id": len(TOKENS) - 1,
}


def written(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """A GGUF file of these tensors; `kinds` names the format of those that are given as blocks."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        raw = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _ if isinstance(value, Sequence):
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")


def gguf_of(
    model: PreTrainedModel, path: Path, architecture: str, extra: Mapping[str, Any] | None = None
) -> Path:
    """The model as llama.cpp's converter would write it, in float32."""
    interleave = architecture in {"llama", "smollm3"}
    metadata = {**metadata_of(model, architecture), **VOCABULARY, **(extra or {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return written(path, architecture, metadata, tensors_of(model, interleave=interleave))


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """u8[rows, bytes]: random blocks of a format, their scales finite float16 numbers."""
    quantization = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[quantization]
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    scales = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q4_1": [0, 2], "Q5_1": [0, 2]}
    scales |= {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for offset in scales[kind]:
        numbers = generator.normal(0, 0.05, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def plain(values: Sequence[float], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Numbers in a floating dtype, as bytes where numpy does not know it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.view(torch.uint8).numpy() if dtype is torch.bfloat16 else tensor.numpy()
