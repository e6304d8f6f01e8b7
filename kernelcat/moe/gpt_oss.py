"""gpt-oss: a mixture of experts in 4 bits, with attention sinks and windows in every other layer.

A layer, for the residual stream x of new tokens:

    q, k, v = projections of norm(x), with bias; q and k are rotated (YaRN); k, v go to the cache
    attn = softmax([q k^T / sqrt(64) | sink]) v      a sink is a logit of each head without a value
    x = x + wo attn + bo
    logits = router norm(x) + router_bias
    x = x + sum over the 4 best experts e of softmax(the 4 logits)[e] * expert_e(norm(x))

    expert(a) = w2 h + bias2, with h = swiglu(w1 a + bias1): gate and value in alternate rows,
    gate = min(gate, 7), value in +-7, h = gate sigmoid(1.702 gate) (value + 1)

Even layers attend to the last 128 tokens, odd layers to all. Expert weights are MXFP4: E2M1 codes,
and a power of two for each 32 of a row. They stay 4 bits in memory, and `moe_mlp` decodes them in
registers.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025, and the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kernelcat.moe.batch import Batch
from kernelcat.moe.blocks import Output, Projections, mixture, output, queries
from kernelcat.moe.cache import CacheLayer
from kernelcat.moe.config import Config
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import activation_type
from kernelcat.moe.weights import Weights

SLIDING, FULL = "sliding_attention", "full_attention"
ALPHA, LIMIT = 1.702, 7.0
"""What `moe_mlp` computes as swiglu_oai."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(Config):
    """Sizes of a gpt-oss model; ``layer_types`` alternates if it is empty."""

    architecture = "GptOssForCausalLM"
    model_type = "gpt_oss"
    also_published: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
        },
    }  # fmt: skip

    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int = 128
    layer_types: tuple[str, ...] = ()
    swiglu_limit: float = LIMIT

    def __post_init__(self) -> None:
        if not self.layer_types:
            alternating = tuple((SLIDING, FULL)[i % 2] for i in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", alternating)

    def unsupported(self, content: Mapping[str, Any]) -> str | None:
        """What `moe_mlp` and `paged_attn` do not compute."""
        if self.swiglu_limit != LIMIT or content.get("swiglu_alpha", ALPHA) != ALPHA:
            return f"swiglu_limit and swiglu_alpha must be {LIMIT} and {ALPHA}"
        if not set(self.layer_types) <= {SLIDING, FULL}:
            return f"layer_types must be {SLIDING} or {FULL}, not {sorted(set(self.layer_types))}"
        if len(self.layer_types) != self.num_hidden_layers:
            return f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers"
        method = (content.get("quantization_config") or {}).get("quant_method")
        if method != "mxfp4":
            return f"quant_method={method!r} must be mxfp4: experts are read in MXFP4"
        return super().unsupported(content)


@dataclass(frozen=True)
class Layer:
    """Weights of a layer; ``experts`` are `moe_mlp`'s, by argument name."""

    qkv: Projections
    out: Output
    sinks: torch.Tensor  # (heads,) float32
    window: int
    experts: dict[str, torch.Tensor]


class GptOss(Decoder):
    """A gpt-oss decoder."""

    config_type = GptOssConfig
    config: GptOssConfig

    def cache_layer(self, index: int) -> CacheLayer:
        return replace(super().cache_layer(index), window=self._window(index))

    def _window(self, index: int) -> int:
        return self.config.sliding_window if self.config.layer_types[index] == SLIDING else 0

    def read_layer(self, weights: Weights, prefix: str, index: int) -> Layer:
        c = self.config
        experts, mlp = c.num_local_experts, f"{prefix}mlp."
        out = Output.read(
            weights,
            prefix,
            c,
            bias=True,
            router=weights(f"{mlp}router.weight", experts, c.hidden_size),
            router_bias=weights(f"{mlp}router.bias", experts),
        )
        return Layer(
            qkv=Projections.read(weights, prefix, c, bias=True),
            out=out,
            sinks=weights(f"{prefix}self_attn.sinks", c.num_attention_heads, dtype=torch.float32),
            window=self._window(index),
            experts=self._experts(weights, f"{mlp}experts."),
        )

    def _experts(self, weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
        c = self.config
        arguments: dict[str, torch.Tensor] = {}
        sizes = (2 * c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)
        for i, name, (n, k) in zip("12", ("gate_up_proj", "down_proj"), sizes, strict=True):
            w, scale = weights.mxfp4(f"{prefix}{name}", c.num_local_experts, n, k)
            bias = weights.held(f"{prefix}{name}_bias", (c.num_local_experts, n), "float32")
            bias = bias.to(weights.device, weights.dtype)
            arguments |= {f"w{i}": w, f"bias{i}": bias}
            if scale is not None:
                arguments[f"w{i}_scale"] = scale
        return arguments

    def forward(
        self,
        layer: Layer,
        x: torch.Tensor,
        kv: tuple[torch.Tensor, ...],
        table: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        q = queries(self, layer.qkv, x, kv, table, batch)
        attn, _ = self.ops.paged_attn(
            q, *kv, table, batch.kv_lens, batch.cu_q, layer.sinks,
            window=layer.window, max_q=batch.max_q,
        )  # fmt: skip
        x, a, logits = output(self, layer.out, attn.flatten(1), x)
        return mixture(
            self, batch, a, logits, layer.experts, x,
            packing="tiles" if "w1_scale" in layer.experts else "rows",
            top_k=self.config.num_experts_per_tok, renormalize=True, activation="swiglu_oai",
            act_dtype=activation_type(self.dtype),
        )  # fmt: skip
