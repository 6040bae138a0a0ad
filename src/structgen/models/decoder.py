"""The decoder of the Llama family: embedding, layers of attention and MLP, final norm, head.

Owns   the weights; no keys, no values, no requests.
Holds  a step is a flat list of tokens. Everything about sequences is in the attention's plan, which
       is passed through unread. Per layer few torch calls: a decode of one token is bound by them.
Used   by the engine's runner, inside `torch.inference_mode()`; made by `registry`.

Shape legend as in `kernels/attention.py`; h is the hidden size, i the intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from structgen.kernels.attention import Attention, HeadShape, LayerSpec
from structgen.kernels.operations import AlikeOperations, Operations, TorchOperations
from structgen.models.config import ModelConfig
from structgen.models.linear import linear
from structgen.models.row_blocks import in_row_blocks
from structgen.models.weights import LayerWeights, Weights


class Decoder:
    """A causal language model over a pool of token slots.

    config       what it is
    shape        heads, as attention needs them
    layers       what differs between layers, as attention needs it
    cos_sin_pd   f32[max_context, head_dim], as attention needs it
    operations   norms and activation; None: in torch
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cos_sin_pd: Tensor,
        operations: Operations | None = None,
    ) -> None:
        self.config = config
        self.shape: HeadShape = config.shape
        self.layers: tuple[LayerSpec, ...] = config.layers
        self.cos_sin_pd = cos_sin_pd
        self._weights = weights
        self.operations = operations or TorchOperations()
        # Of each layer's input, and of what the last one leaves.
        self._norms = [*(layer.input_norm_h for layer in weights.layers), weights.norm_h]

    @property
    def max_context(self) -> int:
        """Tokens a sequence may have: positions in the rotary table."""
        return self.cos_sin_pd.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding_vh.device

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights; a matrix that is embedding and head counts once."""
        return self._weights.nbytes

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one matrix in memory."""
        return self._weights.tied

    def deterministic(self) -> Decoder:
        """The same model, in which a token's result does not depend on the step's other tokens.

        Shares this one's memory. Made with as many threads as it will compute with: what it may
        count on was tried with those. UnsupportedError where this processor gives nothing to count
        on.
        """
        return Decoder(
            self.config,
            in_row_blocks(self._weights),
            self.cos_sin_pd,
            AlikeOperations(),
        )

    def forward(self, inputs: Tensor, attention: Attention, plan: object) -> Tensor:
        """One step: keys and values of all tokens are written, hidden states come back.

        inputs   i64[T] token ids, or embeddings [T, h] in the model's dtype
        plan     what `attention.plan` made of the step's layout

        Returns [T, h] after the final norm, in the model's dtype.
        """
        # The residual stream is added to in place, so a caller's embeddings are copied first.
        x_th = inputs.clone() if inputs.is_floating_point() else self.embed(inputs)
        add_norm, eps = self.operations.add_rms_norm, self.config.norm_eps
        normed_th = self.operations.rms_norm(x_th, self._norms[0], eps)
        for layer, weights in enumerate(self._weights.layers):
            update_th = self._attention(normed_th, weights, layer, attention, plan)
            normed_th = add_norm(x_th, update_th, weights.mlp_norm_h, eps)
            update_th = self._mlp(normed_th, weights)
            normed_th = add_norm(x_th, update_th, self._norms[layer + 1], eps)
        return normed_th

    def embed(self, tokens_t: Tensor) -> Tensor:
        """Embeddings [T, h] of token ids i64[T]."""
        return functional.embedding(tokens_t, self._weights.embedding_vh)

    def logits(self, hidden_rh: Tensor) -> Tensor:
        """f32[R, V] from hidden states as `forward` returns them."""
        return linear(hidden_rh, self._weights.head).float()

    def _attention(
        self, x_th: Tensor, weights: LayerWeights, layer: int, attention: Attention, plan: object
    ) -> Tensor:
        qkv_tx = linear(x_th, weights.qkv, weights.qkv_bias)
        if weights.qk_norm_nd is not None:
            self.operations.norm_heads(qkv_tx, weights.qk_norm_nd, self.config.norm_eps)
        q_thd = attention.write(qkv_tx, layer, plan)
        return linear(attention.attend(q_thd, layer, plan), weights.out, weights.out_bias)

    def _mlp(self, x_th: Tensor, weights: LayerWeights) -> Tensor:
        both_ti = linear(x_th, weights.gate_up, weights.gate_up_bias)
        return linear(self.operations.silu_and_multiply(both_ti), weights.down, weights.down_bias)
