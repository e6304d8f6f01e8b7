"""Around `flashmla` and `mla_kv_write`: a DeepSeek layer's weights, absorbed into its queries.

Attention of H heads over latents c of 512 elements (DeepSeek-V2, section 2.1; V3, section 2.1.1):

    k = W_UK c,  v = W_UV c,  with Wkv_b = [W_UK; W_UV] of each head
    q . k = (q W_UK) . c,  sum p v = W_UV (sum p c)

so that a decoder keeps latents alone, and all heads share them:

>>> flashmla, mla_kv_write = kernelcat.get("flashmla"), kernelcat.get("mla_kv_write")
>>> w_uk, w_uv = mla.split(kv_b.weight, heads=128, nope=128)
>>> mla_kv_write(c, k_pe, block_table, kv_lens, cu_q, cos_sin, out=kv_cache)
>>> q = mla.absorb(q_nope, mla.rotate(q_pe, cos_sin, positions), w_uk)
>>> out, lse = flashmla(q, kv_cache, block_table, kv_lens, cu_q, sm_scale=mla.sm_scale(192, 40))
>>> heads = mla.expand(out, w_uv)

Where each query token has a list of its own (DeepSeek-V3.2), of slots of the cache:

>>> out, lse = flashmla(q, *mla.sparse(kv_cache, indices), sm_scale=mla.sm_scale(192, 40))

Of a chunk of a prompt, with keys and values of every head instead:

>>> new = q_nope, mla.rotate(q_pe, cos_sin, positions), kv_b.weight
>>> heads, lse = mla.prefill(*new, kv_cache, block_table, [4096], [1024], mla.sm_scale(192, 40))

Needs torch, and works on any device and type.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch

from kernelcat.layers.mla_prefill import prefill as prefill


def split(kv_b: torch.Tensor, heads: int, nope: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """``(W_UK, W_UV)`` of a layer, views of its weight.

    Parameters
    ----------
    kv_b : (heads * (nope + v), 512), the weight of DeepSeek's ``kv_b_proj``
    heads : of the layer, or of this rank's part of it
    nope : elements of a head's key that are not rotated

    Returns
    -------
    W_UK (heads, nope, 512) and W_UV (heads, v, 512).

    Raises
    ------
    ValueError
        The rows are not those of so many heads.
    """
    if kv_b.shape[0] % heads or kv_b.shape[0] <= heads * nope:
        raise ValueError(f"{kv_b.shape[0]} rows are not {heads} heads of {nope} + v")
    w = kv_b.unflatten(0, (heads, -1))
    return w[:, :nope], w[:, nope:]


def rotate(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, style: str = "interleaved"
) -> torch.Tensor:
    """RoPE of queries, as `mla_kv_write` has it for keys: in float32, rounded once.

    Parameters
    ----------
    x : (tokens, heads, 64)
    cos_sin : (rows, 64) float32, cosines and then sines of a position
    positions : (tokens,), rows of cos_sin
    style : ``interleaved`` (DeepSeek) pairs elements 2 i and 2 i + 1, ``neox`` i and i + 32
    """
    if style not in ("interleaved", "neox"):
        raise ValueError(f"style={style!r} must be interleaved or neox")
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    pairs = x.float().unflatten(-1, (-1, 2) if style == "interleaved" else (2, -1))
    axis = -1 if style == "interleaved" else -2
    first, second = pairs.unbind(axis)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, axis).flatten(-2).to(x.dtype)


def absorb(q_nope: torch.Tensor, q_pe: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Queries in latent space, what `flashmla` takes.

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
    """Outputs of `flashmla`, (tokens, heads, 512), as those of heads, (tokens, heads, v).

    ``w_uv`` is (heads, v, 512), from :func:`split`.
    """
    return torch.einsum("shc,hdc->shd", out, w_uv)


class Sparse(NamedTuple):
    """What `flashmla` takes after ``q``: a query token is a sequence, and a slot is a page."""

    kv_cache: torch.Tensor  # (pages * page_size, 1, 576, or 656 bytes), a view
    block_table: torch.Tensor  # (tokens, topk) int32
    kv_lens: torch.Tensor  # (tokens,) int32
    cu_q: torch.Tensor  # (tokens + 1,) int32


def sparse(
    kv_cache: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor | None = None
) -> Sparse:
    """Attention of each query token to the slots that it lists, as arguments of `flashmla`.

    A list is not ordered: a token attends to all of it, and twice to what stands there twice.
    Whoever makes the lists leaves out tokens that come after the query.

    Parameters
    ----------
    kv_cache : (pages, page_size, 576) or uint8 (pages, page_size, 656), contiguous
    indices : (tokens, topk) or (batch, q_len, topk) int32, slots of the cache: ``page * page_size``
        plus the place in the page. -1, or any other number that is no slot, may stand anywhere and
        counts for nothing.
    lens : (tokens,) or (batch, q_len) int32: only so many of each list count. They must be slots,
        which is not checked. Without it invalid indices are moved to the end, by a few kernels.

    Nothing is read on the host, so that it can be part of a CUDA graph. ``indices`` stay as they
    are. Source: ``indices_in_kvcache`` and ``topk_length`` of DeepSeek's FlashMLA.

    Raises
    ------
    ValueError
        An array is not of such a shape, type or layout.
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
    """Lists with what is no slot, not in ``range(num_slots)``, at their end; in order otherwise.

    ``indices`` is (tokens, topk) int32, and so is the first result. The second is how many of each
    list are slots, (tokens,) int32.
    """
    valid = (indices >= 0) & (indices < num_slots)
    before = valid.cumsum(1) - valid.long()
    count = valid.sum(1, keepdim=True)
    invalid_before = torch.arange(indices.shape[1], device=indices.device) - before
    place = torch.where(valid, before, count + invalid_before)
    return torch.empty_like(indices).scatter_(1, place, indices), count[:, 0].int()


def sm_scale(head_dim: int, yarn: float = 1.0) -> float:
    """The factor of scores: ``1 / sqrt(head_dim)``, and of a context that YaRN makes longer.

    ``head_dim`` is that before absorption (128 + 64), and ``yarn`` how many times longer (40 for
    DeepSeek-V3). YaRN (Peng et al. 2023) multiplies both sides of a score by 0.1 ln(yarn) + 1.
    """
    return float(head_dim**-0.5 * (0.1 * log(max(yarn, 1.0)) + 1.0) ** 2)
