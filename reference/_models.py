"""Shapes of published models, from their configurations: what random problems are drawn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Sizes of one model.

    Attributes
    ----------
    hidden : columns of the residual stream
    heads, kv_heads, head_dim
        Attention; ``kv_heads`` 0 is latent attention (DeepSeek), whose results have ``head_dim``
        elements a head.
    vocab : tokens of the vocabulary
    inter : columns between the products of a dense layer's MLP; 0 without dense layers
    experts, top_k, expert_inter
        Experts of a layer, how many serve a token, and columns between an expert's products; 0
        without experts
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    inter: int = 0
    experts: int = 0
    top_k: int = 0
    expert_inter: int = 0


MODELS = {
    "gpt-oss-20b": Model(2880, 64, 8, 64, 201088, 0, 32, 4, 2880),
    "gpt-oss-120b": Model(2880, 64, 8, 64, 201088, 0, 128, 4, 2880),
    "qwen3-8b": Model(4096, 32, 8, 128, 151936, 12288),
    "qwen3-32b": Model(5120, 64, 8, 128, 151936, 25600),
    "qwen3-30b-a3b": Model(2048, 32, 4, 128, 151936, 0, 128, 8, 768),
    "qwen3-235b-a22b": Model(4096, 64, 4, 128, 151936, 0, 128, 8, 1536),
    "llama-3.2-1b": Model(2048, 32, 8, 64, 128256, 8192),
    "llama-3.1-8b": Model(4096, 32, 8, 128, 128256, 14336),
    "llama-3.1-70b": Model(8192, 64, 8, 128, 128256, 28672),
    "mixtral-8x7b": Model(4096, 32, 8, 128, 32000, 0, 8, 2, 14336),
    "gemma-2b": Model(2048, 8, 1, 256, 256000, 16384),
    "gemma-2-9b": Model(3584, 16, 8, 256, 256000, 14336),
    "phi-4": Model(5120, 40, 10, 128, 100352, 17920),
    "smollm2-135m": Model(576, 9, 3, 64, 49152, 1536),
    "deepseek-v2-lite": Model(2048, 16, 0, 128, 102400, 10944, 64, 6, 1408),
    "deepseek-v3": Model(7168, 128, 0, 128, 129280, 18432, 256, 8, 2048),
}

SHARDS = (1, 1, 2, 4, 8)
"""GPUs that share a layer under tensor parallelism; one is as likely as any two others."""

LATENT_PRODUCTS = ((2112, 7168), (24576, 1536), (32768, 512))
"""Rows and columns of DeepSeek-V3's down- and up-projections of queries and latents."""


def projections(model: Model) -> list[tuple[int, int, str]]:
    """Weights of a layer: rows N, columns K, and which of both tensor parallelism divides."""
    hidden, heads_dim = model.hidden, model.heads * model.head_dim
    found = [(hidden, heads_dim, "K")]
    if model.kv_heads:
        found.append(((model.heads + 2 * model.kv_heads) * model.head_dim, hidden, "N"))
    else:
        found += [(n, k, "N") for n, k in LATENT_PRODUCTS if hidden == LATENT_PRODUCTS[0][1]]
    if model.inter:
        found += [(2 * model.inter, hidden, "N"), (hidden, model.inter, "K")]
    return found
