"""Llama: the dense decoder that most others vary; also SmolLM2, whose head is its embedding.

A layer, for the residual stream x of new tokens:

    q, k, v = projections of norm(x); q and k are rotated; k and v go to the cache
    x = x + wo softmax(q k^T / sqrt(head_dim)) v     groups of query heads share keys and values
    x = x + w_down (silu(w_gate a) * (w_up a)),  a = norm(x)

Source: Touvron et al., "LLaMA", 2023; Llama Team, "The Llama 3 herd of models", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernelcat.moe.batch import Batch
from kernelcat.moe.blocks import Mlp, Output, Projections, added, mlp, output, queries
from kernelcat.moe.config import Config
from kernelcat.moe.model import Decoder
from kernelcat.moe.weights import Weights


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """Sizes of a Llama model; 0 stands for what older files leave out."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"

    intermediate_size: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention_bias: bool = False

    def __post_init__(self) -> None:
        heads = self.num_attention_heads
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // heads)

    def unsupported(self, content: Mapping[str, Any]) -> str | None:
        """Biases in the MLP."""
        if content.get("mlp_bias"):
            return "mlp_bias must be false"
        return super().unsupported(content)


@dataclass(frozen=True)
class Layer:
    """Weights of a layer."""

    qkv: Projections
    out: Output
    mlp: Mlp


class Llama(Decoder):
    """A Llama decoder."""

    config_type = LlamaConfig
    config: LlamaConfig

    def read_layer(self, weights: Weights, prefix: str, index: int) -> Layer:
        c = self.config
        return Layer(
            qkv=Projections.read(weights, prefix, c, bias=c.attention_bias),
            out=Output.read(weights, prefix, c, bias=c.attention_bias),
            mlp=Mlp.read(weights, f"{prefix}mlp.", c.hidden_size, c.intermediate_size),
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
        x, a, _ = output(self, layer.out, attn.flatten(1), x)
        return added(self, x, partial(mlp, self, layer.mlp, a))
