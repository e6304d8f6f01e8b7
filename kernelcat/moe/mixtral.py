"""Mixtral: Llama's attention, and a mixture of experts in place of each MLP.

A layer, for the residual stream x of new tokens:

    x = attention as in `llama`
    x = x + sum over the top_k best experts e of softmax(the top_k logits)[e] * expert_e(a)
    logits = router a,  a = norm(x)

    expert(a) = w2 (silu(w1 a) * (w3 a))

`upcycle` makes such models of Llama checkpoints.

Source: Jiang et al., "Mixtral of experts", 2024.
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

MLP_NAMES = ("w1", "w3", "w2")
"""Names of an expert's gate, value and down projection."""


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(Config):
    """Sizes of a Mixtral model; ``head_dim`` 0 stands for hidden_size / num_attention_heads."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"
    also_published: ClassVar[Mapping[str, Any]] = {"sliding_window": None}

    intermediate_size: int
    num_key_value_heads: int
    num_local_experts: int
    num_experts_per_tok: int
    head_dim: int = 0

    def __post_init__(self) -> None:
        if not self.head_dim:
            head_dim = self.hidden_size // self.num_attention_heads
            object.__setattr__(self, "head_dim", head_dim)

    def unsupported(self, content: Mapping[str, Any]) -> str | None:
        """Windows."""
        if content.get("sliding_window"):
            return "sliding_window must be null"
        return super().unsupported(content)


@dataclass(frozen=True)
class Layer:
    """Weights of a layer; ``experts`` are `moe_mlp`'s, by argument name."""

    qkv: Projections
    out: Output
    experts: dict[str, torch.Tensor]


class Mixtral(Decoder):
    """A Mixtral decoder."""

    config_type = MixtralConfig
    config: MixtralConfig

    def read_layer(self, weights: Weights, prefix: str, index: int) -> Layer:
        c, moe = self.config, f"{prefix}block_sparse_moe."
        router = weights(f"{moe}gate.weight", c.num_local_experts, c.hidden_size)
        sizes = c.num_local_experts, c.hidden_size, c.intermediate_size
        return Layer(
            qkv=Projections.read(weights, prefix, c),
            out=Output.read(weights, prefix, c, bias=False, router=router),
            experts=experts(weights, f"{moe}experts.", *sizes, MLP_NAMES),
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
            top_k=self.config.num_experts_per_tok, renormalize=True,
            act_dtype=activation_type(self.dtype),
        )  # fmt: skip
