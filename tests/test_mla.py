"""A DeepSeek-V3 layer that is served from a cache of latents equals the layer as it is defined.

On a CPU the oracles replace the kernels, in float32, so that only the cache rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from oracle_operator import OracleOperator

import kernelcat
from kernelcat import catalog, dtypes
from kernelcat.errors import MissingDependency
from kernelcat.layers import mla
from kernelcat.reference.flashmla import DEEPSEEK_SCALE, POISON

HEADS, NOPE, ROPE, V, LATENT, HIDDEN = 4, 32, 64, 24, 512, 96
LENGTHS, PAGE_SIZE = (37, 20), 16
CHUNKS = ((11, 5), (14, 8))
"""New tokens of each sequence in the chunks of the prompts; the rest of the tokens is decoded."""


@dataclass
class Layer:
    """A DeepSeek-V3 attention layer.

    ``heads`` heads with ``nope`` elements that RoPE does not rotate, weights (rows, columns), and
    the gains of the norms, which are vectors.
    """

    heads: int
    nope: int
    q_a: torch.Tensor
    q_norm: torch.Tensor
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_norm: torch.Tensor
    kv_b: torch.Tensor
    o: torch.Tensor

    @staticmethod
    def random(heads: int = HEADS, nope: int = NOPE, v: int = V, hidden: int = HIDDEN) -> Layer:
        torch.manual_seed(0)

        def weight(rows: int, cols: int) -> torch.Tensor:
            return torch.randn(rows, cols) * cols**-0.5

        return Layer(
            heads, nope,
            weight(48, hidden), torch.rand(48) + 0.5, weight(heads * (nope + ROPE), 48) * 2,
            weight(LATENT + ROPE, hidden), torch.rand(LATENT) + 0.5,
            weight(heads * (nope + v), LATENT), weight(hidden, heads * v),
        )  # fmt: skip

    @property
    def scale(self) -> float:
        return mla.sm_scale(self.nope + ROPE, yarn=40)

    def to(self, *args: Any) -> Layer:
        """The layer with its weights on another device or of another type, as ``Tensor.to``."""
        weights = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return replace(self, **{name: weight.to(*args) for name, weight in weights.items()})

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q_nope (tokens, heads, nope) and q_pe (tokens, heads, 64) of x (tokens, hidden)."""
        q = norm(x @ self.q_a.T, self.q_norm) @ self.q_b.T
        return q.view(len(x), self.heads, -1).split((self.nope, ROPE), -1)

    def latents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """c (tokens, 512) and k_pe (tokens, 64) of x (tokens, hidden)."""
        c, k_pe = (x @ self.kv_a.T).split((LATENT, ROPE), -1)
        return norm(c, self.kv_norm), k_pe.contiguous()


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm of x (tokens, columns) in float32, rounded to x's type before the gain."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * gain


def rotations(positions: int) -> torch.Tensor:
    """RoPE's cosines, then sines: (positions, 64)."""
    angles = torch.outer(torch.arange(positions), 10000.0 ** -torch.linspace(0, 1, ROPE // 2))
    return torch.cat((angles.cos(), angles.sin()), 1)


def defined(layer: Layer, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """The layer of x (tokens, hidden), with keys and values of all heads and causal attention."""

    def rotate(pe):
        """RoPE of pe (tokens, heads, 64) as products of complex numbers."""
        factors = torch.complex(*cos_sin[: len(x), None].chunk(2, -1))
        pairs = torch.view_as_complex(pe.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * factors).flatten(-2)

    q_nope, q_pe = layer.queries(x)
    c, k_pe = layer.latents(x)
    kv = (c @ layer.kv_b.T).view(len(x), layer.heads, -1)
    k_nope, v = kv[..., : layer.nope], kv[..., layer.nope :]
    k_pe = rotate(k_pe[:, None]).expand(-1, layer.heads, -1)
    q, k = torch.cat((q_nope, rotate(q_pe)), -1), torch.cat((k_nope, k_pe), -1)
    z = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    z = z.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", z.softmax(-1), v)
    return out.flatten(1) @ layer.o.T


WRITE, ATTEND = OracleOperator("mla_kv_write"), OracleOperator("flashmla")


@dataclass
class Server:
    """Serves a layer over a paged cache of latents.

    ``write`` and ``attend`` are the operators `mla_kv_write` and `flashmla`.
    """

    layer: Layer
    cos_sin: torch.Tensor
    kv_dtype: torch.dtype
    page_size: int = PAGE_SIZE
    context_step: int = 4
    write: Callable = WRITE
    attend: Callable = ATTEND

    def run(
        self, sequences: Sequence[torch.Tensor], chunks: Sequence[Sequence[int]] = ()
    ) -> list[torch.Tensor]:
        """Results (tokens, hidden) of each sequence's hidden states (tokens, hidden).

        Prompts are processed in ``chunks``, then one or two tokens of each sequence in a step.
        """
        device, batch = self.cos_sin.device, len(sequences)
        width = -(-max(map(len, sequences)) // self.page_size)
        order = np.random.default_rng(0).permutation(batch * width).astype("int32")
        self.table = torch.from_numpy(order).view(batch, width).to(device)
        is_packed = self.kv_dtype == torch.uint8
        self.cache = torch.full(
            (batch * width, self.page_size, 656 if is_packed else 576),
            POISON if is_packed else float("nan"), dtype=self.kv_dtype, device=device,
        )  # fmt: skip
        lens, results, step = [0] * batch, [[] for _ in sequences], 0
        while any(length < len(x) for length, x in zip(lens, sequences, strict=True)):
            counts = chunks[step] if step < len(chunks) else [
                min(1 + length % 2, len(x) - length)
                for length, x in zip(lens, sequences, strict=True)
            ]  # fmt: skip
            new = [x[n : n + k] for x, n, k in zip(sequences, lens, counts, strict=True)]
            lens = [n + k for n, k in zip(lens, counts, strict=True)]
            rows = self.step(torch.cat(new), lens, counts, is_chunk=step < len(chunks))
            for parts, part in zip(results, rows.split([*counts]), strict=True):
                parts.append(part)
            step += 1
        return [torch.cat(rows) for rows in results]

    def step(
        self, x: torch.Tensor, lens: list[int], counts: Sequence[int], is_chunk: bool
    ) -> torch.Tensor:
        """Results for x (tokens, hidden), the last ``counts`` of ``lens`` tokens of sequences."""
        layer, device = self.layer, x.device
        positions = torch.cat([torch.arange(n - k, n) for n, k in zip(lens, counts, strict=True)])
        cu_q = torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device=device)
        indices = self.table, torch.tensor(lens, dtype=torch.int32, device=device), cu_q
        self.write(*layer.latents(x), *indices, self.cos_sin, out=self.cache)
        q_nope, q_pe = layer.queries(x)
        q_pe = mla.rotate(q_pe, self.cos_sin, positions.to(device))
        if is_chunk:
            arrays = q_nope, q_pe, layer.kv_b, self.cache, self.table
            out, _ = mla.prefill(*arrays, lens, counts, layer.scale, self.context_step)
        else:
            w_uk, w_uv = mla.split(layer.kv_b, layer.heads, layer.nope)
            q = mla.absorb(q_nope, q_pe, w_uk)
            out, _ = self.attend(q, self.cache, *indices, sm_scale=layer.scale, max_q=max(counts))
            out = mla.expand(out, w_uv)
        return out.flatten(1) @ layer.o.T


def sequences(lengths: Sequence[int] = LENGTHS, hidden: int = HIDDEN) -> list[torch.Tensor]:
    """Random hidden states (length, hidden) of sequences of these lengths."""
    torch.manual_seed(1)
    return [torch.randn(length, hidden) for length in lengths]


@pytest.mark.parametrize("chunks", [(), CHUNKS])
@pytest.mark.parametrize(("kv_dtype", "allowed"), [("float32", 1e-4), ("uint8", 0.15)])
def test_a_served_layer_equals_its_definition(kv_dtype: str, allowed: float, chunks) -> None:
    """A cache of uint8 rounds latents to float8 and keys to bfloat16."""
    layer, batch, cos_sin = Layer.random(), sequences(), rotations(max(LENGTHS))
    server = Server(layer, cos_sin, getattr(torch, kv_dtype))
    for result, x in zip(server.run(batch, chunks), batch, strict=True):
        expected = defined(layer, x, cos_sin)
        assert expected.std() > 0.2
        assert (result - expected).abs().max() < allowed


@pytest.mark.parametrize("chunks", [(), CHUNKS])
def test_a_served_layer_equals_that_of_transformers(chunks) -> None:
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
    layer, batch = Layer.random(), sequences()
    theirs = modeling.DeepseekV3Attention(config, 0).eval()
    assert abs(theirs.scaling - layer.scale) < 1e-9
    names = {
        "q_a_proj": layer.q_a, "q_a_layernorm": layer.q_norm, "q_b_proj": layer.q_b,
        "kv_a_proj_with_mqa": layer.kv_a, "kv_a_layernorm": layer.kv_norm,
        "kv_b_proj": layer.kv_b, "o_proj": layer.o,
    }  # fmt: skip
    theirs.load_state_dict({f"{name}.weight": weight for name, weight in names.items()})
    positions = torch.arange(max(LENGTHS))[None]
    cos, sin = modeling.DeepseekV3RotaryEmbedding(config)(batch[0], positions)
    cos_sin = torch.cat((cos[0, :, : ROPE // 2], sin[0, :, : ROPE // 2]), 1)
    server = Server(layer, cos_sin, torch.float32)
    for result, x in zip(server.run(batch, chunks), batch, strict=True):
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            expected, _ = theirs(x[None], (cos[:, : len(x)], sin[:, : len(x)]), mask)
        assert (result - expected[0]).abs().max() < 1e-4


REAL = {"heads": 16, "nope": 128, "v": 128, "hidden": 512}
"""DeepSeek-V3's heads on one of eight tensor-parallel ranks, with a small hidden size."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:there is no tuning database")
@pytest.mark.filterwarnings("ignore:.* is unverified")
@pytest.mark.parametrize("language", catalog.languages("flashmla"))
@pytest.mark.parametrize(("kv_dtype", "allowed"), [("bfloat16", 0.08), ("uint8", 0.25)])
def test_a_layer_served_by_kernels_equals_its_definition(
    language: str, kv_dtype: str, allowed: float
) -> None:
    """Two chunks, whose context `attn_merge` merges, then decoding."""
    try:
        write, attend = (
            kernelcat.get(name, language=language) for name in ("mla_kv_write", "flashmla")
        )
    except MissingDependency as error:
        pytest.skip(str(error))
    lengths, chunks = (300, 170), ((128, 100), (150, 60))
    layer = Layer.random(**REAL).to(torch.bfloat16)
    batch = [x.bfloat16() for x in sequences(lengths, REAL["hidden"])]
    cos_sin = rotations(max(lengths))
    server = Server(
        layer.to("cuda"), cos_sin.cuda(), getattr(torch, kv_dtype), 64, 64, write, attend
    )
    for result, x in zip(server.run([x.cuda() for x in batch], chunks), batch, strict=True):
        expected = defined(layer.to(torch.float32), x.float(), cos_sin)
        assert expected.std() > 0.2
        assert (result.float().cpu() - expected).abs().max() < allowed


def test_sm_scale_gives_deepseeks_factor() -> None:
    assert abs(mla.sm_scale(192, yarn=40) - DEEPSEEK_SCALE) < 1e-5
    assert mla.sm_scale(64) == 0.125


@pytest.mark.parametrize("style", ["interleaved", "neox"])
def test_queries_are_rotated_as_mla_kv_write_rotates_keys(style: str) -> None:
    """Bit by bit after rounding to bfloat16."""
    entry = catalog.entry("mla_kv_write")
    problem = entry.problem(
        batch=1, tokens=7, pages=1, table_width=1, positions=20, dtype="bfloat16",
        kv_dtype="bfloat16", style=style,
    )  # fmt: skip
    torch.manual_seed(2)
    k_pe, cos_sin = torch.randn(7, 64).bfloat16(), rotations(20)
    cache = entry.oracle(problem, {
        "c": np.zeros((7, 512), "float32"), "k_pe": k_pe.float().numpy(),
        "block_table": np.zeros((1, 1), "int32"),
        "kv_lens": np.array([17], "int32"), "cu_q": np.array([0, 7], "int32"),
        "cos_sin": cos_sin.numpy(), "kv_cache": np.zeros((1, 64, 576), "float32"),
    })["kv_cache"]  # fmt: skip
    rotated = mla.rotate(k_pe[:, None], cos_sin, torch.arange(10, 17), style)
    assert rotated.dtype == torch.bfloat16
    stored = dtypes.encode(cache[0, 10:17, 512:], "bfloat16")
    assert np.array_equal(rotated[:, 0].view(torch.uint16).numpy(), stored)


def test_invalid_weights_and_styles_are_refused() -> None:
    for rows in (HEADS * NOPE, HEADS * (NOPE + V) + 1):
        with pytest.raises(ValueError, match=f"{rows} rows of kv_b are not 4 heads of 32"):
            mla.split(torch.zeros(rows, LATENT), HEADS, NOPE)
    with pytest.raises(ValueError, match="must be interleaved or neox"):
        mla.rotate(torch.zeros(1, 1, 64), rotations(1), torch.zeros(1).long(), "gptj")
