"""A layer decoded with absorbed weights through the oracles, against the layer as it is written."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kernelcat import catalog, dtypes, mla
from kernelcat.reference.flashmla import DEEPSEEK_SCALE, POISON

HEADS, NOPE, ROPE, V, LATENT, HIDDEN = 4, 32, 64, 24, 512, 96
SCALE = mla.sm_scale(NOPE + ROPE, yarn=40)
LENGTHS, PAGE_SIZE = (37, 20), 16


@dataclass
class Layer:
    """Weights (rows, columns) of a DeepSeek-V3 attention layer, and gains of its norms."""

    q_a: torch.Tensor
    q_norm: torch.Tensor
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_norm: torch.Tensor
    kv_b: torch.Tensor
    o: torch.Tensor

    @staticmethod
    def random() -> Layer:
        torch.manual_seed(0)

        def weight(rows: int, cols: int) -> torch.Tensor:
            return torch.randn(rows, cols) * cols**-0.5

        return Layer(
            weight(48, HIDDEN), torch.rand(48) + 0.5, weight(HEADS * (NOPE + ROPE), 48) * 2,
            weight(LATENT + ROPE, HIDDEN), torch.rand(LATENT) + 0.5,
            weight(HEADS * (NOPE + V), LATENT), weight(HIDDEN, HEADS * V),
        )  # fmt: skip

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = norm(x @ self.q_a.T, self.q_norm) @ self.q_b.T
        return q.view(len(x), HEADS, -1).split((NOPE, ROPE), -1)

    def latents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c, k_pe = (x @ self.kv_a.T).split((LATENT, ROPE), -1)
        return norm(c, self.kv_norm), k_pe


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def angles(positions: int) -> torch.Tensor:
    turns = torch.outer(torch.arange(positions), 10000.0 ** -torch.linspace(0, 1, ROPE // 2))
    return torch.cat((turns.cos(), turns.sin()), 1)


def as_written(layer: Layer, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Keys and values of every head, and causal attention: x (tokens, hidden) and so the result."""

    def turn(pe):  # (tokens, heads, 64): products of complex numbers
        by = torch.complex(*cos_sin[: len(x), None].chunk(2, -1))
        pairs = torch.view_as_complex(pe.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * by).flatten(-2)

    q_nope, q_pe = layer.queries(x)
    c, k_pe = layer.latents(x)
    k_nope, v = (c @ layer.kv_b.T).view(len(x), HEADS, -1).split((NOPE, V), -1)
    k_pe = turn(k_pe[:, None]).expand(-1, HEADS, -1)
    q, k = torch.cat((q_nope, turn(q_pe)), -1), torch.cat((k_nope, k_pe), -1)
    z = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    z = z.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", z.softmax(-1), v)
    return out.flatten(1) @ layer.o.T


def decoded(
    layer: Layer, sequences: list[torch.Tensor], cos_sin: torch.Tensor, kv_dtype: str
) -> list[torch.Tensor]:
    """A token of each sequence a step, or two, from a paged cache of latents."""
    batch, width = len(sequences), -(-max(LENGTHS) // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(batch * width).astype("int32")
    shared = {"batch": batch, "pages": batch * width, "table_width": width,
              "page_size": PAGE_SIZE, "dtype": "bfloat16", "kv_dtype": kv_dtype}  # fmt: skip
    is_packed = kv_dtype == "uint8"
    cache = np.full((batch * width, PAGE_SIZE, 656 if is_packed else 576), np.nan, "float32")
    cache = np.full_like(cache, POISON) if is_packed else cache
    lens, results = [0] * batch, [[] for _ in sequences]
    w_uk, w_uv = mla.split(layer.kv_b, HEADS, NOPE)
    while any(length < len(x) for length, x in zip(lens, sequences, strict=True)):
        counts = [min(1 + length % 2, len(x) - length)
                  for length, x in zip(lens, sequences, strict=True)]  # fmt: skip
        new = [x[n : n + count] for x, n, count in zip(sequences, lens, counts, strict=True)]
        at = torch.cat([torch.arange(n, n + k) for n, k in zip(lens, counts, strict=True)])
        lens = [n + k for n, k in zip(lens, counts, strict=True)]
        x, tokens = torch.cat(new), sum(counts)
        arrays = {
            "block_table": table.reshape(batch, width), "kv_lens": np.array(lens, "int32"),
            "cu_q": np.cumsum([0, *counts]).astype("int32"),
        }  # fmt: skip
        c, k_pe = layer.latents(x)
        write = catalog.entry("mla_kv_write")
        problem = write.problem(tokens=tokens, positions=len(cos_sin), **shared)
        cache = write.oracle(problem, {**arrays, "c": c.numpy(), "k_pe": k_pe.numpy(),
                                       "cos_sin": cos_sin.numpy(), "kv_cache": cache})  # fmt: skip
        cache = cache["kv_cache"]
        q_nope, q_pe = layer.queries(x)
        q = mla.absorb(q_nope, mla.rotate(q_pe, cos_sin, at), w_uk)
        attend = catalog.entry("flashmla")
        problem = attend.problem(tokens=tokens, heads=HEADS, max_q=2, sm_scale=SCALE, **shared)
        out = attend.oracle(problem, {**arrays, "q": q.numpy(), "kv_cache": cache})["out"]
        result = mla.expand(torch.from_numpy(out), w_uv).flatten(1) @ layer.o.T
        for own, rows in zip(results, result.split(counts), strict=True):
            own.append(rows)
    return [torch.cat(rows) for rows in results]


def sequences() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(length, HIDDEN) for length in LENGTHS]


@pytest.mark.parametrize(("kv_dtype", "allowed"), [("bfloat16", 1e-4), ("uint8", 0.15)])
def test_a_decoded_layer_is_the_layer_as_written(kv_dtype: str, allowed: float) -> None:
    """But for float8's rounding of latents and bfloat16's of keys."""
    layer, x, cos_sin = Layer.random(), sequences(), angles(max(LENGTHS))
    for found, own in zip(decoded(layer, x, cos_sin, kv_dtype), x, strict=True):
        expected = as_written(layer, own, cos_sin)
        assert expected.std() > 0.2
        assert (found - expected).abs().max() < allowed


def test_a_decoded_layer_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=48,
        kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V,
        max_position_embeddings=4096, attn_implementation="eager",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        },
    )  # fmt: skip
    layer, x = Layer.random(), sequences()
    theirs = modeling.DeepseekV3Attention(config, 0).eval()
    assert abs(theirs.scaling - SCALE) < 1e-9
    names = {
        "q_a_proj": layer.q_a, "q_a_layernorm": layer.q_norm, "q_b_proj": layer.q_b,
        "kv_a_proj_with_mqa": layer.kv_a, "kv_a_layernorm": layer.kv_norm,
        "kv_b_proj": layer.kv_b, "o_proj": layer.o,
    }  # fmt: skip
    theirs.load_state_dict({f"{name}.weight": weight for name, weight in names.items()})
    at = torch.arange(max(LENGTHS))[None]
    cos, sin = modeling.DeepseekV3RotaryEmbedding(config)(x[0], at)
    cos_sin = torch.cat((cos[0, :, : ROPE // 2], sin[0, :, : ROPE // 2]), 1)
    for found, own in zip(decoded(layer, x, cos_sin, "bfloat16"), x, strict=True):
        mask = torch.full((len(own), len(own)), float("-inf")).triu(1)[None, None]
        turned = cos[:, : len(own)], sin[:, : len(own)]
        with torch.no_grad():
            expected, _ = theirs(own[None], turned, mask)
        assert (found - expected[0]).abs().max() < 1e-4


def test_the_scale_is_that_of_deepseek() -> None:
    assert abs(mla.sm_scale(192, yarn=40) - DEEPSEEK_SCALE) < 1e-5
    assert mla.sm_scale(64) == 0.125


@pytest.mark.parametrize("style", ["interleaved", "neox"])
def test_queries_turn_as_keys_do(style: str) -> None:
    """As `mla_kv_write` turns and stores them."""
    entry = catalog.entry("mla_kv_write")
    problem = entry.problem(
        batch=1, tokens=7, pages=1, table_width=1, positions=20, dtype="bfloat16",
        kv_dtype="bfloat16", style=style,
    )  # fmt: skip
    torch.manual_seed(2)
    k_pe, cos_sin = torch.randn(7, 64).bfloat16(), angles(20)
    arrays = SimpleNamespace(c=np.zeros((7, 512), "float32"), k_pe=k_pe.float().numpy())
    cache = entry.oracle(problem, {
        **vars(arrays), "block_table": np.zeros((1, 1), "int32"),
        "kv_lens": np.array([17], "int32"), "cu_q": np.array([0, 7], "int32"),
        "cos_sin": cos_sin.numpy(), "kv_cache": np.zeros((1, 64, 576), "float32"),
    })["kv_cache"]  # fmt: skip
    turned = mla.rotate(k_pe[:, None], cos_sin, torch.arange(10, 17), style)
    assert turned.dtype == torch.bfloat16
    stored = dtypes.encode(cache[0, 10:17, 512:], "bfloat16")
    assert np.array_equal(turned[:, 0].view(torch.uint16).numpy(), stored)


def test_what_is_no_layer_is_refused() -> None:
    for rows in (HEADS * NOPE, HEADS * (NOPE + V) + 1):
        with pytest.raises(ValueError, match=f"{rows} rows are not 4 heads of 32"):
            mla.split(torch.zeros(rows, LATENT), HEADS, NOPE)
    with pytest.raises(ValueError, match="must be interleaved or neox"):
        mla.rotate(torch.zeros(1, 1, 64), angles(1), torch.zeros(1).long(), "gptj")
