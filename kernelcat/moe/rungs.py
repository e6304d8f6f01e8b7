"""The rungs of the ladder: settings of a model and of its engine, one more at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kernelcat.moe import eager, fp8_products
from kernelcat.moe.config import Config
from kernelcat.moe.grouped_experts import GroupedExperts
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import Ops, bind, on
from kernelcat.reference._mla_row import ROW

EAGER, GROUPED, FUSED = "eager", "grouped", "fused"
"""Ways to run experts: in torch, by `moe_route` and `moe_gemm`, by `moe_mlp`."""


@dataclass(frozen=True)
class Setup:
    """How a model runs; the first rung has these defaults.

    Attributes
    ----------
    has_attention : attention and cache writes are the catalog's, not torch's
    has_products : so are all other operations but experts
    experts : EAGER, GROUPED or FUSED; EAGER experts have 16 bits
    has_graphs, has_prefix_cache : as in `EngineSettings`
    has_dependent_launches : kernels may start before the kernel before them has ended
    has_fp8_cache : keys and values, or latent rows, are float8
    has_fp8_projections, has_fp8_head : these weights are multiplied in float8 (`fp8_products`)
    num_drafts : draft tokens of speculation; 0 for none
    """

    has_attention: bool = False
    has_products: bool = False
    experts: str = EAGER
    has_graphs: bool = False
    has_dependent_launches: bool = False
    has_fp8_cache: bool = False
    has_fp8_projections: bool = False
    has_fp8_head: bool = False
    has_prefix_cache: bool = False
    num_drafts: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether nothing but experts is rounded to fewer than 16 bits."""
        return not (self.has_fp8_cache or self.has_fp8_projections or self.has_fp8_head)

    def ops(self, model: Decoder) -> Ops:
        """The operations that ``model`` runs; its weights may get copies in float8."""
        device = model.device
        ops, in_torch = on(device), list[str]()
        if not self.has_attention:
            in_torch += eager.ATTENTION
        if not self.has_products:
            in_torch += eager.PRODUCTS
        if self.experts == EAGER:
            in_torch += eager.EXPERTS
        ops = eager.replace(ops, in_torch)
        if self.experts == GROUPED:
            grouped = GroupedExperts(bind("moe_route", device), bind("moe_gemm", device))
            ops = replace(ops, moe_mlp=grouped)
        product = bind("fp8_gemm", device)
        if self.has_fp8_projections:
            ops = fp8_products.with_projections(ops, model, product)
        return fp8_products.with_head(ops, model, product) if self.has_fp8_head else ops

    def cache_dtype(self, model: Decoder) -> str:
        """The name of the caches' element type; "" for the model's."""
        if not self.has_fp8_cache:
            return ""
        return "uint8" if model.cache_layers[0].rows == ((ROW,),) else "float8_e4m3fn"


@dataclass(frozen=True)
class Rung:
    """One step: what it is called, what it does, and the fields of `Setup` that it changes."""

    name: str
    what: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    needs_gpu: bool = False

    def why_not(self, config: Config, device: str) -> str:
        """Why this rung cannot change anything here; "" if it can."""
        if self.needs_gpu and device != "cuda":
            return f"needs a GPU, and the model is on the {device}"
        if "experts" in self.changes and not getattr(config, "num_experts_per_tok", 0):
            return "the model has no experts"
        return ""


RUNGS = (
    Rung("eager torch", "each operation in torch, experts in 16 bits"),
    Rung(
        "paged attention", "paged_attn and kv_write; for latent attention flashmla, mla_kv_write",
        {"has_attention": True},
    ),
    Rung(
        "fused products", "qkv_rope_write and out_router for few tokens, gemm, rms_norm, lm_head",
        {"has_products": True},
    ),
    Rung(
        "MXFP4 experts", "moe_route and two moe_gemm on weights as published, in gpt-oss 4 bits",
        {"experts": GROUPED},
    ),
    Rung("CUDA graphs", "a decode step is one launch", {"has_graphs": True}, needs_gpu=True),
    Rung("fused MoE", "moe_mlp: routing and both products in one call", {"experts": FUSED}),
    Rung(
        "dependent launches", "kernels in CUDA C++ and Triton start before the one before ends",
        {"has_dependent_launches": True}, needs_gpu=True,
    ),
    Rung("FP8 cache", "keys and values in float8", {"has_fp8_cache": True}),
    Rung(
        "FP8 attention", "attention's projections by fp8_gemm, one launch a step again",
        {"has_fp8_projections": True},
    ),
    Rung("FP8 lm_head", "the head by fp8_gemm, and torch's topk", {"has_fp8_head": True}),
    Rung("prefix cache", "prompts share pages of equal blocks", {"has_prefix_cache": True}),
    Rung("speculation", "n-gram drafts, verified exactly", {"num_drafts": 4}),
)  # fmt: skip
