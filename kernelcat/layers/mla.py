"""Around `flashmla` and `mla_kv_write`: a DeepSeek layer with its weights absorbed into queries.

Multi-head latent attention (DeepSeek-V2, section 2.1; V3, section 2.1.1) makes keys and values of H
heads from one latent c of 512 elements a token. With ``kv_b = [W_UK; W_UV]`` for each head,

    k = W_UK c,  v = W_UV c
    q . k = (q W_UK) . c,  sum of p v = W_UV (sum of p c)

so a decoder caches only latents, all heads share them, and the weights are applied to queries and
results. One decoding step:

>>> flashmla, mla_kv_write = kernelcat.get("flashmla"), kernelcat.get("mla_kv_write")
>>> w_uk, w_uv = mla.split(kv_b.weight, heads=128, nope=128)
>>> mla_kv_write(c, k_pe, block_table, kv_lens, cu_q, cos_sin, out=kv_cache)
>>> q = mla.absorb(q_nope, mla.rotate(q_pe, cos_sin, positions), w_uk)
>>> out, lse = flashmla(q, kv_cache, block_table, kv_lens, cu_q, sm_scale=mla.sm_scale(192, 40))
>>> heads = mla.expand(out, w_uv)

Sparse decoding (DeepSeek-V3.2), where each query token lists the slots that it attends to:

>>> out, lse = flashmla(q, *mla.sparse(kv_cache, indices), sm_scale=mla.sm_scale(192, 40))

A chunk of a prompt, with keys and values of every head instead of absorbed weights:

>>> new = q_nope, mla.rotate(q_pe, cos_sin, positions), kv_b.weight
>>> heads, lse = mla.prefill(*new, kv_cache, block_table, [4096], [1024], mla.sm_scale(192, 40))

These functions need torch. They take tensors on any device and of any floating-point type.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch

from kernelcat.layers.mla_prefill import prefill as prefill


def split(kv_b: torch.Tensor, heads: int, nope: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """``(W_UK, W_UV)`` of a layer, as views of its weight.

    Parameters
    ----------
    kv_b : (heads * (nope + v), 512), the weight of DeepSeek's ``kv_b_proj``
    heads : heads of the layer, or of this rank under tensor parallelism
    nope : elements of a head's key that RoPE does not rotate

    Returns
    -------
    W_UK (heads, nope, 512) and W_UV (heads, v, 512).

    Raises
    ------
    ValueError
        The number of rows is not heads * (nope + v) for a positive v.
    """
    if kv_b.shape[0] % heads or kv_b.shape[0] <= heads * nope:
        raise ValueError(f"{kv_b.shape[0]} rows of kv_b are not {heads} heads of {nope} + v")
    w = kv_b.unflatten(0, (heads, -1))
    return w[:, :nope], w[:, nope:]


def rotate(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, style: str = "interleaved"
) -> torch.Tensor:
    """RoPE of queries as `mla_kv_write` does it for keys: in float32, rounded once.

    Parameters
    ----------
    x : (tokens, heads, 64)
    cos_sin : (rows, 64) float32: for each position 32 cosines, then 32 sines
    positions : (tokens,), rows of cos_sin
    style : ``interleaved`` (DeepSeek) pairs elements 2 i and 2 i + 1, ``neox`` i and i + 32

    Returns
    -------
    (tokens, heads, 64) in x's type.

    Raises
    ------
    ValueError
        ``style`` is neither of the two.
    """
    if style not in ("interleaved", "neox"):
        raise ValueError(f"style={style!r} must be interleaved or neox")
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    pairs = x.float().unflatten(-1, (-1, 2) if style == "interleaved" else (2, -1))
    axis = -1 if style == "interleaved" else -2
    first, second = pairs.unbind(axis)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(rotated, axis).flatten(-2).to(x.dtype)


def absorb(q_nope: torch.Tensor, q_pe: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Queries in latent space, as `flashmla` takes them.

    Parameters
    ----------
    q_nope : (tokens, heads, nope)
    q_pe : (tokens, heads, 64), rotated
    w_uk : (heads, nope, 512), from :func:`split`

    Returns
    -------
    (tokens, heads, 576), contiguous.
    """
    return torch.cat((torch.einsum("shd,hdc->shc", q_nope, w_uk), q_pe), -1)


def expand(out: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Results of heads, from the results of `flashmla` in latent space.

    Parameters
    ----------
    out : (tokens, heads, 512)
    w_uv : (heads, v, 512), from :func:`split`

    Returns
    -------
    (tokens, heads, v).
    """
    return torch.einsum("shc,hdc->shd", out, w_uv)


class Sparse(NamedTuple):
    """The arguments of `flashmla` after ``q``, where a query token is a sequence, a slot a page."""

    kv_cache: torch.Tensor
    """(pages * page_size, 1, 576), or uint8 (pages * page_size, 1, 656): a view of the cache."""
    block_table: torch.Tensor
    """(tokens, topk) int32."""
    kv_lens: torch.Tensor
    """(tokens,) int32."""
    cu_q: torch.Tensor
    """(tokens + 1,) int32."""


def sparse(
    kv_cache: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor | None = None
) -> Sparse:
    """Arguments of `flashmla` for query tokens that list the slots they attend to.

    The order of a list has no meaning. A token attends to every slot of its list, and twice to a
    slot that is listed twice. Slots of tokens after the query must be left out by the caller.

    Nothing is read on the host, so the call can be part of a CUDA graph. ``indices`` are not
    changed.

    Parameters
    ----------
    kv_cache : (pages, page_size, 576) or uint8 (pages, page_size, 656), contiguous
    indices : (tokens, topk) or (batch, q_len, topk) int32: slots of the cache, which are
        ``page * page_size`` plus the slot in the page. -1 and any other number that is no slot may
        stand anywhere in a list, and is ignored.
    lens : (tokens,) or (batch, q_len) int32: how many leading entries of each list count. These
        must be slots, which only ``kernelcat.debug`` checks. If None, the numbers that are no slots
        are moved to the end of each list, which takes a few kernels.

    Returns
    -------
    :class:`Sparse`.

    Raises
    ------
    ValueError
        An array has another shape, element type or layout.

    Source: ``indices_in_kvcache`` and ``topk_length`` of DeepSeek's FlashMLA.
    """
    if kv_cache.ndim != 3 or not kv_cache.is_contiguous():
        raise ValueError("kv_cache must be contiguous, (pages, page_size, row)")
    if indices.ndim not in (2, 3) or indices.dtype != torch.int32:
        raise ValueError("indices must be int32, (tokens, topk) or (batch, q_len, topk)")
    if lens is not None and (lens.shape != indices.shape[:-1] or lens.dtype != torch.int32):
        raise ValueError(f"lens must be int32, {tuple(indices.shape[:-1])}")
    slots = kv_cache.view(-1, 1, kv_cache.shape[2])
    table = indices.flatten(0, -2).contiguous()
    if lens is None:
        table, lens = valid_first(table, len(slots))
    starts = torch.arange(len(table) + 1, dtype=torch.int32, device=table.device)
    return Sparse(slots, table, lens.flatten(), starts)


def valid_first(indices: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists whose invalid entries stand at the end; valid entries keep their order.

    Parameters
    ----------
    indices : (tokens, topk) int32; an entry is valid if it is in ``range(num_slots)``
    num_slots : slots of the cache

    Returns
    -------
    The lists (tokens, topk) int32, and the number of valid entries of each, (tokens,) int32.
    """
    valid = (indices >= 0) & (indices < num_slots)
    valid_before = valid.cumsum(1) - valid.long()
    count = valid.sum(1, keepdim=True)
    invalid_before = torch.arange(indices.shape[1], device=indices.device) - valid_before
    place = torch.where(valid, valid_before, count + invalid_before)
    return torch.empty_like(indices).scatter_(1, place, indices), count[:, 0].int()


def sm_scale(head_dim: int, yarn: float = 1.0) -> float:
    """The factor of scores: 1 / sqrt(head_dim), times YaRN's correction for long contexts.

    Parameters
    ----------
    head_dim : elements of a head's key before absorption (128 + 64 in DeepSeek-V3)
    yarn : how many times YaRN extends the context (40 in DeepSeek-V3)

    Source: YaRN (Peng et al. 2023) multiplies both factors of a score by 0.1 ln(yarn) + 1.
    """
    return float(head_dim**-0.5 * (0.1 * log(max(yarn, 1.0)) + 1.0) ** 2)
