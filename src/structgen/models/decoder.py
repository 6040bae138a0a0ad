"""The decoder of the Llama family: embedding, layers of attention and MLP, final norm, head.

Owns   the weights; no keys, no values, no requests.
Holds  a step is a flat list of tokens. Everything about sequences is in the attention's plan, which
       is passed through unread. Per layer few torch calls: a decode of one token is bound by them.
Used   by the engine's runner, inside `torch.inference_mode()`; made by `registry`.

Shape legend as in `kernels/attention.py`; h is the hidden size, i the intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from structgen.kernels.attention import Attention, HeadShape, LayerSpec
from structgen.models.config import ModelConfig
from structgen.models.linear import linear
from structgen.models.row_blocks import in_row_blocks, silu_and_multiply_alike
from structgen.models.weights import LayerWeights, Weights


def silu_and_multiply(both_ti: Tensor) -> Tensor:
    """SiLU of the gate times the up projection, [T, i] of both side by side, [T, 2 * i]."""
    gate_ti, up_ti = both_ti.chunk(2, dim=-1)
    return functional.silu(gate_ti).mul_(up_ti)


class Decoder:
    """A causal language model over a pool of token slots.

    config       what it is
    shape        heads, as attention needs them
    layers       what differs between layers, as attention needs it
    cos_sin_pd   f32[max_context, head_dim], as attention needs it
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cos_sin_pd: Tensor,
        *,
        activation: Callable[[Tensor], Tensor] = silu_and_multiply,
    ) -> None:
        self.config = config
        self.shape: HeadShape = config.shape
        self.layers: tuple[LayerSpec, ...] = config.layers
        self.cos_sin_pd = cos_sin_pd
        self._weights = weights
        self._activation = activation
        self._hidden = (config.hidden_size,)

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
            activation=silu_and_multiply_alike,
        )

    def forward(self, inputs: Tensor, attention: Attention, plan: object) -> Tensor:
        """One step: keys and values of all tokens are written, hidden states come back.

        inputs   i64[T] token ids, or embeddings [T, h] in the model's dtype
        plan     what `attention.plan` made of the step's layout

        Returns [T, h] after the final norm, in the model's dtype.
        """
        # The residual stream is added to in place, so a caller's embeddings are copied first.
        x_th = inputs.clone() if inputs.is_floating_point() else self.embed(inputs)
        for layer, weights in enumerate(self._weights.layers):
            x_th += self._attention(x_th, weights, layer, attention, plan)
            x_th += self._mlp(x_th, weights)
        return self._norm(x_th, self._weights.norm_h)

    def embed(self, tokens_t: Tensor) -> Tensor:
        """Embeddings [T, h] of token ids i64[T]."""
        return functional.embedding(tokens_t, self._weights.embedding_vh)

    def logits(self, hidden_rh: Tensor) -> Tensor:
        """f32[R, V] from hidden states as `forward` returns them."""
        return linear(hidden_rh, self._weights.head).float()

    def _attention(
        self, x_th: Tensor, weights: LayerWeights, layer: int, attention: Attention, plan: object
    ) -> Tensor:
        qkv_tx = linear(self._norm(x_th, weights.input_norm_h), weights.qkv, weights.qkv_bias)
        if weights.qk_norm_nd is not None:
            self._norm_heads(qkv_tx, weights.qk_norm_nd)
        q_thd = attention.write(qkv_tx, layer, plan)
        return linear(attention.attend(q_thd, layer, plan), weights.out, weights.out_bias)

    def _norm_heads(self, qkv_tx: Tensor, weight_nd: Tensor) -> None:
        """RMSNorm of each head of q and k, in place (Qwen3)."""
        count, dim = weight_nd.shape
        heads_tnd = qkv_tx.narrow(1, 0, count * dim).view(-1, count, dim)
        normed_tnd = functional.rms_norm(heads_tnd, (dim,), None, self.config.norm_eps)
        heads_tnd.copy_(normed_tnd.mul_(weight_nd))

    def _mlp(self, x_th: Tensor, weights: LayerWeights) -> Tensor:
        both_ti = linear(
            self._norm(x_th, weights.mlp_norm_h), weights.gate_up, weights.gate_up_bias
        )
        return linear(self._activation(both_ti), weights.down, weights.down_bias)

    def _norm(self, x_th: Tensor, weight_h: Tensor) -> Tensor:
        return functional.rms_norm(x_th, self._hidden, weight_h, self.config.norm_eps)
