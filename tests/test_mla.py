"""A DeepSeek-V3 layer served from a cache of latents, against the layer as it is written.

On a CPU the oracles stand in for the kernels, and nothing is rounded but what the cache rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import kernelcat
from kernelcat import catalog, dtypes
from kernelcat.call import signature
from kernelcat.errors import MissingDependency
from kernelcat.layers import mla
from kernelcat.reference.flashmla import DEEPSEEK_SCALE, POISON

HEADS, NOPE, ROPE, V, LATENT, HIDDEN = 4, 32, 64, 24, 512, 96
LENGTHS, PAGE_SIZE = (37, 20), 16
CHUNKS = ((11, 5), (14, 8))
"""Of the prompts; what follows is decoded."""


@dataclass
class Layer:
    """Weights (rows, columns) of a DeepSeek-V3 attention layer, and gains of its norms."""

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
        """Moved, or of another type, as a tensor's ``to``."""
        weights = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return replace(self, **{name: weight.to(*args) for name, weight in weights.items()})

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = norm(x @ self.q_a.T, self.q_norm) @ self.q_b.T
        return q.view(len(x), self.heads, -1).split((self.nope, ROPE), -1)

    def latents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c, k_pe = (x @ self.kv_a.T).split((LATENT, ROPE), -1)
        return norm(c, self.kv_norm), k_pe.contiguous()


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * gain


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
    kv = (c @ layer.kv_b.T).view(len(x), layer.heads, -1)
    k_nope, v = kv[..., : layer.nope], kv[..., layer.nope :]
    k_pe = turn(k_pe[:, None]).expand(-1, layer.heads, -1)
    q, k = torch.cat((q_nope, turn(q_pe)), -1), torch.cat((k_nope, k_pe), -1)
    z = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    z = z.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", z.softmax(-1), v)
    return out.flatten(1) @ layer.o.T


def oracle(name: str) -> Callable:
    """An operator on CPU tensors: what the oracle says, in the type of the first array.

    Tensors of float32 stand for bfloat16 ones that are not rounded.
    """
    entry = catalog.entry(name)

    def call(*arrays: torch.Tensor, out: Any = None, **axes: Any) -> tuple[torch.Tensor, ...]:
        outs = signature.outputs(entry, out)
        told = [*zip(entry.inputs, arrays, strict=True), *zip(entry.outputs, outs, strict=False)]
        typed = [
            array.bfloat16()
            if array.dtype == torch.float32 and tensor.dtype != "float32"
            else array
            for tensor, array in told
        ]
        infos = signature.describe(entry, typed[: len(arrays)], typed[len(arrays) :])
        values = {
            tensor.name: (array if tensor.dtype == "int32" else array.float()).numpy()
            for tensor, array in told
        }
        found = entry.oracle(signature.infer(entry, infos, axes), values)
        results = tuple(torch.from_numpy(found[tensor.name]) for tensor in entry.outputs)
        for place, result in zip(outs, results, strict=False):
            place.copy_(result)
        return outs or tuple(result.to(arrays[0].dtype) for result in results)

    return call


WRITE, ATTEND = oracle("mla_kv_write"), oracle("flashmla")


@dataclass
class Server:
    """A layer over a paged cache of latents, in such pages; `write` and `attend` are operators."""

    layer: Layer
    cos_sin: torch.Tensor
    kv_dtype: torch.dtype
    page_size: int = PAGE_SIZE
    piece: int = 4
    write: Callable = WRITE
    attend: Callable = ATTEND

    def run(
        self, sequences: Sequence[torch.Tensor], chunks: Sequence[Sequence[int]] = ()
    ) -> list[torch.Tensor]:
        """Prompts chunk by chunk, then one or two tokens of each sequence a step."""
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
            for own, part in zip(results, rows.split([*counts]), strict=True):
                own.append(part)
            step += 1
        return [torch.cat(rows) for rows in results]

    def step(
        self, x: torch.Tensor, lens: list[int], counts: Sequence[int], is_chunk: bool
    ) -> torch.Tensor:
        """``counts`` new tokens of each sequence, which has ``lens`` then."""
        layer, device = self.layer, x.device
        at = torch.cat([torch.arange(n - k, n) for n, k in zip(lens, counts, strict=True)])
        cu_q = torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device=device)
        where = self.table, torch.tensor(lens, dtype=torch.int32, device=device), cu_q
        self.write(*layer.latents(x), *where, self.cos_sin, out=self.cache)
        q_nope, q_pe = layer.queries(x)
        q_pe = mla.rotate(q_pe, self.cos_sin, at.to(device))
        if is_chunk:
            new = q_nope, q_pe, layer.kv_b, self.cache, self.table
            out, _ = mla.prefill(*new, lens, counts, layer.scale, piece=self.piece)
        else:
            w_uk, w_uv = mla.split(layer.kv_b, layer.heads, layer.nope)
            q = mla.absorb(q_nope, q_pe, w_uk)
            out, _ = self.attend(q, self.cache, *where, sm_scale=layer.scale, max_q=max(counts))
            out = mla.expand(out, w_uv)
        return out.flatten(1) @ layer.o.T


def sequences(lengths: Sequence[int] = LENGTHS, hidden: int = HIDDEN) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(length, hidden) for length in lengths]


@pytest.mark.parametrize("chunks", [(), CHUNKS])
@pytest.mark.parametrize(("kv_dtype", "allowed"), [("float32", 1e-4), ("uint8", 0.15)])
def test_a_served_layer_is_the_layer_as_written(kv_dtype: str, allowed: float, chunks) -> None:
    """But for float8's rounding of latents and bfloat16's of keys."""
    layer, x, cos_sin = Layer.random(), sequences(), angles(max(LENGTHS))
    server = Server(layer, cos_sin, getattr(torch, kv_dtype))
    for found, own in zip(server.run(x, chunks), x, strict=True):
        expected = as_written(layer, own, cos_sin)
        assert expected.std() > 0.2
        assert (found - expected).abs().max() < allowed


@pytest.mark.parametrize("chunks", [(), CHUNKS])
def test_a_served_layer_is_that_of_transformers(chunks) -> None:
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
    assert abs(theirs.scaling - layer.scale) < 1e-9
    names = {
        "q_a_proj": layer.q_a, "q_a_layernorm": layer.q_norm, "q_b_proj": layer.q_b,
        "kv_a_proj_with_mqa": layer.kv_a, "kv_a_layernorm": layer.kv_norm,
        "kv_b_proj": layer.kv_b, "o_proj": layer.o,
    }  # fmt: skip
    theirs.load_state_dict({f"{name}.weight": weight for name, weight in names.items()})
    at = torch.arange(max(LENGTHS))[None]
    cos, sin = modeling.DeepseekV3RotaryEmbedding(config)(x[0], at)
    cos_sin = torch.cat((cos[0, :, : ROPE // 2], sin[0, :, : ROPE // 2]), 1)
    server = Server(layer, cos_sin, torch.float32)
    for found, own in zip(server.run(x, chunks), x, strict=True):
        mask = torch.full((len(own), len(own)), float("-inf")).triu(1)[None, None]
        turned = cos[:, : len(own)], sin[:, : len(own)]
        with torch.no_grad():
            expected, _ = theirs(own[None], turned, mask)
        assert (found - expected[0]).abs().max() < 1e-4


REAL = {"heads": 16, "nope": 128, "v": 128, "hidden": 512}
"""A tensor-parallel rank's part of DeepSeek-V3, but for the hidden size."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:there is no tuning database")
@pytest.mark.filterwarnings("ignore:.* is unverified")
@pytest.mark.parametrize("language", catalog.languages("flashmla"))
@pytest.mark.parametrize(("kv_dtype", "allowed"), [("bfloat16", 0.08), ("uint8", 0.25)])
def test_kernels_serve_the_layer_as_written(language: str, kv_dtype: str, allowed: float) -> None:
    """Two chunks, whose context is merged by `attn_merge`, and then some tokens decoded."""
    try:
        write, attend = (
            kernelcat.get(name, language=language) for name in ("mla_kv_write", "flashmla")
        )
    except MissingDependency as error:
        pytest.skip(str(error))
    lengths, chunks = (300, 170), ((128, 100), (150, 60))
    layer = Layer.random(**REAL).to(torch.bfloat16)
    x = [own.bfloat16() for own in sequences(lengths, REAL["hidden"])]
    cos_sin = angles(max(lengths))
    server = Server(
        layer.to("cuda"), cos_sin.cuda(), getattr(torch, kv_dtype), 64, 64, write, attend
    )
    for found, own in zip(server.run([own.cuda() for own in x], chunks), x, strict=True):
        expected = as_written(layer.to(torch.float32), own.float(), cos_sin)
        assert expected.std() > 0.2
        assert (found.float().cpu() - expected).abs().max() < allowed


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
