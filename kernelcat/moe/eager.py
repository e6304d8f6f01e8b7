"""Entries in plain torch operators: the baseline that the ladder starts from.

Each function takes the arguments of the entry of its name and returns what the entry returns, on
any device. They are written as a model in eager torch is: one operator after another, in the type
of the tensors, and the host may wait for the GPU where shapes depend on values. So only decode
steps without experts could be captured in a CUDA graph.

`ops.Ops` with these functions is a real way to run a model, and the slowest one:

    >>> model = moe.random_model("small-gpt-oss", "cpu", dense_experts=True)
    >>> model.ops = eager.replace(model.ops, eager.EVERYTHING)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from kernelcat.errors import Unsupported
from kernelcat.moe.ops import Ops
from kernelcat.reference._epilogue import torch_activation
from kernelcat.reference._experts import ALPHA, LIMIT
from kernelcat.reference._mla_row import LATENT

ATTENTION = ("flashmla", "kv_write", "mla_kv_write", "paged_attn")
PRODUCTS = ("embedding", "gemm", "lm_head", "rms_norm")
EXPERTS = ("moe_mlp",)
EVERYTHING = (*ATTENTION, *PRODUCTS, *EXPERTS)
"""What a greedy step runs; drawing tokens and quantizing stay the catalog's."""


def replace(ops: Ops, names: Iterable[str]) -> Ops:
    """``ops`` with the functions of this module in place of the entries ``names``.

    Fused projections (`Ops.fused_tokens`, `Ops.projected_tokens`) are switched off if a product is
    replaced: they have no form in single operators.
    """
    named = tuple(names)
    chosen: dict[str, Any] = {name: globals()[name] for name in named}
    if set(named) & set(PRODUCTS):
        chosen |= {"fused_tokens": 0, "projected_tokens": 0}
    return dataclasses.replace(ops, **chosen)


# ---- products -----------------------------------------------------------------------------------


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of ``table``; ids must be valid."""
    return functional.embedding(ids, table)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> tuple[torch.Tensor]:
    """RMSNorm of rows, alone in a tuple, as the entry returns it."""
    return (functional.rms_norm(x, x.shape[1:], weight, eps),)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str = "none",
) -> torch.Tensor:
    """activation(a b^T + bias) + residual."""
    d: torch.Tensor = torch_activation(activation)(functional.linear(a, b, bias))
    return d if residual is None else d + residual


def lm_head(
    x: torch.Tensor, w: torch.Tensor, *, top_k: int = 1, has_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The largest logits, their tokens, and all logits where ``has_logits``."""
    logits = functional.linear(x, w).float()
    values, ids = logits.topk(top_k, 1)
    return values, ids.int(), logits if has_logits else None


# ---- attention ----------------------------------------------------------------------------------


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor, is_interleaved: bool = False) -> torch.Tensor:
    """x (tokens, heads, head_dim) with its pairs rotated by rows cos_sin (tokens, head_dim)."""
    cos, sin = cos_sin[:, None].chunk(2, -1)
    if is_interleaved:
        first, second = x[..., ::2].float(), x[..., 1::2].float()
    else:
        first, second = (half.float() for half in x.chunk(2, -1))
    parts = first * cos - second * sin, second * cos + first * sin
    y = torch.stack(parts, -1).flatten(-2) if is_interleaved else torch.cat(parts, -1)
    return y.to(x.dtype)


def _slots(
    count: int, table: torch.Tensor, kv_lens: torch.Tensor, cu_q: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Position, page and slot in the page of each of ``count`` new tokens."""
    token = torch.arange(count, dtype=torch.int32, device=cu_q.device)
    sequence = torch.searchsorted(cu_q, token, right=True) - 1
    position = kv_lens[sequence] - cu_q[sequence + 1] + token
    return position, table[sequence, position // page_size], position % page_size


def kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """RoPE of whole heads (style neox); ``out`` are rotated queries and both caches."""
    q_out, *caches = out
    position, page, slot = _slots(len(k), table, kv_lens, cu_q, caches[0].shape[1])
    rows = cos_sin[position]
    q_out.copy_(_rotated(q, rows))
    for cache, new in zip(caches, (_rotated(k, rows), v), strict=True):
        _store(cache, page, slot, new)
    return out


def mla_kv_write(
    c: torch.Tensor,
    k_pe: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """RoPE of interleaved pairs; ``out`` is the cache of latent rows."""
    position, page, slot = _slots(len(c), table, kv_lens, cu_q, out.shape[1])
    rotated = _rotated(k_pe[:, None], cos_sin[position], is_interleaved=True)[:, 0]
    _store(out, page, slot, torch.cat((c, rotated), 1))
    return out


def _store(cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, rows: torch.Tensor) -> None:
    _check_type(cache, rows)
    cache[page, slot] = rows


def _check_type(cache: torch.Tensor, x: torch.Tensor) -> None:
    if cache.dtype != x.dtype:
        raise Unsupported(f"a cache of {cache.dtype} for {x.dtype} needs the catalog's kernels")


def paged_attn(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    window: int = 0,
    max_q: int = 1,
) -> tuple[torch.Tensor, None]:
    """Attention without its log-sum-exp; slots that nobody wrote must be finite.

    Decode steps gather the pages of all sequences and attend at once; in other steps one sequence
    follows the other, because their numbers of queries differ.
    """
    caches = k_cache, v_cache
    scale = q.shape[-1] ** -0.5
    return _paged(q, caches, table, kv_lens, cu_q, sinks, window, max_q, scale), None


def flashmla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q: torch.Tensor,
    *,
    sm_scale: float,
    max_q: int = 1,
) -> tuple[torch.Tensor, None]:
    """Latent attention as `paged_attn` with one key head, whose values are parts of its keys."""
    rows = kv_cache[:, :, None]
    caches = rows, rows[..., :LATENT]
    return _paged(q, caches, table, kv_lens, cu_q, None, 0, max_q, sm_scale), None


def _paged(
    q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor,
    kv_lens: torch.Tensor, cu_q: torch.Tensor, sinks: torch.Tensor | None, window: int, max_q: int,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Results (tokens, heads, width of values) of q (tokens, heads, head_dim)."""
    _check_type(caches[0], q)
    num_pages, page_size = caches[0].shape[:2]
    if max_q == 1 and len(q) == len(kv_lens):
        pages = table.clamp(0, num_pages - 1)  # entries after the last page may be anything
        k, v = (cache[pages].flatten(1, 2) for cache in caches)
        return _attend(q[:, None], k, v, kv_lens[:, None] - 1, sinks, window, scale)[:, 0]
    out = q.new_zeros(*q.shape[:2], caches[1].shape[-1])
    lengths = kv_lens.tolist()
    for s, (start, end) in enumerate(pairwise(cu_q.tolist())):
        if start == end:
            continue
        length = lengths[s]
        pages = table[s, : -(-length // page_size)]
        k, v = (cache[pages].flatten(0, 1)[None, :length] for cache in caches)
        last = torch.arange(length - (end - start), length, device=q.device)[None]
        out[start:end] = _attend(q[None, start:end], k, v, last, sinks, window, scale)[0]
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor,
    sinks: torch.Tensor | None, window: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attention of q (batch, queries, heads, dim) to keys up to positions last (batch, queries).

    k (batch, tokens, kv_heads, dim) and v (batch, tokens, kv_heads, width); sinks (heads,).
    """
    batch, queries, heads, dim = q.shape
    kv_heads = k.shape[2]
    rows = q.transpose(1, 2).reshape(batch, kv_heads, -1, dim)
    scores = (rows @ k.permute(0, 2, 3, 1)).float() * scale
    scores = scores.view(batch, heads, queries, -1)
    distance = last[:, :, None] - torch.arange(k.shape[1], device=q.device)
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(batch, -1, queries, 1)
        scores = torch.cat((scores, column), -1)
    p = scores.softmax(-1)[..., : k.shape[1]].to(v.dtype)
    out = p.reshape(batch, kv_heads, -1, k.shape[1]) @ v.transpose(1, 2)
    return out.view(batch, heads, queries, -1).transpose(1, 2)


# ---- experts ------------------------------------------------------------------------------------


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, *, top_k: int, renormalize: bool,
    score: str = "softmax", groups: int = 1, top_groups: int = 1, scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Ids (tokens, top_k) of the selected experts and their weights, float32 (`moe_route`)."""
    logits = logits.float()
    scores = logits.sigmoid() if score == "sigmoid" else logits
    ranked = scores if correction is None else scores + correction
    if groups > 1:
        grouped = ranked.view(len(ranked), groups, -1)
        best = grouped.topk(min(2, grouped.shape[2]), 2).values.sum(2).topk(top_groups, 1).indices
        is_out = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter(1, best, False)
        ranked = grouped.masked_fill(is_out[:, :, None], float("-inf")).flatten(1)
    ids = ranked.topk(top_k, 1).indices
    chosen = scores.gather(1, ids)
    if score == "sigmoid":
        gates = chosen / (chosen.sum(1, keepdim=True) + 1e-20) if renormalize else chosen
    else:
        gates = chosen.softmax(1) if renormalize else logits.softmax(1).gather(1, ids)
    return ids, gates * scaling


def _activated(activation: str, z: torch.Tensor) -> torch.Tensor:
    if activation != "swiglu_oai":
        y: torch.Tensor = torch_activation(activation)(z)
        return y
    gate, up = z[:, ::2].clamp(max=LIMIT), z[:, 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def moe_mlp(
    x: torch.Tensor, logits: torch.Tensor, *, w1: torch.Tensor, w2: torch.Tensor,
    top_k: int, renormalize: bool, activation: str,
    bias1: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, correction: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None, w2_scale: torch.Tensor | None = None,
    score: str = "softmax", groups: int = 1, top_groups: int = 1, scaling: float = 1.0,
    packing: str = "rows", act_dtype: str = "bfloat16",
) -> torch.Tensor:  # fmt: skip
    """The experts of a layer, one after another; only those that serve a token are read.

    Raises ``Unsupported`` for weights with scales: torch has no product for them.
    """
    if w1_scale is not None or w2_scale is not None:
        raise Unsupported("torch multiplies experts of 16 bits only, not quantized ones")
    ids, gates = route(
        logits, correction, top_k=top_k, renormalize=renormalize, score=score, groups=groups,
        top_groups=top_groups, scaling=scaling,
    )  # fmt: skip
    out = torch.zeros_like(x) if residual is None else residual.clone()
    for expert in ids.unique().tolist():
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        first, second = (None if b is None else b[expert] for b in (bias1, bias2))
        h = _activated(activation, functional.linear(x[tokens], w1[expert], first))
        y = functional.linear(h, w2[expert], second)
        out.index_add_(0, tokens, (gates[tokens, slots, None] * y).to(x.dtype))
    return out
