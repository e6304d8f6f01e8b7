"""Qwen3-MoE: many small experts, and queries and keys that are normalized before RoPE.

A layer, for the residual stream x of new tokens:

    q, k, v = projections of norm(x); each head of q and k is normalized, then rotated
    x = x + wo softmax(q k^T / sqrt(128)) v
    p = softmax(router a) over all experts,  a = norm(x)
    x = x + sum over the 8 largest p[e] of p[e] / (sum of these 8) * expert_e(a)

    expert(a) = w_down (silu(w_gate a) * (w_up a))

The 8 largest p, divided by their sum, are the softmax over the 8 largest logits, which is how
`moe_mlp` computes them (``renormalize``). Without norm_topk_prob p itself is the weight.

Source: Qwen Team, "Qwen3 technical report", 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernelcat.moe.batch import Batch
from kernelcat.moe.blocks import Output, Projections, experts, mixture, output, queries
from kernelcat.moe.config import Config
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import activation_type
from kernelcat.moe.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Config):
    """Sizes of a Qwen3-MoE model."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    other_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = False
    attention_bias: bool = False

    def unsupported(self, content: Mapping[str, Any]) -> str | None:
        """Layers without experts, and windows."""
        if content.get("mlp_only_layers") or content.get("decoder_sparse_step", 1) != 1:
            return "every layer must have experts: mlp_only_layers=[], decoder_sparse_step=1"
        if content.get("use_sliding_window"):
            return "use_sliding_window must be false"
        return super().unsupported(content)


@dataclass(frozen=True)
class Layer:
    """Weights of a layer; ``experts`` are `moe_mlp`'s, by argument name."""

    qkv: Projections
    out: Output
    experts: dict[str, torch.Tensor]


class Qwen3Moe(Decoder):
    """A Qwen3-MoE decoder."""

    config_type = Qwen3MoeConfig
    config: Qwen3MoeConfig

    def read_layer(self, weights: Weights, prefix: str, index: int) -> Layer:
        c = self.config
        router = weights(f"{prefix}mlp.gate.weight", c.num_experts, c.hidden_size)
        sizes = c.num_experts, c.hidden_size, c.moe_intermediate_size
        return Layer(
            qkv=Projections.read(weights, prefix, c, bias=c.attention_bias, norms=True),
            out=Output.read(weights, prefix, c, bias=c.attention_bias, router=router),
            experts=experts(weights, f"{prefix}mlp.experts.", *sizes),
        )

    def forward(
        self,
        layer: Layer,
        x: torch.Tensor,
        kv: tuple[torch.Tensor, ...],
        table: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        q = queries(self, layer.qkv, x, kv, table, batch)
        attn, _ = self.ops.paged_attn(q, *kv, table, batch.kv_lens, batch.cu_q, max_q=batch.max_q)
        x, a, logits = output(self, layer.out, attn.flatten(1), x)
        return mixture(
            self, batch, a, logits, layer.experts, x, activation="swiglu",
            top_k=self.config.num_experts_per_tok, renormalize=self.config.norm_topk_prob,
            act_dtype=activation_type(self.dtype),
        )  # fmt: skip
