"""DeepSeek-V3: latent attention, a shared expert, and experts chosen by groups.

A layer, for the residual stream x of new tokens and a = norm(x):

    q = wq_b norm(wq_a a), for each head [q_nope (128) | q_pe (64)]
    c, k_pe = norm(wkv_a a), wk_pe a        all that is cached of a token: 512 + 64 elements
    k = [W_UK c | rope(k_pe)],  v = W_UV c     for each head, but never computed:
    attn = softmax(s [q_nope W_UK | rope(q_pe)] . [c | rope(k_pe)]) c,  then W_UV attn
    x = x + wo (W_UV attn of all heads)

    score = sigmoid(router a);  score + correction selects, score weighs
    groups of experts: the 4 of 8 with the largest sums of their two best; 8 experts of these
    x = x + shared(a) + 2.5 sum of score[e] / (sum of the 8 scores) * expert_e(a)

The first layers are dense. Because W_UK is applied to queries and W_UV to results (*absorbed*), all
heads read one latent, and a cached token is 576 elements (`kernelcat.layers.mla`). The router's
product is float32 for few tokens, as in DeepSeek's code.

Sources: DeepSeek-V2 (2024), section 2.1; DeepSeek-V3 technical report (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernelcat.layers import mla
from kernelcat.moe.batch import Batch
from kernelcat.moe.blocks import Mlp, Output, added, experts, mixture, mlp, output
from kernelcat.moe.cache import CacheLayer
from kernelcat.moe.config import Config
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import activation_type
from kernelcat.moe.weights import Weights
from kernelcat.reference._mla_row import LATENT, ROPE, ROW


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(Config):
    """Sizes of a DeepSeek-V3 model; ``q_lora_rank`` 0: queries have one projection."""

    architecture = "DeepseekV3ForCausalLM"
    model_type = "deepseek_v3"

    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = LATENT
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = ROPE
    v_head_dim: int = 128
    num_key_value_heads: int = 0

    def __post_init__(self) -> None:
        """Each head has keys and values of its own, made from the latent."""
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)

    def unsupported(self, content: Mapping[str, Any]) -> str | None:
        """Latents of other sizes than `flashmla` has, and other routers."""
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (LATENT, ROPE):
            return f"kv_lora_rank and qk_rope_head_dim must be {LATENT} and {ROPE}: flashmla"
        if content.get("scoring_func", "sigmoid") != "sigmoid":
            return f"scoring_func={content['scoring_func']!r} must be sigmoid"
        if content.get("attention_bias") or not content.get("rope_interleave", True):
            return "attention_bias must be false and rope_interleave true"
        if content.get("moe_layer_freq", 1) != 1:
            return "moe_layer_freq must be 1"
        return super().unsupported(content)


@dataclass(frozen=True)
class Latent:
    """Weights of latent attention, with the norm before it.

    Attributes
    ----------
    norm, q_norm, c_norm : (hidden,), (q_lora_rank,) or None, (512,)
    wq_a, wq_b : (q_lora_rank, hidden) or None, (heads * (nope + 64), q_lora_rank or hidden)
    wc, wk_pe : (512, hidden), (64, hidden)
    w_uk, w_uv : (heads, nope, 512), (heads, v, 512)
    """

    norm: torch.Tensor
    q_norm: torch.Tensor | None
    c_norm: torch.Tensor
    wq_a: torch.Tensor | None
    wq_b: torch.Tensor
    wc: torch.Tensor
    wk_pe: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """Weights of a layer; ``mlp`` is the shared expert, or the MLP of a dense layer.

    ``experts`` are `moe_mlp`'s weights by argument name, empty in a dense layer.
    """

    latent: Latent
    out: Output
    mlp: Mlp
    experts: dict[str, torch.Tensor]


class DeepseekV3(Decoder):
    """A DeepSeek-V3 decoder."""

    config_type = DeepseekV3Config
    config: DeepseekV3Config

    @property
    def rotary_dim(self) -> int:
        return ROPE

    def cache_layer(self, index: int) -> CacheLayer:
        return CacheLayer(((ROW,),))

    @property
    def sm_scale(self) -> float:
        """Factor of scores, in which YaRN sharpens attention."""
        c = self.config
        sharpening = c.rope.magnitude(c.rope.mscale_all_dim) if c.rope.mscale_all_dim else 1.0
        return float((c.qk_nope_head_dim + ROPE) ** -0.5 * sharpening**2)

    def read_layer(self, weights: Weights, prefix: str, index: int) -> Layer:
        c = self.config
        hidden, is_dense = c.hidden_size, index < c.first_k_dense_replace
        router, arguments = None, {}
        if not is_dense:
            count = c.n_routed_experts
            router = weights(f"{prefix}mlp.gate.weight", count, hidden)
            arguments = experts(
                weights, f"{prefix}mlp.experts.", count, hidden, c.moe_intermediate_size
            )
            arguments["correction"] = weights(
                f"{prefix}mlp.gate.e_score_correction_bias", count, dtype=torch.float32
            )
        inter = c.intermediate_size if is_dense else c.moe_intermediate_size * c.n_shared_experts
        width = c.num_attention_heads * c.v_head_dim
        return Layer(
            latent=self._latent(weights, prefix),
            out=Output(
                weight=weights(f"{prefix}self_attn.o_proj.weight", hidden, width),
                norm=weights(f"{prefix}post_attention_layernorm.weight", hidden),
                router=router,
            ),
            mlp=Mlp.read(
                weights, f"{prefix}mlp." + "shared_experts." * (not is_dense), hidden, inter
            ),
            experts=arguments,
        )

    def _latent(self, weights: Weights, prefix: str) -> Latent:
        c, attn = self.config, f"{prefix}self_attn."
        heads, hidden, rank, nope = (
            c.num_attention_heads, c.hidden_size, c.q_lora_rank, c.qk_nope_head_dim,
        )  # fmt: skip
        kv_a = weights(f"{attn}kv_a_proj_with_mqa.weight", ROW, hidden)
        kv_b = weights(f"{attn}kv_b_proj.weight", heads * (nope + c.v_head_dim), LATENT)
        w_uk, w_uv = mla.split(kv_b, heads, nope)
        q = f"{attn}q_b_proj.weight" if rank else f"{attn}q_proj.weight"
        return Latent(
            norm=weights(f"{prefix}input_layernorm.weight", hidden),
            q_norm=weights(f"{attn}q_a_layernorm.weight", rank) if rank else None,
            c_norm=weights(f"{attn}kv_a_layernorm.weight", LATENT),
            wq_a=weights(f"{attn}q_a_proj.weight", rank, hidden) if rank else None,
            wq_b=weights(q, heads * (nope + ROPE), rank or hidden),
            wc=kv_a[:LATENT], wk_pe=kv_a[LATENT:], w_uk=w_uk, w_uv=w_uv,
        )  # fmt: skip

    def _attend(
        self, w: Latent, x: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Results of all heads (tokens, heads * v); the latents of x go to the cache."""
        c, ops = self.config, self.ops
        where = (table, batch.kv_lens, batch.cu_q)
        a = self.normalized(x, w.norm)
        ops.mla_kv_write(
            self.normalized(ops.gemm(a, w.wc), w.c_norm), ops.gemm(a, w.wk_pe), *where,
            self.cos_sin, out=cache,
        )  # fmt: skip
        if w.wq_a is not None and w.q_norm is not None:
            a = self.normalized(ops.gemm(a, w.wq_a), w.q_norm)
        q = ops.gemm(a, w.wq_b).view(len(x), c.num_attention_heads, -1)
        q_nope, q_pe = q.split((c.qk_nope_head_dim, ROPE), -1)
        q_pe = mla.rotate(q_pe, self.cos_sin, batch.positions)
        q = mla.absorb(q_nope, q_pe, w.w_uk)
        out, _ = ops.flashmla(q, cache, *where, sm_scale=self.sm_scale, max_q=batch.max_q)
        return mla.expand(out, w.w_uv).reshape(len(x), -1)

    def forward(
        self,
        layer: Layer,
        x: torch.Tensor,
        kv: tuple[torch.Tensor, ...],
        table: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        attn = self._attend(layer.latent, x, kv[0], table, batch)
        x, a, logits = output(self, layer.out, attn, x)
        shared = partial(mlp, self, layer.mlp, a)
        if not layer.experts:
            return added(self, x, shared)
        c = self.config
        return mixture(
            self, batch, a, logits, layer.experts, x, shared, activation="swiglu", score="sigmoid",
            top_k=c.num_experts_per_tok, renormalize=c.norm_topk_prob, groups=c.n_group,
            top_groups=c.topk_group, scaling=c.routed_scaling_factor,
            act_dtype=activation_type(self.dtype),
        )  # fmt: skip
