"""Configurations by name: published models at their true sizes, and small ones for tests.

DeepSeek-V3 as a whole needs several GPUs. Its first 4 layers, of which one has experts, are 30 GB
and have a name of their own.

Small models have every feature of the large ones: several layers, windows shorter than a test's
prompts, more groups than are selected, YaRN. Their heads have 64 elements and their latents 512,
which are the fewest that `paged_attn` and `flashmla` take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernelcat.moe.config import Config
from kernelcat.moe.deepseek_v3 import DeepseekV3Config
from kernelcat.moe.gpt_oss import GptOssConfig
from kernelcat.moe.llama import LlamaConfig
from kernelcat.moe.mixtral import MixtralConfig
from kernelcat.moe.qwen3_moe import Qwen3MoeConfig
from kernelcat.moe.rope import Rope

_GPT_OSS = GptOssConfig(
    hidden_size=2880, num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8,
    head_dim=64, vocab_size=201088, intermediate_size=2880, num_local_experts=32,
    num_experts_per_tok=4, max_position_embeddings=131072, rms_norm_eps=1e-5,
    rope=Rope(
        rope_theta=150000.0, rope_type="yarn", factor=32.0, truncate=False,
        original_max_position_embeddings=4096,
    ),
)  # fmt: skip

_QWEN3_30B = Qwen3MoeConfig(
    hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, vocab_size=151936, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960,
    rope=Rope(rope_theta=1000000.0),
)  # fmt: skip

_DEEPSEEK_V3 = DeepseekV3Config(
    hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, vocab_size=129280,
    intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256,
    num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5,
    first_k_dense_replace=3, q_lora_rank=1536, max_position_embeddings=163840,
    rope=Rope(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0,
        mscale_all_dim=1.0,
    ),
)  # fmt: skip

_LLAMA_8B = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, intermediate_size=14336, max_position_embeddings=131072, rms_norm_eps=1e-5,
    rope=Rope(
        rope_theta=500000.0, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192
    ),
)  # fmt: skip

_MIXTRAL_8X7B = MixtralConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=32000, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
    max_position_embeddings=32768, rms_norm_eps=1e-5, rope=Rope(rope_theta=1000000.0),
)  # fmt: skip

_SMOLLM2 = LlamaConfig(
    hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, intermediate_size=1536, max_position_embeddings=8192, rms_norm_eps=1e-5,
    tie_word_embeddings=True, rope=Rope(rope_theta=100000.0),
)  # fmt: skip

_SMALL: dict[str, Any] = {"vocab_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 512}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}

SIZES: dict[str, Config] = {
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": replace(
        _GPT_OSS, num_hidden_layers=36, num_local_experts=128, layer_types=()
    ),
    "qwen3-30b-a3b": _QWEN3_30B,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3-4-layers": replace(_DEEPSEEK_V3, num_hidden_layers=4),
    "llama-3.1-8b": _LLAMA_8B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "smollm2-135m": _SMOLLM2,
    "small-gpt-oss": replace(
        _GPT_OSS, **_SMALL, **_HEADS, hidden_size=96, intermediate_size=64, num_local_experts=8,
        layer_types=(), sliding_window=24,
        rope=replace(_GPT_OSS.rope, original_max_position_embeddings=16),
    ),
    "small-qwen3-moe": replace(
        _QWEN3_30B, **_SMALL, **_HEADS, hidden_size=64, moe_intermediate_size=48, num_experts=8,
        num_experts_per_tok=3,
    ),
    "small-deepseek-v3": replace(
        _DEEPSEEK_V3, **{**_SMALL, "num_hidden_layers": 3}, num_attention_heads=2, hidden_size=64,
        intermediate_size=96, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=48,
        qk_nope_head_dim=32, v_head_dim=32,
        rope=replace(_DEEPSEEK_V3.rope, original_max_position_embeddings=16),
    ),
    "small-llama": replace(
        _LLAMA_8B, **_SMALL, **_HEADS, hidden_size=64, intermediate_size=96,
        rope=replace(_LLAMA_8B.rope, original_max_position_embeddings=64),
    ),
    "small-mixtral": replace(
        _MIXTRAL_8X7B, **_SMALL, **_HEADS, hidden_size=64, intermediate_size=96,
        num_local_experts=4,
    ),
    "small-smollm2": replace(
        _SMOLLM2, **_SMALL, **_HEADS, hidden_size=64, intermediate_size=96,
    ),
}  # fmt: skip
"""Name -> configuration; those that begin with ``small-`` are for tests."""
